"""The HTTP ledger against a receiver that answers as told, over real sockets: requests, outcomes, deadlines."""

from __future__ import annotations

import email.utils
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import attrs
import jwt
import pytest
import trio

from runtime import wire
from runtime.http_ledger import MAX_FACTS, HttpLedger
from runtime.ledger import (
    HostedLedger,
    LedgerNotCurrent,
    LedgerRejected,
    LedgerRetry,
    LimitedLedger,
    takes_batches,
)
from runtime.wire import Capabilities
from sql.connection import SessionOptions
from sql.errors import InputRefused
from sql.types import Delivery, Fact, Lane
from tests.support.receivers import (
    HANG,
    RESET,
    Answer,
    Asked,
    Said,
    ScriptedReceiver,
    results,
    scripted_receiver,
)

SECRET = "a secret of at least thirty-two bytes"
NOW = datetime(2026, 1, 31, 18, 0, 0, 250_000, tzinfo=UTC)


def delivery(
    first: int = 1, last: int = 1, *, run_id: str = "r", payload: Any = None, **fields: Any
) -> Delivery:
    lane = Lane.LIFECYCLE
    facts = tuple(Fact(run_id, lane, seq, "run.progress", payload, NOW) for seq in range(first, last + 1))
    key = wire.delivery_key(run_id, lane, first, last)
    digest = wire.digest_of(
        key, [(one.seq, one.type, one.created_at.isoformat(), one.payload) for one in facts]
    )
    return Delivery(run_id, lane, facts, key, 1, digest, **{"token": 2**61 + 1, **fields})


def many(count: int) -> list[Delivery]:
    return [delivery(run_id=f"r{number}") for number in range(count)]


@asynccontextmanager
async def ledger_of(receiver: ScriptedReceiver, **options: Any) -> AsyncIterator[HttpLedger]:
    ledger = HttpLedger(receiver.url, **{"secret": SECRET, **options})
    try:
        yield ledger
    finally:
        await ledger.aclose()


async def outcome_of(answer: Said, **options: Any) -> Any:
    """What becomes of one delivery that is answered so."""
    async with scripted_receiver(answers=[answer]) as receiver, ledger_of(receiver, **options) as ledger:
        (outcome,) = await ledger.append_many([delivery()])
        return outcome


# --- the request ---------------------------------------------------------------------------------------------


async def test_a_delivery_on_the_wire() -> None:
    async with scripted_receiver() as receiver, ledger_of(receiver, headers={"X-Team": "ops"}) as ledger:
        ledger.use(SessionOptions("", "jobs"))
        sent = delivery(3, 4, payload={"b": [1, 2.5, "é"], "a": None}, generation=2)
        await ledger.append(sent)
        (asked,) = receiver.posts
        assert asked.headers["idempotency-key"] == sent.delivery_key == "r:lifecycle:3-4"
        assert asked.headers["content-type"] == "application/json"
        assert asked.headers["x-team"] == "ops"
        assert asked.deliveries == [
            {
                "run_id": "r",
                "lane": "lifecycle",
                "delivery_key": "r:lifecycle:3-4",
                "digest": sent.digest,
                "attempt": 1,
                "lease_token": str(2**61 + 1),
                "generation": 2,
                "passed": 0,
                "facts": [
                    {
                        "seq": seq,
                        "type": "run.progress",
                        "created_at": "2026-01-31T18:00:00.250000+00:00",
                        "payload": {"a": None, "b": [1, 2.5, "é"]},
                    }
                    for seq in (3, 4)
                ],
            }
        ]
        token = asked.headers["authorization"].removeprefix("Bearer ")
        claims = jwt.decode(token, SECRET, algorithms=["HS256"], audience=receiver.url)
        assert claims["scope"] == "run.ledger.append"
        assert (claims["run_id"], claims["schema"]) == ("r", "jobs")
        assert 0 < claims["exp"] - time.time() <= 300


async def test_many_runs_share_a_request_and_each_has_its_own_token() -> None:
    """G-6, G-11: nobody's token covers another run."""
    async with scripted_receiver() as receiver, ledger_of(receiver) as ledger:
        assert list(await ledger.append_many(many(120))) == [None] * 120
        assert sorted(len(asked.deliveries) for asked in receiver.posts) == [20, 50, 50]
        for asked in receiver.posts:
            assert "authorization" not in asked.headers
            assert "idempotency-key" not in asked.headers
            for one in asked.deliveries:
                claims = jwt.decode(one["token"], SECRET, algorithms=["HS256"], audience=receiver.url)
                assert claims["run_id"] == one["run_id"]


async def test_connections_are_kept() -> None:
    async with scripted_receiver() as receiver, ledger_of(receiver) as ledger:
        for _ in range(5):
            await ledger.append(delivery())
        assert {asked.connection for asked in receiver.asked} == {1}
        await ledger.aclose()
        await ledger.append(delivery())
        assert receiver.asked[-1].connection == 2


async def test_requests_at_once_are_bounded() -> None:
    async def slow(asked: Asked) -> Said:
        await trio.sleep(0.02)
        return Answer(200, results("applied"))

    async with (
        scripted_receiver(capabilities=None, script=slow) as receiver,
        ledger_of(receiver, concurrency=3) as ledger,
    ):
        assert list(await ledger.append_many(many(20))) == [None] * 20
        assert len(receiver.posts) == 20
        assert receiver.most_at_once == 3


def test_it_is_a_ledger_that_the_host_knows_how_to_use() -> None:
    ledger = HttpLedger("http://ledger.example/base/", secret=SECRET)
    assert ledger.receiver == "http://ledger.example/base"
    assert takes_batches(ledger)
    assert isinstance(ledger, LimitedLedger)
    assert isinstance(ledger, HostedLedger)


# --- capabilities --------------------------------------------------------------------------------------------


async def test_without_capabilities_one_fact_and_one_run_a_request() -> None:
    async with scripted_receiver(capabilities=None) as receiver, ledger_of(receiver, concurrency=4) as ledger:
        assert ledger.limits.facts == 1
        assert list(await ledger.append_many(many(3))) == [None] * 3
        assert [len(asked.deliveries) for asked in receiver.posts] == [1, 1, 1]
        assert (ledger.limits.facts, ledger.limits.deliveries) == (1, 4)
        assert len(receiver.of(wire.CAPABILITIES)) == 1
        (outcome,) = await ledger.append_many([delivery(1, 2)])
        assert isinstance(outcome, LedgerRetry)
        assert "takes 1 facts in a delivery, this one has 2" in str(outcome)
        assert len(receiver.posts) == 3


async def test_prefixes_need_a_receiver_that_takes_them_and_an_immutable_origin() -> None:
    """F-46, F-48, G-9."""
    async with scripted_receiver(capabilities=Capabilities(max_facts=100)) as receiver:
        for immutable, facts in ((True, MAX_FACTS), (False, 1)):
            async with ledger_of(receiver, immutable=immutable) as ledger:
                await ledger.append(delivery())
                assert ledger.limits.facts == facts


async def test_capabilities_are_asked_once_and_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_receiver() as receiver, ledger_of(receiver) as ledger:
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ledger.append, delivery())
        assert len(receiver.of(wire.CAPABILITIES)) == 1
        receiver.capabilities = Capabilities(max_facts=4)
        later = time.monotonic() + 301.0
        monkeypatch.setattr("runtime.http_ledger.time.monotonic", lambda: later)
        await ledger.append(delivery())
        assert ledger.limits.facts == 4


@pytest.mark.parametrize("body", [b"what?", {"protocol": 0}, {"prefix_batching": {"max_facts": "all"}}, [1]])
async def test_capabilities_nobody_understands_are_none(body: Any) -> None:
    async with scripted_receiver(capabilities=Answer(200, body)) as receiver, ledger_of(receiver) as ledger:
        await ledger.append(delivery())
        assert ledger.limits.facts == 1


async def test_nothing_is_sent_to_a_receiver_that_is_another_one() -> None:
    """G-12."""
    other = Capabilities(receiver="https://other.example")
    async with scripted_receiver(capabilities=other) as receiver, ledger_of(receiver) as ledger:
        with pytest.raises(LedgerRetry, match=r"calls itself https://other\.example"):
            await ledger.append(delivery())
        assert receiver.posts == []


async def test_a_request_never_exceeds_what_the_receiver_takes() -> None:
    small = Capabilities(max_facts=8, max_deliveries=50, max_body_bytes=20_000)
    async with scripted_receiver(capabilities=small) as receiver, ledger_of(receiver) as ledger:
        assert list(await ledger.append_many(many(50))) == [None] * 50
        assert len(receiver.posts) > 1
        assert max(len(asked.body) for asked in receiver.posts) <= 20_000


# --- outcomes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (Answer(200, results("applied")), None, ""),
        (Answer(200, results("duplicate")), None, ""),
        (Answer(204), None, ""),
        (Answer(200, b"ok"), None, ""),
        (Answer(409, {"outcome": "duplicate"}), None, ""),
        (Answer(409, {"outcome": "rejected", "reason": "other digest"}), LedgerRejected, "other digest"),
        (
            Answer(409, {"outcome": "gap", "reason": "2 is next"}),
            LedgerRejected,
            "2 is next; it has lost facts",
        ),
        (Answer(409, b""), LedgerRejected, "answered 409"),
        (Answer(412, results({"outcome": "not_current", "reason": "lease"})), LedgerNotCurrent, "lease"),
        (Answer(412), LedgerNotCurrent, "answered 412"),
        (Answer(422, results({"outcome": "rejected", "reason": "no"})), LedgerRejected, "no"),
        (Answer(400, {"error": "facts: must be a list"}), LedgerRejected, "facts: must be a list"),
        (Answer(403, {"reason": "not you"}), LedgerRejected, "not you"),
        (Answer(404), LedgerRejected, "answered 404"),
        (Answer(413), LedgerRejected, "answered 413"),
        (Answer(408), LedgerRetry, "answered 408"),
        (Answer(425), LedgerRetry, "answered 425"),
        (Answer(429), LedgerRetry, "answered 429"),
        (Answer(500, {"error": "oops"}), LedgerRetry, "oops"),
        (Answer(503, results({"outcome": "retry", "reason": "busy"})), LedgerRetry, "busy"),
        (Answer(302, headers={"location": "http://127.0.0.1:1/"}), LedgerRetry, "answered 302"),
        (Answer(200, results("perhaps")), LedgerRetry, "perhaps"),
        (Answer(200, results("retry")), LedgerRetry, "retry"),
        (RESET, LedgerRetry, "ReadError"),
        (Answer(200, b"x" * 2_000_000), LedgerRetry, "more than 1048576 bytes"),
    ],
)
async def test_every_answer_has_its_outcome(answer: Said, kind: Any, said: str) -> None:
    outcome = await outcome_of(answer)
    if kind is None:
        assert outcome is None
    else:
        assert isinstance(outcome, kind), outcome
        assert said in str(outcome)


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7.0, 7.0),
        ("0", 0.0, 0.0),
        ("in a minute", 30.0, 61.0),
        ("a minute ago", 0.0, 0.0),
        ("999999999999999999999999", 1e8, 1e9),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_in_seconds_or_as_a_date(
    status: int, header: str, least: float, most: float
) -> None:
    dates = {"in a minute": time.time() + 60, "a minute ago": time.time() - 60}
    if header in dates:
        header = email.utils.formatdate(dates[header], usegmt=True)
    outcome = await outcome_of(Answer(status, headers={"retry-after": header}))
    assert isinstance(outcome, LedgerRetry)
    assert outcome.after is not None
    assert least <= outcome.after <= most


@pytest.mark.parametrize("header", ["soon", "-1", ""])
async def test_a_retry_after_that_says_nothing(header: str) -> None:
    outcome = await outcome_of(Answer(429, headers={"retry-after": header}))
    assert isinstance(outcome, LedgerRetry)
    assert outcome.after is None


async def test_a_receiver_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        ledger = HttpLedger(f"http://127.0.0.1:{unused.getsockname()[1]}", secret=SECRET)
        with pytest.raises(LedgerRetry, match="ConnectError"):
            await ledger.append(delivery())


async def test_no_answer_in_time_costs_only_those_that_had_none() -> None:
    async def script(asked: Asked) -> Said:
        return HANG if asked.deliveries[0]["run_id"] == "r1" else Answer(200, results("applied"))

    async with (
        scripted_receiver(capabilities=None, script=script) as receiver,
        ledger_of(receiver, timeout_s=0.3) as ledger,
    ):
        first, second, third = await ledger.append_many(many(3))
        assert (first, third) == (None, None)
        assert isinstance(second, LedgerRetry)
        assert "no answer within 0.3 s" in str(second)


async def test_each_delivery_of_a_request_has_its_own_outcome() -> None:
    said = results("applied", {"outcome": "rejected", "reason": "no"}, "gap", "duplicate", "retry")
    async with scripted_receiver(answers=[Answer(200, said)]) as receiver, ledger_of(receiver) as ledger:
        outcomes = await ledger.append_many(many(5))
        assert [type(one) for one in outcomes] == [
            type(None),
            LedgerRejected,
            LedgerRejected,
            type(None),
            LedgerRetry,
        ]


async def test_one_bad_delivery_does_not_block_those_that_shared_its_request() -> None:
    async def script(asked: Asked) -> Said:
        if any(one["run_id"] == "r3" for one in asked.deliveries):
            return Answer(400, {"error": "r3 is malformed"})
        return Answer(200, results(*["applied"] * len(asked.deliveries)))

    async with scripted_receiver(script=script) as receiver, ledger_of(receiver) as ledger:
        outcomes = await ledger.append_many(many(8))
        assert [index for index, one in enumerate(outcomes) if one is not None] == [3]
        assert isinstance(outcomes[3], LedgerRejected)


async def test_as_many_results_as_deliveries_or_none_counts() -> None:
    async with (
        scripted_receiver(answers=[Answer(200, results("applied"))]) as receiver,
        ledger_of(receiver) as ledger,
    ):
        outcomes = await ledger.append_many(many(2))
        assert all(isinstance(one, LedgerRetry) for one in outcomes)


async def test_what_cannot_be_written_as_json_is_rejected_alone() -> None:
    async with scripted_receiver() as receiver, ledger_of(receiver) as ledger:
        bad = [delivery(run_id="a", payload=float("inf")), delivery(run_id="b", payload="\ud800")]
        outcomes = await ledger.append_many([*bad, delivery(run_id="c")])
        assert [type(one) for one in outcomes] == [LedgerRejected, LedgerRejected, type(None)]
        assert [one["run_id"] for one in receiver.posts[0].deliveries] == ["c"]


async def test_nothing_is_repeated_by_the_client() -> None:
    """F-71."""
    async with scripted_receiver(answers=[Answer(503), RESET]) as receiver, ledger_of(receiver) as ledger:
        for _ in range(2):
            with pytest.raises(LedgerRetry):
                await ledger.append(delivery())
        assert len(receiver.posts) == 2


# --- the caller's deadline -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [wire.CAPABILITIES, wire.DISPATCH_TOKEN, wire.DELIVERIES])
async def test_a_cancelled_request_leaves_at_once(path: str) -> None:
    """F-87, G-4: whatever the request waits for."""

    async def hang(_: Asked) -> Said:
        return HANG

    fields: dict[str, Any] = {"script": hang, "token_script": hang}
    options: dict[str, Any] = {"secret": None, "internal_token": "internal"}
    if path == wire.CAPABILITIES:
        fields["capabilities"] = HANG
    if path == wire.DELIVERIES:
        options = {}
    async with (
        scripted_receiver(**fields) as receiver,
        ledger_of(receiver, timeout_s=30.0, **options) as ledger,
    ):
        start = trio.current_time()
        with trio.move_on_after(0.1) as scope:
            await ledger.append_many([delivery()])
        assert scope.cancelled_caught
        assert trio.current_time() - start < 0.5
        assert receiver.asked[-1].path == path
        with trio.fail_after(1.0):
            while receiver.open:  # noqa: ASYNC110 - it sees the connection go
                await trio.sleep(0.005)


async def test_a_cancelled_connect_leaves_at_once() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        hogs = []
        for _ in range(4):  # the backlog is full: a further connection gets no answer
            hog = socket.socket()
            hog.setblocking(False)
            hog.connect_ex(address)
            hogs.append(hog)
        ledger = HttpLedger(f"http://127.0.0.1:{address[1]}", secret=SECRET, timeout_s=30.0)
        start = trio.current_time()
        with trio.move_on_after(0.1) as scope:
            await ledger.append(delivery())
        assert scope.cancelled_caught
        assert trio.current_time() - start < 0.5
        for hog in hogs:
            hog.close()


async def test_connections_of_cancelled_requests_are_not_counted_for_ever() -> None:
    async with (
        scripted_receiver(answers=[HANG] * 4) as receiver,
        ledger_of(receiver, concurrency=2) as ledger,
    ):
        for _ in range(4):
            with trio.move_on_after(0.05):
                await ledger.append(delivery())
        with trio.fail_after(2):
            await ledger.append(delivery())


# --- tokens --------------------------------------------------------------------------------------------------


async def test_a_refused_token_is_made_anew_once() -> None:
    """G-7."""
    async with scripted_receiver(answers=[Answer(401)]) as receiver, ledger_of(receiver) as ledger:
        await ledger.append(delivery())
        first, second = (asked.headers["authorization"] for asked in receiver.posts)
        assert first != second
        await ledger.append(delivery())
        assert receiver.posts[-1].headers["authorization"] == second
        receiver.answers = [Answer(401), Answer(401, {"error": "unknown signature"})]
        with pytest.raises(LedgerRetry, match="unknown signature"):
            await ledger.append(delivery())
        assert len(receiver.posts) == 5


async def test_only_those_whose_token_was_refused_are_sent_again() -> None:
    said = results("applied", {"outcome": "unauthorized", "reason": "expired"}, "applied")
    async with scripted_receiver(answers=[Answer(200, said)]) as receiver, ledger_of(receiver) as ledger:
        assert list(await ledger.append_many(many(3))) == [None] * 3
        assert [one["run_id"] for one in receiver.posts[1].deliveries] == ["r1"]


async def test_tokens_from_the_receiver() -> None:
    """G-1, G-2: the internal token goes to the token endpoint and nowhere else."""

    async def tokens(asked: Asked) -> Said:
        assert asked.headers["authorization"] == "Bearer internal"
        return Answer(200, {"tokens": {run_id: f"opaque-{run_id}" for run_id in asked.json["run_ids"]}})

    async with (
        scripted_receiver(token_script=tokens) as receiver,
        ledger_of(receiver, secret=None, internal_token="internal") as ledger,
    ):
        ledger.use(SessionOptions("", "jobs"))
        assert list(await ledger.append_many(many(2))) == [None, None]
        (asked,) = receiver.of(wire.DISPATCH_TOKEN)
        assert asked.json == {"schema": "jobs", "receiver": receiver.url, "run_ids": ["r0", "r1"]}
        assert [one["token"] for one in receiver.posts[0].deliveries] == ["opaque-r0", "opaque-r1"]
        assert b'"internal"' not in receiver.posts[0].body
        # An opaque token has no known life, so it is not used again (G-8).
        await ledger.append(delivery(run_id="r0"))
        assert len(receiver.of(wire.DISPATCH_TOKEN)) == 2


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Answer(403, {"error": "wrong internal token"}), "wrong internal token"),
        (Answer(200, {"tokens": {}}), "no dispatch token for run r"),
        (Answer(200, b"?"), "answered 200"),
        (Answer(503, headers={"retry-after": "3"}), "answered 503"),
    ],
)
async def test_no_token_no_delivery(answer: Answer, said: str) -> None:
    async def tokens(_: Asked) -> Said:
        return answer

    async with (
        scripted_receiver(token_script=tokens) as receiver,
        ledger_of(receiver, secret=None, internal_token="internal") as ledger,
    ):
        with pytest.raises(LedgerRetry, match=said):
            await ledger.append(delivery())
        assert receiver.posts == []


async def test_the_token_endpoint_has_its_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """G-3."""
    monkeypatch.setattr("runtime.http_ledger._TOKEN_TIMEOUT_S", 0.1)

    async def hang(_: Asked) -> Said:
        return HANG

    async with (
        scripted_receiver(token_script=hang) as receiver,
        ledger_of(receiver, secret=None, internal_token="internal") as ledger,
    ):
        with pytest.raises(LedgerRetry, match=r"no dispatch token within 0\.1 s"):
            await ledger.append(delivery())


async def test_a_ledger_with_credentials_of_its_own() -> None:
    async with (
        scripted_receiver() as receiver,
        ledger_of(receiver, secret=None, headers={"Authorization": "Basic eDp5"}) as ledger,
    ):
        await ledger.append(delivery())
        assert receiver.posts[0].headers["authorization"] == "Basic eDp5"


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("url", {"url": "ftp://ledger.example"}),
        ("url", {"url": "http://"}),
        ("url", {"url": "http://user:pass@ledger.example"}),
        ("url", {"url": "http://ledger.example?x=1"}),
        ("url", {"url": "http://ledger.example:99999"}),
        ("url", {"url": None}),
        ("url", {"url": "http://ledger example"}),
        ("url", {"url": "http://ledgér.example"}),
        ("url", {"url": "http://ledger.example/\r\nx: y"}),
        ("secret", {"secret": "short"}),
        ("internal_token", {"internal_token": "and a secret"}),
        ("timeout_s", {"timeout_s": 0}),
        ("timeout_s", {"timeout_s": float("nan")}),
        ("concurrency", {"concurrency": 0}),
        ("headers", {"headers": {"Content-Length": "3"}}),
        ("headers", {"headers": {"Authorization": "x"}}),
        ("headers", {"headers": {"x": "a\r\nb: c"}}),
        ("headers", {"headers": {"x y": "a"}}),
        ("headers", {"headers": {"x": "☃"}}),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputRefused) as caught:
        HttpLedger(**{"url": "http://ledger.example", "secret": SECRET, **options})
    assert caught.value.field == field
    assert "pass" not in str(caught.value)


def test_a_digest_says_key_order_of_facts_and_content() -> None:
    base = delivery(1, 2, payload={"a": 1, "b": 2})
    assert base.digest == delivery(1, 2, payload={"b": 2, "a": 1}).digest
    others = [
        delivery(1, 3, payload={"a": 1, "b": 2}),
        delivery(1, 2, payload={"a": 1, "b": 3}),
        delivery(1, 2, run_id="s", payload={"a": 1, "b": 2}),
    ]
    assert base.digest not in {one.digest for one in others}
    assert attrs.evolve(base, attempt=7, token=9).digest == base.digest
