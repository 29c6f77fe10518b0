"""Waits: what live attempts wait for in memory, the children that they start, and who is woken.

Owns the group commit of waits that a play stands at without being parked and of launches, and the sweep of wakes, which
makes parked runs due. It never parks an attempt: its play's own rule does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import trio

from actors.attempts import Attempt, Attempts, Why
from actors.core import PASSING_FAULTS, Backoff, Life, Mailbox, Reply, commit_in_groups
from actors.hints import Hints
from sql import children
from sql import waits as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault

_BATCH = 500


@attrs.define(slots=True, eq=False)
class Stand:
    """A wait at which a live attempt stands in memory, and where it hears that it is over.

    ``dropped``: nobody stands there any more. ``ask_at``: trio time at which to ask again without being woken.
    """

    attempt: Attempt
    wait: door.Wait
    reply: Reply[door.WaitState] = attrs.field(factory=Reply)
    dropped: bool = False
    ask_at: float = 0.0

    @property
    def live(self) -> bool:
        """Whether somebody stands there."""
        return not self.dropped and self.attempt.why is None


@attrs.define(slots=True, eq=False)
class LaunchRequest:
    """A child to start for a live attempt, and where its answer goes."""

    attempt: Attempt
    item: children.Launch
    reply: Reply[children.Launched] = attrs.field(factory=Reply)


class Waits:
    """Stands arrive in ``mailbox``, whose wake flag is the hint ``wake_waits``, and stay in flight until they are over.

    Launches arrive in ``launches``, with the same flag. ``backstop_s`` is the longest time between two looks at a
    stand, should every notification be lost.
    """

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Stand],
        launches: Mailbox[LaunchRequest],
        attempts: Attempts,
        hints: Hints,
        *,
        release_id: str | None,
        environment: str | None,
        backstop_s: float,
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._launches = launches
        self._attempts = attempts
        self._hints = hints
        self._release_id = release_id
        self._environment = environment
        self._backstop_s = backstop_s
        self._locked = Backoff(first_s=0.005, max_s=1.0)

    async def run(self, life: Life) -> None:
        """Ask and sweep until the mailbox ends. Connects when somebody first waits, or has something for a run."""
        standing: list[Stand] = []
        busy: list[LaunchRequest] = []
        sweep_at: float | None = None
        life.ready()
        if life.number > 1:
            self._hints.wakes.set()  # the last life's sweep may have been cut short
        while not (len(self._mailbox) or len(self._launches) or self._hints.wakes.is_set):
            if self._mailbox.closed:
                return
            await self._hints.wake_waits.wait()
        self._hints.wake_waits.set()
        async with life.session(self._options) as session:
            while True:
                await self._hints.wake_waits.wait(self._next_look(standing, sweep_at, again=bool(busy)))
                life.beat()
                fresh, launches = self._mailbox.take_nowait(_BATCH), self._launches.take_nowait(_BATCH)
                if self._mailbox.closed and not fresh and not launches:
                    # Their plays have ended, or run on without a lease.
                    self._mailbox.done(standing)
                    self._launches.done(busy)
                    return
                if len(self._mailbox) or len(self._launches):
                    self._hints.wake_waits.set()
                if busy or launches:
                    busy = await self._launch(session, busy + launches)
                woken = self._hints.wakes.clear()
                standing = await self._ask(session, standing + fresh, everybody=woken)
                if woken or (sweep_at is not None and trio.current_time() >= sweep_at):
                    sweep_at = await self._sweep(session)

    def _next_look(self, standing: Iterable[Stand], sweep_at: float | None, *, again: bool) -> float | None:
        times = [stand.ask_at for stand in standing]
        if sweep_at is not None:
            times.append(sweep_at)
        if again:
            times.append(trio.current_time() + self._locked.next())
        return min(times, default=None)

    async def _sweep(self, session: Session) -> float | None:
        """Make parked runs due; when to look again, if wakes are left."""
        woken, remaining = await door.sweep(session, limit=_BATCH)
        if woken:
            self._hints.everywhere(["runs"])
        if not remaining:
            return None
        if woken:
            self._locked.reset()
        return trio.current_time() + self._locked.next()

    # --- stands --------------------------------------------------------------------------------------

    async def _ask(self, session: Session, stands: Sequence[Stand], *, everybody: bool) -> list[Stand]:
        """Ask for those that are due (or all), and return the ones that still stand."""
        self._mailbox.done([stand for stand in stands if not stand.live])
        stands = [stand for stand in stands if stand.live]
        now = trio.current_time()
        by_attempt: dict[int, list[Stand]] = {}
        for stand in stands:
            if everybody or stand.ask_at <= now:
                by_attempt.setdefault(id(stand.attempt), []).append(stand)
        await commit_in_groups(
            list(by_attempt.values()), lambda groups: self._try(session, groups), fail=self._refuse
        )
        return [stand for stand in stands if not stand.reply.done]

    async def _try(self, session: Session, groups: Sequence[list[Stand]]) -> None:
        trials = [
            door.Trial(
                stands[0].attempt.run_id,
                stands[0].attempt.attempt,
                stands[0].attempt.token,
                list({stand.wait.key: stand.wait for stand in stands}.values()),
            )
            for stands in groups
        ]
        answers = await door.try_waits(session, trials)
        busy = False
        for stands, answer in zip(groups, answers, strict=True):
            if answer.answer == "lost":
                self._lost(stands)
            elif answer.answer == "busy":
                busy = True
                self._later(stands)
            else:
                for stand in stands:
                    self._tried(stand, answer.states[stand.wait.key])
        if not busy:
            self._locked.reset()

    def _tried(self, stand: Stand, state: door.WaitState) -> None:
        if state.done:
            self._mailbox.done([stand])
            stand.reply.set_result(state)
            return
        left_s = self._backstop_s if state.left_s is None else min(state.left_s, self._backstop_s)
        # The database's clock decides: asked a moment too early, it is asked again.
        stand.ask_at = trio.current_time() + max(left_s, 0.001)

    def _later(self, stands: Iterable[Stand]) -> None:
        ask_at = trio.current_time() + self._locked.next()
        for stand in stands:
            stand.ask_at = ask_at

    def _lost(self, stands: Sequence[Stand]) -> None:
        self._lose(stands[0].attempt)
        self._mailbox.done(stands)
        for stand in stands:
            stand.dropped = True

    def _lose(self, attempt: Attempt) -> None:
        if self._attempts.get(attempt.run_id) is attempt and attempt.holds_slot:
            self._attempts.lose(attempt, Why.LOST)

    def _refuse(self, stands: list[Stand], fault: ItemFault) -> None:
        if isinstance(fault, PASSING_FAULTS):
            self._later(stands)
            return
        self._mailbox.done(stands)
        for stand in stands:
            stand.reply.set_error(fault)

    # --- launches ------------------------------------------------------------------------------------

    async def _launch(self, session: Session, requests: Sequence[LaunchRequest]) -> list[LaunchRequest]:
        """Start children; those for which some row or key is locked are returned."""
        busy: list[LaunchRequest] = []

        async def commit(group: Sequence[LaunchRequest]) -> None:
            answers = await children.start(
                session,
                [request.item for request in group],
                release_id=self._release_id,
                environment=self._environment,
            )
            for request, answer in zip(group, answers, strict=True):
                if answer.answer == "busy":
                    busy.append(request)
                    continue
                if answer.answer == "lost":
                    self._lose(request.attempt)
                self._launches.done([request])
                request.reply.set_result(answer)
            if any(answer.created for answer in answers):
                self._hints.lanes.set()
                self._hints.everywhere(["runs"])

        def refuse(request: LaunchRequest, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                busy.append(request)
                return
            self._launches.done([request])
            request.reply.set_error(fault)

        gone = [request for request in requests if request.attempt.why is not None]
        self._launches.done(gone)
        live = [request for request in requests if request.attempt.why is None]
        await commit_in_groups(live, commit, fail=refuse)
        if not busy:
            self._locked.reset()
        return busy
