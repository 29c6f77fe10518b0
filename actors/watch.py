"""Watch: who waits for a run to end, and everybody's reads.

Owns one set read for all waiting handles, and the connection that single reads share. It never writes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import attrs
import trio

from actors.core import Life, Mailbox, Reply, WakeFlag
from sql import status
from sql.connection import Session, SessionOptions
from sql.errors import LinkError, RunlaneError, StatementTooSlow

_BATCH = 100
_READ = 500
# Terminals of a busy system arrive in a stream of hints: one read per moment answers them all.
_PACE_S = 0.010


@attrs.define(slots=True, eq=False)
class Query:
    """A read: ``ask(session)`` and where its answer goes. ``deadline`` is on the trio clock: past it nobody waits."""

    ask: Callable[[Session], Awaitable[Any]]
    deadline: float
    reply: Reply[Any] = attrs.field(factory=Reply)
    too_slow: bool = False


class Waiters:
    """Replies that wait for the terminal of a run, by run id."""

    def __init__(self) -> None:
        self._by_run: dict[str, list[Reply[status.Terminal]]] = defaultdict(list)
        self._fresh: set[str] = set()
        self._closed: RunlaneError | None = None

    def __len__(self) -> int:
        return len(self._by_run)

    def add(self, run_id: str, *, running_here: bool = False) -> Reply[status.Terminal]:
        """Wait for this run's end. It may have ended before, unless its attempt runs on this host."""
        reply: Reply[status.Terminal] = Reply()
        if self._closed is not None:
            reply.set_error(self._closed)
            return reply
        self._by_run[run_id].append(reply)
        if not running_here:
            self._fresh.add(run_id)
        return reply

    def discard(self, run_id: str, reply: Reply[status.Terminal]) -> None:
        """No longer wait."""
        replies = self._by_run.get(run_id)
        if replies is not None and reply in replies:
            replies.remove(reply)
            if not replies:
                del self._by_run[run_id]

    def tell(self, terminal: status.Terminal) -> None:
        """The run has ended (or does not exist)."""
        for reply in self._by_run.pop(terminal.run_id, ()):
            reply.set_result(terminal)

    def close(self, error: RunlaneError) -> None:
        """Nobody looks any more: whoever waits, or comes to wait, hears why."""
        self._closed = error
        for replies in self._by_run.values():
            for reply in replies:
                reply.set_error(error)
        self._by_run.clear()

    def waited_for(self, run_id: str) -> bool:
        """Whether anybody waits for this run."""
        return run_id in self._by_run

    def take_fresh(self) -> list[str]:
        """Runs that somebody waits for since the last call: they may have ended before."""
        fresh = [run_id for run_id in self._fresh if run_id in self._by_run]
        self._fresh.clear()
        return fresh

    def run_ids(self) -> list[str]:
        """Runs that somebody waits for."""
        return list(self._by_run)


class Watch:
    """Reads arrive in ``mailbox``, whose wake flag is ``wake``; ``ended`` (the hint, which forwards to ``wake``) says
    that some run has ended."""

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Query],
        waiters: Waiters,
        *,
        ended: WakeFlag,
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._waiters = waiters
        self._ended = ended

    async def run(self, life: Life) -> None:
        """Answer reads and waiters until the mailbox ends."""
        look_at = trio.current_time()
        async with life.session(self._options) as session:
            life.ready()
            self._ended.set()
            while True:
                await self._mailbox.wake.wait(look_at if self._ended.is_set and len(self._waiters) else None)
                life.beat()
                await self._answer(session, self._mailbox.take_nowait(_BATCH))
                if len(self._mailbox):
                    self._mailbox.wake.set()
                elif self._mailbox.closed:
                    return
                await self._look(session, self._waiters.take_fresh())
                if len(self._waiters) and trio.current_time() >= look_at and self._ended.clear():
                    look_at = trio.current_time() + _PACE_S
                    await self._look(session, self._waiters.run_ids())

    async def _answer(self, session: Session, queries: Iterable[Query]) -> None:
        for query in queries:
            if query.deadline <= trio.current_time():
                self._mailbox.done([query])
                continue
            try:
                query.reply.set_result(await query.ask(session))
            except StatementTooSlow as exc:
                # Once it may be the link. Twice it is the read, which would hold up everybody's with every life.
                if query.too_slow:
                    query.reply.set_error(exc)
                    self._mailbox.done([query])
                query.too_slow = True
                raise
            except LinkError:
                raise
            except (RunlaneError, ValueError, RecursionError) as exc:
                # Its own fault, also when what it read cannot be decoded.
                query.reply.set_error(exc)
            self._mailbox.done([query])

    async def _look(self, session: Session, run_ids: list[str]) -> None:
        for start in range(0, len(run_ids), _READ):
            for terminal in await status.read_terminals(session, run_ids[start : start + _READ]):
                self._waiters.tell(terminal)
