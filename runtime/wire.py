"""The delivery protocol: how facts look on their way to a ledger over HTTP, for both ends.

Owns names, paths, the canonical form of facts with its digest, and the JSON of deliveries, results and capabilities.
It opens no connection, trusts nothing, and decides nothing about a delivery.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from runtime.codec import preview
from sql.errors import InputRefused
from sql.types import Delivery, Lane

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
"""What can become of a delivery. ``applied`` and ``duplicate``: the ledger has it. ``gap`` and ``not_current``: it is
not this delivery's turn, nothing was changed. ``unauthorized``: the token does not allow it. ``retry``: not now."""

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
