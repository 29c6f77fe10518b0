"""A receiver of ours over loopback HTTP: who may deliver, in which order, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx
import pytest
import trio

from runtime import Context, HttpLedger, RunFailed, play, wire
from runtime.dispatch import mint
from runtime.receiver import Receiver, receiver_app
from sql.connection import SessionOptions
from sql.errors import ConfigError, InputRefused, SchemaNotReady
from sql.types import Lane
from tests.support import servers
from tests.support.callers import open_caller
from tests.support.hosts import Hosts, eventually
from tests.support.kernel import Kernel, open_kernel
from tests.support.proxies import actor_proxy
from tests.support.receiving import (
    INTERNAL,
    SECRET,
    ReceiverProcess,
    drop_ledger,
    open_receiver,
    outcomes,
    post,
    record_of,
    sealed,
    token_for,
)

NOW = "2026-01-31T18:00:00+00:00"


@play("talks")
async def talks(ctx: Context, data: int) -> int:
    for number in range(data):
        ctx.log(f"line {number}")
    ctx.progress(1, 2)
    await ctx.sleep(0.25)
    if data < 0:
        raise ValueError("no")
    return data


@pytest.fixture(autouse=True)
def ledger_schema(dsn: str, schema: str) -> Iterator[None]:
    yield
    drop_ledger(dsn, schema)


def delivery(run_id: str = "r", first: int = 1, last: int | None = None, **changes: Any) -> dict[str, Any]:
    """Made up: for receivers that believe whoever has a token."""
    last = first if last is None else last
    generation = changes.get("generation", 0)
    facts = [
        {"seq": seq, "type": "run.progress", "created_at": NOW, "payload": {"done": seq}}
        for seq in range(first, last + 1)
    ]
    record = {
        "run_id": run_id,
        "lane": "lifecycle",
        "delivery_key": wire.delivery_key(run_id, Lane.LIFECYCLE, first, last, generation),
        "digest": "",
        "attempt": 1,
        "lease_token": "7",
        "generation": generation,
        "passed": 0,
        "facts": facts,
    }
    return sealed(record | changes)


async def ledger_rows(dsn: str, schema: str, query: str) -> list[Any]:
    return await trio.to_thread.run_sync(servers.ask, dsn, query.replace("@.", f"l{schema}."))


async def seqs(dsn: str, schema: str, run_id: str = "r") -> list[int]:
    query = f"SELECT seq FROM @.facts WHERE run_id = '{run_id}' AND lane = 0 ORDER BY seq"
    return [row[0] for row in await ledger_rows(dsn, schema, query)]


@asynccontextmanager
async def kernel_and_receiver(
    dsn: str, schema: str, **options: Any
) -> AsyncIterator[tuple[Kernel, Receiver]]:
    """A runtime's kernel, and a receiver that proves leases in its database."""
    async with (
        open_kernel(dsn, schema) as kernel,
        open_receiver(dsn, schema, prove_in=SessionOptions(dsn, schema), **options) as receiver,
    ):
        yield kernel, receiver


# --- a whole run ---------------------------------------------------------------------------------------------


async def delivered(hosts: Hosts, *, within_s: float = 20.0) -> None:
    async def whole() -> bool:
        return not await hosts.value(
            """SELECT (SELECT count(*) FROM @.runs WHERE acked_seq < last_seq)
                    + (SELECT count(*) FROM @.lanes WHERE acked_seq < last_seq)"""
        )

    await eventually(whole, within_s=within_s, every_s=0.03)


@pytest.mark.parametrize("way", ["secret", "internal token", "gateway"])
async def test_runs_of_a_host_reach_the_ledger(hosts: Hosts, way: str) -> None:
    """Each of the ways to a token, and to a proof of the lease."""
    credentials: dict[str, Any] = {"secret": SECRET}
    if way == "internal token":
        credentials = {"internal_token": INTERNAL}
    prove: dict[str, Any] = {"prove_in": SessionOptions(hosts.dsn, hosts.schema)}
    async with trio.open_nursery() as nursery:
        if way == "gateway":
            with trio.socket.socket() as probe:
                await probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            prove = {"prove_at": f"http://127.0.0.1:{port}"}
        else:
            port = 0
            async with hosts.open(talks):
                pass  # the receiver asks a database in which the runtime is
        async with open_receiver(hosts.dsn, hosts.schema, **prove) as receiver:
            ledger = HttpLedger(receiver.origin, **credentials)
            async with hosts.open(talks, ledger=ledger, health_port=port, health_host="127.0.0.1") as rt:
                handles = await rt.submit_many([(talks, number % 5) for number in range(40)] + [(talks, -1)])
                for handle in handles[:-1]:
                    await handle.result(timeout=20)
                with pytest.raises(RunFailed):
                    await handles[-1].result(timeout=20)
                await delivered(hosts)
                for handle in (handles[4], handles[-1]):
                    status, log = await handle.status(), await rt.facts(handle.run_id)
                    rows = await ledger_rows(
                        hosts.dsn,
                        hosts.schema,
                        f"SELECT lane, seq, type, payload::text, created_at FROM @.facts"
                        f" WHERE run_id = '{handle.run_id}' ORDER BY lane, seq",
                    )
                    assert [(row[0], row[1], row[2], json.loads(row[3]), row[4]) for row in rows] == [
                        (one.lane, one.seq, one.type, one.payload, one.created_at) for one in log
                    ]
                    async with httpx.AsyncClient(trust_env=False) as client:
                        found = (
                            await client.get(
                                f"{receiver.origin}/v1/runs/{handle.run_id}",
                                headers={"authorization": f"Bearer {INTERNAL}"},
                            )
                        ).json()
                    assert found["status"] == status.status
                    assert found["play"] == "talks"
                    assert found["attempts"] == status.attempt
                    assert found["lanes"]["lifecycle"]["applied_seq"] == status.facts_last
                    assert found["lanes"]["lifecycle"]["skipped"] == 0
                    assert (found["progress_done"], found["progress_total"]) == (1, 2)
                    assert found["wait_kind"] is None
                assert found["error"]["message"] == "no"
                assert found["lanes"].get("observability") is None
                counted = await ledger_rows(
                    hosts.dsn, hosts.schema, "SELECT status, count(*) FROM @.runs GROUP BY status"
                )
                assert {row[0]: row[1] for row in counted} == {"completed": 40, "failed": 1}
        nursery.cancel_scope.cancel()


async def test_a_receiver_is_a_process(hosts: Hosts) -> None:
    async with hosts.open(talks):
        pass
    process = ReceiverProcess(hosts.dsn, hosts.schema)
    try:
        await process.start()
        async with hosts.open(talks, ledger=HttpLedger(process.url, secret=SECRET)) as rt:
            handle = await rt.submit(talks, 3)
            await handle.result(timeout=20)
            await delivered(hosts)
        assert await seqs(hosts.dsn, hosts.schema, handle.run_id) == list(range(1, 9))
        assert process.process is not None
        process.process.terminate()
        assert await trio.to_thread.run_sync(process.process.wait) == 0
    finally:
        process.kill()


# --- order and repetition ------------------------------------------------------------------------------------


async def test_order_and_repetition(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:

        async def said(*records: dict[str, Any]) -> list[str]:
            return outcomes(await post(receiver, *records))

        assert await said(delivery(first=2)) == ["gap"]
        assert await said(delivery(first=1, last=2)) == ["applied"]
        assert await said(delivery(first=1, last=2)) == ["duplicate"]
        assert await said(delivery(first=4)) == ["gap"]
        assert await said(delivery(first=3), delivery(first=4), delivery("other")) == ["applied"] * 3
        assert await seqs(dsn, schema) == [1, 2, 3, 4]
        # Cut differently, as a sender that lost its memory might.
        assert await said(delivery(first=2, last=3)) == ["duplicate"]
        assert await said(delivery(first=4, last=6)) == ["applied"]
        assert await seqs(dsn, schema) == [1, 2, 3, 4, 5, 6]


async def test_the_same_key_with_other_facts_is_refused_and_seen(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        await post(receiver, delivery(first=1, last=2))
        other = delivery(first=1, last=2)
        other["facts"][1]["payload"] = {"done": 9}
        answer = await post(receiver, sealed(other))
        assert answer.status_code == 422
        assert answer.json()["results"][0]["reason"] == "the same delivery key came with another digest"
        overlapping = delivery(first=2, last=3)
        overlapping["facts"][0]["payload"] = {"done": 9}
        answer = await post(receiver, sealed(overlapping))
        assert outcomes(answer) == ["rejected"]
        assert "differ from those already here" in answer.json()["results"][0]["reason"]
        assert await seqs(dsn, schema) == [1, 2]
        async with httpx.AsyncClient(trust_env=False) as client:
            found = await client.get(
                f"{receiver.origin}/v1/runs/r", headers={"authorization": f"Bearer {INTERNAL}"}
            )
        lane = found.json()["lanes"]["lifecycle"]
        assert lane["conflicts"] == 2
        assert lane["conflict"].startswith("r:lifecycle:2-3: ")


async def test_a_gap_is_right_where_the_generation_rose(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        await post(receiver, delivery(first=1))
        assert outcomes(await post(receiver, delivery(first=4, generation=1))) == ["applied"]
        assert await seqs(dsn, schema) == [1, 4]
        assert outcomes(await post(receiver, delivery(first=4, generation=1))) == ["duplicate"]
        assert outcomes(await post(receiver, delivery(first=6, generation=1))) == ["gap"]
        assert outcomes(await post(receiver, delivery(first=5))) == ["not_current"]
        assert outcomes(await post(receiver, delivery(first=5, generation=1))) == ["applied"]
        (row,) = await ledger_rows(dsn, schema, "SELECT applied_seq, skipped, generation FROM @.cursors")
        assert tuple(row) == (5, 2, 1)


async def test_facts_without_effect_may_be_passed(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        await post(receiver, delivery(first=1))
        assert outcomes(await post(receiver, delivery(first=4, passed=1))) == ["gap"]
        assert outcomes(await post(receiver, delivery(first=4, passed=2))) == ["applied"]
        assert await seqs(dsn, schema) == [1, 4]


async def test_a_fact_without_effect_changes_nothing_that_people_see(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        quiet = delivery(first=1, last=3)
        quiet["facts"][0]["type"] = "run.started"
        for fact, type_ in zip(quiet["facts"][1:], ("run.waiting", "run.resumed"), strict=True):
            fact |= {"type": type_, "payload": {"kind": "detached_runner"}}
        alone = delivery(first=4)
        alone["facts"][0] |= {"type": "run.waiting", "payload": {"kind": "detached_runner"}}
        assert outcomes(await post(receiver, sealed(quiet), sealed(alone))) == ["applied", "applied"]
        assert await seqs(dsn, schema) == [1, 2, 3, 4]
        (row,) = await ledger_rows(dsn, schema, "SELECT status, wait_kind, attempts FROM @.runs")
        assert tuple(row) == ("running", None, 1)


async def test_a_lane_that_somebody_applies_to_is_answered_at_once(dsn: str, schema: str) -> None:
    async with (
        open_receiver(dsn, schema, unproven=True) as receiver,
        open_caller(dsn, f"l{schema}") as other,
    ):
        await post(receiver, delivery("held"), delivery("free"))
        await other.begin()
        await other.execute(f"SELECT 1 FROM l{schema}.cursors WHERE run_id = 'held' FOR UPDATE")
        with trio.fail_after(2.0):
            answer = await post(receiver, delivery("held", first=2), delivery("free", first=2))
        assert outcomes(answer) == ["retry", "applied"]
        assert answer.json()["results"][0]["retry_after_s"] <= 1.0
        await other.rollback()
        assert outcomes(await post(receiver, delivery("held", first=2))) == ["applied"]


async def test_two_receivers_may_keep_one_ledger(dsn: str, schema: str) -> None:
    """The same deliveries at both at once, in different orders: each is applied once, nobody waits for the other."""
    async with (
        open_receiver(dsn, schema, unproven=True) as first,
        open_receiver(dsn, schema, unproven=True) as second,
    ):
        records = [delivery(f"r{number}", first=1, last=3) for number in range(40)]
        said: list[str] = []

        async def send(receiver: Receiver, mine: list[dict[str, Any]]) -> None:
            left = mine
            while left:
                found = outcomes(await post(receiver, *left))
                said.extend(found)
                left = [one for one, outcome in zip(left, found, strict=True) if outcome == "retry"]

        with trio.fail_after(10.0):
            async with trio.open_nursery() as nursery:
                for receiver, mine in ((first, records), (second, records[::-1])):
                    nursery.start_soon(send, receiver, mine)
        assert said.count("applied") == 40
        assert set(said) <= {"applied", "duplicate", "retry"}
        (row,) = await ledger_rows(
            dsn, schema, "SELECT count(*), sum(applied_seq), (SELECT count(*) FROM @.facts) FROM @.cursors"
        )
        assert tuple(row) == (40, 120, 120)


async def test_what_cannot_be_stored_is_refused_alone(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        bad = delivery("bad")
        bad["facts"][0]["payload"] = {"text": "a\0b"}
        answer = await post(receiver, delivery("a"), sealed(bad), delivery("b"))
        assert outcomes(answer) == ["applied", "rejected", "applied"]
        assert "cannot be stored" in answer.json()["results"][1]["reason"]


async def test_what_a_play_reports_stops_nothing(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        odd = delivery(first=1, last=2)
        odd["facts"][0] |= {"type": "run.waiting", "payload": {"kind": 5, "wait_until": 1e300}}
        odd["facts"][1] |= {"type": "run.progress", "payload": {"done": "many", "total": [1]}}
        assert outcomes(await post(receiver, sealed(odd))) == ["applied"]


# --- who may deliver -----------------------------------------------------------------------------------------


async def test_a_live_lease_for_exactly_this_prefix(dsn: str, schema: str) -> None:
    """G-11."""
    async with kernel_and_receiver(dsn, schema) as (kernel, receiver):
        await kernel.freeze_clock()
        await kernel.submit(run_id="r")
        item = (await kernel.claim())[0]
        await kernel.say(item, 1)
        await kernel.say(item, 2, Lane.OBSERVABILITY)
        (prefix,) = await kernel.claim_lanes(prefix=2, lease_s=30.0)
        (logs,) = await kernel.claim_lanes(Lane.OBSERVABILITY)
        record = record_of(prefix)
        other_token = record_of(attrs.evolve(prefix, token=prefix.token + 1))
        for wrong in (
            other_token,
            record_of(
                attrs.evolve(
                    prefix,
                    seqs=prefix.seqs[:1],
                    types=prefix.types[:1],
                    payloads=prefix.payloads[:1],
                    created_ats=prefix.created_ats[:1],
                )
            ),
            record_of(logs) | {"lease_token": str(prefix.token)},
        ):
            answer = await post(receiver, wrong)
            assert (answer.status_code, outcomes(answer)) == (412, ["not_current"])
        await kernel.advance(31.0)
        assert outcomes(await post(receiver, record)) == ["not_current"]
        (again,) = await kernel.claim_lanes(prefix=2)
        (logs,) = await kernel.claim_lanes(Lane.OBSERVABILITY)
        assert outcomes(await post(receiver, record_of(again), record_of(logs))) == ["applied", "applied"]
        await kernel.acknowledge(again)
        assert outcomes(await post(receiver, record_of(again))) == ["not_current"]
        assert await seqs(dsn, schema) == [1, 2]


async def test_proof_for_many_in_order(dsn: str, schema: str) -> None:
    async with kernel_and_receiver(dsn, schema) as (kernel, receiver):
        for _ in range(6):
            await kernel.submit()
        prefixes = await kernel.claim_lanes()
        records = [record_of(prefix) for prefix in prefixes]
        records[1]["lease_token"] = "1"
        records[4]["lease_token"] = "2"
        expected = ["applied", "not_current", "applied", "applied", "not_current", "applied"]
        assert outcomes(await post(receiver, *records)) == expected


async def test_without_proof_nothing_is_applied(dsn: str, schema: str) -> None:
    """The runtime's database is away: the receiver says when to come back, and lives."""
    async with (
        open_kernel(dsn, schema) as kernel,
        actor_proxy(dsn) as proxy,
        open_receiver(dsn, schema, prove_in=SessionOptions(proxy.dsn, schema), timeout_s=1.0) as receiver,
    ):
        await kernel.submit(run_id="r")
        (prefix,) = await kernel.claim_lanes()
        proxy.refuses = True
        proxy.reset("proof")
        answer = await post(receiver, record_of(prefix))
        assert (answer.status_code, outcomes(answer)) == (503, ["retry"])
        assert "no proof of the lease" in answer.json()["results"][0]["reason"]
        assert await seqs(dsn, schema) == []
        proxy.refuses = False

        async def applied() -> bool:
            return outcomes(await post(receiver, record_of(prefix))) == ["applied"]

        await eventually(applied, every_s=0.2)


async def test_a_lost_answer_of_the_ledger_is_asked_for_again(dsn: str, schema: str) -> None:
    async with actor_proxy(dsn) as proxy, open_receiver(proxy.dsn, schema, unproven=True) as receiver:
        await post(receiver, delivery("warm"))
        link = proxy.lose_next_answer("receive")
        answer = await post(receiver, delivery(first=1, last=3))
        assert link.answer_lost.is_set()
        assert outcomes(answer) in (["applied"], ["duplicate"])
        assert await seqs(dsn, schema) == [1, 2, 3]


async def test_dispatch_tokens_are_checked(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        good: dict[str, Any] = {"run_id": "r", "schema": schema, "receiver": receiver.origin}
        for reason, token in (
            ("there is no dispatch token", ""),
            ("not valid", "nonsense"),
            ("another run", mint(SECRET, **{**good, "run_id": "s"})),
            ("another schema", mint(SECRET, **{**good, "schema": "other"})),
            ("another receiver", mint(SECRET, **{**good, "receiver": "http://elsewhere"})),
            ("has expired", mint(SECRET, **good, now=0.0)),
            ("signature is not valid", mint(SECRET + "!", **good)),
        ):
            answer = await post(receiver, delivery(token=token))
            assert (answer.status_code, outcomes(answer)) == (401, ["unauthorized"])
            assert reason in answer.json()["results"][0]["reason"]
        bare = {"deliveries": [delivery()]}
        header = {"authorization": f"Bearer {mint(SECRET, **good)}"}
        assert outcomes(await post(receiver, json=bare, headers=header)) == ["applied"]
        # In a request for many, the header is nobody's.
        bare = {"deliveries": [delivery(first=2), delivery("s")]}
        assert outcomes(await post(receiver, json=bare, headers=header)) == ["unauthorized"] * 2


async def test_tokens_for_the_internal_token(dsn: str, schema: str) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:

        async def ask(internal: str | None = INTERNAL, **changes: Any) -> httpx.Response:
            body = {"schema": schema, "receiver": receiver.origin, "run_ids": ["r"], **changes}
            headers = {} if internal is None else {"authorization": f"Bearer {internal}"}
            return await post(receiver, path=wire.DISPATCH_TOKEN, json=body, headers=headers)

        tokens = (await ask()).json()["tokens"]
        assert outcomes(await post(receiver, delivery(token=tokens["r"]))) == ["applied"]
        for status, said, answer in (
            (401, "internal token", await ask(None)),
            (401, "internal token", await ask("wrong")),
            (403, "schema", await ask(schema="other")),
            (403, "receiver", await ask(receiver="http://elsewhere")),
            (400, "run_ids", await ask(run_ids=[])),
            (400, "run_id", await ask(run_ids=["a b"])),
            (400, "run_id", await ask(run_ids=[5])),
        ):
            assert answer.status_code == status, answer.text
            assert said in answer.json()["error"]


async def test_without_an_internal_token_nobody_asks(dsn: str, schema: str) -> None:
    async with (
        open_receiver(dsn, schema, unproven=True, internal_token=None) as receiver,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        for answer in (
            await client.get(f"{receiver.origin}/v1/runs/r", headers={"authorization": "Bearer x"}),
            await client.post(receiver.origin + wire.DISPATCH_TOKEN, json={}),
        ):
            assert answer.status_code == 403
            assert "no internal token" in answer.json()["error"]


# --- the gateway ---------------------------------------------------------------------------------------------


async def test_the_gateway_tells_only_whoever_has_the_tokens(hosts: Hosts) -> None:
    ledger = HttpLedger("http://127.0.0.1:9", secret=SECRET)  # nobody is there: lanes stay pending
    async with hosts.open(talks, ledger=ledger, health_port=0, lane_actors=1) as rt:
        handle = await rt.submit(talks, 0)
        good = mint(SECRET, run_id=handle.run_id, schema=hosts.schema, receiver=ledger.receiver)
        claim = {"run_id": handle.run_id, "lane": "lifecycle", "lease_token": "1", "first": 1, "through": 1}

        async def ask(body: Any) -> httpx.Response:
            async with httpx.AsyncClient(trust_env=False) as client:
                return await client.post(f"http://127.0.0.1:{rt.health_port}{wire.LANES_PROOF}", json=body)

        answer = await ask({"lanes": [claim | {"token": good}]})
        assert (answer.status_code, answer.json()) == (200, {"proven": [False]})
        for status, said, body in (
            (401, "no dispatch token", {"lanes": [claim]}),
            (401, "another run", {"lanes": [claim | {"run_id": "s", "token": good}]}),
            (400, "lanes", {}),
            (400, "lanes[0].lane: must be lifecycle or observability", {"lanes": [claim | {"lane": "x"}]}),
            (400, "lanes[0].through", {"lanes": [claim | {"through": 0}]}),
            (400, "lanes[0].lease_token", {"lanes": [claim | {"lease_token": 1}]}),
        ):
            answer = await ask(body)
            assert answer.status_code == status, answer.text
            assert said in answer.json()["error"]


async def test_a_host_without_such_a_ledger_has_no_gateway(hosts: Hosts) -> None:
    async with hosts.open(talks, health_port=0) as rt, httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"http://127.0.0.1:{rt.health_port}{wire.LANES_PROOF}", json={})
        assert answer.status_code == 404


async def test_a_gateway_that_is_away_is_no_proof(dsn: str, schema: str) -> None:
    with trio.socket.socket() as probe:
        await probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        async with open_receiver(dsn, schema, prove_at=url) as receiver:
            answer = await post(receiver, delivery())
            assert outcomes(answer) == ["retry"]
            assert url in answer.json()["results"][0]["reason"]


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("run_id", {"run_id": "a b"}),
        ("run_id", {"run_id": None}),
        ("lane", {"lane": "fast"}),
        ("delivery_key", {"delivery_key": "s:lifecycle:1-1"}),
        ("delivery_key", {"delivery_key": "r:lifecycle:1-1:s1"}),
        ("digest", {"digest": "0" * 64}),
        ("digest", {"digest": 5}),
        ("lease_token", {"lease_token": 7}),
        ("lease_token", {"lease_token": "99999999999999999999"}),
        ("generation", {"generation": -1}),
        ("passed", {"passed": True}),
        ("token", {"token": 5}),
        ("facts", {"facts": []}),
        ("facts", {"facts": [{}] * 9}),
        ("facts[0].seq", {"facts": [{"seq": 0}]}),
        ("facts[0].fact", {"facts": [5]}),
        ("facts[0].type", {"facts": [{"seq": 1, "type": "a b"}]}),
        ("facts[0].created_at", {"facts": [{"seq": 1, "type": "a", "created_at": "2026-01-31T18:00:00"}]}),
        ("facts[0].payload", {"facts": [{"seq": 1, "type": "a", "created_at": NOW}]}),
        (
            "facts[1].seq",
            {"facts": [{"seq": n, "type": "a", "created_at": NOW, "payload": 1} for n in (1, 3)]},
        ),
    ],
)
async def test_a_delivery_that_cannot_be_read_is_refused_by_name(
    dsn: str, schema: str, field: str, changes: dict[str, Any]
) -> None:
    async with open_receiver(dsn, schema, unproven=True) as receiver:
        content = {"deliveries": [delivery() | {"token": token_for(receiver, "r")} | changes]}
        answer = await post(receiver, json=content)
        assert (answer.status_code, outcomes(answer)) == (422, ["rejected"])
        assert answer.json()["results"][0]["reason"].startswith(f"deliveries[0].{field}: ")


@pytest.mark.parametrize(
    ("status", "said", "content"),
    [
        (400, "body: must be JSON", b"{"),
        (400, "body: must be JSON", b'{"deliveries": [NaN]}'),
        (400, "body: must be JSON", b"\xff\xfe"),
        (400, "body: must be JSON", b"[" * 100_000),
        (400, "deliveries: must be a list of 1 to 200", b"{}"),
        (400, "deliveries: must be a list of 1 to 200", b'{"deliveries": []}'),
        (400, "deliveries: must be a list of 1 to 200", b"[1]"),
        (413, "larger than 100000 bytes", b" " * 100_001),
    ],
)
async def test_a_body_that_is_none_is_refused_by_name(
    dsn: str, schema: str, status: int, said: str, content: bytes
) -> None:
    async with open_receiver(dsn, schema, unproven=True, max_body_bytes=100_000) as receiver:
        answer = await post(receiver, json=None, content=content)
        assert answer.status_code == status
        assert said in answer.json()["error"]


async def test_unknown_paths_and_methods(dsn: str, schema: str) -> None:
    async with (
        open_receiver(dsn, schema, unproven=True) as receiver,
        httpx.AsyncClient(trust_env=False, base_url=receiver.origin) as client,
    ):
        assert (await client.get("/v1/nothing")).status_code == 404
        assert (await client.get(wire.DELIVERIES)).status_code == 405
        headers = {"authorization": f"Bearer {INTERNAL}"}
        missing = await client.get("/v1/runs/nobody", headers=headers)
        assert (missing.status_code, missing.json()["error"]) == (
            404,
            "there is nothing of run nobody here",
        )
        assert (await client.get("/v1/runs/a%20b", headers=headers)).status_code == 400
        assert (await client.get("/v1/runs/nobody")).status_code == 401
        assert (await client.get("/livez")).json() == {"alive": True}
        assert (await client.get("/readyz")).json()["ready"] is True
        assert (await client.get(wire.CAPABILITIES)).json() == {
            "protocol": 1,
            "receiver": receiver.origin,
            "schema": schema,
            "prefix_batching": {"max_facts": 8},
            "multi_run": {"max_deliveries": 200},
            "max_body_bytes": 16_777_216,
        }


def test_settings_that_make_no_receiver() -> None:
    here = SessionOptions("postgresql://db/app", "ledger")
    good: dict[str, Any] = {"origin": "http://here", "secrets": [SECRET], "unproven": True}
    for kind, said, changes in (
        (InputRefused, "secrets", {"secrets": []}),
        (InputRefused, "32 bytes", {"secrets": ["short"]}),
        (InputRefused, "origin", {"origin": "here"}),
        (ConfigError, "exactly one of them", {"unproven": False}),
        (ConfigError, "exactly one of them", {"prove_at": "http://there"}),
        (InputRefused, "prove_url", {"unproven": False, "prove_at": "there"}),
        (ConfigError, "one of its own", {"unproven": False, "prove_in": here}),
    ):
        with pytest.raises(kind, match=said):
            receiver_app(here, **{**good, **changes})


async def test_a_schema_that_is_not_what_it_should_be(dsn: str, schema: str) -> None:
    options: dict[str, Any] = {"origin": "http://here", "secrets": [SECRET]}
    nobody = Receiver(SessionOptions(dsn, f"l{schema}"), prove_in=SessionOptions(dsn, schema), **options)
    with pytest.raises(SchemaNotReady, match="nobody there to prove"):
        async with nobody.running():
            pass
    async with open_kernel(dsn, schema):
        pass
    taken = Receiver(SessionOptions(dsn, schema), unproven=True, **options)
    with pytest.raises(SchemaNotReady, match="in use for something else"):
        async with taken.running():
            pass


async def test_errors_of_the_block_leave_unwrapped(dsn: str, schema: str) -> None:
    receiver = Receiver(
        SessionOptions(dsn, f"l{schema}"), origin="http://here", secrets=[SECRET], unproven=True
    )
    with pytest.raises(KeyError):
        async with receiver.running():
            raise KeyError("mine")
