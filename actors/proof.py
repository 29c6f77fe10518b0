"""Proof: asks the runtime's database whether senders hold the lanes that they deliver, in groups.

Owns a receiver's one connection to the runtime's database. It never changes anything there.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from actors.core import EndOfMailbox, Life, Mailbox, Reply
from sql import proof as door
from sql.connection import SessionOptions
from sql.proof import Claimed

_QUESTIONS = 64


@attrs.define(slots=True, eq=False)
class Question:
    """What the senders of a request say that they hold. Past ``deadline`` (trio time) nobody waits."""

    claims: Sequence[Claimed]
    deadline: float
    reply: Reply[Sequence[bool]] = attrs.field(factory=Reply)


class Proof:
    """Questions arrive in ``mailbox``."""

    def __init__(self, options: SessionOptions, mailbox: Mailbox[Question]) -> None:
        self._options = options
        self._mailbox = mailbox

    async def run(self, life: Life) -> None:
        """Answer until the mailbox ends."""
        async with life.session(self._options) as session:
            life.ready()
            while True:
                try:
                    questions = await self._mailbox.take(_QUESTIONS)
                except EndOfMailbox:
                    return
                life.beat()
                now = trio.current_time()
                live = [question for question in questions if question.deadline > now]
                claims = [claim for question in live for claim in question.claims]
                answers = iter(await door.prove(session, claims) if claims else [])
                for question in live:
                    question.reply.set_result([next(answers) for _ in question.claims])
                self._mailbox.done(questions)
