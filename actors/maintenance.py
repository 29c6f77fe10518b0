"""Maintenance: what grows is kept small, by one host at a time, in small passes.

Owns how long things are kept, how often that is looked at, and how much of the database it may take. Whose turn it is
stands in the database. It has a connection only while it works.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime

import attrs
import trio

from actors.core import Life, Portion
from actors.hints import Hints
from sql import maintenance as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault

log = logging.getLogger("runlane.maintenance")

_BATCH = 1_000
_PAGE = 10_000
_LEASE_S = 120.0
# A turn ends well within its lease; whoever comes next goes on from there.
_TURN_S = 30.0
# Work and rest in equal parts: at most half of one connection, and the rest of the database for others.
_LEAST_REST_S = 0.005
_OFTEN_S, _RARELY_S = 1.0, 600.0
_RETRY_S = 60.0
# Counting reads every run: never more than a hundredth of the time.
_COUNT_SHARE = 0.01
_FORGET_HOSTS_S = 30 * 86_400.0
_LEAST_HOSTS_S = 86_400.0


@attrs.frozen(kw_only=True)
class Keep:
    """How long things are kept, in seconds; None: for ever. ``ledger``: the read model is kept when its run goes."""

    runs_s: float | None
    logs_s: float | None
    ledger: bool


@attrs.frozen
class _Step:
    """What one pass of a chore did: by kind of thing, and the state to go on from (None: the round is over)."""

    done: Mapping[str, int]
    state: str | None


_Pass = Callable[[Session, str | None], Awaitable[_Step]]


class Maintenance:
    """``on_done`` hears how many of which kind were done: ``runs_deleted``, ``logs_scrubbed`` and so on."""

    def __init__(
        self, options: SessionOptions, hints: Hints, keep: Keep, *, on_done: Callable[[str, int], None]
    ) -> None:
        self._options = options
        self._hints = hints
        self._keep = keep
        self._on_done = on_done
        self._portions = {name: Portion(_BATCH) for name in ("retention", "logs")}
        self._portions["counts"] = Portion(_PAGE)
        self._steps: dict[str, _Pass] = {
            "retention": self._retain,
            "logs": self._scrub,
            "counts": self._count,
        }

    async def run(self, life: Life) -> None:
        """Do what is due until asked to stop."""
        life.ready()
        while not life.stopping.is_set():
            await self._hints.chores.wait()
            life.beat()
            if life.stopping.is_set():
                return
            async with life.session(self._options) as session:
                while not life.stopping.is_set():
                    claimed = await door.claim(session, list(self._steps), lease_s=_LEASE_S)
                    if claimed is None:
                        break
                    await self._turn(session, life, claimed)

    async def _turn(self, session: Session, life: Life, claimed: door.Claim) -> None:
        """Passes of one chore until its round is over or the turn is; then it is handed back."""
        began, state = trio.current_time(), claimed.state
        done: dict[str, int] = {}
        worked_s = 0.0
        try:
            while True:
                life.beat()
                start = trio.current_time()
                step = await self._steps[claimed.name](session, state)
                took_s = trio.current_time() - start
                worked_s += took_s
                state = step.state
                for kind, count in step.done.items():
                    done[kind] = done.get(kind, 0) + count
                    self._on_done(kind, count)
                if state is None or life.stopping.is_set() or trio.current_time() - began > _TURN_S:
                    break
                with trio.move_on_after(max(_LEAST_REST_S, took_s)):
                    await life.stopping.wait()
        except ItemFault as fault:
            log.error("event=chore_failed chore=%s next_try_s=%g error=%s", claimed.name, _RETRY_S, fault)
            await door.finish(session, claimed, next_s=_RETRY_S, state=None)
            return
        if any(done.values()):
            said = " ".join(f"{kind}={count}" for kind, count in done.items())
            log.info("event=maintained chore=%s %s worked_s=%.1f", claimed.name, said, worked_s)
        next_s = self._next_s(claimed.name, worked_s) if state is None else 0.0
        await door.finish(session, claimed, next_s=next_s, state=state)

    def _next_s(self, name: str, worked_s: float) -> float:
        """Seconds until a chore that is done is due again: what is kept for longer is looked at less often."""
        if name == "counts":
            return max(_RARELY_S, worked_s / _COUNT_SHARE)
        kept_s = self._keep.runs_s if name == "retention" else self._keep.logs_s
        return min(max((math.inf if kept_s is None else kept_s) / 20, _OFTEN_S), _RARELY_S)

    # --- chores: one pass each -----------------------------------------------------------------------

    async def _retain(self, session: Session, state: str | None) -> _Step:
        keep, portion = self._keep, self._portions["retention"]
        done, next_from = {}, None
        if keep.runs_s is not None:
            with portion.adapt():
                pass_ = await door.purge_runs(
                    session, age_s=keep.runs_s, limit=portion.most, ledger=not keep.ledger, start=_from(state)
                )
            done = {"runs_deleted": pass_.items, "rows_deleted": pass_.rows}
            next_from = pass_.next_from
        if next_from is not None:
            return _Step(done, _state(next_from))
        age_s = max(_FORGET_HOSTS_S if keep.runs_s is None else keep.runs_s, _LEAST_HOSTS_S)
        done["hosts_forgotten"] = await door.forget_hosts(session, age_s=age_s, limit=_BATCH)
        return _Step(done, None)

    async def _scrub(self, session: Session, state: str | None) -> _Step:
        """First the facts, then the read model; which of them stands in the state."""
        age_s, portion = self._keep.logs_s, self._portions["logs"]
        if age_s is None:
            return _Step({}, None)
        ledger = state is not None and json.loads(state)["ledger"]
        scrub = door.scrub_ledger_logs if ledger else door.scrub_logs
        with portion.adapt():
            pass_ = await scrub(session, age_s=age_s, limit=portion.most, start=_from(state))
        done = {"ledger_logs_scrubbed" if ledger else "logs_scrubbed": pass_.items}
        if pass_.next_from is None:
            return _Step(done, None if ledger else _state(None, ledger=True))
        return _Step(done, _state(pass_.next_from, ledger=ledger))

    async def _count(self, session: Session, state: str | None) -> _Step:
        portion = self._portions["counts"]
        with portion.adapt():
            return _Step({}, await door.count_runs(session, state=state, limit=portion.most))


def _from(state: str | None) -> datetime | None:
    text = None if state is None else json.loads(state)["from"]
    return None if text is None else datetime.fromisoformat(text)


def _state(next_from: datetime | None, *, ledger: bool = False) -> str:
    return json.dumps({"from": None if next_from is None else next_from.isoformat(), "ledger": ledger})
