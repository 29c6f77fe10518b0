"""Array input: intents of live attempts, registered before a play stages its first page.

Owns the group call and the retry of intents whose run somebody holds. It never stages or retires a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from actors.core import Backoff, Life, Mailbox, Reply, commit_in_groups, each_turn
from sql import array_input as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault

_BATCH = 200


@attrs.define(slots=True, eq=False)
class IntentRequest:
    """An intent and where its answer goes: ``done``, ``lost`` or ``no_receiver``."""

    item: door.Intent
    reply: Reply[str] = attrs.field(factory=Reply)


class ArrayInput:
    """Requests arrive in ``mailbox``."""

    def __init__(self, options: SessionOptions, mailbox: Mailbox[IntentRequest]) -> None:
        self._options = options
        self._mailbox = mailbox

    async def run(self, life: Life) -> None:
        """Register until the mailbox ends."""
        held = Backoff(first_s=0.005, max_s=1.0)
        async with life.session(self._options) as session:
            life.ready()
            await each_turn(
                life,
                self._mailbox,
                lambda requests: self._register(session, requests),
                most=lambda: _BATCH,
                locked=held,
            )

    async def _register(self, session: Session, requests: Sequence[IntentRequest]) -> list[IntentRequest]:
        busy: list[IntentRequest] = []

        async def commit(group: Sequence[IntentRequest]) -> None:
            answers = await door.register(session, [request.item for request in group])
            for request, answer in zip(group, answers, strict=True):
                if answer == "busy":
                    busy.append(request)
                else:
                    self._mailbox.done([request])
                    request.reply.set_result(answer)

        await commit_in_groups(requests, commit, fail=self._refuse)
        return busy

    def _refuse(self, request: IntentRequest, fault: ItemFault) -> None:
        self._mailbox.done([request])
        request.reply.set_error(fault)
