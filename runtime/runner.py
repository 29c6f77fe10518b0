"""The runner: runs the play of one detached attempt inside its sandbox.

Owns the process that a sandbox exists for: it asks the gateway what to run, says that it lives, passes on what the play
has to say, and pushes how it ended until that is taken. It has no database and decides nothing that a fence decides.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import random
import resource
import runpy
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import cattrs
import trio

from actors.attempts import Attempt, Why
from actors.circuits import Circuits, Enter, Outcome
from actors.core import Backoff, Mailbox, WakeFlag
from actors.rates import Acquire, Release
from actors.receipts import StepClaim, StepEnd
from actors.waits import Stand
from runtime.codec import JsonCodec
from runtime.config import RuntimeConfig
from runtime.context import Doors
from runtime.detached import GATEWAY, PLAYS, TOKEN
from runtime.executor import Executor
from runtime.gateway import MOST_STEPS
from runtime.http_client import HttpClient, NoAnswer
from runtime.plays import Play, find_play
from runtime.submit import Submit
from sql.admission import Submission
from sql.circuits import Entered
from sql.claim import Claimed
from sql.connection import SessionOptions
from sql.errors import (
    CapacityUnavailable,
    ConfigError,
    InputRefused,
    KernelRefused,
    RunCancelled,
    RunlaneError,
)
from sql.receipts import Receipt, ReceiptEnd
from sql.settle import Settlement
from sql.waits import Wait, WaitState

log = logging.getLogger("runlane.runner")

_REQUEST_S = 30.0
# What waits for a slot of a rate scope holds its connection.
_MOST_REQUESTS = 100
_MOST_FACTS = 500
_MOST_GATEWAYS = 16
# A gateway that is away is asked again at least this often, by those that are just starting and by all others.
_FIRST_PAUSE_S, _PAUSE_S = 2.0, 10.0
# The codes that say: the same again, later.
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class RunnerGone(RunlaneError):
    """The attempt is over, or was never this runner's; the message is the gateway's."""


class GatewayClient:
    """Requests to the gateway, each asked again until it is answered."""

    def __init__(self, urls: Iterable[str], token: str) -> None:
        self._headers = {"authorization": f"Bearer {token}"}
        self._gateways: list[HttpClient] = []
        self.learn(urls)
        self.pause_s = _FIRST_PAUSE_S
        """The longest between two requests for the same."""

    async def __aenter__(self) -> GatewayClient:
        return self

    async def __aexit__(self, *args: Any) -> None:
        for gateway in self._gateways:
            await gateway.aclose()

    def _at(self, url: str) -> HttpClient:
        return HttpClient(url, headers=self._headers, concurrency=_MOST_REQUESTS, answer_bytes=math.inf)

    def learn(self, urls: Iterable[str]) -> None:
        """Where else the gateway is. The ones that were known stay: the first of all may be a balancer's address."""
        known = {gateway.base for gateway in self._gateways}
        fresh = [self._at(url) for url in (url.rstrip("/") for url in urls) if url not in known]
        self._gateways += fresh[: _MOST_GATEWAYS - len(known)]

    async def ask(
        self, verb: str, body: Mapping[str, Any] | None = None, *, answer_s: float = _REQUEST_S
    ) -> Any:
        """The answer to a verb; a gateway that gives none within ``answer_s`` counts as away.

        Raises RunnerGone where asking again is of no use.
        """
        backoff = Backoff(first_s=0.05, max_s=self.pause_s)
        content = json.dumps(body or {}).encode()
        while True:
            gateway = self._gateways[0]
            try:
                with trio.fail_after(answer_s):
                    answer = await gateway.call("POST", f"/v1/runner/{verb}", body=content)
            except (NoAnswer, trio.TooSlowError) as error:
                log.info("event=gateway_away verb=%s url=%s error=%r", verb, gateway.base, error)
                if gateway is self._gateways[0]:  # else another request has found that out
                    self._gateways.append(self._gateways.pop(0))
            else:
                if answer.status == 200:
                    return answer.json()
                said = answer.content[:500].decode(errors="replace")
                if answer.status not in _LATER:
                    raise RunnerGone(f"{verb}: HTTP {answer.status}: {said}")
                log.info("event=gateway_busy verb=%s status=%d said=%r", verb, answer.status, said)
            await trio.sleep(backoff.next())


async def run_attempt(environ: Mapping[str, str]) -> None:
    """Run the attempt that the environment names to its end. Raises ConfigError and RunnerGone."""
    urls, token, home = (_required(environ, name) for name in (GATEWAY, TOKEN, PLAYS))
    async with GatewayClient(urls.split(), token) as gateway:
        told = await gateway.ask("start")
        play = _play(home, told["claimed"]["play"])
        await _Runner(gateway, play, told["claimed"], told["manners"]).run()


class _Runner:
    def __init__(
        self, gateway: GatewayClient, play: Play, claimed: Mapping[str, Any], manners: Mapping[str, Any]
    ) -> None:
        self._gateway = gateway
        self._beat_s = float(manners["heartbeat_s"])
        # The time that a gateway was away is not to be taken for our silence.
        gateway.pause_s = min(_PAUSE_S, self._beat_s)
        self._flush_s = float(manners["flush_ms"]) / 1000
        now = trio.current_time()
        self._attempt = Attempt(cattrs.structure({**claimed, "token": 0}, Claimed), math.inf, now)
        self._said = WakeFlag()
        self._hurry = WakeFlag()
        self._codec = JsonCodec()
        self._config = RuntimeConfig(
            park_after_s=manners["park_after_s"],
            max_payload_bytes=manners["max_payload_bytes"],
            max_depth=manners["max_depth"],
            outage_max_s=manners["outage_max_s"],
        )
        self._rates: Mailbox[Acquire | Release] = Mailbox("rates")
        self._receipts: Mailbox[StepClaim | StepEnd] = Mailbox("receipts")
        self._calls: Mailbox[Enter | Outcome] = Mailbox("circuits")
        self._stands: Mailbox[Stand] = Mailbox("waits")
        doors = Doors(
            say=lambda _: self._said.set(),
            register=self._register,
            rates=self._rates,
            receipts=self._receipts,
            circuits=_Circuits(self._calls),
            prepare=self._prepare,
            launch=self._start_run,
            hold=self._hold,
            payload=self._payload,
        )
        self._execute = Executor(
            {play.name: play}, self._codec, self._config, doors=doors, flush=self._hurry.set
        )

    async def run(self) -> None:
        """To the end: the play's, or the attempt's."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._live)
            nursery.start_soon(self._tell)
            nursery.start_soon(self._pass_time, nursery)
            nursery.start_soon(self._pass_on, nursery)
            nursery.start_soon(self._record)
            nursery.start_soon(self._call, nursery)
            ending = await self._execute(self._attempt)
            nursery.cancel_scope.cancel()
        if ending is None:
            log.info("event=runner_stopped run=%s why=%s", self._attempt.run_id, self._attempt.why)
            return
        answer = await self._gateway.ask("result", {**_result(ending), "usage": _usage()})
        log.info(
            "event=runner_ended run=%s outcome=%s answer=%s",
            self._attempt.run_id,
            ending.outcome,
            answer["answer"],
        )

    async def _register(self, _: Attempt) -> str:
        answer: str = (await self._gateway.ask("array-input"))["answer"]
        return answer

    async def _payload(self, _: str, key: str) -> str | None:
        text: str | None = (await self._gateway.ask("payload", {"key": key}))["payload"]
        return text

    # --- short waits ---------------------------------------------------------------------------------

    def _hold(self, attempt: Attempt, wait: Wait) -> Stand:
        stand = Stand(attempt, wait)
        self._stands.send_nowait(stand)
        return stand

    async def _pass_time(self, nursery: trio.Nursery) -> None:
        """Pass sleeps that are held in memory. What comes from elsewhere is waited for parked, without a sandbox."""

        async def pass_(stand: Stand) -> None:
            await trio.sleep(stand.wait.delay_s or 0.0)
            if stand.live:
                stand.reply.set_result(WaitState(stand.wait.kind, stand.wait.name, done=True))

        while True:
            for stand in await self._stands.take(1):
                self._stands.done([stand])
                if stand.wait.kind == "sleep" and stand.wait.until is None:
                    nursery.start_soon(pass_, stand)

    # --- rate scopes ---------------------------------------------------------------------------------

    async def _pass_on(self, nursery: trio.Nursery) -> None:
        """Requests for slots go to the gateway, each in a task of its own: one may wait for long."""
        while True:
            for message in await self._rates.take(1):
                self._rates.done([message])
                if isinstance(message, Acquire):
                    nursery.start_soon(self._acquire, message)
                else:
                    nursery.start_soon(self._release, message)

    async def _acquire(self, message: Acquire) -> None:
        slot = message.slot
        body = {"scope": slot.scope, "slot": str(slot.token), "cost": slot.cost}
        if math.isfinite(message.most_s):
            body["most_s"] = message.most_s
        try:
            answer = await self._gateway.ask("rate-acquire", body)
        except RunnerGone as gone:
            message.reply.set_error(gone)
            return
        if "granted_at" in answer:
            message.reply.set_result((datetime.fromisoformat(answer["granted_at"]), trio.current_time()))
        elif answer["refused"] == "capacity":
            message.reply.set_error(
                CapacityUnavailable(answer["reason"], retry_after=answer["retry_after_s"])
            )
        else:
            message.reply.set_error(InputRefused("name", answer["reason"]))

    async def _release(self, message: Release) -> None:
        result = message.result
        with contextlib.suppress(RunnerGone):  # the end of the attempt gives it back
            await self._gateway.ask(
                "rate-release",
                {
                    "scope": result.scope,
                    "slot": str(result.token),
                    "result": result.result,
                    "retry_after_s": result.retry_after_s,
                },
            )

    # --- steps -----------------------------------------------------------------------------------------

    async def _record(self) -> None:
        """Claims and ends of steps go together: what arrives while a request is under way is the next one."""
        while True:
            messages = await self._receipts.take(MOST_STEPS)
            try:
                answers = (await self._gateway.ask("steps", {"items": [_step(each) for each in messages]}))[
                    "answers"
                ]
            except RunnerGone as gone:
                for message in messages:
                    message.reply.set_error(RunCancelled(self._attempt.run_id, str(gone)))
            else:
                for message, answer in zip(messages, answers, strict=True):
                    if "refused" in answer:
                        message.reply.set_error(KernelRefused(answer["refused"]))
                    elif isinstance(message, StepClaim):
                        message.reply.set_result(Receipt(**answer))
                    else:
                        message.reply.set_result(None)
            self._receipts.done(messages)

    # --- dependencies and children ---------------------------------------------------------------------

    async def _call(self, nursery: trio.Nursery) -> None:
        while True:
            for message in await self._calls.take(1):
                self._calls.done([message])
                if isinstance(message, Enter):
                    nursery.start_soon(self._enter, message)
                else:
                    nursery.start_soon(self._report, message)

    async def _enter(self, message: Enter) -> None:
        try:
            body = {"name": message.call.name, "call": str(message.call.token)}
            message.reply.set_result(Entered(**await self._gateway.ask("circuit-enter", body)))
        except RunnerGone as gone:
            message.reply.set_error(RunCancelled(self._attempt.run_id, str(gone)))

    async def _report(self, message: Outcome) -> None:
        report = message.report
        body = {
            "name": report.name,
            "call": str(report.token),
            "result": report.result,
            "error": report.error,
        }
        with contextlib.suppress(RunnerGone):  # the circuit's own clock goes on without it
            await self._gateway.ask("circuit-report", body)

    async def _prepare(self, item: Submit) -> Submission:
        """Only in form: the gateway checks it, where the play's buckets are known."""
        name = item.play.name if isinstance(item.play, Play) else item.play
        text = self._codec.encode(
            item.input,
            what="input",
            limit_bytes=self._config.max_payload_bytes,
            max_depth=self._config.max_depth,
        )
        labels = None if item.labels is None else json.dumps(dict(item.labels))
        extras = json.dumps({"concurrency_key": item.concurrency_key})
        return Submission(
            item.run_id or "",
            True,
            name,
            0,
            item.priority,
            text,
            delay_s=item.delay,
            labels=labels,
            extras=extras,
        )

    async def _start_run(self, _: Attempt, key: str, item: Submission) -> str:
        body = {
            "play": item.play,
            "input": item.input,
            "key": key,
            "priority": item.priority,
            "delay": item.delay_s,
            "labels": None if item.labels is None else json.loads(item.labels),
            **json.loads(item.extras or "{}"),
        }
        answer = await self._gateway.ask("start-run", body)
        if "refused" in answer:
            raise InputRefused(**answer["refused"])
        started: str = answer["answer"]
        return started

    # --- life and facts ------------------------------------------------------------------------------

    async def _live(self) -> None:
        """Say that we live, in time. A gateway that is away changes nothing: the play goes on."""
        while True:
            await trio.sleep(self._beat_s * random.uniform(0.8, 1.0))
            try:
                # A host may hang while its port still answers: the others shall hear of us in time.
                answer = await self._gateway.ask("heartbeat", answer_s=min(_REQUEST_S, 2 * self._beat_s))
            except RunnerGone as gone:
                log.warning("event=runner_gone run=%s reason=%r", self._attempt.run_id, str(gone))
                self._attempt.stop(Why.LOST)
                return
            self._gateway.learn(answer["gateways"])
            standing = answer["standing"]
            if standing != "ok":
                self._attempt.stop(Why.CANCELLED if standing == "cancelled" else Why.LOST)
                return

    async def _tell(self) -> None:
        """Pass on what the play says, in order, a short while after it was said or at once before its end."""
        attempt = self._attempt
        while True:
            await self._said.wait()
            await self._hurry.wait(trio.current_time() + self._flush_s)
            while attempt.has_unstored:
                part = attempt.number()[:_MOST_FACTS]
                facts = [
                    {
                        "ordinal": saying.ordinal,
                        "lane": int(saying.lane),
                        "type": saying.type,
                        "payload": saying.payload,
                    }
                    for saying in part
                ]
                try:
                    await self._gateway.ask("facts", {"facts": facts})
                except RunnerGone as gone:
                    log.warning("event=facts_refused run=%s reason=%r", attempt.run_id, str(gone))
                    attempt.mark_stored()
                else:
                    attempt.mark_stored(len(part))


class _Circuits(Circuits):
    """Circuits as the executor knows them, with no memory of its own: each call is asked for."""

    def __init__(self, mailbox: Mailbox[Enter | Outcome]) -> None:
        super().__init__(SessionOptions("", ""), mailbox)


def _step(message: StepClaim | StepEnd) -> dict[str, Any]:
    item = message.item
    told: dict[str, Any] = {"key": item.key, "function": item.function}
    if isinstance(item, ReceiptEnd):
        told |= {"outcome": item.outcome, "payload": item.payload, "tries": item.tries}
    return told


def _result(ending: Settlement) -> dict[str, Any]:
    return {
        "outcome": ending.outcome,
        "payload": ending.payload,
        "waits": ending.waits,
        "delay_s": ending.delay_s,
        "outage_max_s": ending.outage_max_s,
        "overdue": ending.overdue,
    }


def _usage() -> dict[str, float]:
    """What this process and those that it has waited for have used."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "cpu_s": sum(used.ru_utime + used.ru_stime for used in (own, children)),
        "peak_memory_bytes": unit * max(own.ru_maxrss, children.ru_maxrss),
    }


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise ConfigError(f"{name} is not set: a runner is started by its host, inside a sandbox")
    return value


def _play(home: str, name: str) -> Play:
    """The play of that name in a module, or in the file of a program."""
    if home.endswith(".py"):
        sys.path.insert(0, str(Path(home).parent))
        found = runpy.run_path(home, run_name="__runlane_runner__")
    else:
        found = vars(importlib.import_module(home))
    play = find_play(found, name)
    if play is None:
        raise ConfigError(f"{home} has no play named {name!r} at its top level")
    return play


def main() -> None:
    """The process of a sandbox. What it cannot do is said in one line, for its provider to keep."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        trio.run(run_attempt, os.environ)
    except RunlaneError as error:
        raise SystemExit(f"runner: {error}") from None
