"""Payloads to and from JSON text.

Owns the canonical form of everything a run stores (inputs, outputs, events, log fields) and the rules of
what can be stored at all; the limits are checked here, before the database sees anything. It never talks
to the database and never changes a value silently: what it cannot store it refuses, by path.

What another codec than plain JSON has written stands in an envelope that names it:
``{"$codec": name, "data": text}``, and ``"same"`` where equal payloads can be told without reading them. Plain JSON has
none, so that what was stored before a codec came into use stays readable.

Canonical form: UTF-8, sorted keys, no white space, tuples as lists, ``-0.0`` as ``0.0``, and floats of
1e16 and more in positional notation (``10000000000000000000000.0``), because ``jsonb`` would otherwise
give them back as integers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, Protocol

import attrs
import cattrs
from cattrs.errors import StructureHandlerNotFoundError
from cattrs.v import format_exception

from sql.errors import PayloadRefused

MAX_INT_DIGITS = 640
"""Digits an integer may have. Python refuses longer conversions under a limit that each process may set,
but never below this many: so every host can read what any host has stored."""

MESSAGE_BYTES = 10_000
TRACEBACK_BYTES = 30_000
PREVIEW_CHARS = 500

_INT_BOUND = 10**MAX_INT_DIGITS
_POSITIONAL_FROM = 1e16
_MAX_PATH_CHARS = 200
_MAX_DEEP_STEPS = 4
_MAX_LINE_CHARS = 2_000

_SCALARS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = frozenset({dict, list, tuple})
_PLAIN = _SCALARS | _CONTAINERS

_HINTS = {
    "bytes": "store text, for example base64",
    "bytearray": "store text, for example base64",
    "datetime.datetime": "store value.isoformat()",
    "datetime.date": "store value.isoformat()",
    "datetime.timedelta": "store value.total_seconds()",
    "decimal.Decimal": "store str(value)",
    "set": "store a list",
    "frozenset": "store a list",
    "uuid.UUID": "store str(value)",
    "coroutine": "did you forget await?",
}
# What trio, asyncio and trio-asyncio say of code that is written for asyncio, in a play, which runs on trio.
_ASYNCIO_WORDS = ("unrecognized yield message", "no running event loop", "run_aio_coroutine")

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


class _Refused(Exception):
    """A value that cannot be stored; ``steps`` is the way to it, innermost first."""

    def __init__(self, reason: str, *, code: str = "payload_not_json", size: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.size = size
        self.steps: list[str | int] = []

    def path(self, what: str) -> str:
        if self.code == "payload_too_large":
            return what
        steps = [_step_text(step) for step in reversed(self.steps)]
        if self.code == "payload_too_deep" and len(steps) > _MAX_DEEP_STEPS:
            steps[_MAX_DEEP_STEPS:] = ["…"]  # where it begins; the rest may be the same step again and again
        text = what + "".join(steps)
        if len(text) > _MAX_PATH_CHARS:
            half = _MAX_PATH_CHARS // 2
            text = f"{text[:half]}…{text[-half:]}"
        return text


def _step_text(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    if step.isascii() and step.isidentifier():
        return f".{_clip(step, 80)}"
    return f"[{quoted(step, 80)}]"


def _clip(text: str, chars: int) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def quoted(text: str, chars: int) -> str:
    """``text`` in quotes and in ASCII, but for an ellipsis where more than ``chars`` characters were cut."""
    if len(text) <= chars:
        return ascii(text)
    shown = ascii(text[: chars - 1])
    return f"{shown[:-1]}…{shown[-1]}"


def type_name(value: object) -> str:
    """The name of a value's type, with its module unless it is a builtin."""
    kind = type(value)
    bare = kind.__module__ in ("builtins", "__main__")
    return kind.__qualname__ if bare else f"{kind.__module__}.{kind.__qualname__}"


# --- the fast check ----------------------------------------------------------------------------------


def _plain_float(value: float) -> bool:
    return -_POSITIONAL_FROM < value < _POSITIONAL_FROM and (value != 0.0 or math.copysign(1.0, value) > 0.0)


def _plain_numbers(items: Iterable[Any], kinds: set[type]) -> bool:
    if int in kinds and not all(-_INT_BOUND < item < _INT_BOUND for item in items if type(item) is int):
        return False
    return float not in kinds or all(_plain_float(item) for item in items if type(item) is float)


def _is_plain(value: Any, budget: int, max_depth: int) -> bool:
    """Whether the standard encoder writes ``value`` as our canonical form.

    False only means "look closer". Works on the set of types in each container, level by level, so that it
    costs little, needs no recursion, and stops at ``max_depth`` and at ``budget`` characters, whatever
    references the value shares.
    """
    if type(value) not in _CONTAINERS:
        return type(value) in _SCALARS and _plain_numbers((value,), {type(value)})
    level = [value]
    for _ in range(max_depth):
        inner: list[Any] = []
        for box in level:
            items = box
            if type(box) is dict:
                if box and set(map(type, box)) != {str}:
                    return False
                budget -= 3 * len(box) + sum(map(len, box))
                items = box.values()
            kinds = set(map(type, items))
            if not kinds <= _PLAIN or not _plain_numbers(items, kinds):
                return False
            budget -= 2 * len(box)
            if str in kinds:
                budget -= sum(len(item) for item in items if type(item) is str)
            if budget < 0:
                return False
            if not kinds.isdisjoint(_CONTAINERS):
                inner.extend(item for item in items if type(item) in _CONTAINERS)
        if not inner:
            return True
        level = inner
    return False


# --- the careful writer ------------------------------------------------------------------------------


class _Writer:
    """Writes or refuses what the fast check did not let through; the only place that knows every rule.

    Recursive, but never deeper than ``max_depth``. Values of subclasses are read through their base class,
    so that no method of the user's runs.
    """

    def __init__(self, limit_bytes: int, max_depth: int) -> None:
        self._limit = limit_bytes
        self._max_depth = max_depth
        self._size = 0
        self._parts: list[str] = []

    def text(self, value: Any) -> str:
        self._write(value, 0)
        return "".join(self._parts)

    def _put(self, text: str) -> None:
        self._size += len(text) if text.isascii() else len(text.encode())
        if self._size > self._limit:
            _too_large(self._size, self._limit, more=True)
        self._parts.append(text)

    def _write(self, value: Any, depth: int) -> None:
        if value is None or value is True or value is False:
            self._put("null" if value is None else "true" if value else "false")
        elif isinstance(value, str):
            self._put(_ENCODER.encode(_checked_text(str.__str__(value), "the text")))
        elif isinstance(value, int):
            self._put(_int_text(int.__int__(value)))
        elif isinstance(value, float):
            self._put(_float_text(float.__float__(value)))
        elif isinstance(value, dict):
            self._write_dict(value, depth + 1)
        elif isinstance(value, (list, tuple)):
            self._write_list(value, depth + 1)
        else:
            fields = _fields_of(value)
            if fields is None:
                name = type_name(value)
                hint = _HINTS.get(name)
                raise _Refused(f"{name} is not JSON" + (f"; {hint}" if hint else ""))
            self._write(fields, depth)

    def _enter(self, depth: int) -> None:
        if depth > self._max_depth:
            raise _Refused(
                f"nested deeper than {self._max_depth} levels, or contains itself", code="payload_too_deep"
            )

    def _write_dict(self, box: dict[Any, Any], depth: int) -> None:
        self._enter(depth)
        for key in dict.keys(box):
            if not isinstance(key, str):
                raise _Refused(f"the key {preview(key, 0)} is {type_name(key)}; keys must be str")
        pairs = [(str.__str__(key), item) for key, item in dict.items(box)]
        pairs.sort(key=lambda pair: pair[0])
        comma = ""
        self._put("{")
        for key, item in pairs:
            quoted = _ENCODER.encode(_checked_text(key, f"the key {preview(key, 0)}"))
            self._put(f"{comma}{quoted}:")
            comma = ","
            try:
                self._write(item, depth)
            except _Refused as refused:
                refused.steps.append(key)
                raise
        self._put("}")

    def _write_list(self, box: list[Any] | tuple[Any, ...], depth: int) -> None:
        self._enter(depth)
        items = list.__iter__(box) if isinstance(box, list) else tuple.__iter__(box)
        self._put("[")
        for index, item in enumerate(items):
            if index:
                self._put(",")
            try:
                self._write(item, depth)
            except _Refused as refused:
                refused.steps.append(index)
                raise
        self._put("]")


def _too_large(size: int, limit: int, *, more: bool) -> NoReturn:
    raise _Refused(
        f"needs {'at least ' if more else ''}{size} bytes as JSON; the limit is {limit} bytes",
        code="payload_too_large",
        size=size,
    )


def _checked_text(text: str, subject: str) -> str:
    if "\x00" in text:
        raise _Refused(f"{subject} holds a NUL character at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Refused(f"{subject} holds a lone surrogate at position {error.start}") from None
    return text


def _int_text(value: int) -> str:
    if not -_INT_BOUND < value < _INT_BOUND:
        raise _Refused(f"the integer has more than {MAX_INT_DIGITS} digits")
    return str(value)


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        raise _Refused(f"{value} is not JSON; store None or text")
    if value == 0.0:
        return "0.0"
    return f"{int(value)}.0" if abs(value) >= _POSITIONAL_FROM else repr(value)


def _fields_of(value: object) -> dict[str, Any] | None:
    """The fields of an attrs, dataclass or pydantic object, one level deep; None for anything else."""
    kind = type(value)
    if attrs.has(kind):
        return {field.name: getattr(value, field.name) for field in attrs.fields(kind)}
    if dataclasses.is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    dump: Callable[..., Any] | None = getattr(kind, "model_dump", None)
    if dump is not None and hasattr(kind, "model_validate"):
        dumped = dump(value, mode="json", by_alias=True)  # as model_validate reads it
        return dumped if isinstance(dumped, dict) else {"root": dumped}
    return None


def _encode(value: Any, limit_bytes: int, max_depth: int) -> str:
    if _envelope(value) is not None:
        raise _Refused(f"an object of {_MARK} and data alone is the form of an encoded payload")
    if not _is_plain(value, limit_bytes, max_depth):
        return _Writer(limit_bytes, max_depth).text(value)
    text = _ENCODER.encode(value)
    if "\\u0000" in text:  # may also be a written backslash: only the careful writer can tell
        return _Writer(limit_bytes, max_depth).text(value)
    if text.isascii():
        size = len(text)
    else:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            return _Writer(limit_bytes, max_depth).text(value)
    if size > limit_bytes:
        _too_large(size, limit_bytes, more=False)
    return text


# --- reading -----------------------------------------------------------------------------------------


def _refuse_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _finite_float(token: str) -> float:
    value = float(token)
    if math.isinf(value):
        raise ValueError("a number is beyond the range of a float")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite_float)


def _strict(kind: type, *accepted: type) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if type(value) not in accepted:
            raise ValueError(f"expected {kind.__name__}, not {type_name(value)}")
        return kind(value)

    return hook


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(int, _strict(int, int))
    converter.register_structure_hook(float, _strict(float, float, int))
    converter.register_structure_hook(str, _strict(str, str))
    converter.register_structure_hook(bool, _strict(bool, bool))
    # A pydantic class as a field of another kind of class.
    converter.register_structure_hook_func(
        lambda kind: hasattr(kind, "model_validate"), lambda value, kind: kind.model_validate(value)
    )
    return converter


_CONVERTER = _converter()


def _problem(error: BaseException, kind: type | None) -> str:
    return _pydantic_problems(error, "") or format_exception(error, kind)


def _pydantic_problems(error: BaseException, what: str) -> str | None:
    """What pydantic complains of, field by field, without the values: those may be secrets."""
    listed: Callable[..., Any] | None = getattr(error, "errors", None)
    if listed is None:
        return None
    found = listed(include_url=False, include_context=False, include_input=False)
    return "; ".join(f"{what}{''.join(map(_step_text, one['loc']))}: {one['msg']}" for one in found)


# --- errors and replacements -------------------------------------------------------------------------


def scrub(text: str, limit_bytes: int, *, keep_end: bool = False) -> str:
    """``text`` made storable: NUL and lone surrogates become visible escapes, and what is over
    ``limit_bytes`` of UTF-8 is cut (the end, or with ``keep_end`` the middle) with a note of how much."""
    clean = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(clean) <= limit_bytes:
        return clean.decode()
    room = max(0, limit_bytes - 40)
    head = room // 3 if keep_end else room
    note = f"… [{len(clean) - room} bytes cut] …"
    tail = clean[len(clean) - (room - head) :] if room > head else b""
    return clean[:head].decode(errors="ignore") + note + tail.decode(errors="ignore")


def preview(value: object, depth: int = 3) -> str:
    """A short description of any value that runs none of its own code."""
    kind = type(value)
    if kind is str:
        return quoted(str(value), 120)
    if isinstance(value, int) and kind in (int, bool):
        return repr(value) if -_INT_BOUND < value < _INT_BOUND else "<huge int>"
    if kind in (float, type(None)):
        return repr(value)
    if isinstance(value, (bytes, bytearray)) and kind in (bytes, bytearray):
        return f"<{kind.__name__} of {len(value)}>"
    if depth > 0 and isinstance(value, dict) and kind is dict:
        pairs = [f"{preview(key, 0)}: {preview(item, depth - 1)}" for key, item in _first(value.items())]
        return "{" + ", ".join(pairs) + (", …}" if len(value) > len(pairs) else "}")
    if depth > 0 and isinstance(value, (list, tuple)) and kind in (list, tuple):
        items = [preview(item, depth - 1) for item in _first(value)]
        return "[" + ", ".join(items) + (", …]" if len(value) > len(items) else "]")
    return f"<{type_name(value)}>"


def _first(items: Iterable[Any]) -> Iterator[Any]:
    return (item for item, _ in zip(items, range(6), strict=False))


def _single_leaf(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _first_leaves(error: BaseException, most: int) -> list[BaseException]:
    found: list[BaseException] = []
    todo = [error]
    while todo and len(found) < most:
        one = todo.pop()
        if isinstance(one, BaseExceptionGroup):
            todo.extend(reversed(one.exceptions))
        else:
            found.append(one)
    return found


def _message(error: BaseException) -> str:
    try:  # the traceback module survives a __str__ that raises
        lines = traceback.TracebackException(type(error), error, None).format_exception_only()
        text = "".join(lines).removesuffix("\n")
    except RecursionError:
        return "the message cannot be shown: the error's causes are nested too deep"
    return text.removeprefix(type_name(error)).removeprefix(": ")


def _asyncio_hint(error: BaseException) -> str:
    """What to add to the error of asyncio code in a play: neither library can know what to do here."""
    said = str(error) if type(error) in (RuntimeError, TypeError, AttributeError) else ""
    if not any(words in said for words in _ASYNCIO_WORDS):
        return ""
    return (
        "\nPlays run on trio: within `async with trio_asyncio.open_loop():`, await "
        "trio_asyncio.aio_as_trio(fn)(…), or call asyncio.run(…) in a play or step that is a plain def"
    )


def _traceback_text(error: BaseException) -> str:
    try:
        lines = traceback.TracebackException.from_exception(error, compact=True).format()
        return "".join(_clip(line.removesuffix("\n"), _MAX_LINE_CHARS) + "\n" for line in lines)
    except RecursionError:  # groups nested hundreds of levels deep
        return "".join(traceback.format_tb(error.__traceback__))


def error_record(error: BaseException) -> dict[str, str]:
    """``error_type``, ``message`` and ``traceback`` of an exception, always storable.

    NUL characters and lone surrogates are escaped, the message is cut at 10 kB and the traceback at 30 kB.
    A group around a single error is reported as that error; a larger group names its first errors in the
    message. The traceback shows the whole group.
    """
    leaf = _single_leaf(error)
    if not isinstance(leaf, BaseExceptionGroup):
        message = _message(leaf) + _asyncio_hint(leaf)
    else:
        shown = [f"{type_name(one)}: {_clip(_message(one), 500)}" for one in _first_leaves(leaf, 5)]
        message = f"{leaf.message} ({len(leaf.exceptions)} errors): " + "; ".join(shown)
    return {
        "error_type": scrub(type_name(leaf), 500),
        "message": scrub(message, MESSAGE_BYTES),
        "traceback": scrub(_traceback_text(error), TRACEBACK_BYTES, keep_end=True),
    }


# --- envelopes ---------------------------------------------------------------------------------------

_MARK = "$codec"


@attrs.frozen
class _Envelope:
    name: str
    data: str


def _envelope(value: Any) -> _Envelope | None:
    """What a stored value says of itself if another codec than plain JSON has written it."""
    if not isinstance(value, dict) or _MARK not in value or not value.keys() <= {_MARK, "data", "same"}:
        return None
    name, data = value[_MARK], value.get("data")
    return _Envelope(name, data) if isinstance(name, str) and isinstance(data, str) else None


def _decoded(text: str, what: str) -> Any:
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise PayloadRefused(what, "nested too deep to be read") from None
    except ValueError as error:
        raise PayloadRefused(what, _clip(str(error), 300)) from None


# --- the codec ---------------------------------------------------------------------------------------


class JsonCodec:
    """Payloads as plain JSON text."""

    def encode(self, value: Any, *, what: str, limit_bytes: int, max_depth: int) -> str:
        """The canonical JSON text of ``value``.

        attrs, dataclass and pydantic objects are written as their fields. Raises PayloadRefused, with the
        path below ``what`` as its field, for: more than ``limit_bytes`` of UTF-8, more than ``max_depth``
        nested containers, NaN or infinity, NUL characters, lone surrogates, integers of more than 640
        digits, keys that are not str, and every other type. So it does for the form of an envelope.
        """
        try:
            return self._written(_encode(value, limit_bytes, max_depth))
        except _Refused as refused:
            raise PayloadRefused(refused.path(what), refused.reason) from None

    def encode_output(self, value: Any, *, limit_bytes: int, max_depth: int) -> tuple[str, str | None]:
        """Like ``encode``, but what cannot be stored is replaced, so that its run can still end.

        Returns the text and, when the value was replaced, the reason in words. The replacement is
        ``{"$replaced": {"reason", "detail", "type", "bytes", "preview"}}`` where ``reason`` is
        ``payload_too_large``, ``payload_too_deep`` or ``payload_not_json`` and ``bytes`` is the size, where
        known (at least that many). Only an error that an object's own serializer raises leaves this call.
        """
        try:
            return self._written(_encode(value, limit_bytes, max_depth)), None
        except _Refused as refused:
            detail = scrub(f"{refused.path('output')}: {refused.reason}", 500)
            record = {
                "reason": refused.code,
                "detail": detail,
                "type": scrub(type_name(value), 200),
                "bytes": refused.size,
                "preview": scrub(_clip(preview(value), PREVIEW_CHARS), 2 * PREVIEW_CHARS),
            }
        return _ENCODER.encode({"$replaced": record}), detail

    def decode(self, text: str, *, what: str = "payload") -> Any:
        """The value of a stored JSON text. Raises PayloadRefused when Python cannot hold it: not JSON, a
        number beyond a float or with more digits than this process converts, or nested too deep."""
        return self.read(_decoded(text, what), what=what)

    def read(self, value: Any, *, what: str = "payload") -> Any:
        """The same for JSON that is decoded already. Raises PayloadRefused for what another codec has written."""
        sealed = _envelope(value)
        return value if sealed is None else self._read(sealed, what)

    def _written(self, text: str) -> str:
        """The JSON text that is stored for a canonical one."""
        return text

    def _read(self, sealed: _Envelope, what: str) -> Any:
        raise PayloadRefused(
            what, f"was written with the codec {preview(sealed.name)}, which is not in use here"
        )

    def structure(self, value: Any, wanted: type, *, what: str) -> Any:
        """A decoded value as an instance of ``wanted``, an attrs, dataclass or pydantic class.

        Raises PayloadRefused naming the fields that are missing, unknown or of another type.
        """
        validate: Callable[[Any], Any] | None = getattr(wanted, "model_validate", None)
        try:
            if validate is not None and not attrs.has(wanted):
                return validate(value)
            if not isinstance(value, dict):
                raise TypeError(f"expected an object, not {type_name(value)}")
            return _CONVERTER.structure(value, wanted)
        except (cattrs.BaseValidationError, StructureHandlerNotFoundError) as error:
            problems = "; ".join(cattrs.transform_error(error, path=what, format_exception=_problem))
            raise PayloadRefused(what, _clip(problems, 1_000)) from error
        except (ValueError, TypeError) as error:
            problems = _pydantic_problems(error, what) or str(error)
            raise PayloadRefused(what, _clip(f"not a {wanted.__name__}: {problems}", 1_000)) from error


class Seal(Protocol):
    """How a ``SealedCodec`` hides payloads: for example encryption, see ``examples/encryption.py``."""

    @property
    def name(self) -> str:
        """What is stored with each payload, to know again how to read it."""
        ...

    def seal(self, text: bytes) -> str:
        """JSON text, made unreadable."""
        ...

    def unseal(self, sealed: str) -> bytes:
        """The JSON text again. Raises ValueError for what it cannot read, with a reason that reveals nothing."""
        ...

    def same(self, text: bytes) -> str | None:
        """Equal for equal texts, and saying no more of them: how an idempotency key's input is compared without being
        read. None: it cannot be, and a submit that is repeated with its key conflicts."""
        ...


class SealedCodec(JsonCodec):
    """JSON that nobody reads without the keys: inputs, outputs, events and log fields go through a ``Seal``.

    ``seal`` writes and reads. ``others`` only read what was written under their names before. Plain JSON from before
    is read as it is. Error messages, log lines' text, labels and keys are not sealed. Limits are of the plain text.
    """

    def __init__(self, seal: Seal, *others: Seal) -> None:
        self._seal = seal
        self._seals = {one.name: one for one in (*others, seal)}

    def _written(self, text: str) -> str:
        plain = text.encode()
        envelope = {_MARK: self._seal.name, "data": self._seal.seal(plain), "same": self._seal.same(plain)}
        return _ENCODER.encode({key: value for key, value in envelope.items() if value is not None})

    def _read(self, sealed: _Envelope, what: str) -> Any:
        seal = self._seals.get(sealed.name)
        if seal is None:
            return super()._read(sealed, what)
        try:
            text = seal.unseal(sealed.data).decode()
        except ValueError as error:
            raise PayloadRefused(
                what, f"cannot be read with the codec {preview(seal.name)}: {error}"
            ) from error
        return _decoded(text, what)
