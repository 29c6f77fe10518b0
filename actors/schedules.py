"""Schedules: fires what is due, once whichever hosts live, and carries out changes of schedules.

Owns when to look, which missed fires count, and the retry of changes that found their row held. It never admits a run
itself: firing does, in the transaction that moves the schedule.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import attrs
import trio

from actors.core import Backoff, Life, Mailbox, Reply, commit_in_groups
from actors.cron import Timing
from actors.hints import Hints
from sql import schedules as door
from sql.connection import Session, SessionOptions
from sql.errors import LinkError, LockTimedOut, RunlaneError

log = logging.getLogger("runlane.schedules")

_BATCH = 1_000
_RETRY_S = 0.02
# Fires of one call; of one schedule with missed="all", the latest of what was missed.
MOST_FIRES = 1_000
# A fire later than this was missed, where missed="skip".
MISSED_AFTER_S = 60.0
# A schedule that cannot be read or fired here, not even alone, is tried again so much later.
_SPOILED_S = 30.0


@attrs.define(slots=True, eq=False)
class Change:
    """A write: ``make(session)``, which answers None where somebody holds the row, and where its answer goes.

    ``deadline`` is on the trio clock.
    """

    make: Callable[[Session], Awaitable[Any]]
    deadline: float
    reply: Reply[Any] = attrs.field(factory=Reply)


@attrs.frozen
class Adoption:
    """Whose runs the schedules of these plays submit from the start of this host on."""

    plays: Sequence[str]
    release_id: str | None
    environment: str | None


class Schedules:
    """Changes arrive in ``mailbox``, whose wake flag is that of the hint ``schedules``.

    ``adoption`` None: this runtime hosts nothing, and fires nothing. ``on_fired`` hears how late each run was made.
    """

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Change],
        hints: Hints,
        *,
        adoption: Adoption | None,
        on_fired: Callable[[Sequence[float]], None],
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._hints = hints
        self._adoption = adoption
        self._to_adopt = adoption is not None  # once in all lives: a later host's adoption stands
        self._on_fired = on_fired
        self._spoiled: dict[str, float] = {}  # schedules that failed alone, until when they are left alone

    async def run(self, life: Life) -> None:
        """Fire and change until the mailbox ends."""
        held = Backoff(first_s=0.005, max_s=1.0)
        look_at: float | None = None
        busy: list[Change] = []
        async with life.session(self._options) as session:
            life.ready()
            self._hints.schedules.set()
            while True:
                retry_at = trio.current_time() + _RETRY_S if busy else None
                await self._mailbox.wake.wait(_earlier(look_at, retry_at))
                life.beat()
                busy = await self._change(session, busy + self._mailbox.take_nowait(_BATCH))
                if len(self._mailbox):
                    self._mailbox.wake.set()
                elif self._mailbox.closed:
                    return
                if self._adoption is None:
                    continue
                due = look_at is not None and trio.current_time() >= look_at
                if self._hints.schedules.clear() or due:
                    look_at = await self._look(session, self._adoption, held)

    # --- firing --------------------------------------------------------------------------------------

    async def _look(self, session: Session, adoption: Adoption, held: Backoff) -> float | None:
        """Fire what is due; when to look again."""
        if self._to_adopt:
            self._to_adopt = bool(
                await door.adopt(
                    session,
                    adoption.plays,
                    release_id=adoption.release_id,
                    environment=adoption.environment,
                )
            )
        found, next_s = await door.due(session, limit=_BATCH)
        now = trio.current_time()
        looks = [] if next_s is None else [now + next_s]
        firings = []
        for due in found:
            try:
                if self._spoiled.get(due.name, now) <= now:
                    firings.append(firing(due))
            except RunlaneError as exc:  # its time zone is not known here, for example
                self._spoil(due, exc)
        fired = 0

        async def fire(items: Sequence[door.Firing]) -> None:
            nonlocal fired
            fired += await self._fire(session, items)

        for portion in _portions(firings):
            await commit_in_groups(portion, fire, fail=lambda item, fault: self._spoil(item.due, fault))
        self._spoiled = {name: until for name, until in self._spoiled.items() if until > now}
        looks += self._spoiled.values()
        looks += [now + (item.next_fire_at - item.due.now).total_seconds() for item in firings]
        if self._to_adopt or len(found) == _BATCH or fired < len(firings):
            looks.append(trio.current_time() + held.next())  # more is due, or somebody else is at it
        else:
            held.reset()
        # Hosts share this work: a little apart, so that they do not all look in the same millisecond.
        return min(looks) + random.uniform(0.0, 0.005) if looks else None

    async def _fire(self, session: Session, items: Sequence[door.Firing]) -> int:
        """How many of these were ours to fire."""
        answers = await door.fire(session, items)
        lags_s = [lag_s for answer in answers for lag_s in answer.lags_s]
        if lags_s:
            log.info("event=fired schedules=%d runs=%d", len(items), len(lags_s))
            self._hints.everywhere(["runs"])
            self._hints.lanes.set()
            self._on_fired(lags_s)
        return sum(answer.answer == "done" for answer in answers)

    def _spoil(self, due: door.DueSchedule, fault: RunlaneError) -> None:
        log.error("event=fire_failed schedule=%s next_try_s=%g error=%s", due.name, _SPOILED_S, fault)
        self._spoiled[due.name] = trio.current_time() + _SPOILED_S

    # --- changes -------------------------------------------------------------------------------------

    async def _change(self, session: Session, changes: Sequence[Change]) -> list[Change]:
        """Make them, each on its own; those that found their row held."""
        busy = []
        for change in changes:
            if change.deadline <= trio.current_time():
                self._refuse(change, LockTimedOut("somebody else holds this schedule, or its run"))
                continue
            try:
                answer = await change.make(session)
            except LinkError:
                raise
            except RunlaneError as exc:
                self._refuse(change, exc)
                continue
            if answer is None:
                busy.append(change)
                continue
            self._mailbox.done([change])
            change.reply.set_result(answer)
            self._hints.everywhere(["schedules", "runs"])
        return busy

    def _refuse(self, change: Change, error: RunlaneError) -> None:
        self._mailbox.done([change])
        change.reply.set_error(error)


def firing(due: door.DueSchedule) -> door.Firing:
    """What fires of a schedule that is due, by its rule for missed fires. Raises InputRefused."""
    timing = Timing(due.cron, due.every_s, due.timezone)
    found = timing.fires(due.next_fire_at, due.now, MOST_FIRES if due.missed == "all" else 1)
    next_ = timing.next_after(found[-1], due.now)
    if due.missed == "skip":
        found = [moment for moment in found if due.now - moment <= timedelta(seconds=MISSED_AFTER_S)]
    return door.Firing(due, found, next_)


def _portions(firings: Sequence[door.Firing]) -> Iterator[list[door.Firing]]:
    """Groups with at most so many fires that one call is quick."""
    group: list[door.Firing] = []
    for item in firings:
        if group and sum(len(one.fire_ats) for one in group) + len(item.fire_ats) > MOST_FIRES:
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _earlier(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)
