"""The pair test: for every ordered pair of transitions of one run, hold the first one open before its commit, start
the second one, then commit or roll back. Nobody waits, and what comes out is what one after the other would give.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest

from sql.errors import LockTimedOut
from tests.support.callers import Caller, open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel
from tests.support.transitions import (
    TRANSITIONS,
    Situation,
    Subject,
    Transition,
    clear_away,
    left_behind,
    prepare_run,
)

pytestmark = pytest.mark.modes

# Only these may wait for each other, because only the other one's end tells what is right: two requests to cancel that
# are one and the same, two results of one attempt, of which the first stands, and two submits of the same run id
# through the SQL door (test_admission).
ONE_REQUEST = {("cancel_run", "cancel_run"), ("push result", "push result")}

# The same statements as one that stands for them in the short run; the soak takes all.
ALIKE = {"admit", "failed", "released", "deferred", "cancel", "lifecycle acknowledge", "lifecycle block"}
ALIKE |= {"fail step", "release step"}
# Of sandboxes: in the short run these meet one another and what ends runs, not everything.
DETACHED = ["reserve sandbox", "detach", "push result", "settle results", "judge runner"]
DETACHED += ["claim cleanup", "accept deletion", "confirm deletion"]
ENDS = ["completed", "park", "cancel_run", "cancel or mark", "sweep", "claim"]
ALIKE |= {
    f"observability {verb}" for verb in ("acknowledge", "hand back", "hand back unsent", "block", "renew")
}


@attrs.define
class Stage:
    """Two connections to one schema: one holds, the other acts and must not wait."""

    acting: Kernel
    holding: Kernel
    caller: Caller
    runs: int = 0

    @asynccontextmanager
    async def subject(self, situation: Situation) -> AsyncIterator[Subject]:
        self.runs += 1
        subject = await prepare_run(self.acting, situation, f"run-{self.runs}")
        try:
            yield subject
        finally:
            await clear_away(self.acting, subject)

    async def serial(self, situation: Situation, *order: Transition) -> tuple[list[Any], Any]:
        """What the transitions answer, and leave behind, one after the other."""
        async with self.subject(situation) as subject:
            answers = [subject.plain(await transition.call(self.acting, subject)) for transition in order]
            return answers, await left_behind(self.acting, subject)

    async def interleaved(
        self, situation: Situation, first: Transition, second: Transition, *, commit: bool
    ) -> tuple[list[Any], Any]:
        """The same, with the second one called while the first one is open, and again if it was told to."""
        async with self.subject(situation) as subject:
            await self.caller.begin()
            one = subject.plain(await first.call(self.holding, subject))
            try:
                two = subject.plain(await second.call(self.acting, subject))
            finally:
                await (self.caller.commit() if commit else self.caller.rollback())
            if not second.settled(two):
                two = subject.plain(await second.call(self.acting, subject))
            await check_invariants(self.acting.session)
            return [one, two] if commit else [two], await left_behind(self.acting, subject)


@asynccontextmanager
async def open_stage(dsn: str, schema: str) -> AsyncIterator[Stage]:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        await kernel.freeze_clock()
        yield Stage(kernel, caller.doors(kernel), caller)


async def broken_promises(stage: Stage, first: Transition, second: Transition) -> list[str]:
    """Everything that is wrong with a pair, in words."""
    situation = first.needs.over(second.needs).over(Situation(run="running"))
    wrong = []
    try:
        answers, left = await stage.interleaved(situation, first, second, commit=True)
        forward = await stage.serial(situation, first, second)
        (two, one), state = await stage.serial(situation, second, first)
        for order in (answers, forward[0], both := [one, two]):
            order[:] = [
                None if told.hint else answer for told, answer in zip((first, second), order, strict=True)
            ]
        if (answers, left) not in (forward, (both, state)):
            wrong.append(f"committed: {answers}, in neither order: {forward[0]} or {both}")
        rolled_back = await stage.interleaved(situation, first, second, commit=False)
        if rolled_back != await stage.serial(situation, second):
            wrong.append(f"rolled back: {rolled_back[0]} is not what the second one does alone")
    except LockTimedOut:
        wrong.append("the second one waited")
    except AssertionError as broken:
        wrong.append(str(broken))
    return [f"{first.name} / {second.name}: {words}" for words in wrong]


async def hold_open(dsn: str, schema: str, name: str, others: Iterable[str]) -> None:
    wrong: list[str] = []
    async with open_stage(dsn, schema) as stage:
        for other in others:
            if (name, other) not in ONE_REQUEST:
                wrong += await broken_promises(stage, TRANSITIONS[name], TRANSITIONS[other])
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", [name for name in TRANSITIONS if name not in {*ALIKE, *DETACHED}])
async def test_held_open(dsn: str, schema: str, name: str) -> None:
    """E-1, E-2, E-7."""
    await hold_open(dsn, schema, name, [other for other in TRANSITIONS if other not in {*ALIKE, *DETACHED}])


@pytest.mark.parametrize("name", [*DETACHED, *ENDS])
async def test_held_open_with_a_sandbox(dsn: str, schema: str, name: str) -> None:
    """E-1, E-2, E-7."""
    await hold_open(dsn, schema, name, DETACHED if name in ENDS else [*DETACHED, *ENDS])


@pytest.mark.soak
@pytest.mark.parametrize("name", TRANSITIONS)
async def test_every_pair_held_open(dsn: str, schema: str, name: str) -> None:
    await hold_open(dsn, schema, name, TRANSITIONS)


async def test_a_wait_would_be_seen(dsn: str, schema: str) -> None:
    # The one pair that has to wait shows that the test above can fail.
    async with open_stage(dsn, schema) as stage:
        cancel_run = TRANSITIONS["cancel_run"]
        wrong = await broken_promises(stage, cancel_run, cancel_run)
    assert wrong == ["cancel_run / cancel_run: the second one waited"]
