"""A receiver: takes deliveries over HTTP, proves and checks them, and keeps a ledger of its own.

Owns the routes, the order of the checks (shape, digest, token, lease, order) and the receiver's actors. It never asks a
runtime for anything but proof of a lease, and never changes anything there.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.core import ChildSpec, Mailbox, Supervisor, bounded_cleanup, only
from actors.proof import Proof, Question
from actors.receive import Batch, Lookup, Receive
from actors.receive import Request as Mail
from runtime import ids, wire
from runtime.asgi import json_app, json_response, read_body
from runtime.codec import preview
from runtime.dispatch import TokenRefused, Verifier, check_secret, mint
from runtime.http_client import check_base
from runtime.proof import DatabaseProver, GatewayProver, ProofUnavailable, Prover
from runtime.wire import Arrived, Capabilities, Malformed
from sql import bundle, deployment
from sql.connection import SessionOptions, open_session
from sql.errors import (
    ConfigError,
    HostStopping,
    InputRefused,
    MailboxFull,
    OutcomeUnknown,
    RunlaneError,
    SchemaNotReady,
)
from sql.proof import Claimed
from sql.receive import Parcel

log = logging.getLogger("runlane.receiver")

SCHEMA = "runlane_ledger"

_STOP_S = 5.0
_WAITING = 256
_MOST_RUN_IDS = 1_000
_BUSY_S = 0.05
_TOKEN_BODY_BYTES = 1_048_576


@attrs.frozen
class _Result:
    """What becomes of one delivery."""

    outcome: str
    reason: str | None = None
    retry_after_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return attrs.asdict(self, filter=lambda _, value: value is not None)


class Receiver:
    """One receiver: its ledger, its checks and its ASGI application ``app``.

    - ``ledger``: where its own schema is, which it builds.
    - ``origin``: its identity, the ``receiver`` of the ledgers that deliver to it.
    - ``source``: the runtime's schema that it takes facts of.
    - ``secrets``: what dispatch tokens are signed with; the first one signs those that it makes itself.
    - ``internal_token``: who shows it may ask for dispatch tokens and read runs; without one nobody may.
    - ``max_body_bytes``: at least ``max_facts`` payloads of the size that the runtime allows, twice over for what JSON
      and UTF-8 add: a prefix that is once out cannot be cut smaller.
    - ``prove_in``: the runtime's database; or ``prove_at``: the URL of a host's health server; or, only where
      ``unproven`` is true, neither: then whoever has a token is believed.

    Raises InputRefused or ConfigError naming what is wrong.
    """

    def __init__(
        self,
        ledger: SessionOptions,
        *,
        origin: str | None,
        secrets: Sequence[str],
        source: str = "runlane",
        internal_token: str | None = None,
        prove_in: SessionOptions | None = None,
        prove_at: str | None = None,
        unproven: bool = False,
        max_facts: int = 8,
        max_deliveries: int = 200,
        max_body_bytes: int = 16_777_216,
        timeout_s: float = 8.0,
    ) -> None:
        if not secrets:
            raise InputRefused("secrets", "at least one is needed to check dispatch tokens")
        if (prove_in is not None) + (prove_at is not None) + bool(unproven) != 1:
            raise ConfigError(
                "a receiver proves leases in the runtime's database (prove_in) or at its gateway (prove_at), or says "
                "that it does not (unproven): exactly one of them"
            )
        if prove_in is not None and (prove_in.dsn, prove_in.schema) == (ledger.dsn, ledger.schema):
            raise ConfigError(f"schema {ledger.schema!r} is the runtime's: the receiver needs one of its own")
        self._ledger = ledger
        self._secrets = [check_secret(secret) for secret in secrets]
        self._source = source
        self._internal_token = internal_token
        self._prove_in = prove_in
        self._limits = (max_facts, max_deliveries, max_body_bytes)
        self._timeout_s = timeout_s
        self._mailbox: Mailbox[Mail] = Mailbox("receive", _WAITING)
        self._questions: Mailbox[Question] = Mailbox("proof", _WAITING)
        self._prover: Prover | None = None
        self._gateway: GatewayProver | None = None
        if prove_in is not None:
            self._prover = DatabaseProver(self._questions)
        elif prove_at is not None:
            self._prover = self._gateway = GatewayProver(prove_at, internal_token=internal_token)
        self._supervisor: Supervisor | None = None
        self._verifier: Verifier | None = None
        if origin is not None:
            self.be(origin)
        self.app = self._application()

    def be(self, origin: str) -> None:
        """Take an identity, where it was not known before."""
        origin = check_base(origin, "origin")
        self._verifier = Verifier(self._secrets, origin, self._source)

    @property
    def origin(self) -> str:
        """Its identity."""
        return self._known().receiver

    def _known(self) -> Verifier:
        if self._verifier is None:
            raise HTTPException(503, "this receiver does not know its origin yet")
        return self._verifier

    @property
    def capabilities(self) -> Capabilities:
        """What it takes in a request."""
        max_facts, max_deliveries, max_body_bytes = self._limits
        return Capabilities(
            receiver=self.origin,
            schema=self._source,
            max_facts=max_facts,
            max_deliveries=max_deliveries,
            max_body_bytes=max_body_bytes,
        )

    # --- life ----------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Receiver]:
        """Build or check the schema and keep the actors at work for the block. Errors of the block leave unwrapped."""
        await self._prepare()
        children = [
            ChildSpec(name="receive", actor=Receive(self._ledger, self._mailbox), mailboxes=[self._mailbox])
        ]
        if self._prove_in is not None:
            proof = Proof(self._prove_in, self._questions)
            children.insert(0, ChildSpec(name="proof", actor=proof, mailboxes=[self._questions]))
        self._supervisor = supervisor = Supervisor(children, stop_budget_s=_STOP_S)
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(supervisor.run)
                try:
                    yield self
                finally:
                    supervisor.request_stop()
        except BaseExceptionGroup as group:
            failure = only(group)
        finally:
            if self._gateway is not None:
                with bounded_cleanup(1.0):
                    await self._gateway.client.aclose()
        if failure is not None:
            raise failure

    async def _prepare(self) -> None:
        async with open_session(self._ledger, "deployment") as session:
            await deployment.ensure(session, bundle.RECEIVER)
        if self._prove_in is not None:
            async with open_session(self._prove_in, "deployment") as session:
                readiness = await deployment.check(session)
            if not readiness.ready:
                raise SchemaNotReady(
                    f"{readiness.problem(self._prove_in.schema)}: there is nobody there to prove leases"
                )

    # --- routes --------------------------------------------------------------------------------------

    def _application(self) -> Starlette:
        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            if self._supervisor is not None:  # whoever serves the application keeps it running
                yield
                return
            async with self.running():
                yield

        routes = [
            Route(wire.CAPABILITIES, self._get_capabilities, methods=["GET"]),
            Route(wire.DELIVERIES, self._post_deliveries, methods=["POST"]),
            Route(wire.DISPATCH_TOKEN, self._post_dispatch_token, methods=["POST"]),
            Route(wire.RUNS + "/{run_id}", self._get_run, methods=["GET"]),
            Route("/livez", self._livez, methods=["GET"]),
            Route("/readyz", self._readyz, methods=["GET"]),
        ]
        return json_app(routes, lifespan)

    async def _livez(self, _: Request) -> Response:
        alive = self._supervisor is not None and all(
            health.state != "failed" for health in self._supervisor.health.values()
        )
        return json_response({"alive": alive}, 200 if alive else 503)

    async def _readyz(self, _: Request) -> Response:
        ready = self._supervisor is not None and self._supervisor.ready
        actors = {} if self._supervisor is None else self._supervisor.health
        state = {"ready": ready, "actors": {name: health.as_dict() for name, health in actors.items()}}
        return json_response(state, 200 if ready else 503)

    async def _get_capabilities(self, _: Request) -> Response:
        return json_response(self.capabilities.to_json())

    async def _get_run(self, request: Request) -> Response:
        self._internal(request)
        run_id = request.path_params["run_id"]
        with _named():
            ids.check_run_id(run_id)
        lookup = Lookup(run_id, trio.current_time() + self._timeout_s)
        with _unavailable():
            self._mailbox.send_nowait(lookup)
            found = await lookup.reply.wait(self._timeout_s)
        if found is None:
            return json_response({"error": f"there is nothing of run {run_id} here"}, 404)
        return json_response(found)

    async def _post_dispatch_token(self, request: Request) -> Response:
        self._internal(request)
        body = _object(await read_body(request, _TOKEN_BODY_BYTES))
        verifier = self._known()
        for name, wanted in (("receiver", verifier.receiver), ("schema", verifier.schema)):
            if body.get(name) != wanted:
                raise HTTPException(
                    403, f"{name}: this receiver takes {wanted}, not {preview(body.get(name))}"
                )
        run_ids = body.get("run_ids")
        if not isinstance(run_ids, list) or not 1 <= len(run_ids) <= _MOST_RUN_IDS:
            raise HTTPException(400, f"run_ids: must be a list of 1 to {_MOST_RUN_IDS}")
        with _named():
            for run_id in run_ids:
                ids.check_run_id(run_id)
        schema, receiver = verifier.schema, verifier.receiver
        secret = self._secrets[0]
        tokens = {run_id: mint(secret, run_id=run_id, schema=schema, receiver=receiver) for run_id in run_ids}
        return json_response({"tokens": tokens})

    async def _post_deliveries(self, request: Request) -> Response:
        max_facts, max_deliveries, max_body_bytes = self._limits
        verifier = self._known()
        content = await read_body(request, max_body_bytes)
        deadline = trio.current_time() + self._timeout_s
        with _named():
            deliveries = wire.decode(content, max_facts=max_facts, max_deliveries=max_deliveries)
        shown = _bearer(request) if len(deliveries) == 1 else None
        results = await self._results(verifier, deliveries, shown, deadline)
        status, headers = 200, {}
        if len(results) == 1:
            status = wire.STATUSES[results[0].outcome]
            if status == 401:
                headers["www-authenticate"] = "Bearer"
        answer = json_response({"results": [result.to_json() for result in results]}, status)
        answer.headers.update(headers)
        return answer

    # --- the checks ----------------------------------------------------------------------------------

    async def _results(
        self,
        verifier: Verifier,
        deliveries: Sequence[Arrived | Malformed],
        shown: str | None,
        deadline: float,
    ) -> list[_Result]:
        """What becomes of each: each check is passed on to by those that passed the one before."""
        results: dict[int, _Result] = {}
        allowed: list[tuple[int, Arrived, str]] = []
        for index, delivery in enumerate(deliveries):
            if isinstance(delivery, Malformed):
                results[index] = _Result(wire.REJECTED, delivery.reason)
                continue
            token = delivery.token or shown or ""
            try:
                verifier.check(token, delivery.parcel.run_id)
            except TokenRefused as error:
                results[index] = _Result(wire.UNAUTHORIZED, str(error))
                continue
            allowed.append((index, delivery, token))
        proven = await self._proven(allowed, results, deadline)
        parcels = [delivery.parcel for _, delivery, _ in proven]
        answers = await self._applied(parcels, deadline) if parcels else []
        for (index, _, _), answer in zip(proven, answers, strict=True):
            results[index] = answer
        return [results[index] for index in range(len(deliveries))]

    async def _proven(
        self, allowed: Sequence[tuple[int, Arrived, str]], results: dict[int, _Result], deadline: float
    ) -> list[tuple[int, Arrived, str]]:
        """Those whose sender holds the lane now."""
        if self._prover is None or not allowed:
            return list(allowed)
        claims = [
            Claimed(parcel.run_id, parcel.lane, delivery.lease_token, parcel.seqs[0], parcel.seqs[-1])
            for _, delivery, _ in allowed
            for parcel in (delivery.parcel,)
        ]
        try:
            answers = await self._prover.prove(claims, [token for _, _, token in allowed], deadline)
        except ProofUnavailable as error:
            results |= {
                index: _Result(wire.RETRY, f"no proof of the lease: {error}") for index, _, _ in allowed
            }
            return []
        kept = []
        for one, proven in zip(allowed, answers, strict=True):
            if proven:
                kept.append(one)
            else:
                reason = "the sender holds no live lease for exactly this prefix"
                results[one[0]] = _Result(wire.NOT_CURRENT, reason)
        return kept

    async def _applied(self, parcels: Sequence[Parcel], deadline: float) -> list[_Result]:
        batch = Batch(parcels, deadline)
        try:
            self._mailbox.send_nowait(batch)
            received = await batch.reply.wait(deadline - trio.current_time())
        except MailboxFull as error:
            return [_Result(wire.RETRY, f"overloaded: {error}", 1.0)] * len(parcels)
        except (HostStopping, OutcomeUnknown) as error:
            return [_Result(wire.RETRY, f"the ledger does not answer: {error}")] * len(parcels)
        return [
            _Result(answer.outcome, answer.reason, _BUSY_S if answer.outcome == wire.RETRY else None)
            for answer in received
        ]

    def _internal(self, request: Request) -> None:
        """Return if the request shows the internal token."""
        if self._internal_token is None:
            raise HTTPException(403, "this receiver has no internal token, so nobody may ask")
        if not hmac.compare_digest((_bearer(request) or "").encode(), self._internal_token.encode()):
            raise HTTPException(
                401, "the internal token is missing or wrong", headers={"www-authenticate": "Bearer"}
            )


def receiver_app(ledger: SessionOptions, **options: Any) -> Starlette:
    """A receiver as an ASGI application, for a server that runs on trio (such as hypercorn); options as Receiver's.

    Its lifespan keeps it running. Where it is mounted into another application, which passes no lifespan on, use
    ``Receiver(…)`` and hold ``async with receiver.running()`` around the serving.
    """
    return Receiver(ledger, **options).app


# --- parts -----------------------------------------------------------------------------------------------


def _bearer(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _object(content: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"body: must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise HTTPException(400, "body: must be an object")
    return body


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Bad input is answered with 400 and its name."""
    try:
        yield
    except InputRefused as error:
        raise HTTPException(400, str(error)) from None


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except RunlaneError as error:
        raise HTTPException(503, f"the ledger does not answer: {error}") from None
