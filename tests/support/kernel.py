"""The kernel under test: a session on a fresh schema, a clock that only tests move, short names for the doors.

Owns the defaults of test calls. What must always hold of the tables is in ``tests.support.invariants``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs

from sql import (
    admission,
    bundle,
    children,
    control,
    deployment,
    events,
    facts,
    lanes,
    leases,
    receipts,
    timers,
    waits,
)
from sql import claim as claims
from sql import settle as settling
from sql.calls import new_token
from sql.connection import Session, SessionOptions, open_session
from sql.types import Lane

PLAYS = ("alpha", "beta")
LEASE_S = 60.0

# Time stands still until a test moves it, so that every due time can be predicted to the microsecond.
_FROZEN_CLOCK = """
CREATE TABLE @schema@.test_clock (stands timestamptz NOT NULL);
INSERT INTO @schema@.test_clock VALUES ('2030-01-01T00:00:00Z');
CREATE OR REPLACE FUNCTION @schema@.clock() RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT stands FROM @schema@.test_clock $$;
"""


def options(dsn: str, schema: str, **changes: Any) -> SessionOptions:
    """Options of a test's session: short deadlines, so that a wait nobody expects fails the test."""
    return attrs.evolve(SessionOptions(dsn, schema, statement_timeout_s=20.0, lock_timeout_s=5.0), **changes)


@attrs.define
class Kernel:
    """The doors of one session with the defaults of tests. ``owner`` is the host it speaks for."""

    session: Session
    owner: int = 1
    served: dict[tuple[str, int], int] = attrs.field(factory=dict)

    def render(self, text: str) -> str:
        """Fill in the schema."""
        return bundle.render(text, self.session.options.schema)

    async def fetch(self, text: str, *args: Any) -> list[Any]:
        return await self.session.fetch(self.render(text), *args)

    async def fetchval(self, text: str, *args: Any) -> Any:
        return await self.session.fetchval(self.render(text), *args)

    async def execute(self, text: str, *args: Any) -> None:
        await self.session.execute(self.render(text), *args)

    # --- time ----------------------------------------------------------------------------------------

    async def freeze_clock(self) -> None:
        """From now on only ``advance`` moves the kernel's time."""
        await self.session.script(self.render(_FROZEN_CLOCK))

    async def advance(self, seconds: float) -> None:
        await self.execute(
            "UPDATE @schema@.test_clock SET stands = stands + make_interval(secs => $1)", seconds
        )

    # --- runs ----------------------------------------------------------------------------------------

    def bucket(self, play: str = "alpha", priority: int = 0) -> int:
        return self.served[play, priority]

    def buckets(self, plays: Sequence[str] = PLAYS) -> claims.Buckets:
        """Every bucket of some plays, without release and environment."""
        return claims.Buckets.of({key: bucket for key, bucket in self.served.items() if key[0] in plays})

    def submission(self, play: str = "alpha", *, input: Any = None, **fields: Any) -> admission.Submission:
        """One item for ``admit``; a run id that the test gives counts as the caller's own."""
        named = "run_id" in fields
        run_id = fields.pop("run_id", None) or f"run-{secrets.token_hex(8)}"
        priority = fields.pop("priority", 0)
        return admission.Submission(
            run_id, named, play, self.bucket(play, priority), priority, json.dumps(input), **fields
        )

    async def admit(
        self, items: Sequence[admission.Submission], *, lease_s: float = LEASE_S
    ) -> list[admission.Admitted]:
        return await admission.admit(
            self.session, items, owner=self.owner, lease_s=lease_s, release_id=None, environment=None
        )

    async def submit(self, play: str = "alpha", **fields: Any) -> str:
        """Admit one run that must be new, and return its id."""
        (answer,) = await self.admit([self.submission(play, **fields)])
        assert answer.outcome == "created", answer
        return answer.run_id

    async def claim(
        self,
        limit: int = 100,
        *,
        plays: Sequence[str] = PLAYS,
        token: int | None = None,
        lease_s: float = LEASE_S,
        oldest: bool = False,
        stand: claims.Stand | None = None,
    ) -> list[claims.Claimed]:
        answer = await self.claim_answer(
            limit, plays=plays, token=token, lease_s=lease_s, oldest=oldest, stand=stand
        )
        return answer.items

    async def claim_answer(
        self,
        limit: int = 100,
        *,
        plays: Sequence[str] = PLAYS,
        token: int | None = None,
        lease_s: float = LEASE_S,
        oldest: bool = False,
        stand: claims.Stand | None = None,
    ) -> claims.Claims:
        """The whole answer of a claim. ``stand``: of the one before; None begins anew."""
        return await claims.claim(
            self.session,
            self.buckets(plays),
            owner=self.owner,
            token=token or new_token(),
            limit=limit,
            lease_s=lease_s,
            oldest=oldest,
            stand=stand or claims.Stand(),
        )

    async def started(self, play: str = "alpha", **fields: Any) -> claims.Claimed:
        """A new run with a live attempt of this host."""
        run_id = await self.submit(play, **fields)
        taken = [item for item in await self.claim() if item.run_id == run_id]
        assert taken, "somebody else took it"
        return taken[0]

    async def settle(self, item: claims.Claimed, outcome: str, **fields: Any) -> settling.Settled:
        (answer,) = await settling.settle(
            self.session,
            [settling.Settlement(item.run_id, item.attempt, item.token, outcome, **fields)],
        )
        return answer

    async def defer(
        self, item: claims.Claimed, kind: str = "out", *, max_s: float = 900.0, delay_s: float = 0.0
    ) -> settling.Settled:
        """Defer an attempt by an outage."""
        fence = (item.run_id, item.attempt, item.token)
        payload = json.dumps({"error": {"kind": kind, "message": "no answer"}})
        (answer,) = await settling.defer(
            self.session,
            [settling.Settlement(*fence, "deferred", payload, delay_s, outage_max_s=max_s)],
        )
        return answer

    async def complete(self, item: claims.Claimed, output: Any = None) -> settling.Settled:
        return await self.settle(item, "completed", payload=json.dumps({"output": output}))

    async def park(self, item: claims.Claimed, **delays_s: float) -> settling.Settled:
        waits = [{"key": key, "kind": "sleep", "delay_s": delay} for key, delay in delays_s.items()]
        (answer,) = await settling.park(
            self.session,
            [settling.Settlement(item.run_id, item.attempt, item.token, "parked", waits=json.dumps(waits))],
        )
        return answer

    async def park_on(self, item: claims.Claimed, *standing: waits.Wait) -> settling.Settled:
        """Park on waits of any kind."""
        text = waits.waits_text(standing)
        (answer,) = await settling.park(
            self.session, [settling.Settlement(item.run_id, item.attempt, item.token, "parked", waits=text)]
        )
        return answer

    async def try_waits(self, item: claims.Claimed, *standing: waits.Wait) -> waits.Tried:
        """Stand at waits in memory."""
        (answer,) = await waits.try_waits(
            self.session, [waits.Trial(item.run_id, item.attempt, item.token, standing)]
        )
        return answer

    async def start_child(
        self, item: claims.Claimed, key: str = "kid", *, play: str = "alpha", **fields: Any
    ) -> children.Launched:
        """Start a child of a live attempt, whose id is the parent's with the key behind."""
        child = self.submission(play, run_id=child_of(item.run_id, key), **fields)
        (answer,) = await children.start(
            self.session,
            [children.Launch(item.run_id, item.attempt, item.token, key, child)],
            release_id=None,
            environment=None,
        )
        return answer

    async def send(
        self, run_id: str, name: str = "e", payload: Any = None, *, event_id: str | None = None, **fields: Any
    ) -> str:
        """Send an event; an event id that the test gives counts as the caller's own."""
        (answer,) = await events.send(
            self.session,
            [
                events.Sending(
                    run_id,
                    name,
                    json.dumps(payload),
                    event_id or secrets.token_hex(8),
                    event_id is not None,
                    **fields,
                )
            ],
        )
        return answer

    async def sweep_wakes(self, limit: int = 100) -> tuple[int, bool]:
        return await waits.sweep(self.session, limit=limit)

    async def renew(self, item: claims.Claimed, lease_s: float = LEASE_S) -> leases.Renewal:
        (answer,) = await leases.renew(self.session, [item], lease_s=lease_s)
        return answer

    async def say(
        self, item: claims.Claimed, ordinal: int, lane: Lane = Lane.LIFECYCLE, payload: Any = None
    ) -> str:
        (answer,) = await facts.append(self.session, [saying(item, ordinal, lane, payload)])
        return answer

    async def claim_step(
        self, item: claims.Claimed, key: str = "step", function: str = "work", **fields: Any
    ) -> receipts.Receipt:
        asked = receipts.ReceiptClaim(item.run_id, item.attempt, item.token, key, function, **fields)
        (answer,) = await receipts.claim(self.session, [asked])
        return answer

    async def end_step(
        self, item: claims.Claimed, outcome: str = "completed", key: str = "step", **fields: Any
    ) -> str:
        if outcome != "released":
            fields.setdefault("payload", "1")
        asked = receipts.ReceiptEnd(item.run_id, item.attempt, item.token, key, outcome, **fields)
        (answer,) = await receipts.settle(self.session, [asked])
        return answer.answer

    async def mark_step(
        self, item: claims.Claimed, state: str | None = None, key: str = "step", **fields: Any
    ) -> str:
        asked = receipts.ReceiptMark(item.run_id, item.attempt, item.token, key, state, **fields)
        (answer,) = await receipts.mark(self.session, [asked])
        return answer

    async def step(self, run_id: str, key: str = "step") -> receipts.StepRecord:
        found = await receipts.read(self.session, run_id, after=None, limit=100, outputs=True)
        return next(record for record in found if record.key == key)

    async def cancel(self, run_id: str, request_id: str = "r", *, mark: bool = False) -> str:
        (answer,) = await control.cancel(
            self.session, [control.Cancellation(run_id, request_id, "why", "tester")], mark=mark
        )
        return answer.answer

    async def fail_waiting(
        self, run_id: str, attempt: int, kind: str, key: str, request_id: str = "f"
    ) -> control.Failed:
        error = json.dumps({"error_type": "FailedWhileWaiting", "message": "why", "traceback": None})
        (answer,) = await control.fail(
            self.session, [control.Failure(run_id, attempt, kind, key, request_id, error, "tester")]
        )
        return answer

    async def expire(self, limit: int = 100, crash_cap: int = 5) -> timers.Expiry:
        return await timers.expire(self.session, limit=limit, crash_cap=crash_cap)

    async def status(self, run_id: str) -> str | None:
        found: str | None = await self.fetchval("SELECT status FROM @schema@.runs WHERE run_id = $1", run_id)
        return found

    async def fact_types(self, run_id: str, lane: Lane = Lane.LIFECYCLE) -> list[str]:
        return [fact.type for fact in await facts.read(self.session, run_id) if fact.lane is lane]

    async def append_quiet(self, run_id: str, type_: str = "run.waiting", *, quiet: bool = True) -> None:
        """Append a fact of a detached runner, as a transition would; ``quiet`` False: a like one that people see."""
        await self.execute(
            """WITH moved AS (
                   UPDATE @schema@.runs
                      SET last_seq = last_seq + 1,
                          quiet_seq = CASE WHEN $3 THEN last_seq + 1 ELSE quiet_seq END,
                          lane_due_at = CASE WHEN lane_pending THEN lane_due_at ELSE @schema@.clock() END
                    WHERE run_id = $1 RETURNING run_id, last_seq)
               INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
               SELECT run_id, 0, last_seq, $2, @schema@.clock(),
                      jsonb_build_object('kind', CASE WHEN $3 THEN 'detached_runner' ELSE 'sleep' END) FROM moved""",
            run_id,
            type_,
            quiet,
        )

    # --- lanes ---------------------------------------------------------------------------------------

    async def claim_lanes(
        self,
        lane: Lane = Lane.LIFECYCLE,
        *,
        token: int | None = None,
        limit: int = 100,
        prefix: int = 8,
        lease_s: float = 30.0,
        most_rank: int = lanes.LEAST_URGENT,
        oldest: bool = False,
        receivers: Sequence[str] = (lanes.OWN_LEDGER,),
    ) -> list[lanes.Prefix]:
        prefixes, _ = await lanes.claim(
            self.session,
            lane,
            receivers=receivers,
            token=token or new_token(),
            limit=limit,
            prefix=prefix,
            lease_s=lease_s,
            most_rank=most_rank,
            oldest=oldest,
        )
        return prefixes

    async def apply(self, prefix: lanes.Prefix) -> bool:
        """What a ledger does with a delivery."""
        applied, _ = await lanes.apply(
            self.session, prefix.lane, [(prefix.run_id, prefix.seqs[0], prefix.through)]
        )
        return prefix.run_id in applied

    async def acknowledge(
        self, item: lanes.Prefix, *, prefix: int = 0, lease_s: float = 30.0
    ) -> lanes.Acknowledged:
        (answer,) = await lanes.acknowledge(self.session, item.lane, [item], prefix=prefix, lease_s=lease_s)
        return answer

    async def hand_back(self, item: lanes.Prefix, **fields: Any) -> str:
        (answer,) = await lanes.hand_back(
            self.session,
            item.lane,
            [lanes.HandBack(item.run_id, item.token, **{"ending": "given_up", **fields})],
        )
        return answer

    async def deliver(
        self,
        lane: Lane = Lane.LIFECYCLE,
        *,
        limit: int = 100,
        prefix: int = 64,
        oldest: bool = False,
        receivers: Sequence[str] = (lanes.OWN_LEDGER,),
    ) -> lanes.Turn:
        return await lanes.deliver(
            self.session, lane, receivers=receivers, limit=limit, prefix=prefix, oldest=oldest
        )


def child_of(run_id: str, key: str = "kid") -> str:
    """The id of the child that tests start under a key."""
    return f"{run_id}-{key}"


def saying(
    item: claims.Claimed, ordinal: int, lane: Lane = Lane.LIFECYCLE, payload: Any = None
) -> facts.Saying:
    """One fact that a live attempt has to say."""
    type_, default = (
        ("run.progress", {"done": ordinal, "total": 10})
        if lane is Lane.LIFECYCLE
        else ("run.log", {"message": f"line {ordinal}"})
    )
    return facts.Saying(
        item.run_id,
        item.attempt,
        item.token,
        ordinal,
        lane,
        type_,
        json.dumps(default if payload is None else payload),
    )


async def prepare(session: Session, *, plays: Sequence[str] = PLAYS, owner: int = 1) -> Kernel:
    """Build the schema of a session (or find it built), register the plays, and return its doors."""
    await deployment.ensure(session)
    await admission.register_host(
        session,
        host=owner,
        name=f"host-{owner}",
        pid=owner,
        version="test",
        plays={play: admission.PlayRules(5) for play in plays},
    )
    served = await admission.play_buckets(session, plays, release_id=None, environment=None)
    return Kernel(session, owner, served)


@asynccontextmanager
async def open_kernel(
    dsn: str, schema: str, *, owner: int = 1, plays: Sequence[str] = PLAYS, **changes: Any
) -> AsyncIterator[Kernel]:
    """A host's connection to the schema, which the first one builds."""
    async with open_session(options(dsn, schema, **changes), f"test-{owner}") as session:
        yield await prepare(session, plays=plays, owner=owner)
