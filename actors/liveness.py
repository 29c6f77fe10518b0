"""Liveness: detached runners that fell silent are asked after at their provider, and judged.

Owns the sweep over one provider's runners: when it looks, and that a verdict is written only for exactly what was
judged. It never holds a transaction while it asks, and never decides what an answer means.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence

import attrs
import trio

from actors.core import Backoff, Life
from actors.hints import Hints
from sql import runners as door
from sql import sandboxes
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.runners import Silent, Verdict

log = logging.getLogger("runlane.liveness")

_PAGE = 100
_SETTLED_PAGE = 500
# Runners of one pass are asked after side by side.
_AT_ONCE = 20


@attrs.frozen(slots=True)
class Judgement:
    """What was found: a verdict, or None to leave the runner alone; and what is known of its end."""

    verdict: Verdict | None
    diagnostics: dict[str, object] = attrs.field(factory=dict)


Judge = Callable[[Silent], Awaitable[Judgement]]
"""Asks the provider and judges. An error or a timeout means that nothing is known: no verdict."""


class Liveness:
    """One per provider, so that one that hangs holds up nobody else's.

    ``look_s``: how long a pass may take to ask; a runner under judgement is nobody else's for that long.
    """

    def __init__(
        self,
        options: SessionOptions,
        hints: Hints,
        judge: Judge,
        *,
        provider: str,
        look_s: float,
        crash_cap: int,
    ) -> None:
        self._options = options
        self._hints = hints
        self.wake = hints.runners.join()
        self._judge = judge
        self._provider = provider
        self._look_s = look_s
        self._crash_cap = crash_cap

    async def run(self, life: Life) -> None:
        """Sweep until asked to stop."""
        held = Backoff(first_s=0.01, max_s=1.0)
        async with life.session(self._options) as session:
            life.ready()
            look_at: float | None = None
            while True:
                await self.wake.wait(look_at)
                if life.stopping.is_set():
                    return
                life.beat()
                remaining = await self._settle(session)
                silent, next_due_s = await door.sweep(
                    session, [self._provider], limit=_PAGE, look_s=self._look_s
                )
                await self._look(session, silent)
                if remaining or (not silent and next_due_s is not None and next_due_s < 0):
                    # Somebody holds the rows that are due.
                    look_at = trio.current_time() + held.next()
                elif next_due_s is None:
                    look_at = None
                else:
                    held.reset()
                    # Hosts share this work: a little apart, so that they do not all look in the same millisecond.
                    look_at = trio.current_time() + max(0.0, next_due_s) + random.uniform(0.0, 0.05)

    async def _settle(self, session: Session) -> int:
        try:
            settled, remaining = await door.settle_results(session, limit=_SETTLED_PAGE)
        except ItemFault as fault:
            # What is kept was checked when it came: this is for an operator, and must not stop the sweep.
            log.error("event=results_unsettled provider=%s error=%r", self._provider, fault)
            return 1
        if settled:
            self._tell()
        return remaining

    async def _look(self, session: Session, silent: Sequence[Silent]) -> None:
        judged: list[tuple[Silent, Judgement]] = []
        limit = trio.CapacityLimiter(_AT_ONCE)

        async def ask(one: Silent) -> None:
            async with limit:
                judged.append((one, await self._judge(one)))

        with trio.move_on_after(self._look_s * 0.8):
            async with trio.open_nursery() as nursery:
                for one in silent:
                    nursery.start_soon(ask, one)
        for one, judgement in judged:
            if judgement.diagnostics:
                await sandboxes.record_diagnostics(session, one.sandbox, judgement.diagnostics)
        await self._write(session, [each.verdict for _, each in judged if each.verdict is not None])

    async def _write(self, session: Session, verdicts: Sequence[Verdict]) -> None:
        backoff = Backoff(first_s=0.005, max_s=0.25)
        give_up_at = trio.current_time() + self._look_s * 0.2
        while verdicts:
            answers = await door.judge(session, verdicts, crash_cap=self._crash_cap)
            for verdict, answer in zip(verdicts, answers, strict=True):
                if answer == "done":
                    log.warning(
                        "event=runner_%s run=%s attempt=%d sandbox=%s silent_s=%.1f",
                        verdict.verdict,
                        verdict.silent.run_id,
                        verdict.silent.attempt,
                        verdict.silent.sandbox,
                        verdict.silent.silent_s,
                    )
            if "done" in answers:
                self._tell()
            verdicts = [each for each, answer in zip(verdicts, answers, strict=True) if answer == "busy"]
            if verdicts:
                if trio.current_time() >= give_up_at:
                    return  # they are due again soon
                await trio.sleep(backoff.next())

    def _tell(self) -> None:
        self._hints.lanes.set()
        self._hints.cleanup.set()
        self._hints.everywhere(["runs", "terminals"])
