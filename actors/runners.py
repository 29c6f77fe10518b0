"""Runners: what comes in from detached attempts, in groups.

Owns the group commit of heartbeats, results and what runners have to say. It never decides who may speak (the gateway
does) nor what a silence means (liveness does).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs
import trio

from actors.core import PASSING_FAULTS, Backoff, Life, Mailbox, Reply, commit_in_groups, each_turn
from actors.hints import Hints
from sql import facts, runners
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.facts import Saying
from sql.runners import Beat, Pushed
from sql.settle import Settlement
from sql.types import Lane

log = logging.getLogger("runlane.runners")

_BATCH = 500


@attrs.define(slots=True, eq=False)
class Word:
    """One thing that a runner has to say: a heartbeat, its result, or facts (in the order of their ordinals).

    The answer: of a heartbeat the kernel's word; of a result ``Pushed``; of facts ``done``, ``lost`` or ``busy``.
    """

    item: Beat | Settlement | list[Saying]
    deadline: float
    reply: Reply[Any] = attrs.field(factory=Reply)


class Runners:
    """Words arrive in ``mailbox``; ``on_settled`` hears of each result that moved a run on."""

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Word],
        hints: Hints,
        *,
        on_settled: Callable[[Settlement, Pushed], None],
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._hints = hints
        self._on_settled = on_settled
        self._locked = Backoff(first_s=0.002, max_s=0.1)

    async def run(self, life: Life) -> None:
        """Commit words until the mailbox ends."""
        async with life.session(self._options) as session:
            life.ready()
            await each_turn(
                life,
                self._mailbox,
                lambda batch: self._commit(session, batch),
                most=lambda: _BATCH,
                locked=self._locked,
            )

    async def _commit(self, session: Session, batch: Sequence[Word]) -> list[Word]:
        busy: list[Word] = []
        for kind, write in ((Beat, self._beat), (list, self._append), (Settlement, self._push)):
            words = [word for word in batch if isinstance(word.item, kind)]
            await self._write(session, words, write, busy)
        return busy

    async def _write(
        self,
        session: Session,
        words: Sequence[Word],
        write: Callable[[Session, Sequence[Word]], Awaitable[Sequence[Any]]],
        busy: list[Word],
    ) -> None:
        def refuse(word: Word, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS) and trio.current_time() < word.deadline:
                busy.append(word)
                return
            self._mailbox.done([word])
            word.reply.set_error(fault)

        async def commit(words: Sequence[Word]) -> None:
            answers = await write(session, words)
            for word, answer in zip(words, answers, strict=True):
                if answer == "busy" and trio.current_time() < word.deadline:
                    busy.append(word)
                else:
                    self._mailbox.done([word])
                    word.reply.set_result(answer)

        await commit_in_groups(words, commit, fail=refuse)

    async def _beat(self, session: Session, words: Sequence[Word]) -> Sequence[str]:
        return await runners.beat(session, [word.item for word in words if isinstance(word.item, Beat)])

    async def _append(self, session: Session, words: Sequence[Word]) -> Sequence[str]:
        parts = [word.item for word in words if isinstance(word.item, list)]
        sayings = [saying for part in parts for saying in part]
        answers = iter(await facts.append(session, sayings) if sayings else [])
        lanes = {saying.lane for saying in sayings}
        if Lane.LIFECYCLE in lanes:
            self._hints.lanes.set()
        if Lane.OBSERVABILITY in lanes:
            self._hints.logs.set()
        told = [[next(answers) for _ in part] for part in parts]
        return ["lost" if "lost" in one else "busy" if "busy" in one else "done" for one in told]

    async def _push(self, session: Session, words: Sequence[Word]) -> Sequence[Pushed]:
        results = [word.item for word in words if isinstance(word.item, Settlement)]
        answers = await runners.push(session, results)
        hints = self._hints
        for result, answer in zip(results, answers, strict=True):
            self._on_settled(result, answer)
            if answer.answer == "recorded":
                hints.runners.set()
        hints.lanes.set()
        hints.cleanup.set()
        outcomes = {result.outcome for result in results}
        if outcomes & {"completed", "failed"}:
            hints.everywhere(["terminals"])
        # Queued again, or room for another of the same limit.
        hints.everywhere(["runs"])
        return answers
