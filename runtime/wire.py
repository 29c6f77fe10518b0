"""The delivery protocol: how facts look on their way to a ledger over HTTP, for both ends.

Owns names, paths, the canonical form of facts with its digest, and the JSON of deliveries, results and capabilities.
It opens no connection, trusts nothing, and decides nothing about a delivery.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import attrs

from runtime.codec import preview
from sql.errors import InputRefused
from sql.proof import Claimed
from sql.receive import Parcel
from sql.types import RUN_ID_PATTERN, Delivery, Lane

PROTOCOL = 1

CAPABILITIES = "/v1/capabilities"
DELIVERIES = "/v1/deliveries"
DISPATCH_TOKEN = "/v1/dispatch-token"
RUNS = "/v1/runs"
LANES_PROOF = "/v1/lanes/proof"

APPLIED = "applied"
DUPLICATE = "duplicate"
REJECTED = "rejected"
GAP = "gap"
NOT_CURRENT = "not_current"
UNAUTHORIZED = "unauthorized"
RETRY = "retry"

OUTCOMES = frozenset({APPLIED, DUPLICATE, REJECTED, GAP, NOT_CURRENT, UNAUTHORIZED, RETRY})
"""What can become of a delivery. ``applied`` and ``duplicate``: the ledger has it. ``rejected``: it never will.
``gap``: facts before it are missing. ``not_current``: it is not its sender's turn. ``unauthorized``: the token does not
allow it. ``retry``: not now. Only ``applied`` changes anything."""

STATUSES = {
    APPLIED: 200,
    DUPLICATE: 200,
    REJECTED: 422,
    GAP: 409,
    NOT_CURRENT: 412,
    UNAUTHORIZED: 401,
    RETRY: 503,
}
"""The HTTP status that a request with a single delivery is answered with."""

LANES = {lane.label: lane for lane in Lane}


# --- the canonical form --------------------------------------------------------------------------------


def delivery_key(run_id: str, lane: Lane, first: int, through: int, generation: int = 0) -> str:
    """The idempotency key of a prefix. It says what it covers, and how often an operator had skipped before it."""
    key = f"{run_id}:{lane.label}:{first}-{through}"
    return f"{key}:s{generation}" if generation else key


def digest_of(key: str, facts: Iterable[tuple[int, str, str, Any]]) -> str:
    """SHA-256 (hex) over the key and, per fact (seq, type, created_at as text, payload), a newline and its canonical
    JSON: an array of the four, keys sorted, no spaces, UTF-8."""
    digest = hashlib.sha256(key.encode())
    for fact in facts:
        line = json.dumps(fact, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest.update(b"\n" + line.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def encode(delivery: Delivery) -> bytes:
    """A delivery as a JSON object. Raises ValueError or RecursionError when a fact cannot be written as JSON."""
    record = {
        "run_id": delivery.run_id,
        "lane": delivery.lane.label,
        "delivery_key": delivery.delivery_key,
        "digest": delivery.digest,
        "attempt": delivery.attempt,
        # As text: it has more bits than many a JSON reader gives a number.
        "lease_token": str(delivery.token),
        "generation": delivery.generation,
        "passed": delivery.passed,
        "facts": [
            {
                "seq": fact.seq,
                "type": fact.type,
                "created_at": fact.created_at.isoformat(),
                "payload": fact.payload,
            }
            for fact in delivery.facts
        ],
    }
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def body_of(encoded: Iterable[tuple[bytes, str | None]]) -> bytes:
    """A request's body: encoded deliveries, each with its dispatch token unless that travels in the header."""
    parts = (
        delivery if token is None else delivery[:-1] + b',"token":' + json.dumps(token).encode() + b"}"
        for delivery, token in encoded
    )
    return b'{"deliveries":[' + b",".join(parts) + b"]}"


# --- capabilities --------------------------------------------------------------------------------------


@attrs.frozen
class Capabilities:
    """What a receiver takes. The defaults are those of one that says nothing: one fact, one run, per request."""

    protocol: int = PROTOCOL
    receiver: str | None = None
    schema: str | None = None
    max_facts: int = 1
    max_deliveries: int = 1
    max_body_bytes: int = 1_048_576

    def to_json(self) -> dict[str, Any]:
        """The body of the receiver's answer."""
        return {
            "protocol": self.protocol,
            "receiver": self.receiver,
            "schema": self.schema,
            "prefix_batching": {"max_facts": self.max_facts},
            "multi_run": {"max_deliveries": self.max_deliveries},
            "max_body_bytes": self.max_body_bytes,
        }

    @classmethod
    def from_json(cls, body: Any) -> Capabilities:
        """What a receiver has answered; whatever is missing is not supported. Raises InputRefused naming the field."""
        if not isinstance(body, Mapping):
            raise InputRefused("capabilities", f"must be an object, not {preview(body)}")
        default = cls()
        return cls(
            protocol=_count(body, "protocol", default.protocol),
            receiver=_name(body, "receiver"),
            schema=_name(body, "schema"),
            max_facts=_count(_part(body, "prefix_batching"), "max_facts", 1),
            max_deliveries=_count(_part(body, "multi_run"), "max_deliveries", 1),
            max_body_bytes=_count(body, "max_body_bytes", default.max_body_bytes),
        )


def _part(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = body.get(name)
    return part if isinstance(part, Mapping) else {}


def _count(body: Mapping[str, Any], name: str, default: int) -> int:
    value = body.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputRefused(f"capabilities.{name}", f"must be a whole number above 0, not {preview(value)}")
    return value


def _name(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise InputRefused(f"capabilities.{name}", f"must be text, not {preview(value)}")
    return value


# --- what has arrived ----------------------------------------------------------------------------------

_RUN_ID = re.compile(RUN_ID_PATTERN)
_TYPE = re.compile(r"[a-z0-9_.:-]{1,100}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_INTEGER = 2**31 - 1
_MOST_TOKEN = 2**63 - 1


@attrs.frozen
class Arrived:
    """A delivery as a receiver reads it, its digest checked. ``token`` is None where the request's header has it."""

    parcel: Parcel
    lease_token: int
    token: str | None


@attrs.frozen
class Malformed:
    """A delivery that nobody can read; ``reason`` names the field."""

    reason: str


def decode(content: bytes, *, max_facts: int, max_deliveries: int) -> list[Arrived | Malformed]:
    """The deliveries of a request's body. Raises InputRefused when it is no such body at all."""
    try:
        body = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InputRefused("body", f"must be JSON: {error}") from None
    deliveries = body.get("deliveries") if isinstance(body, dict) else None
    if not isinstance(deliveries, list) or not 1 <= len(deliveries) <= max_deliveries:
        raise InputRefused("deliveries", f"must be a list of 1 to {max_deliveries}")
    found: list[Arrived | Malformed] = []
    for number, record in enumerate(deliveries):
        try:
            found.append(_arrived(record, max_facts))
        except InputRefused as error:
            found.append(Malformed(f"deliveries[{number}].{error}"))
    return found


def _no_constant(token: str) -> NoReturn:
    raise ValueError(f"{token} is not JSON")


def _arrived(record: Any, max_facts: int) -> Arrived:
    run_id, lane, lease_token, token = _lease(record)
    generation = _integer(record, "generation", 0)
    passed = _integer(record, "passed", 0)
    facts = record.get("facts")
    if not isinstance(facts, list) or not 1 <= len(facts) <= max_facts:
        raise InputRefused("facts", f"must be a list of 1 to {max_facts}")
    seqs: list[int] = []
    types, texts, created_ats, payloads = [], [], [], []
    for number, fact in enumerate(facts):
        try:
            if not isinstance(fact, dict):
                raise InputRefused("fact", "must be an object")
            seqs.append(_integer(fact, "seq", 1 if not seqs else seqs[-1] + 1))
            if len(seqs) > 1 and seqs[-1] != seqs[-2] + 1:
                raise InputRefused("seq", f"must follow {seqs[-2]}, the one before")
            types.append(_matching(fact, "type", _TYPE))
            text, moment = _moment(fact)
            texts.append(text)
            created_ats.append(moment)
            payloads.append(_payload(fact))
        except InputRefused as error:
            raise InputRefused(f"facts[{number}].{error.field}", error.reason) from None
    key = delivery_key(run_id, lane, seqs[0], seqs[-1], generation)
    if record.get("delivery_key") != key:
        raise InputRefused("delivery_key", f"must be {key}, as what it covers says")
    digest = _matching(record, "digest", _DIGEST)
    content = zip(seqs, types, texts, (fact["payload"] for fact in facts), strict=True)
    if digest != digest_of(key, content):
        raise InputRefused("digest", "is not that of the key and the facts")
    parcel = Parcel(run_id, lane, key, digest, generation, passed, seqs, types, created_ats, payloads)
    return Arrived(parcel, lease_token, token)


def claim_of(record: Any) -> tuple[Claimed, str | None]:
    """A lane that somebody says to hold, and the dispatch token that comes with it. Raises InputRefused."""
    run_id, lane, lease_token, token = _lease(record)
    first = _integer(record, "first", 1)
    return Claimed(run_id, lane, lease_token, first, _integer(record, "through", first)), token


def _lease(record: Any) -> tuple[str, Lane, int, str | None]:
    if not isinstance(record, dict):
        raise InputRefused("item", "must be an object")
    run_id = _matching(record, "run_id", _RUN_ID)
    lane = LANES.get(_matching(record, "lane", _TYPE))
    if lane is None:
        raise InputRefused("lane", "must be " + " or ".join(LANES))
    lease_token = record.get("lease_token")
    if not isinstance(lease_token, str) or not lease_token.isascii() or not lease_token.isdigit():
        raise InputRefused("lease_token", "must be a number as text")
    if len(lease_token) > 19 or int(lease_token) > _MOST_TOKEN:
        raise InputRefused("lease_token", f"must be at most {_MOST_TOKEN}")
    token = record.get("token")
    if token is not None and not isinstance(token, str):
        raise InputRefused("token", "must be text")
    return run_id, lane, int(lease_token), token


def _matching(record: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise InputRefused(name, f"must be text that matches {pattern.pattern}")
    return value


def _integer(record: Mapping[str, Any], name: str, least: int) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_INTEGER:
        raise InputRefused(name, f"must be a whole number from {least}")
    return value


def _moment(fact: Mapping[str, Any]) -> tuple[str, datetime]:
    text = fact.get("created_at")
    moment = None
    if isinstance(text, str):
        with contextlib.suppress(ValueError):
            moment = datetime.fromisoformat(text)
    if not isinstance(text, str) or moment is None or moment.tzinfo is None:
        raise InputRefused("created_at", "must be a time with an offset, as in 2026-01-31T18:00:00+00:00")
    return text, moment


def _payload(fact: Mapping[str, Any]) -> str:
    if "payload" not in fact:
        raise InputRefused("payload", "is missing")
    try:
        return json.dumps(fact["payload"], allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        raise InputRefused("payload", "holds a number too large, or is too deep") from None
