"""The gateway takes anything from anybody, and says what it does not take: never a 500."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import attrs
import httpx
import jwt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import Runtime
from runtime.detached import TOKEN
from tests.support import sandboxed
from tests.support.callers import open_caller
from tests.support.hosts import Hosts, eventually, until
from tests.support.sandboxed import Pretended

MOST_BYTES = 20_000

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
HOSTILE = st.sampled_from(
    [
        b"", b"null", b"[]", b"{", b"\xff\xfe", b'{"key": "\\ud800"}', b'{"key": "a\\u0000b"}', b"[" * 100_000,
        b'{"cost": 1e999, "scope": "s", "slot": "1"}', b"NaN", b"1" * 5_000, b'{"outcome": "completed", "x": 1}',
        b"x" * (MOST_BYTES + 400_000),
    ]
)  # fmt: skip
JSON_TEXT = st.one_of(
    VALUES.map(json.dumps),
    st.text(max_size=10),
    st.sampled_from(['"\\u0000"', '"\\ud800"', "1e400000", "[" * 5_000, "-0", '{"a": 1e999}', "NaN"]),
)
WAITS = st.lists(
    st.fixed_dictionaries(
        {"key": st.text(max_size=5), "kind": st.sampled_from(["sleep", "event", "approval", "child", "x"])},
        optional={
            "name": st.text(max_size=5),
            "delay_s": st.floats(),
            "until": st.sampled_from(["2030-01-01T00:00:00+00:00", "2030-01-01", "soon", "infinity"]),
        },
    ),
    max_size=3,
).map(json.dumps)


def fitting(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a schema of the published document allows."""
    if "anyOf" in schema:
        return st.one_of([fitting(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "object":
            fields = {name: fitting(one) for name, one in schema.get("properties", {}).items()}
            needed = schema.get("required", [])
            if isinstance(schema.get("additionalProperties"), dict):
                return st.dictionaries(
                    st.text(max_size=8), fitting(schema["additionalProperties"]), max_size=4
                )
            return st.fixed_dictionaries(
                {name: fields[name] for name in needed},
                optional={name: one for name, one in fields.items() if name not in needed},
            )
        case "array":
            return st.lists(fitting(schema["items"]), min_size=schema["minItems"], max_size=4)
        case "string" if schema.get("description") == "JSON, as text":
            return JSON_TEXT | WAITS
        case "string" if "pattern" in schema:
            return st.from_regex(re.compile(schema["pattern"]), fullmatch=True).map(lambda s: s[:255])
        case "string":
            return st.text(max_size=20)
        case "integer":
            whole = st.integers(schema.get("minimum"), schema.get("maximum"))
            return whole | whole.map(float)
        case "number":
            return st.floats(0.001, schema["maximum"]) | st.integers(1, 10)
        case _:
            return st.none()


@st.composite
def bodies(draw: st.DrawFn, schema: dict[str, Any]) -> bytes:
    """Valid bodies, valid ones with one thing wrong, and anything at all."""
    kind = draw(st.sampled_from(["valid", "valid", "mutated", "any", "hostile"]))
    if kind == "hostile":
        return draw(HOSTILE)
    if kind == "any":
        return json.dumps(draw(VALUES)).encode()
    body = draw(fitting(schema))
    if kind == "mutated":
        name = draw(st.sampled_from([*body, "more"]))
        body = {**body, name: draw(VALUES)}
        if draw(st.booleans()):
            del body[name]
    return json.dumps(body).encode()


@attrs.frozen
class Runner:
    """What a runner is told, and where it speaks."""

    url: str
    token: str
    run_id: str

    def forged(self, secret: bytes, **changes: Any) -> str:
        claims = jwt.decode(self.token, options={"verify_signature": False})
        return jwt.encode({**claims, **changes}, secret, algorithm="HS256")


@asynccontextmanager
async def hosting(hosts: Hosts, provider: Pretended, **more: Any) -> AsyncIterator[Runtime]:
    """A host whose sandboxes are only pretended."""
    settings = {"health_port": 0, "heartbeat_timeout_s": 60.0, "max_payload_bytes": MOST_BYTES, **more}
    async with hosts.open(sandboxed.pretended, sandboxes={"pretended": provider}, **settings) as rt:
        yield rt


async def launched(rt: Runtime, provider: Pretended) -> Runner:
    """A detached attempt whose runner is the test."""
    handle = await rt.submit(sandboxed.pretended, {}, terminal_performance="full")

    async def waits() -> bool:
        return "run.waiting" in [fact.type for fact in await rt.facts(handle.run_id)]

    await eventually(waits, within_s=20.0)
    (spec,) = [one for one in provider.specs.values() if one.run_id == handle.run_id]
    status = await rt.status(handle.run_id)
    assert status.host == f"sandbox {spec.sandbox} (pretended)"
    assert status.lease_expires_at is None
    return Runner(f"http://127.0.0.1:{rt.health_port}", spec.env[TOKEN], handle.run_id)


def tokens_of(rt: Runtime) -> bytes:
    detached = rt._host.detached
    assert detached is not None
    return detached._tokens.secret


@attrs.frozen
class Route:
    """One route of the published document."""

    client: httpx.AsyncClient
    path: str
    post: dict[str, Any]

    async def answer(self, body: bytes, token: str | None) -> int:
        """The status of the answer, which is one of those that the document names and says why."""
        headers = {} if token is None else {b"authorization": token.encode("latin-1")}
        response = await self.client.post(self.path, content=body, headers=headers)
        told = (self.path, body[:500], response.status_code, response.text[:500])
        assert str(response.status_code) in self.post["responses"], told
        if response.status_code != 200:
            said = response.json()
            assert said["error"], told
            assert said["message"], told
        return response.status_code

    def bodies(self) -> list[bytes]:
        """Bodies of every kind. Drawn while nothing else runs: hypothesis has the random numbers to itself."""
        drawn: list[bytes] = []

        @settings(
            max_examples=30,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(body=bodies(self.post["requestBody"]["content"]["application/json"]["schema"]))
        def draw(body: bytes) -> None:
            drawn.append(body)

        draw()
        return drawn


@pytest.mark.timeout(150)
async def test_whatever_comes_is_answered_and_what_is_refused_is_told_why(hosts: Hosts) -> None:
    provider = Pretended()
    async with hosting(hosts, provider) as rt:
        runner = await launched(rt, provider)
        secret = tokens_of(rt)
        bad = {
            None: 401,
            "Bearer": 401,
            "Basic abc": 401,
            "Bearer \u00e4.\u00f6.\u00fc": 401,
            f"Bearer {runner.token}x": 401,
            f"Bearer {runner.forged(secret, exp=int(time.time()) - 60)}": 401,
            f"Bearer {runner.forged(secret, schema='other')}": 401,
            f"Bearer {runner.forged(b'x' * 32)}": 401,
            f"Bearer {runner.forged(secret, attempt=2**40)}": 401,
            f"Bearer {runner.forged(secret, attempt='1')}": 401,
            f"Bearer {runner.forged(secret, lease=str(2**70))}": 401,
            f"Bearer {runner.forged(secret, lease='7')}": 404,
            f"Bearer {runner.forged(secret, attempt=9)}": 404,
            f"Bearer {runner.forged(secret, run_id='no-such-run')}": 404,
        }

        async with httpx.AsyncClient(base_url=runner.url, trust_env=False, timeout=40) as client:
            document = (await client.get("/v1/openapi.json")).json()
            taken = set()
            # The result comes last: it ends the attempt.
            paths = sorted(document["paths"].items(), key=lambda item: item[0].endswith("/result"))
            for path, item in paths:
                route = Route(client, path, item["post"])
                for body in route.bodies():
                    if await route.answer(body, f"Bearer {runner.token}") == 200:
                        taken.add(path)
                for token, status in bad.items():
                    found = await route.answer(b"{}", token)
                    if status == 401 or path.endswith(("/start", "/heartbeat")):
                        assert found == status, (path, token)
                assert await route.answer(b"x" * (MOST_BYTES + 400_000), f"Bearer {runner.token}") == 413
            assert len(taken) >= 8, taken  # what fits is taken: it is not all refused at the door


async def test_a_result_that_could_not_be_settled_is_not_kept(hosts: Hosts) -> None:
    provider = Pretended()
    async with hosting(hosts, provider) as rt:
        runner = await launched(rt, provider)
        headers = {"authorization": f"Bearer {runner.token}"}
        sleep = {"key": "nap", "kind": "sleep", "delay_s": 1}
        async with httpx.AsyncClient(base_url=runner.url, headers=headers, trust_env=False) as client:
            for waits, told in (
                ({"key": "nap"}, "is not of type"),
                ([], "non-empty"),
                ([{"kind": "sleep", "delay_s": 1}], "key"),
                ([{"key": "nap", "kind": "sleep"}], "waits"),
                ([{"key": "go", "kind": "event"}], "name"),
                ([sleep, sleep], "once"),
                ([{"key": "nap", "kind": "sleep", "until": "tomorrow"}], "moment"),
            ):
                said = await client.post(
                    "/v1/runner/result", json={"outcome": "parked", "waits": json.dumps(waits)}
                )
                assert said.status_code == 400
                assert told in said.json()["message"]
            for number in ("1e400", "1E+131071", "-" + "9" * 641):  # a host that reads it would crash
                said = await client.post(
                    "/v1/runner/result", json={"outcome": "completed", "payload": f'{{"output": [{number}]}}'}
                )
                assert said.status_code == 400
                assert "a number" in said.json()["message"]
            assert await hosts.value("SELECT count(*) FROM @.runner_results") == 0
            said = await client.post(
                "/v1/runner/result",
                json={"outcome": "completed", "payload": '{"output": 1}', "usage": {"cpu_s": "much"}},
            )
            assert said.json() == {"answer": "settled", "first": True}
            details = (await rt.status(runner.run_id, full=True)).details  # E-36: it costs no result
            assert details is not None
            assert details.performance_unavailable == "invalid_usage"
            assert details.performance is not None


async def test_a_moment_in_any_form_is_one_that_can_be_settled_later(hosts: Hosts) -> None:
    provider = Pretended()
    # Python reads the days of a week and zones that are far away; Postgres does not.
    nap = {"key": "nap", "kind": "sleep", "until": "2030-W01-2T20:00:00+20:00"}
    async with hosting(hosts, provider) as rt:
        runner = await launched(rt, provider)
        headers = {"authorization": f"Bearer {runner.token}"}
        async with (
            httpx.AsyncClient(base_url=runner.url, headers=headers, trust_env=False) as client,
            open_caller(hosts.dsn, hosts.schema) as caller,
        ):
            await caller.begin("read committed")  # it is kept first, and settled once the row is free
            await caller.fetchval(f"SELECT 1 FROM {hosts.schema}.runs FOR UPDATE")
            said = await client.post(
                "/v1/runner/result", json={"outcome": "parked", "waits": json.dumps([nap])}
            )
            assert said.json() == {"answer": "recorded", "first": True}
            await caller.rollback()
        status = await until(rt, runner.run_id, "waiting")
        assert status.due_at == datetime(2030, 1, 1, tzinfo=UTC)


async def test_a_sandbox_that_comes_into_being_too_late_is_deleted_all_the_same(hosts: Hosts) -> None:
    provider = Pretended(create_s=1.5)
    more = {"sandbox_create_s": 0.3, "outage_max_s": 3_600.0}
    async with hosting(hosts, provider, **more) as rt:
        handle = await rt.submit(sandboxed.pretended, {})

        async def tried() -> bool:
            return bool(await rt.attempts(handle.run_id))

        await eventually(tried, within_s=20.0)
        (attempt, *_) = await rt.attempts(handle.run_id)
        assert attempt.error is not None
        assert "no answer within 0.3 s" in attempt.error["message"]
        await handle.cancel()

        async def gone() -> bool:
            return await hosts.value("SELECT bool_and(confirmed_at IS NOT NULL) FROM @.sandboxes") is True

        await eventually(gone, within_s=40.0)
        assert provider.specs == {}
