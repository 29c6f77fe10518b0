"""The README tells the truth: its settings, its example and its verbs are the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest

import runtime
from runtime import Runtime, RuntimeConfig

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_setting_is_listed_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", README, re.MULTILINE))
    assert listed == {field.name: shown(field.default) for field in attrs.fields(RuntimeConfig)}


def test_the_example_is_at_most_twenty_lines_and_compiles() -> None:
    (example,) = re.findall(r"```python\n(import trio\n.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    names: dict[str, Any] = {}
    exec(compile(example.replace("trio.run(main)", ""), "README.md", "exec"), names)
    assert names["greet"].name == "greet"


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"`rt\.(\w+)", README))))
def test_verbs_exist(verb: str) -> None:
    assert hasattr(Runtime, verb)


def test_errors_and_ledgers_that_it_names_are_public() -> None:
    for name in (
        "RunFailed",
        "RunCancelled",
        "ResultTimeout",
        "IdempotencyConflict",
        "OutcomeUnknown",
        "HostFailed",
    ):
        assert name in README
        assert name in runtime.__all__
