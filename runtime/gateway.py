"""The gateway: where runners in sandboxes speak for their attempts, over HTTP.

Owns the routes below ``/v1/runner``, what they take (one JSON schema each, published at ``/v1/openapi.json``) and how
every refusal reads. It asks the database nothing itself: each word goes to an actor, and the kernel's fences decide.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs
import jsonschema
import trio
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from actors.circuits import Enter, Outcome
from actors.core import Mailbox
from actors.rates import Acquire, Release
from actors.receipts import StepClaim, StepEnd
from runtime.asgi import json_response, read_body
from runtime.codec import MAX_INT_DIGITS
from runtime.ids import child_run_id
from runtime.runner_tokens import Bearer, RunnerRefused, RunnerTokens
from runtime.submit import Submit
from sql.circuits import Call, Report
from sql.claim import Claimed
from sql.errors import (
    CapacityUnavailable,
    InputRefused,
    ItemFault,
    OutcomeUnknown,
    RunCancelled,
    RunlaneError,
)
from sql.facts import Saying
from sql.rates import Result, Slot
from sql.receipts import ReceiptClaim, ReceiptEnd
from sql.runners import Beat, Pushed
from sql.settle import Settlement
from sql.types import Lane

log = logging.getLogger("runlane.gateway")

_MOST_FACTS = 1_000
MOST_STEPS = 200
"""Of claims and ends of steps in one request."""
# What a request may weigh beyond the largest payload.
_ENVELOPE_BYTES = 262_144
_MOST_INT = 2**31 - 1
# How long a request for a slot waits before it is asked again.
_LONG_POLL_S = 20.0
# And how long anything may take: less than a runner waits for an answer.
_ANSWER_S = 25.0

_JSON_TEXT = {"type": "string", "description": "JSON, as text"}
_SECONDS = {"type": "number", "minimum": 0, "maximum": 315_576_000}
_NAME = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[^\\u0000-\\u001f]+$"}
_SLOT = {"type": "string", "pattern": "^[0-9]{1,19}$", "description": "a number, as text"}
_FACT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["ordinal", "lane", "type", "payload"],
    "properties": {
        "ordinal": {"type": "integer", "minimum": 1, "maximum": _MOST_INT},
        "lane": {"enum": [0, 1]},
        "type": {"enum": ["run.log", "run.progress"]},
        "payload": _JSON_TEXT,
    },
}
_EMPTY: Mapping[str, Any] = {"type": "object", "additionalProperties": False}
_FACTS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["facts"],
    "properties": {"facts": {"type": "array", "minItems": 1, "maxItems": _MOST_FACTS, "items": _FACT}},
}
_RESULT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["outcome"],
    "properties": {
        "outcome": {"enum": ["completed", "failed", "retried", "deferred", "released", "parked"]},
        "payload": _JSON_TEXT,
        "waits": _JSON_TEXT,
        "delay_s": _SECONDS,
        "outage_max_s": {"anyOf": [_SECONDS, {"type": "null"}]},
        "overdue": _JSON_TEXT,
        # Whatever it says: a measure that cannot be must not cost the result that it comes with.
        "usage": {"type": "object", "description": "what the process has used: cpu_s, peak_memory_bytes"},
    },
}


_KEY = {
    "type": "object",
    "additionalProperties": False,
    "required": ["key"],
    "properties": {"key": _NAME},
}
_ACQUIRE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["scope", "slot", "cost"],
    "properties": {
        "scope": _NAME,
        "slot": _SLOT,
        "cost": {"type": "number", "exclusiveMinimum": 0, "maximum": 1_000_000},
        "most_s": _SECONDS,
    },
}
_RELEASE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["scope", "slot", "result"],
    "properties": {
        "scope": _NAME,
        "slot": _SLOT,
        "result": {"enum": ["done", "failed", "unused", "refused"]},
        "retry_after_s": _SECONDS,
    },
}


_STEPS = {
    "type": "object",
    "additionalProperties": False,
    "required": ["items"],
    "properties": {
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": MOST_STEPS,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["key"],
                "properties": {
                    "key": _NAME,
                    "function": {"anyOf": [_NAME, {"type": "null"}]},
                    "outcome": {"enum": [None, "completed", "skipped", "failed", "fatal", "released"]},
                    "payload": {"anyOf": [_JSON_TEXT, {"type": "null"}]},
                    "tries": {"type": "integer", "minimum": 0, "maximum": _MOST_INT},
                },
            },
        }
    },
}


_ENTER = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "call"],
    "properties": {"name": _NAME, "call": _SLOT},
}
_REPORT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "call", "result"],
    "properties": {
        "name": _NAME,
        "call": _SLOT,
        "result": {"enum": ["ok", "failed", "none"]},
        "error": {
            "anyOf": [{"type": "string", "maxLength": 2_000, "pattern": "^[^\\u0000]*$"}, {"type": "null"}]
        },
    },
}
_START_RUN = {
    "type": "object",
    "additionalProperties": False,
    "required": ["play", "input", "key"],
    "properties": {
        "play": _NAME,
        "input": _JSON_TEXT,
        "key": _NAME,
        "priority": {"type": "integer", "minimum": -2, "maximum": 2},
        "delay": {"anyOf": [_SECONDS, {"type": "null"}]},
        "labels": {
            "anyOf": [{"type": "object", "additionalProperties": {"type": "string"}}, {"type": "null"}]
        },
        "concurrency_key": {"anyOf": [_NAME, {"type": "null"}]},
    },
}


class GatewayRefused(RunlaneError):
    """A request is not taken. ``status`` is HTTP's, ``error`` a word for programs; the message says why."""

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error


# What ``waits`` of a result are. They are kept before they are read, so what is kept has to be possible.
_WAITS = {
    "type": "array",
    "minItems": 1,
    "maxItems": 10_000,
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["key", "kind"],
        "properties": {
            "key": _NAME,
            "kind": {"enum": ["sleep", "event", "approval", "child"]},
            "name": _NAME,
            "delay_s": _SECONDS,
            "until": {"type": "string", "maxLength": 64},
        },
        "if": {"properties": {"kind": {"const": "sleep"}}},
        "then": {"anyOf": [{"required": ["delay_s"]}, {"required": ["until"]}]},
        "else": {"required": ["name"]},
    },
}
_WAITS_CHECK = jsonschema.Draft202012Validator(_WAITS)

# What the kernel's words about an attempt mean for a runner: HTTP's status, a word for programs, and why.
_STANDINGS = {
    "early": (425, "early", "the host has not let go of the attempt yet: ask again in a moment"),
    "busy": (503, "busy", "somebody holds the attempt's row: ask again in a moment"),
    "lost": (410, "gone", "the attempt is over: nothing more is taken from it"),
    "unknown": (404, "unknown", "there is no such attempt, or the token is another attempt's"),
}


def _standing(word: str) -> GatewayRefused:
    return GatewayRefused(*_STANDINGS[word])


@attrs.frozen(kw_only=True)
class Desk:
    """What the gateway needs of its host.

    ``say`` hands a runner's word to its actor and gives the answer; ``read`` is what a runner needs to begin, None for
    an attempt that is not live; ``register`` registers its intent to stage array input; ``payload`` reads what a wait
    was given; ``start_run`` starts a child under a key. ``rates``, ``receipts`` and ``circuits`` are the mailboxes of
    those actors. ``gateways`` are where runners may go when this host is gone; ``manners`` is told to runners: how
    often to be heard of, and the limits in force.
    """

    tokens: RunnerTokens
    say: Callable[[Any], Awaitable[Any]]
    read: Callable[[Bearer], Awaitable[Claimed | None]]
    register: Callable[[Claimed], Awaitable[str]]
    payload: Callable[[str, str], Awaitable[str | None]]
    rates: Mailbox[Acquire | Release]
    receipts: Mailbox[StepClaim | StepEnd]
    circuits: Mailbox[Enter | Outcome]
    start_run: Callable[[Claimed, str, Submit], Awaitable[str]]
    gateways: Callable[[], Awaitable[Sequence[str]]]
    manners: Mapping[str, Any]
    max_payload_bytes: int


def gateway_routes(desk: Desk) -> list[Route]:
    """The routes, to be mounted beside the health server's."""
    gateway = _Gateway(desk)
    verbs = {
        "start": (gateway.start, _EMPTY),
        "heartbeat": (gateway.heartbeat, _EMPTY),
        "facts": (gateway.facts, _FACTS),
        "array-input": (gateway.array_input, _EMPTY),
        "payload": (gateway.payload, _KEY),
        "steps": (gateway.steps, _STEPS),
        "circuit-enter": (gateway.circuit_enter, _ENTER),
        "circuit-report": (gateway.circuit_report, _REPORT),
        "start-run": (gateway.start_run, _START_RUN),
        "rate-acquire": (gateway.rate_acquire, _ACQUIRE),
        "rate-release": (gateway.rate_release, _RELEASE),
        "result": (gateway.result, _RESULT),
    }
    document = _document({name: schema for name, (_, schema) in verbs.items()})

    async def openapi(_: Request) -> Response:
        return json_response(document)

    routes = [Route("/v1/openapi.json", openapi, methods=["GET"])]
    for name, (verb, schema) in verbs.items():
        routes.append(Route(f"/v1/runner/{name}", gateway.endpoint(verb, schema), methods=["POST"]))
    return routes


_Verb = Callable[[Bearer, Any], Awaitable[Mapping[str, Any]]]


class _Gateway:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def endpoint(self, verb: _Verb, schema: Mapping[str, Any]) -> Callable[[Request], Awaitable[Response]]:
        """The ASGI endpoint of a verb: who speaks, what is said, and every way in which it is refused."""
        validator = jsonschema.Draft202012Validator(schema)

        async def answer(request: Request) -> Response:
            try:
                bearer = self._desk.tokens.check(request.headers.get("authorization"))
                body = await self._body(request)
                problem = jsonschema.exceptions.best_match(validator.iter_errors(body))
                if problem is not None:
                    where = "".join(f"[{part!r}]" for part in problem.absolute_path) or "the body"
                    raise GatewayRefused(400, "malformed", f"{where}: {problem.message[:300]}")
                with trio.fail_after(_ANSWER_S):
                    return json_response(await verb(bearer, body))
            except trio.TooSlowError:
                return _refused(GatewayRefused(503, "unavailable", f"no answer within {_ANSWER_S:g} s"))
            except RunnerRefused as refused:
                return _refused(GatewayRefused(401, "token", str(refused)))
            except GatewayRefused as refused:
                return _refused(refused)
            except HTTPException as error:
                word = "too_large" if error.status_code == 413 else "malformed"
                return _refused(GatewayRefused(error.status_code, word, error.detail))
            except ItemFault as fault:
                return _refused(GatewayRefused(422, "unstorable", str(fault)))
            except RunlaneError as error:
                log.info("event=gateway_unavailable path=%s error=%r", request.url.path, error)
                return _refused(GatewayRefused(503, "unavailable", str(error)))

        return answer

    async def _body(self, request: Request) -> Any:
        taken = await read_body(request, self._desk.max_payload_bytes + _ENVELOPE_BYTES)
        if not taken:
            return {}
        try:
            text = taken.decode()
            body = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise GatewayRefused(400, "malformed", f"the body is not JSON: {error}") from None
        if "\\u" in text and _UNSTORABLE.search(json.dumps(body, ensure_ascii=False)):
            raise GatewayRefused(400, "malformed", "lone surrogates cannot be stored")
        return body

    # --- verbs -----------------------------------------------------------------------------------------

    async def start(self, bearer: Bearer, _: Any) -> Mapping[str, Any]:
        """What the attempt is about. Counts as a heartbeat."""
        standing = await self._beat(bearer)
        if standing != "ok":
            raise GatewayRefused(410, standing, f"the attempt is {standing}: nothing more is taken from it")
        claimed = await self._claimed(bearer)
        return {"claimed": attrs.asdict(claimed, filter=_told), "manners": dict(self._desk.manners)}

    async def heartbeat(self, bearer: Bearer, _: Any) -> Mapping[str, Any]:
        """The runner lives. ``standing``: ok, cancelled, ended or superseded; only with ok may it go on."""
        return {"standing": await self._beat(bearer), "gateways": list(await self._desk.gateways())}

    async def facts(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """Log lines and progress, numbered by the runner: said twice, they are stored once."""
        sayings = [
            Saying(
                bearer.run_id,
                bearer.attempt,
                bearer.token,
                int(fact["ordinal"]),  # JSON writes 1 as 1.0, too
                Lane(fact["lane"]),
                fact["type"],
                _json_text("payload", fact["payload"]),
            )
            for fact in body["facts"]
        ]
        answer = await self._desk.say(sorted(sayings, key=lambda saying: saying.ordinal))
        if answer != "done":
            raise _standing(answer)
        return {"answer": answer}

    async def array_input(self, bearer: Bearer, _: Any) -> Mapping[str, Any]:
        """The attempt is about to stage array input."""
        return {"answer": await self._desk.register(await self._claimed(bearer))}

    async def payload(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """What a wait of the run was given, where it was too large to come along at the start."""
        await self._claimed(bearer)
        return {"payload": await self._desk.payload(bearer.run_id, body["key"])}

    async def rate_acquire(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """A slot of a rate scope. Its place in the line is kept by the slot's number: ask again, and go on waiting."""
        await self._claimed(bearer)
        slot = Slot(
            body["scope"], _number("slot", body["slot"]), float(body["cost"]), bearer.run_id, bearer.attempt
        )
        message = Acquire(slot, float(body.get("most_s", math.inf)))
        await self._desk.rates.send(message)
        try:
            granted_at, starts = await message.reply.wait(_LONG_POLL_S)
        except OutcomeUnknown:
            raise GatewayRefused(503, "waiting", "no slot yet: ask again") from None
        except CapacityUnavailable as refused:
            return {"refused": "capacity", "reason": str(refused), "retry_after_s": refused.retry_after}
        except InputRefused as refused:
            return {"refused": "unknown", "reason": refused.reason}
        await trio.sleep_until(starts)
        return {"granted_at": granted_at.isoformat()}

    async def rate_release(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """What became of a slot."""
        result = Result(
            body["scope"],
            _number("slot", body["slot"]),
            body["result"],
            float(body.get("retry_after_s", 0.0)),
        )
        await self._desk.rates.send(Release(result))
        return {}

    async def steps(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """Steps claim their receipts and record their ends, many at once, each answered for itself."""
        messages = [_step(bearer, item) for item in body["items"]]
        for message in messages:
            await self._desk.receipts.send(message)
        return {"answers": [await _step_answer(message) for message in messages]}

    async def circuit_enter(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """Whether a dependency may be called now."""
        await self._claimed(bearer)
        message = Enter(Call(body["name"], _number("call", body["call"]), bearer.run_id, bearer.attempt))
        await self._desk.circuits.send(message)
        return attrs.asdict(await message.reply.wait(_LONG_POLL_S))

    async def circuit_report(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """How a call of a dependency went."""
        await self._claimed(bearer)
        report = Report(body["name"], _number("call", body["call"]), body["result"], body.get("error"))
        await self._desk.circuits.send(Outcome(report))
        return {}

    async def start_run(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """Start a child under a key, once. What is wrong with it is told by field."""
        claimed = await self._claimed(bearer)
        try:
            item = Submit(
                body["play"],
                json.loads(_json_text("input", body["input"])),
                run_id=child_run_id(bearer.run_id, body["key"]),
                org_id=claimed.org_id,
                priority=int(body.get("priority", 0)),
                delay=body.get("delay"),
                labels=body.get("labels"),
                concurrency_key=body.get("concurrency_key"),
            )
            return {"answer": await self._desk.start_run(claimed, body["key"], item)}
        except InputRefused as refused:
            return {"refused": {"field": refused.field, "reason": refused.reason}}

    async def result(self, bearer: Bearer, body: Any) -> Mapping[str, Any]:
        """How the attempt ended. The first word stands; said again, it is answered again."""
        waits = _json_text("waits", body.get("waits", "[]"))
        if body["outcome"] == "parked":
            waits = _checked_waits(json.loads(waits))
        pushed: Pushed = await self._desk.say(
            Settlement(
                bearer.run_id,
                bearer.attempt,
                bearer.token,
                body["outcome"],
                _with_usage(
                    _json_object("payload", body.get("payload", "{}")), body["outcome"], body.get("usage")
                ),
                float(body.get("delay_s", 0.0)),
                waits,
                outage_max_s=body.get("outage_max_s"),
                overdue=_json_object("overdue", body.get("overdue", "{}")),
            )
        )
        if pushed.answer == "unknown":
            raise _standing("unknown")
        return {"answer": pushed.answer, "first": pushed.first}

    async def _beat(self, bearer: Bearer) -> str:
        answer: str = await self._desk.say(Beat(bearer.run_id, bearer.attempt, bearer.token))
        if answer in _STANDINGS:
            raise _standing(answer)
        return answer

    async def _claimed(self, bearer: Bearer) -> Claimed:
        claimed = await self._desk.read(bearer)
        if claimed is None:
            raise _standing("lost")
        return claimed


# --- reading and answering -----------------------------------------------------------------------------


_UNSTORABLE = re.compile("[\ud800-\udfff]")


def _json_text(field: str, text: str) -> str:
    """JSON text that the database takes and everybody can read again, as it came."""
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_int=_whole, parse_float=_decimal)
    except (ValueError, RecursionError) as error:
        raise GatewayRefused(400, "malformed", f"[{field!r}]: not JSON: {error}") from None
    # Escaped ones are seen in what they stand for.
    plain = json.dumps(value, ensure_ascii=False) if "\\u" in text else text
    if "\x00" in text or "\\u0000" in plain or _UNSTORABLE.search(plain):
        raise GatewayRefused(400, "malformed", f"[{field!r}]: NUL and lone surrogates cannot be stored")
    return text


def _step(bearer: Bearer, item: Mapping[str, Any]) -> StepClaim | StepEnd:
    fence = (bearer.run_id, bearer.attempt, bearer.token)
    outcome, payload = item.get("outcome"), item.get("payload")
    if outcome is None:
        if item.get("function") is None:
            raise GatewayRefused(400, "malformed", "['function']: a claim says what it is recorded for")
        return StepClaim(None, ReceiptClaim(*fence, item["key"], item["function"]))
    text = None if payload is None else _json_text("payload", payload)
    end = ReceiptEnd(*fence, item["key"], outcome, text, int(item.get("tries", 0)), item.get("function"))
    return StepEnd(None, end)


async def _step_answer(message: StepClaim | StepEnd) -> Mapping[str, Any]:
    try:
        answer = await message.reply.wait(_LONG_POLL_S)
    except RunCancelled:
        raise _standing("lost") from None
    except ItemFault as fault:
        return {"refused": str(fault)}
    return {} if answer is None else attrs.asdict(answer)


def _number(field: str, text: str) -> int:
    number = int(text)
    if number >= 2**63:
        raise GatewayRefused(400, "malformed", f"[{field!r}]: larger than any number of ours")
    return number


def _json_object(field: str, text: str) -> str:
    if not isinstance(json.loads(_json_text(field, text)), dict):
        raise GatewayRefused(400, "malformed", f"[{field!r}]: must be a JSON object, as text")
    return text


def _with_usage(payload: str, outcome: str, usage: Mapping[str, Any] | None) -> str:
    """The payload of an end with what its runner says to have used, for the kernel to judge: numbers, or null."""
    if usage is None or outcome not in ("completed", "failed"):
        return payload
    measured = {name: _measure(usage.get(name)) for name in ("cpu_s", "peak_memory_bytes")}
    begun = payload.rstrip()[:-1].rstrip()  # as text: no number of the output may change
    comma = "" if begun.endswith("{") else ","
    return f'{begun}{comma}"usage":{json.dumps(measured)}}}'


def _measure(value: Any) -> float | None:
    """The value, if JSON has such a number."""
    return value if type(value) in (int, float) and abs(value) < math.inf else None


def _checked_waits(waits: Any) -> str:
    """Waits as the kernel takes them, as text: Python reads moments in forms and zones that Postgres does not."""
    problem = jsonschema.exceptions.best_match(_WAITS_CHECK.iter_errors(waits))
    if problem is not None:
        where = "".join(f"[{part!r}]" for part in problem.absolute_path)
        raise GatewayRefused(400, "malformed", f"['waits']{where}: {problem.message[:300]}")
    if len({wait["key"] for wait in waits}) < len(waits):
        raise GatewayRefused(400, "malformed", "['waits']: a key may be there once")
    for wait in waits:
        try:
            if "until" in wait:
                moment = datetime.fromisoformat(wait["until"])
                if moment.tzinfo is None:
                    raise ValueError("it has no time zone")
                wait["until"] = moment.astimezone(UTC).isoformat()
        except (ValueError, OverflowError) as error:
            raise GatewayRefused(400, "malformed", f"['waits']: until is not a moment: {error}") from None
    return json.dumps(waits)


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_INT_DIGITS:
        raise ValueError(f"a number of more than {MAX_INT_DIGITS} digits")
    return int(digits)


def _decimal(text: str) -> float:
    """No number that Postgres would write out in so many digits that nobody could read it again."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"a number that is too large: {text[:40]}")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _told(attribute: attrs.Attribute[Any], _: Any) -> bool:
    return attribute.name not in ("was_due_at", "lag_s", "token")


def _refused(refused: GatewayRefused) -> Response:
    response = json_response({"error": refused.error, "message": str(refused)}, refused.status)
    if refused.status in (425, 503):
        response.headers["retry-after"] = "1"
    return response


def _document(verbs: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The OpenAPI document: what every route takes is what it checks."""
    refusal = {"$ref": "#/components/responses/Refused"}
    codes = ("400", "401", "404", "410", "413", "422", "425", "503")
    paths = {
        f"/v1/runner/{name}": {
            "post": {
                "operationId": name,
                "security": [{"runner": []}],
                "requestBody": {"content": {"application/json": {"schema": schema}}},
                "responses": {
                    "200": {
                        "description": "Taken.",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    },
                    **dict.fromkeys(codes, refusal),
                },
            }
        }
        for name, schema in verbs.items()
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "runlane runner gateway", "version": "1"},
        "paths": paths,
        "components": {
            "securitySchemes": {"runner": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}},
            "responses": {
                "Refused": {
                    "description": "Not taken, and why.",
                    "content": {
                        "application/json": {
                            "schema": {
                                "type": "object",
                                "required": ["error", "message"],
                                "properties": {"error": {"type": "string"}, "message": {"type": "string"}},
                            }
                        }
                    },
                }
            },
        },
    }
