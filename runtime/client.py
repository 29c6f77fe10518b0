"""Clients: programs that submit runs and look at them, and host none.

Owns the two ways to be one, ``Client`` in a program on trio and ``SyncClient`` in any other, and how the latter's
calls reach the database. What can be asked, and what the answers mean, is the verbs' business.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import attrs

from runtime.api import Runtime, Verbs, check_on_trio
from runtime.codec import JsonCodec
from runtime.config import RuntimeConfig
from runtime.embedded import EmbeddedServer
from runtime.host import session_options
from runtime.link import ActorLink
from runtime.routes import Routes
from runtime.submit import Submissions, plays_from
from runtime.sync import SyncVerbs
from sql import admission, control, deployment, due, events, status
from sql.admission import Admitted, Submission
from sql.calls import channel
from sql.connection import Session
from sql.control import Cancellation, Cancelled, Failed, Failure
from sql.errors import ItemFault, LockTimedOut, OutcomeUnknown
from sql.events import Sending
from sql.plain import Line
from sql.status import Terminal

T = TypeVar("T")

_CHUNK = 500
_READ = 500
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
# How long a locked row is tried again before a request to cancel is recorded.
_PATIENCE_S = 0.25
# Other runs end, too: their notifications must not make each waiter read without a pause.
_PACE_S = 0.02
# Without a notification, lost or switched off.
_LOOK_EVERY_S = 2.0


class Client(Verbs):
    """The verbs of a runtime without its host, for a program on trio. Made by ``Client.open``.

    It costs the database two connections, and never changes the schema.
    """

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, config: RuntimeConfig | None = None, *, codec: JsonCodec | None = None
    ) -> AsyncIterator[Client]:
        """Connect for the length of the block; an error of the block leaves it unwrapped.

        ``config`` None reads ``RUNLANE_*`` variables; what concerns hosts is not used. Raises SchemaNotReady where no
        host, and no ``runlane migrate``, has built the schema for this version.
        """
        check_on_trio("Client.open")
        async with Runtime._opened(config, (), None, codec, deploy=False) as runtime:
            yield cls(ActorLink(runtime._host))


class SyncClient(SyncVerbs):
    """The verbs of a runtime as blocking calls, for scripts and web apps that know nothing of trio.

    One client serves any number of threads over one connection, on which their calls take turns. It never changes the
    schema, nor the program's own asyncio. Open it after a fork, not before. Made by ``SyncClient.open``; leaving its
    block, or ``close()``, ends it, and calls that still wait then raise HostStopping.
    """

    def __init__(self, link: LineLink, embedded: EmbeddedServer | None) -> None:
        super().__init__(Verbs(link), link.line.call)
        self._link = link
        self._embedded = embedded

    @classmethod
    def open(cls, config: RuntimeConfig | None = None, *, codec: JsonCodec | None = None) -> SyncClient:
        """Connect. ``config`` and errors are as in ``Client.open``."""
        config = RuntimeConfig.given(config)
        embedded: EmbeddedServer | None = None
        if config.dsn is None:
            embedded = EmbeddedServer.of(None if config.embedded_dir is None else Path(config.embedded_dir))
            config = attrs.evolve(config, dsn=embedded.join())
        client = cls(LineLink(config, codec or JsonCodec()), embedded)
        try:
            client._link.line.call(client._link.check)
        except BaseException:
            client.close()
            raise
        return client

    def close(self) -> None:
        """End the client. Can be called twice, from any thread."""
        self._link.line.close()
        if self._embedded is not None:
            self._embedded.leave()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LineLink:
    """The link of a client without actors: each call is made on the line, again until its deadline."""

    def __init__(self, config: RuntimeConfig, codec: JsonCodec) -> None:
        channels = [channel(config.schema, "terminals")] if config.notify else []
        self.config = config
        self.submissions = Submissions(config, codec, {}, plays_from(self.ask, config), Routes(None, {}))
        self.line = Line(session_options(config), "sync client", channels=channels)
        self._watched: Counter[str] = Counter()
        self._ends: dict[str, Terminal] = {}
        self._looked_at = 0.0

    async def check(self) -> None:
        """Raise what keeps the database from being used."""
        await self.line.ask(deployment.require, timeout_s=self.config.operation_timeout_s, again=False)

    async def ask(self, read: Callable[[Session], Awaitable[T]]) -> T:
        """As ``Link.ask``."""
        return await self.line.ask(read, timeout_s=self.config.operation_timeout_s)

    async def admit(self, items: Sequence[Submission]) -> list[Admitted]:
        """As ``Link.admit``."""
        deadline = time.monotonic() + self.config.operation_timeout_s
        answers: list[Admitted] = []
        fault: ItemFault | None = None
        for start in range(0, len(items), _CHUNK):
            stack = [items[start : start + _CHUNK]]
            while stack:
                group = stack.pop()
                try:
                    answers += await self._admit(group, deadline)
                except ItemFault as exc:
                    # One item is at fault: the others go in, then its error is told.
                    if len(group) > 1:
                        middle = len(group) // 2
                        stack += [group[middle:], group[:middle]]
                    fault = fault or exc if len(group) == 1 else fault
        if fault is not None:
            raise fault
        return answers

    async def _admit(self, items: Sequence[Submission], deadline: float) -> list[Admitted]:
        """Admit a chunk, and again those whose key an open transaction holds."""
        answers: dict[int, Admitted] = {}
        pause_s = _FIRST_PAUSE_S
        while True:
            places = [place for place in range(len(items)) if place not in answers]
            asked = [items[place] for place in places]

            async def submit(session: Session, asked: Sequence[Submission] = asked) -> list[Admitted]:
                config = self.config
                found = await admission.admit(
                    session,
                    asked,
                    owner=0,
                    lease_s=config.lease_s,
                    release_id=config.release_id,
                    environment=config.environment,
                )
                if config.notify and any(answer.created for answer in found):
                    replaces = any(item.replaces for item in asked)
                    await due.notify(session, ["runs", "control"] if replaces else ["runs"])
                return found

            found = await self.line.ask(submit, timeout_s=deadline - time.monotonic())
            answers |= {
                place: answer for place, answer in zip(places, found, strict=True) if answer.outcome != "busy"
            }
            if len(answers) == len(items):
                return [answers[place] for place in range(len(items))]
            if time.monotonic() + pause_s >= deadline:
                raise LockTimedOut(
                    "a run id, an idempotency key or a unique key is held by another transaction that is still open"
                )
            await self.line.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def cancel(self, item: Cancellation) -> Cancelled:
        """As ``Link.cancel``."""
        patience = time.monotonic() + _PATIENCE_S
        while True:
            mark = time.monotonic() >= patience

            async def cancel(session: Session, mark: bool = mark) -> Cancelled:
                (answer,) = await control.cancel(session, [item], mark=mark)
                if self.config.notify and answer.answer in ("cancelled", "pending"):
                    await due.notify(session, ["control", "terminals", "lanes", "wakes", "runs"])
                return answer

            answer = await self.ask(cancel)
            if answer.answer != "busy":
                return answer
            await self.line.sleep(_FIRST_PAUSE_S)

    async def send(self, item: Sending) -> str:
        """As ``Link.send``."""
        deadline = time.monotonic() + self.config.operation_timeout_s
        pause_s = _FIRST_PAUSE_S

        async def send(session: Session) -> str:
            (answer,) = await events.send(session, [item])
            if self.config.notify and answer in ("delivered", "kept"):
                await due.notify(session, ["wakes"])
            return answer

        while True:
            answer = await self.line.ask(send, timeout_s=deadline - time.monotonic())
            if answer != "busy":
                return answer
            if time.monotonic() + pause_s >= deadline:
                raise LockTimedOut(f"event id {item.event_id!r} is held by a transaction that is open")
            await self.line.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def fail(self, item: Failure) -> Failed:
        """As ``Link.fail``."""
        deadline = time.monotonic() + self.config.operation_timeout_s
        pause_s = _FIRST_PAUSE_S

        async def fail(session: Session) -> Failed:
            (answer,) = await control.fail(session, [item])
            if self.config.notify and answer.answer == "failed":
                await due.notify(session, ["terminals", "lanes", "wakes"])
            return answer

        while True:
            answer = await self.line.ask(fail, timeout_s=deadline - time.monotonic())
            if answer.answer != "busy":
                return answer
            if time.monotonic() + pause_s >= deadline:
                raise LockTimedOut(f"run {item.run_id!r} is held by somebody else")
            await self.line.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def change(self, make: Callable[[Session], Awaitable[T | None]]) -> T:
        """As ``Link.change``."""
        deadline = time.monotonic() + self.config.operation_timeout_s
        pause_s = _FIRST_PAUSE_S

        async def change(session: Session) -> T | None:
            answer = await make(session)
            if self.config.notify and answer is not None:
                await due.notify(session, ["schedules", "runs"])
            return answer

        while True:
            answer = await self.line.ask(change, timeout_s=deadline - time.monotonic())
            if answer is not None:
                return answer
            if time.monotonic() + pause_s >= deadline:
                raise LockTimedOut("the schedule is held by another transaction that is still open")
            await self.line.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def ended(self, run_id: str, timeout_s: float) -> Terminal | None:
        """As ``Link.ended``; an outage of the database is waited out."""
        deadline = time.monotonic() + timeout_s
        self._watched[run_id] += 1
        try:
            while True:
                ear = self.line.ear()
                with contextlib.suppress(OutcomeUnknown):
                    await self._look(time.monotonic())
                left_s = deadline - time.monotonic()
                if run_id in self._ends or left_s <= 0:
                    return self._ends.get(run_id)
                await self.line.heard(ear, min(left_s, _LOOK_EVERY_S))
                await self.line.sleep(min(left_s, _PACE_S))
        finally:
            self._watched[run_id] -= 1
            if not self._watched[run_id]:
                del self._watched[run_id]
                self._ends.pop(run_id, None)

    async def _look(self, since: float) -> None:
        """Read the ends of all that is waited for, unless somebody else has begun to do so ``since`` then."""

        async def read(session: Session) -> None:
            if self._looked_at >= since:
                return
            began, run_ids = time.monotonic(), list(self._watched)
            for start in range(0, len(run_ids), _READ):
                for terminal in await status.read_terminals(session, run_ids[start : start + _READ]):
                    if terminal.run_id in self._watched:
                        self._ends[terminal.run_id] = terminal
            self._looked_at = began

        await self.ask(read)
