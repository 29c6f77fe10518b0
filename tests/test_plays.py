"""The play decorator: names, signatures and options."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from runtime.config import RuntimeConfig
from runtime.context import Context, SyncContext
from runtime.detached_host import providers_of
from runtime.plays import Play, index_plays, play
from sql.errors import InvalidPlay


@attrs.frozen
class Item:
    path: str


async def with_data(ctx: Any, data: Any) -> Any:
    return ctx, data


async def test_a_play_keeps_its_options_and_calls_its_function() -> None:
    decorated = play(
        "audit:v1.2_x-y",
        retries=3,
        backoff_s=0,
        backoff_factor=1,
        backoff_max_s=9,
        timeout_s=1.5,
        crash_cap=1,
    )(with_data)
    assert isinstance(decorated, Play)
    assert (decorated.name, decorated.retries, decorated.backoff_s) == ("audit:v1.2_x-y", 3, 0.0)
    assert (decorated.backoff_factor, decorated.backoff_max_s, decorated.timeout_s) == (1.0, 9.0, 1.5)
    assert decorated.crash_cap == 1
    assert (decorated.is_sync, decorated.takes_input) == (False, True)
    assert await decorated("c", data=5) == ("c", 5)


def test_the_defaults() -> None:
    decorated = play("p")(with_data)
    assert (decorated.retries, decorated.backoff_s, decorated.backoff_factor) == (0, 1.0, 2.0)
    assert (decorated.backoff_max_s, decorated.timeout_s, decorated.crash_cap) == (300.0, None, None)
    assert (decorated.backoff_jitter, decorated.final, decorated.outage_max_s) == (0.5, (), None)
    assert (decorated.input_type, decorated.output_type) == (None, None)


@pytest.mark.parametrize("final", [ValueError, (ValueError,), (ValueError, KeyError)])
def test_final_errors_are_a_class_or_a_tuple(final: Any) -> None:
    kinds = final if isinstance(final, tuple) else (final,)
    assert play("p", final=final)(with_data).final == kinds


def test_a_plain_function_runs_in_threads() -> None:
    @play("p")
    def plain(ctx: Any) -> int:
        return 3

    assert plain.is_sync
    assert not plain.takes_input
    assert plain("ctx") == 3


def test_methods_partials_and_positional_only_parameters_are_fine() -> None:
    class Service:
        async def run(self, ctx: Any, data: Any = None, /) -> None: ...

    async def with_client(client: Any, ctx: Any, data: Any) -> None: ...

    for fn in (Service().run, functools.partial(with_client, "client")):
        decorated = play("p")(fn)
        assert decorated.takes_input
        assert not decorated.is_sync


def test_record_types_are_taken_from_the_annotations() -> None:
    async def typed(ctx: Any, item: Item) -> Item:
        return item

    async def untyped(ctx: Any, item: dict[str, Any]) -> list[Item]:
        return []

    async def unresolvable(ctx: NoSuchName, item: Item) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    assert (play("p")(typed).input_type, play("p")(typed).output_type) == (Item, Item)
    assert (play("p")(untyped).input_type, play("p")(untyped).output_type) == (None, None)
    assert play("p")(unresolvable).input_type is None


@pytest.mark.parametrize("name", ["", "a b", "a\n", "ä", "x" * 129, "a\x00", "a/b"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidPlay, match="1 to 128 characters"):
        play(name)


def test_the_bare_decorator_is_refused_with_the_right_spelling() -> None:
    with pytest.raises(InvalidPlay, match=r'write @play\("name"\)'):
        play(with_data)  # type: ignore[arg-type]


def no_parameters() -> None: ...
def three(ctx: Any, a: Any, b: Any) -> None: ...
def three_with_default(ctx: Any, data: Any, retries: int = 3) -> None: ...
def star(ctx: Any, *items: Any) -> None: ...
def double_star(ctx: Any, **fields: Any) -> None: ...
def keyword_only(ctx: Any, *, data: Any) -> None: ...


@pytest.mark.parametrize(
    ("fn", "shown"),
    [
        (no_parameters, "()"),
        (three, "(ctx, a, b)"),
        (three_with_default, "(ctx, data, retries=3)"),
        (star, "(ctx, *items)"),
        (double_star, "(ctx, **fields)"),
        (keyword_only, "(ctx, *, data)"),
    ],
)
def test_another_signature_is_refused_by_its_parameters(fn: Callable[..., Any], shown: str) -> None:
    with pytest.raises(InvalidPlay) as caught:
        play("audit")(fn)
    assert "play 'audit'" in str(caught.value)
    assert f"must be (ctx) or (ctx, data), not {shown}" in str(caught.value)


async def async_generator(ctx: Any) -> AsyncIterator[int]:
    yield 1


def generator(ctx: Any) -> Iterator[int]:
    yield 1


class CallableObject:
    async def __call__(self, ctx: Any) -> None: ...


@pytest.mark.parametrize(
    ("fn", "word"),
    [
        (async_generator, "generator"),
        (generator, "generator"),
        (CallableObject(), "expected a function, not CallableObject"),
        (CallableObject, "expected a function, not type"),
        (len, "expected a function"),
        (None, "expected a function, not NoneType"),
        (play("inner")(with_data), "expected a function, not Play"),
    ],
)
def test_what_is_no_function_is_refused(fn: Any, word: str) -> None:
    with pytest.raises(InvalidPlay, match=word):
        play("p")(fn)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"retries": -1}, "retries must be an int from 0"),
        ({"retries": True}, "retries"),
        ({"retries": 1.0}, "retries"),
        ({"retries": 10**9999}, "retries"),
        ({"backoff_s": -0.1}, "backoff_s must be a number"),
        ({"backoff_s": float("nan")}, "backoff_s"),
        ({"backoff_s": "1"}, "backoff_s"),
        ({"backoff_jitter": 1.5}, "backoff_jitter must be a number from 0 to 1, not 1.5"),
        ({"backoff_jitter": True}, "backoff_jitter"),
        ({"final": "ValueError"}, "final must be a class of exceptions, or a tuple of them"),
        ({"final": (ValueError, 3)}, "final must be .* not 3"),
        ({"final": KeyboardInterrupt}, "final must be"),
        ({"outage_max_s": -1}, "outage_max_s must be a number"),
        ({"backoff_factor": 0.5}, "backoff_factor must be a number from 1"),
        ({"backoff_max_s": float("inf")}, "backoff_max_s"),
        ({"backoff_s": 600}, r"backoff_max_s \(300.0\) is below backoff_s \(600\)"),
        ({"timeout_s": 0}, "timeout_s must be above 0"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": False}, "timeout_s"),
        ({"crash_cap": 0}, "crash_cap must be an int from 1"),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidPlay, match=word) as caught:
        play("audit", **options)
    assert "play 'audit'" in str(caught.value)


def test_plays_are_indexed_by_name() -> None:
    one, two = play("one")(with_data), play("two")(with_data)
    assert index_plays([one, two, one]) == {"one": one, "two": two}
    with pytest.raises(InvalidPlay, match="'one' is registered twice"):
        index_plays([one, play("one")(with_data)])
    with pytest.raises(
        InvalidPlay, match=r'with_data is not a play: decorate the function with @play\("name"\)'
    ):
        index_plays([with_data])
    with pytest.raises(InvalidPlay, match=r"plays=\[greet\], not Play"):
        index_plays(one)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "option", [{"memory_bytes": 2**30}, {"cpu_s": 9.0}, {"ceiling_s": None}, {"ceiling_s": 60}]
)
def test_what_only_a_sandbox_can_hold_needs_one(option: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlay, match=f"play 'p': {next(iter(option))} is for plays in sandboxes"):
        play("p", **option)
    assert play("p", sandbox="local", **option)(with_data).sandbox == "local"


def test_the_context_comes_first() -> None:
    def context_last(data: dict[str, Any], context: Context) -> None: ...
    def ctx_last(data: Any, ctx: Any) -> None: ...
    def only_data(data: dict[str, Any]) -> None: ...
    def only_item(item: Item) -> None: ...

    for wrong in (context_last, ctx_last, only_data, only_item):
        with pytest.raises(InvalidPlay, match=r"play 'p': ctx comes first, \(ctx\) or \(ctx, data\), not \("):
            play("p")(wrong)

    def right(me: SyncContext, data: Item) -> None: ...

    assert play("p")(right).input_type is Item


def at_the_top(ctx: Any) -> None:
    """What a runner finds."""


TOP = play("top", sandbox="local")(at_the_top)


def test_a_play_is_at_home_where_its_runner_finds_it() -> None:
    assert TOP.is_at_home
    assert not play("top", sandbox="local")(at_the_top).is_at_home  # of the same name, but another one
    elsewhere = play("borrowed", sandbox="local")(functools.partial(index_plays))
    assert (elsewhere.home, elsewhere.is_at_home) == ("runtime.plays", False)
    config = RuntimeConfig(health_port=0)
    assert list(providers_of({"top": TOP}, None, config)) == ["local"]
    with pytest.raises(InvalidPlay, match=r"play 'borrowed' runs in a sandbox.* top level of runtime\.plays"):
        providers_of({"borrowed": elsewhere}, None, config)


PROGRAM = """
from runtime import play
from .part import PART

@play(PART, sandbox="local")
def it(ctx): ...

if __name__ == "__main__":
    print(it.home, it.is_at_home)
"""


def test_a_program_that_was_started_as_a_module_is_found_as_one(tmp_path: Path) -> None:
    package = tmp_path / "app"
    package.mkdir()
    (package / "part.py").write_text("PART = 'it'\n")
    for name in ("tool", "__main__"):
        (package / f"{name}.py").write_text(PROGRAM)

    def said(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        return subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    assert said("-m", "app.tool") == "app.tool True"
    assert said("-m", "app") == "app.__main__ True"
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.replace(".part", "app.part"))
    assert said(str(script)) == f"{script} True"
