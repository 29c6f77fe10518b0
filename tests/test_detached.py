"""How a silent runner is judged by what its provider says, and where its bill then ends."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import attrs
import pytest

from actors.liveness import Judgement
from runtime.detached import census_with, judge_with
from runtime.sandboxes import Created, Inspection, SandboxRef, SandboxSpec
from runtime.sandboxes.base import SandboxFault
from sql.runners import Silent
from tests.support.sandboxed import Pretended

HEARD_AT = datetime(2026, 1, 1, tzinfo=UTC)
TIMEOUT_S = 60.0
SPEC = SandboxSpec(sandbox="box", run_id="run", attempt=1, command=(), env={})


@attrs.define
class Saying(Pretended):
    """Says that of every sandbox."""

    says: Any = attrs.field(factory=lambda: Inspection("running"))

    async def inspect(self, ref: SandboxRef) -> Any:
        self.check()
        return self.says


@attrs.frozen
class Captured:
    """What a provider's client may hand over."""

    why: str


async def judged(
    says: Any,
    *,
    silent_s: float,
    heard_at: datetime | None = HEARD_AT,
    heard_s: float = 1e9,
    fails: bool = False,
    over_s: float | None = None,
) -> Judgement:
    finding = "stale" if over_s is None else "ceiling"
    silent = Silent(
        "run", 1, 7, "pretended", "box", None, None, heard_at, silent_s, TIMEOUT_S, finding, over_s or 0.0
    )
    provider = Saying(says=says, fails=fails)
    return await judge_with(provider, lambda: heard_s)(silent)


@pytest.mark.parametrize(
    ("silent_s", "heard_at", "heard_s", "lost"),
    [
        (179.0, HEARD_AT, 1e9, False),
        (181.0, HEARD_AT, 1e9, True),
        (181.0, HEARD_AT, 59.0, False),  # nobody listened
        (181.0, HEARD_AT, 61.0, True),
        (179.0, None, 1e9, False),
        (181.0, None, 1e9, True),
    ],
)
async def test_one_that_lives_is_lost_only_after_long_silence_that_somebody_could_have_broken(
    silent_s: float, heard_at: datetime | None, heard_s: float, lost: bool
) -> None:
    found = await judged(Inspection("running"), silent_s=silent_s, heard_at=heard_at, heard_s=heard_s)
    assert (found.verdict is not None) is lost
    assert "ended_at" not in found.diagnostics


@pytest.mark.parametrize(
    ("state", "told", "ended_s"),
    [
        ("ended", {"exit_code": 3, "ended_at": HEARD_AT.timestamp() + 5}, 5.0),
        ("ended", {"ended_at": HEARD_AT.timestamp() - 5}, 0.0),  # it was heard of later
        ("ended", {"ended_at": float("nan")}, 0.0),
        ("ended", {"ended_at": "yesterday"}, 0.0),
        ("ended", {}, 0.0),
        ("absent", {}, 0.0),
    ],
)
async def test_the_end_is_what_was_seen_or_the_last_heartbeat(
    state: str, told: Mapping[str, Any], ended_s: float
) -> None:
    found = await judged(Inspection(state, told), silent_s=TIMEOUT_S)
    assert found.verdict is not None
    assert found.diagnostics["ended_at"] == HEARD_AT.timestamp() + ended_s
    assert {name: found.diagnostics[name] for name in told if name != "ended_at"} == {
        name: value for name, value in told.items() if name != "ended_at"
    }


@pytest.mark.parametrize(("says", "fails"), [(Inspection("absent"), True), (None, False), ("running", False)])
async def test_a_provider_that_gives_no_answer_decides_nothing(says: Any, fails: bool) -> None:
    found = await judged(says, silent_s=1e6, fails=fails)
    assert (found.verdict, found.diagnostics) == (None, {})


@pytest.mark.parametrize(
    ("told", "kept"),
    [
        ({"output_tail": "a\x00b\ud800"}, {"output_tail": "a\\x00b\\ud800"}),
        ({"load": float("inf"), "\x00": 1}, {"load": "inf", "\\x00": 1}),
        ({7: Captured("late")}, {"7": {"why": "late"}}),
        ({"at": HEARD_AT, "of": [1, {"b": 2}]}, {"at": "<datetime.datetime>", "of": [1, {"b": 2}]}),
    ],
)
async def test_whatever_a_provider_says_of_an_end_can_be_written_down(
    told: dict[Any, Any], kept: dict[str, Any]
) -> None:
    found = await judged(Inspection("ended", told), silent_s=TIMEOUT_S)
    assert found.diagnostics == {**kept, "ended_at": HEARD_AT.timestamp()}
    assert found.verdict is not None
    assert "\\u0000" not in found.verdict.error


def test_what_cannot_be_written_down_of_a_sandbox_is_refused_as_it_is_said() -> None:
    wrong: Any
    for wrong in (7, None, "a\x00", "x" * 3_000):
        with pytest.raises(SandboxFault, match="provider_id"):
            Created(wrong)
    for wrong in (7, "\ud800"):
        with pytest.raises(SandboxFault, match="routing_domain"):
            Inspection("running", routing_domain=wrong)
    with pytest.raises(ValueError, match="state"):
        Inspection("stopped")


@pytest.mark.parametrize(
    ("says", "over_s", "fails", "verdict"),
    [
        (Inspection("running"), 0.1, False, "ceiling"),
        (Inspection("ended", {"exit_code": 3}), 0.1, False, "lost"),  # before it came to that
        (Inspection("absent"), 0.1, False, "lost"),
        (Inspection("ended", {"exit_code": 137}), TIMEOUT_S, False, "ceiling"),  # the provider's own net
        (Inspection("running"), 0.1, True, "ceiling"),
    ],
)
async def test_one_that_was_over_before_its_ceiling_is_lost_and_not_too_late(
    says: Inspection, over_s: float, fails: bool, verdict: str
) -> None:
    found = await judged(says, silent_s=1.0, over_s=over_s, fails=fails)
    assert found.verdict is not None
    assert found.verdict.verdict == verdict
    assert ("exit code 3" in found.verdict.error) is (says.diagnostics.get("exit_code") == 3)


async def test_names_that_cannot_be_written_down_are_counted_all_the_same() -> None:
    provider = Pretended()
    provider.specs = dict.fromkeys(["tag-a", "tag-\udcff", "other-b"], SPEC)
    assert list(await census_with(provider, "tag")()) == ["tag-a", "tag-\\udcff"]
