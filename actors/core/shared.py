"""Several actors on one connection, for a process that should cost the database little.

Owns the turns on the connection and the one life that its parts share. A slow statement of one part holds up the
others, which is why a host of plays gives each actor a connection of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

import trio

from actors.core.supervisor import Actor, Life
from sql.connection import Session, SessionOptions

T = TypeVar("T")


class Together:
    """Runs ``actors``, which live and die together, on one session. It ends when all of them have."""

    def __init__(self, options: SessionOptions, actors: Sequence[Actor]) -> None:
        self._options = options
        self._actors = actors

    async def run(self, life: Life) -> None:
        """Serve until every part has returned."""
        async with life.session(self._options) as session:
            part = _Part(life, session)
            life.ready()
            async with trio.open_nursery() as nursery:
                for actor in self._actors:
                    nursery.start_soon(actor.run, part)


class _Part(Life):
    """The life of a part: the whole's, with the session that is open already."""

    def __init__(self, whole: Life, session: Session) -> None:
        super().__init__(whole._child, whole.number)
        self._session = cast(Session, _Turns(session))

    @contextlib.asynccontextmanager
    async def session(
        self, options: SessionOptions, name: str | None = None, *, on_lost: Callable[[], None] | None = None
    ) -> AsyncIterator[Session]:
        """The shared session, whatever is asked for."""
        yield self._session


class _Turns:
    """A session as its doors use it, for several tasks: each call waits for its turn."""

    def __init__(self, session: Session) -> None:
        self.options = session.options
        self._session = session
        self._turn = trio.Lock()

    async def fetch(self, statement: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        async with self._turn:
            return await self._session.fetch(statement, *args, timeout_s=timeout_s)

    async def fetchrow(self, statement: str, *args: Any, timeout_s: float | None = None) -> Any | None:
        async with self._turn:
            return await self._session.fetchrow(statement, *args, timeout_s=timeout_s)

    async def fetchval(self, statement: str, *args: Any, timeout_s: float | None = None) -> Any:
        async with self._turn:
            return await self._session.fetchval(statement, *args, timeout_s=timeout_s)

    async def execute(self, statement: str, *args: Any, timeout_s: float | None = None) -> str:
        async with self._turn:
            return await self._session.execute(statement, *args, timeout_s=timeout_s)

    async def transact(self, body: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        async with self._turn:
            return await self._session.transact(body, timeout_s)
