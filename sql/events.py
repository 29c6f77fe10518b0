"""Door of the concern events: what somebody has to tell a run.

Owns the typed calls of ``send_events`` and ``read_events``. It never looks at whether anybody waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from sql.calls import call, new_token
from sql.connection import Session
from sql.errors import InputRefused
from sql.types import Event

_PAGE = 500


@attrs.define(slots=True)
class Sending:
    """One event for one run. ``payload`` is JSON text. ``named``: the caller chose ``event_id``.

    ``request`` recognises the event when the call is made again after a lost answer.
    """

    run_id: str
    name: str
    payload: str
    event_id: str
    named: bool = False
    request: int = attrs.field(factory=new_token)


async def send(session: Session, items: Sequence[Sending]) -> list[str]:
    """Send events; one answer each, in order: ``delivered``, ``kept``, ``duplicate``, ``conflict``, ``ended``,
    ``missing``, ``undecided`` (nothing was sent: the run waits for an approval of that name, which it is not) or
    ``busy`` (the event id is in an open transaction). Safe to repeat with the same items.
    """
    rows = await session.fetch(
        call(session.options.schema, "send_events", 7),
        [item.run_id for item in items],
        [item.name for item in items],
        [item.event_id for item in items],
        [item.named for item in items],
        [item.payload for item in items],
        [item.request for item in items],
        False,
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


def undecided(item: Sending) -> InputRefused:
    """Why an event was not sent that only an approval could have taken."""
    return InputRefused(
        "payload", f'run {item.run_id} waits for an approval {item.name!r}: say {{"approved": true}} or false'
    )


async def read(session: Session, run_id: str) -> list[Event]:
    """A run's events in the order of their arrival, read in pages."""
    found: list[Event] = []
    after = 0
    while True:
        rows = await session.fetch(call(session.options.schema, "read_events", 3), run_id, after, _PAGE)
        found += [
            Event(
                row["event_id"], row["name"], json.loads(row["payload"]), row["created_at"], row["wait_key"]
            )
            for row in rows
        ]
        if len(rows) < _PAGE:
            return found
        after = rows[-1]["seq"]
