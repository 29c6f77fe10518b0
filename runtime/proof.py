"""Lease proof: how a receiver learns that a delivery's sender holds its lane.

Owns the two ways of asking, the runtime's database and its gateway, and the gateway's answer. It never changes anything
at the runtime.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import trio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.core import Mailbox
from actors.proof import Question
from runtime import wire
from runtime.asgi import json_response, read_body
from runtime.dispatch import Gatekeeper, TokenRefused
from runtime.http_client import HttpClient, NoAnswer, check_base
from sql.errors import HostStopping, InputRefused, MailboxFull, OutcomeUnknown, RunlaneError
from sql.proof import Claimed

log = logging.getLogger("runlane.proof")

_MOST_LANES = 1_000
_BODY_BYTES = 4_194_304


class ProofUnavailable(RunlaneError):
    """Whoever could prove the lease gives no answer now; the message says who and why."""


class Prover(Protocol):
    """Who knows whether senders hold their lanes."""

    async def prove(
        self, claims: Sequence[Claimed], tokens: Sequence[str], deadline: float
    ) -> Sequence[bool]:
        """Whether each claim holds now. ``tokens`` are the deliveries' dispatch tokens. Raises ProofUnavailable."""
        ...


# --- asking ------------------------------------------------------------------------------------------------


@attrs.frozen
class DatabaseProver:
    """Asks the runtime's database, through the actor ``proof``."""

    mailbox: Mailbox[Question]

    async def prove(
        self, claims: Sequence[Claimed], tokens: Sequence[str], deadline: float
    ) -> Sequence[bool]:
        """Whether each claim holds now. Raises ProofUnavailable."""
        question = Question(claims, deadline)
        try:
            self.mailbox.send_nowait(question)
            return await question.reply.wait(deadline - trio.current_time())
        except (MailboxFull, HostStopping, OutcomeUnknown) as error:
            raise ProofUnavailable(f"the runtime's database: {error}") from error


class GatewayProver:
    """Asks the gateway of the sender's runtime, with the sender's own tokens."""

    def __init__(self, url: str, *, internal_token: str | None, concurrency: int = 8) -> None:
        headers = {} if internal_token is None else {"authorization": f"Bearer {internal_token}"}
        self.client = HttpClient(check_base(url, "prove_url"), headers=headers, concurrency=concurrency)

    async def prove(
        self, claims: Sequence[Claimed], tokens: Sequence[str], deadline: float
    ) -> Sequence[bool]:
        """Whether each claim holds now. Raises ProofUnavailable."""
        body = {
            "lanes": [
                {
                    "run_id": claim.run_id,
                    "lane": claim.lane.label,
                    "lease_token": str(claim.token),
                    "first": claim.first,
                    "through": claim.through,
                    "token": token,
                }
                for claim, token in zip(claims, tokens, strict=True)
            ]
        }
        where = f"the gateway {self.client.base}"
        with trio.move_on_at(deadline):
            try:
                answer = await self.client.call("POST", wire.LANES_PROOF, body=json.dumps(body).encode())
            except NoAnswer as error:
                raise ProofUnavailable(f"{where}: {error}") from error
            found = answer.json()
            proven = found.get("proven") if isinstance(found, Mapping) else None
            if answer.status != 200 or not isinstance(proven, list) or len(proven) != len(claims):
                said = found.get("error", "") if isinstance(found, Mapping) else ""
                raise ProofUnavailable(f"{where}: answered {answer.status} {said}".rstrip())
            return [one is True for one in proven]
        raise ProofUnavailable(f"{where}: no answer in time")


# --- answering ---------------------------------------------------------------------------------------------


def proof_route(
    gatekeepers: Sequence[Gatekeeper], prove: Callable[[Sequence[Claimed]], Awaitable[Sequence[bool]]]
) -> Route:
    """``POST /v1/lanes/proof``: whether lanes are held, for a receiver that cannot reach the database.

    Each ledger of the host has a gatekeeper; whoever one of them lets in is answered.
    """

    async def answer(request: Request) -> Response:
        content = await read_body(request, _BODY_BYTES)
        try:
            asked = _asked(content)
        except InputRefused as error:
            return json_response({"error": str(error)}, 400)
        try:
            for claim, token in asked:
                _check(gatekeepers, request.headers.get("authorization"), token, claim.run_id)
        except TokenRefused as error:
            return json_response({"error": str(error)}, 401)
        try:
            proven = await prove([claim for claim, _ in asked])
        except RunlaneError as error:
            log.warning("event=proof_unavailable error=%r", str(error))
            return json_response({"error": f"no proof now: {error}"}, 503)
        return json_response({"proven": list(proven)})

    return Route(wire.LANES_PROOF, answer, methods=["POST"])


def _check(
    gatekeepers: Sequence[Gatekeeper], authorization: str | None, token: str | None, run_id: str
) -> None:
    refused: TokenRefused | None = None
    for gatekeeper in gatekeepers:
        try:
            gatekeeper.check(authorization, token, run_id)
            return
        except TokenRefused as error:
            refused = error
    raise refused or TokenRefused("this host delivers to no receiver")


def _asked(content: bytes) -> list[tuple[Claimed, str | None]]:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputRefused("body", f"must be JSON: {error}") from None
    lanes = body.get("lanes") if isinstance(body, dict) else None
    if not isinstance(lanes, list) or not 1 <= len(lanes) <= _MOST_LANES:
        raise InputRefused("lanes", f"must be a list of 1 to {_MOST_LANES}")
    return [_claim(record, number) for number, record in enumerate(lanes)]


def _claim(record: Any, number: int) -> tuple[Claimed, str | None]:
    try:
        return wire.claim_of(record)
    except InputRefused as error:
        raise InputRefused(f"lanes[{number}].{error.field}", error.reason) from None
