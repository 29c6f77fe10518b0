"""Dispatch tokens: what they allow, for how long, and whose they are."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jwt
import pytest

from runtime import dispatch
from runtime.dispatch import DispatchTokens, LocalMint, TokenRefused, Verifier, check_secret, expiry_of, mint
from sql.errors import InputRefused

SECRET = "a secret of at least thirty-two bytes"
OTHER = "another secret of thirty-two bytes or so"
HERE = "https://ledger.example"
RUN: dict[str, Any] = {"run_id": "r", "schema": "jobs", "receiver": HERE}

verifier = Verifier([SECRET], HERE, "jobs")


def unsigned(claims: Mapping[str, Any]) -> str:
    def part(value: Mapping[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    return f"{part({'alg': 'none', 'typ': 'JWT'})}.{part(claims)}."


@attrs.define
class Counting:
    """An authority that counts, and gives what it is told to."""

    proof: str = "proof"
    lifetime_s: float = 300.0
    opaque: bool = False
    asked: list[tuple[str, str, tuple[str, ...]]] = attrs.field(factory=list)

    async def tokens(self, schema: str, receiver: str, run_ids: Sequence[str]) -> Mapping[str, str]:
        self.asked.append((schema, receiver, tuple(run_ids)))
        if self.opaque:
            return {run_id: f"opaque-{len(self.asked)}" for run_id in run_ids}
        return await LocalMint(SECRET, self.lifetime_s).tokens(schema, receiver, run_ids)


# --- the token -----------------------------------------------------------------------------------------------


def test_a_token_allows_its_own_run_only() -> None:
    token = mint(SECRET, **RUN)
    verifier.check(token, "r")
    for reason, who, run_id in (
        ("another run", verifier, "other"),
        ("another schema", attrs.evolve(verifier, schema="other"), "r"),
        ("another receiver", attrs.evolve(verifier, receiver="https://other.example"), "r"),
        ("signature is not valid", attrs.evolve(verifier, secrets=[OTHER]), "r"),
    ):
        with pytest.raises(TokenRefused, match=reason):
            who.check(token, run_id)


def test_a_secret_can_be_replaced_while_both_are_in_use() -> None:
    both = attrs.evolve(verifier, secrets=[OTHER, SECRET])
    both.check(mint(SECRET, **RUN), "r")
    both.check(mint(OTHER, **RUN), "r")


def test_what_is_no_token_of_ours_is_refused() -> None:
    claims = {"aud": HERE, "iss": "runlane", "iat": 1, "exp": 9e9, **RUN}
    without_end = {name: value for name, value in claims.items() if name != "exp"}
    for token, reason in (
        (None, "there is no dispatch token"),
        ("", "there is no dispatch token"),
        ("what", "not valid"),
        (mint(SECRET, **RUN, now=time.time() - 400), "has expired"),
        (mint(SECRET, **RUN, now=time.time() + 400), "not valid"),
        (mint(SECRET, **RUN)[:-4], "not valid"),
        (unsigned(claims), "not valid"),
        (jwt.encode(without_end, SECRET), "not valid"),
        (jwt.encode({**claims, "iss": "me"}, SECRET), "not valid"),
        (jwt.encode(claims, SECRET), "another scope"),
        (jwt.encode(claims, SECRET * 2, algorithm="HS512"), "not valid"),
    ):
        with pytest.raises(TokenRefused, match=reason):
            verifier.check(token, "r")


def test_no_secret_is_shown() -> None:
    for one in (LocalMint(SECRET), verifier, dispatch.Gateway(SECRET, Counting().tokens)):
        assert SECRET not in repr(one)
    with pytest.raises(InputRefused) as caught:
        check_secret("short")
    assert "short" not in str(caught.value)
    assert "32 bytes" in str(caught.value)


def test_a_token_is_read_only_for_its_expiry() -> None:
    """G-8."""
    assert expiry_of(mint(OTHER, **RUN, now=1_000.0, lifetime_s=60.0)) == 1_060.0
    assert expiry_of("opaque") is None
    assert expiry_of(jwt.encode({"aud": HERE}, SECRET)) is None
    assert expiry_of(jwt.encode({"exp": 5}, SECRET)) == 5.0


# --- the cache -----------------------------------------------------------------------------------------------


async def test_tokens_are_used_again_while_they_last() -> None:
    authority = Counting()
    tokens = DispatchTokens(authority)
    first = await tokens.of("jobs", HERE, ["a", "b"])
    assert await tokens.of("jobs", HERE, ["b", "a"]) == first
    assert (await tokens.of("jobs", HERE, ["a", "c"]))["a"] == first["a"]
    assert authority.asked == [("jobs", HERE, ("a", "b")), ("jobs", HERE, ("c",))]


@pytest.mark.parametrize("changed", ["schema", "receiver", "proof"])
async def test_everything_that_gives_a_token_its_power_is_in_its_key(changed: str) -> None:
    """G-6: a token for one receiver is never used at another."""
    authority = Counting()
    tokens = DispatchTokens(authority)
    await tokens.of("jobs", HERE, ["a"])
    if changed == "proof":
        authority.proof = "another proof"
    schema = "other" if changed == "schema" else "jobs"
    receiver = "https://other.example" if changed == "receiver" else HERE
    await tokens.of(schema, receiver, ["a"])
    assert len(authority.asked) == 2


async def test_parts_of_a_key_cannot_be_shifted() -> None:
    authority = Counting()
    tokens = DispatchTokens(authority)
    await tokens.of("ab", HERE, ["c"])
    await tokens.of("a", HERE, ["bc"])
    assert len(authority.asked) == 2


async def test_a_token_is_not_used_to_its_last_second() -> None:
    """G-7, G-10: one margin."""
    authority = Counting(lifetime_s=20.0)
    for margin_s, calls in ((30.0, 2), (5.0, 1)):
        authority.asked.clear()
        tokens = DispatchTokens(authority, margin_s=margin_s)
        await tokens.of("jobs", HERE, ["a"])
        await tokens.of("jobs", HERE, ["a"])
        assert len(authority.asked) == calls


async def test_opaque_tokens_work_and_are_not_kept() -> None:
    """G-8."""
    authority = Counting(opaque=True)
    tokens = DispatchTokens(authority)
    assert await tokens.of("jobs", HERE, ["a"]) == {"a": "opaque-1"}
    assert await tokens.of("jobs", HERE, ["a"]) == {"a": "opaque-2"}
    assert len(tokens) == 0


async def test_fresh_asks_whatever_is_there() -> None:
    authority = Counting()
    tokens = DispatchTokens(authority)
    first = await tokens.of("jobs", HERE, ["a"])
    second = await tokens.of("jobs", HERE, ["a"], fresh=True)
    assert first != second
    assert await tokens.of("jobs", HERE, ["a"]) == second


async def test_the_cache_is_bounded_and_drops_what_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = DispatchTokens(Counting(), capacity=3)
    for run_id in "abcde":
        await tokens.of("jobs", HERE, [run_id])
    assert len(tokens) == 3
    later = time.time() + 3_600
    monkeypatch.setattr("runtime.dispatch.time.time", lambda: later)
    await tokens.of("jobs", HERE, ["f"])
    assert len(tokens) == 1


async def test_a_run_asked_for_twice_is_asked_for_once() -> None:
    authority = Counting()
    assert set(await DispatchTokens(authority).of("jobs", HERE, ["a", "a"])) == {"a"}
    assert authority.asked == [("jobs", HERE, ("a",))]
