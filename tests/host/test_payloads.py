"""Payloads end to end: classes of the user's as inputs and outputs, and a codec that hides them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import attrs
import pydantic
import pytest
from cryptography.fernet import Fernet

from runtime import (
    Client,
    Context,
    IdempotencyConflict,
    JsonCodec,
    PayloadRefused,
    RunFailed,
    SealedCodec,
    SyncContext,
    play,
)
from tests.support.hosts import ROOT, Hosts


@dataclasses.dataclass
class Order:
    item: str
    count: int


@attrs.frozen
class Receipt:
    total: float
    order: Order


class Invoice(pydantic.BaseModel):
    number: int
    receipt_total: float = pydantic.Field(alias="receiptTotal")


@play("price")
async def price(_: Context, order: Order) -> Receipt:
    assert isinstance(order, Order)
    return Receipt(1.5 * order.count, order)


@play("bill")
def bill(_: SyncContext, receipt: Receipt) -> Invoice:
    assert isinstance(receipt, Receipt)
    return Invoice(number=1, receiptTotal=receipt.total)


@play("file")
async def file(_: Context, invoice: Invoice) -> dict[str, Any]:
    assert isinstance(invoice, Invoice)
    return {"number": invoice.number}


@play("lies")
async def lies(_: Context, data: Any) -> Order:
    wrong: Any = data * 2 if isinstance(data, str) else data
    return wrong  # type: ignore[no-any-return]


@play("echo")
async def echo(ctx: Context, data: Any) -> Any:
    ctx.log("at work", given=data)
    return data


async def test_inputs_and_outputs_of_the_users_own_classes(hosts: Hosts) -> None:
    async with hosts.open(price, bill, file) as rt:
        order = Order("tea", 2)
        receipt = await (await rt.submit(price, order)).result(10)
        assert receipt == Receipt(3.0, order)
        invoice = await (await rt.submit("bill", receipt)).result(10)  # by name: it is hosted here
        assert invoice == Invoice(number=1, receiptTotal=3.0)
        handle = await rt.submit(file, invoice)
        assert await handle.result(10) == {"number": 1}
        with pytest.raises(PayloadRefused, match="count"):
            await rt.submit(price, {"item": "tea"})

        async with Client.open(hosts.config()) as client:
            again = await client.submit("price", {"item": "tea", "count": 2})
            assert await again.result(10) == {"total": 3.0, "order": {"item": "tea", "count": 2}}
            assert await client.handle(again.run_id, price).result(10) == receipt


async def test_an_output_that_is_not_what_the_play_says(hosts: Hosts) -> None:
    async with hosts.open(lies, max_payload_bytes=1000) as rt:
        handle = await rt.submit(lies, {"item": "tea"})
        with pytest.raises(PayloadRefused, match=r"output.*count"):
            await handle.result(10)
        assert await rt.result(handle.run_id) == {"item": "tea"}
        assert await (await rt.submit(lies, None)).result(10) is None
        assert (await (await rt.submit("lies", "x" * 900)).result(10)).keys() == {"$replaced"}


# --- encryption, as in the example -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("encryption", Path(ROOT, "examples", "encryption.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["encryption"] = module
    spec.loader.exec_module(module)
    return module


async def test_nothing_of_a_payload_is_in_the_database(hosts: Hosts, example: Any) -> None:
    keys = [Fernet.generate_key(), Fernet.generate_key()]
    codec = SealedCodec(example.FernetSeal(keys[:1]))
    async with hosts.open(echo, price, codec=codec) as rt:
        handle = await rt.submit(echo, {"word": "abracadabra"}, idempotency_key="k", labels={"a": "b"})
        assert await handle.result(10) == {"word": "abracadabra"}
        again = await rt.submit(echo, {"word": "abracadabra"}, idempotency_key="k")
        assert (again.run_id, again.created) == (handle.run_id, False)
        with pytest.raises(IdempotencyConflict):
            await rt.submit(echo, {"word": "other"}, idempotency_key="k")
        assert await (await rt.submit(price, Order("tea", 2))).result(10) == Receipt(3.0, Order("tea", 2))
        assert [run.run_id for run in await rt.runs(labels={"a": "b"})] == [handle.run_id]
        await hosts.check([handle.run_id])

        rows = await hosts.ask(
            "SELECT payload::text FROM @.facts UNION ALL SELECT l::text FROM @.ledger_runs l"
        )
        stored = "\n".join(row[0] for row in rows)
        assert "abracadabra" not in stored
        assert "tea" not in stored
        created = (await rt.facts(handle.run_id))[0].payload["input"]
        assert created["$codec"] == "fernet"

        async with Client.open(hosts.config()) as client:
            with pytest.raises(PayloadRefused, match="written with the codec 'fernet'"):
                await client.result(handle.run_id)
            with pytest.raises(PayloadRefused, match="form of an encoded payload"):
                await client.submit("echo", created)
            plain = await client.submit("echo", "plain")
        assert await rt.result(plain.run_id, timeout=10) == "plain"
        async with Client.open(hosts.config(), codec=SealedCodec(example.FernetSeal(keys[::-1]))) as client:
            assert await client.result(handle.run_id) == {"word": "abracadabra"}
        async with Client.open(hosts.config(), codec=SealedCodec(example.FernetSeal(keys[1:]))) as client:
            with pytest.raises(PayloadRefused, match="none of the keys fits"):
                await client.result(handle.run_id)


async def test_a_host_without_the_key_fails_the_run_and_says_why(hosts: Hosts, example: Any) -> None:
    async with hosts.open(echo, codec=JsonCodec()):
        codec = SealedCodec(example.FernetSeal([Fernet.generate_key()]))
        async with Client.open(hosts.config(), codec=codec) as client:
            with pytest.raises(RunFailed, match="input: was written with the codec 'fernet'"):
                await (await client.submit("echo", json.loads('{"a": 1}'))).result(10)
