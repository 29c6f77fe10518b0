"""Plays: functions registered under a durable name.

Owns the ``@play`` decorator, the rules a play's function and options must keep, and the index of a host's
plays. It never runs a play and knows nothing of the database.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from runtime.codec import preview
from sql.errors import InvalidPlay

NAME_PATTERN = r"[A-Za-z0-9._:-]{1,128}"

_CEILING_S = 86_400.0
_NAME = re.compile(NAME_PATTERN)
_JSON = (dict, list, tuple, str, int, float, bool)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@attrs.frozen(slots=True, eq=False, kw_only=True)
class Play:
    """A function under a durable name. Calling it calls the function, without a runtime.

    ``is_sync``: a plain ``def``, to be run in a thread. ``takes_input``: ``(ctx, data)`` rather than
    ``(ctx)``. ``retries`` counts failures after the first try; retry *n* waits
    ``backoff_s * backoff_factor ** (n - 1)`` seconds, at most ``backoff_max_s``, less a random part of up to
    ``backoff_jitter`` of it. Errors of the types ``final`` are not tried again. ``timeout_s`` limits the running
    time of one attempt, parks excluded. ``outage_max_s`` limits for how long the outage of a dependency defers a run,
    ``crash_cap`` how many of its leases may expire; None is the host's setting.
    ``max_running`` limits how many attempts run at once on all hosts, ``max_per_key`` how many of one concurrency key
    (None: one), which ``concurrency_key`` makes of the input unless the submit names one; None there is no key.
    ``input_type`` and ``output_type`` are set where the annotation is an attrs, dataclass or pydantic class.
    """

    name: str
    fn: Callable[..., Any] = attrs.field(repr=False)
    is_sync: bool
    takes_input: bool
    retries: int = 0
    backoff_s: float = 1.0
    backoff_factor: float = 2.0
    backoff_max_s: float = 300.0
    backoff_jitter: float = 0.5
    final: tuple[type[Exception], ...] = ()
    timeout_s: float | None = None
    outage_max_s: float | None = None
    crash_cap: int | None = None
    max_running: int | None = None
    concurrency_key: Callable[[Any], str | None] | None = None
    max_per_key: int | None = None
    input_type: type | None = None
    output_type: type | None = None
    sandbox: str | None = None
    ceiling_s: float | None = None
    memory_bytes: int | None = None
    cpu_s: float | None = None

    @property
    def _function(self) -> Callable[..., Any]:
        inner = self.fn
        while isinstance(inner, functools.partial):
            inner = inner.func
        return inner

    @property
    def home(self) -> str:
        """Where another process finds the play: its module, or the file of a program that was started by it."""
        name: str = self._function.__module__
        if name != "__main__":
            return name
        program = sys.modules[name]
        spec = getattr(program, "__spec__", None)  # there with python -m, whose imports may be relative
        if spec is not None and spec.name != name:
            return str(spec.name)
        return getattr(program, "__file__", None) or name

    @property
    def is_at_home(self) -> bool:
        """Whether another process finds it there, by its name: see ``find_play``."""
        module = sys.modules.get(self._function.__module__)
        return self.home != "__main__" and module is not None and find_play(vars(module), self.name) is self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself."""
        return self.fn(*args, **kwargs)


def play(
    name: str,
    *,
    retries: int = 0,
    backoff_s: float = 1.0,
    backoff_factor: float = 2.0,
    backoff_max_s: float = 300.0,
    backoff_jitter: float = 0.5,
    final: type[Exception] | tuple[type[Exception], ...] = (),
    timeout_s: float | None = None,
    outage_max_s: float | None = None,
    crash_cap: int | None = None,
    max_running: int | None = None,
    concurrency_key: Callable[[Any], str | None] | None = None,
    max_per_key: int | None = None,
    sandbox: str | None = None,
    ceiling_s: float | None = _CEILING_S,
    memory_bytes: int | None = None,
    cpu_s: float | None = None,
) -> Callable[[Callable[..., Any]], Play]:
    """Register a function as a play: ``@play("audit", retries=3)``.

    The function is ``async def`` (or ``def``, which runs in a thread) and takes ``(ctx)`` or
    ``(ctx, data)``. All durations are seconds. Raises InvalidPlay naming the play and what is wrong.

    ``sandbox``: a provider's name; the play then runs detached, in a sandbox of that provider, and takes no slot while
    it does. ``ceiling_s`` is the longest that one attempt may take there (None: no end), ``memory_bytes`` and ``cpu_s``
    are limits where the provider has them.
    """
    if not isinstance(name, str):
        raise InvalidPlay(f'write @play("name"): the name must be str, not {type(name).__name__}')
    if not _NAME.fullmatch(name):
        shown = ascii(name[:140])
        raise InvalidPlay(f"play {shown}: the name must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    options = {
        "retries": _whole(name, "retries", retries, 0),
        "backoff_s": _number(name, "backoff_s", backoff_s, 0.0),
        "backoff_factor": _number(name, "backoff_factor", backoff_factor, 1.0),
        "backoff_max_s": _number(name, "backoff_max_s", backoff_max_s, 0.0),
        "backoff_jitter": _number(name, "backoff_jitter", backoff_jitter, 0.0, 1.0),
        "final": _errors(name, final),
        "outage_max_s": None if outage_max_s is None else _number(name, "outage_max_s", outage_max_s, 0.0),
        "timeout_s": None if timeout_s is None else _number(name, "timeout_s", timeout_s, 0.0),
        "crash_cap": None if crash_cap is None else _whole(name, "crash_cap", crash_cap, 1),
        "max_running": None if max_running is None else _whole(name, "max_running", max_running, 1),
        "concurrency_key": _function(name, "concurrency_key", concurrency_key),
        "max_per_key": None if max_per_key is None else _whole(name, "max_per_key", max_per_key, 1),
        "sandbox": sandbox,
        "ceiling_s": None if ceiling_s is None else _number(name, "ceiling_s", ceiling_s, 1.0),
        "memory_bytes": None
        if memory_bytes is None
        else _whole(name, "memory_bytes", memory_bytes, 2**24, 2**50),
        "cpu_s": None if cpu_s is None else _number(name, "cpu_s", cpu_s, 1.0),
    }
    if sandbox is not None and not (isinstance(sandbox, str) and _NAME.fullmatch(sandbox)):
        raise InvalidPlay(f"play {name!r}: sandbox must be a provider's name, not {preview(sandbox)}")
    if sandbox is None:
        given = {"ceiling_s": ceiling_s != _CEILING_S, "memory_bytes": memory_bytes, "cpu_s": cpu_s}
        for option, there in given.items():
            if there:
                raise InvalidPlay(f"play {name!r}: {option} is for plays in sandboxes: give sandbox= too")
    if timeout_s == 0:
        raise InvalidPlay(f"play {name!r}: timeout_s must be above 0 (or None for no limit)")
    if backoff_max_s < backoff_s:
        raise InvalidPlay(f"play {name!r}: backoff_max_s ({backoff_max_s}) is below backoff_s ({backoff_s})")

    def register(fn: Callable[..., Any]) -> Play:
        return _build(name, fn, options)

    return register


def find_play(namespace: Mapping[str, Any], name: str) -> Play | None:
    """The play of that name among the globals of a module."""
    return next((one for one in namespace.values() if isinstance(one, Play) and one.name == name), None)


def index_plays(plays: Iterable[object]) -> dict[str, Play]:
    """The plays by name. Raises InvalidPlay for something that is no play, and for two of one name."""
    if not isinstance(plays, Iterable):
        raise InvalidPlay(f"plays must be a list of plays, as in plays=[greet], not {type(plays).__name__}")
    index: dict[str, Play] = {}
    for one in plays:
        if not isinstance(one, Play):
            shown = getattr(one, "__name__", type(one).__name__)
            raise InvalidPlay(f'{shown} is not a play: decorate the function with @play("name")')
        if index.setdefault(one.name, one) is not one:
            raise InvalidPlay(f"play {one.name!r} is registered twice")
    return index


def _whole(name: str, option: str, value: Any, least: int, most: int = 1_000_000) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        allowed = f"an int from {least} to {most}"
        raise InvalidPlay(f"play {name!r}: {option} must be {allowed}, not {preview(value)}")
    return value


def _number(name: str, option: str, value: Any, least: float, most: float = 1e9) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most or not math.isfinite(value):
        allowed = f"a number from {least:g} to {'1e9' if most == 1e9 else format(most, 'g')}"
        raise InvalidPlay(f"play {name!r}: {option} must be {allowed}, not {preview(value)}")
    return float(value)


def _function(name: str, option: str, value: Any) -> Any:
    if value is not None and not callable(value):
        allowed = "a function of the input that returns a key or None"
        raise InvalidPlay(f"play {name!r}: {option} must be {allowed}, not {preview(value)}")
    return value


def _errors(name: str, final: Any) -> tuple[type[Exception], ...]:
    kinds = final if isinstance(final, tuple) else (final,)
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            allowed = "a class of exceptions, or a tuple of them"
            raise InvalidPlay(f"play {name!r}: final must be {allowed}, not {preview(kind)}")
    return kinds


def _build(name: str, fn: Callable[..., Any], options: dict[str, Any]) -> Play:
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not (inspect.isfunction(inner) or inspect.ismethod(inner)):
        raise InvalidPlay(f"play {name!r}: expected a function, not {type(fn).__name__}")
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        raise InvalidPlay(f"play {name!r}: a generator cannot be a play; return the result instead")
    hints = _type_hints(inner)
    takes_input = _takes_input(name, fn, hints)
    input_type = None
    if takes_input:
        input_type = _record_type(hints.get(list(inspect.signature(fn).parameters)[1]))
    return Play(
        name=name,
        fn=fn,
        is_sync=not inspect.iscoroutinefunction(inner),
        takes_input=takes_input,
        input_type=input_type,
        output_type=_record_type(hints.get("return")),
        **options,
    )


def _takes_input(name: str, fn: Callable[..., Any], hints: Mapping[str, Any]) -> bool:
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    if not 1 <= len(parameters) <= 2 or any(parameter.kind not in _POSITIONAL for parameter in parameters):
        raise InvalidPlay(f"play {name!r}: parameters must be (ctx) or (ctx, data), not {_shown(parameters)}")
    first, *second = (parameter.name for parameter in parameters)
    if _is_data(hints.get(first)) or any(_is_context(other, hints.get(other)) for other in second):
        raise InvalidPlay(f"play {name!r}: ctx comes first, (ctx) or (ctx, data), not {_shown(parameters)}")
    return len(parameters) == 2


def _is_context(name: str, hint: Any) -> bool:
    """Whether a parameter is meant to be the context, by its name or by its class."""
    return name == "ctx" or getattr(hint, "__module__", None) == "runtime.context"


def _is_data(hint: Any) -> bool:
    """Whether an annotation is one of JSON or of a record."""
    return (typing.get_origin(hint) or hint) in _JSON or _record_type(hint) is not None


def _shown(parameters: list[inspect.Parameter]) -> str:
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))


def returned_type(fn: Callable[..., Any]) -> type | None:
    """The attrs, dataclass or pydantic class that a function is annotated to return."""
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    annotation = getattr(inner, "__annotations__", {}).get("return")
    if isinstance(annotation, str):
        annotation = _type_hints_once(inner).get("return")
    return _record_type(annotation)


def _type_hints(fn: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(fn)
    except (NameError, TypeError, AttributeError):
        return {}  # names that exist for the type checker only: the input stays plain JSON


_type_hints_once = functools.lru_cache(maxsize=1_000)(_type_hints)


def _record_type(hint: Any) -> type | None:
    if not isinstance(hint, type):
        return None
    if attrs.has(hint) or dataclasses.is_dataclass(hint) or hasattr(hint, "model_validate"):
        return hint
    return None
