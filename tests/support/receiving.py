"""Receivers of ours under test: in this process, and as processes of their own.

Owns their start and end, and what a sender without a host needs to talk to one. It asserts nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import attrs
import httpx
import trio

from runtime import wire
from runtime.asgi import serve_app
from runtime.dispatch import mint
from runtime.receiver import Receiver
from sql.connection import SessionOptions
from sql.lanes import Prefix
from tests.support import servers
from tests.support.hosting import ROOT, environment

SECRET = "a-secret-that-only-tests-know-32-bytes"
INTERNAL = "an internal token"


@asynccontextmanager
async def open_receiver(dsn: str, schema: str, **options: Any) -> AsyncIterator[Receiver]:
    """A receiver on a loopback port, in this process; its schema is ``ledger``, by default "l" and ``schema``."""
    ledger = SessionOptions(dsn, options.pop("ledger", f"l{schema}"))
    settings = {"secrets": [SECRET], "internal_token": INTERNAL, "origin": None, "source": schema, **options}
    receiver = Receiver(ledger, **settings)
    shutdown, bound = trio.Event(), trio.Event()

    def on_bound(port: int) -> None:
        if options.get("origin") is None:
            receiver.be(f"http://127.0.0.1:{port}")
        bound.set()

    async with receiver.running(), trio.open_nursery() as nursery:
        serve = partial(
            serve_app,
            receiver.app,
            "receiver",
            "127.0.0.1",
            0,
            on_bound=on_bound,
            shutdown=shutdown,
            grace_s=1.0,
            idle_s=30.0,
        )
        nursery.start_soon(serve)
        await bound.wait()
        try:
            yield receiver
        finally:
            shutdown.set()


def drop_ledger(dsn: str, schema: str) -> None:
    """Remove what a receiver has built."""
    servers.ask(dsn, f"DROP SCHEMA IF EXISTS l{schema} CASCADE")


@attrs.define
class ReceiverProcess:
    """``runlane receive`` on a port that stays the same over its lives."""

    dsn: str
    schema: str
    origin: str | None = None
    port: int = 0
    url: str = ""
    process: subprocess.Popen[str] | None = None
    busy: trio.Lock = attrs.field(factory=trio.Lock)

    async def start(self) -> None:
        """Start it and wait until it listens."""
        command = [
            *(sys.executable, "-m", "runtime", "receive", "--json"),
            *("--dsn", self.dsn, "--schema", f"l{self.schema}", "--port", str(self.port)),
            *("--prove-schema", self.schema),
            *([] if self.origin is None else ["--origin", self.origin]),
        ]
        self.process = await trio.to_thread.run_sync(
            partial(
                subprocess.Popen,
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env=environment(receive_secret=SECRET, receive_internal_token=INTERNAL),
                start_new_session=True,
            )
        )
        assert self.process.stdout is not None
        line = await trio.to_thread.run_sync(self.process.stdout.readline)
        hello = json.loads(line)
        self.url, self.port = hello["url"], hello["port"]

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, now."""
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)
            if self.process.stdout is not None:
                self.process.stdout.close()
        self.process = None


# --- a sender without a host -------------------------------------------------------------------------------


def record_of(prefix: Prefix, **changes: Any) -> dict[str, Any]:
    """A claimed prefix as a delivery on the wire. ``changes`` are not covered by the digest."""
    key = wire.delivery_key(prefix.run_id, prefix.lane, prefix.seqs[0], prefix.through, prefix.generation)
    facts = [
        {"seq": seq, "type": type_, "created_at": moment.isoformat(), "payload": json.loads(payload)}
        for seq, type_, moment, payload in zip(
            prefix.seqs, prefix.types, prefix.created_ats, prefix.payloads, strict=True
        )
    ]
    record = {
        "run_id": prefix.run_id,
        "lane": prefix.lane.label,
        "delivery_key": key,
        "digest": "",
        "attempt": prefix.attempt,
        "lease_token": str(prefix.token),
        "generation": prefix.generation,
        "passed": prefix.passed,
        "facts": facts,
    }
    return sealed(record) | changes


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the digest of what it holds."""
    facts = [(one["seq"], one["type"], one["created_at"], one["payload"]) for one in record["facts"]]
    return record | {"digest": wire.digest_of(record["delivery_key"], facts)}


def token_for(receiver: Receiver, run_id: str, **changes: Any) -> str:
    """A dispatch token for a run of the receiver's source."""
    claims = {"run_id": run_id, "schema": receiver.capabilities.schema, "receiver": receiver.origin}
    return mint(SECRET, **{**claims, **changes})


async def post(
    receiver: Receiver, *records: dict[str, Any], path: str = wire.DELIVERIES, **request: Any
) -> httpx.Response:
    """Send deliveries, each with a token of its own unless it has one."""
    content = {"deliveries": [{"token": token_for(receiver, one["run_id"]), **one} for one in records]}
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        return await client.post(receiver.origin + path, **{"json": content, **request})


def outcomes(response: httpx.Response) -> list[str]:
    """What became of each."""
    return [result["outcome"] for result in response.json()["results"]]
