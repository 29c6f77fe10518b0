"""Dispatch tokens: what allows a host to append a run's facts to a ledger over HTTP.

Owns the token (a JWT scoped to one run, one schema and one receiver), who makes it, its cache, and its check. A sender
reads a token only to learn when it expires, never to trust it; a receiver never trusts anything else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import attrs
import jwt

from sql.errors import InputRefused, RunlaneError

SCOPE = "run.ledger.append"
ISSUER = "runlane"
LIFETIME_S = 300.0
MARGIN_S = 30.0
LEEWAY_S = 10.0

_ALGORITHM = "HS256"
_LEAST_SECRET_BYTES = 32
_MOST_TOKENS = 20_000


class TokenRefused(RunlaneError):
    """A dispatch token does not allow what is asked; the message says why."""


def check_secret(value: object, field: str = "secret") -> str:
    """The secret, or InputRefused: HS256 needs at least 32 bytes. The value is not shown."""
    if not isinstance(value, str) or len(value.encode()) < _LEAST_SECRET_BYTES:
        raise InputRefused(field, f"must be text of at least {_LEAST_SECRET_BYTES} bytes")
    return value


# --- making and checking -------------------------------------------------------------------------------


def mint(
    secret: str,
    *,
    run_id: str,
    schema: str,
    receiver: str,
    lifetime_s: float = LIFETIME_S,
    now: float | None = None,
) -> str:
    """A token for appending this run's facts of this schema to this receiver."""
    issued = time.time() if now is None else now
    claims = {
        "iss": ISSUER,
        "aud": receiver,
        "scope": SCOPE,
        "run_id": run_id,
        "schema": schema,
        "iat": int(issued),
        "exp": int(issued + lifetime_s),
        "jti": secrets.token_urlsafe(12),
    }
    return jwt.encode(claims, secret, algorithm=_ALGORITHM)


@attrs.frozen
class Verifier:
    """Checks tokens for one receiver and one schema.

    ``secrets``: any of them may have signed, so that one can be replaced while the other is still in use.
    """

    secrets: Sequence[str] = attrs.field(repr=False)
    receiver: str
    schema: str

    def check(self, token: str | None, run_id: str) -> None:
        """Return if the token allows appending facts of this run. Raises TokenRefused saying why not."""
        if not token:
            raise TokenRefused("there is no dispatch token")
        claims = self._claims(token)
        for name, wanted in (("scope", SCOPE), ("schema", self.schema), ("run_id", run_id)):
            if claims.get(name) != wanted:
                raise TokenRefused(f"the dispatch token is for another {name.removesuffix('_id')}")

    def _claims(self, token: str) -> Mapping[str, object]:
        for secret in self.secrets:
            try:
                claims: Mapping[str, object] = jwt.decode(
                    token,
                    secret,
                    algorithms=[_ALGORITHM],
                    audience=self.receiver,
                    issuer=ISSUER,
                    leeway=LEEWAY_S,
                    options={"require": ["exp", "iat", "aud", "iss"]},
                )
                return claims
            except jwt.InvalidSignatureError:
                continue
            except jwt.ExpiredSignatureError:
                raise TokenRefused("the dispatch token has expired") from None
            except jwt.InvalidAudienceError:
                raise TokenRefused(
                    f"the dispatch token is for another receiver than {self.receiver}"
                ) from None
            except jwt.InvalidTokenError as error:
                raise TokenRefused(f"the dispatch token is not valid: {error}") from None
        raise TokenRefused("the dispatch token's signature is not valid")


@attrs.frozen
class Gatekeeper:
    """Who may ask a gateway: whoever shows the dispatch tokens that its ledger was sent, or its internal token."""

    verifier: Verifier | None
    internal_token: str | None = attrs.field(repr=False)

    def check(self, authorization: str | None, token: str | None, run_id: str) -> None:
        """Return if the caller may know about this run's lane. Raises TokenRefused."""
        if self.verifier is not None:
            self.verifier.check(token, run_id)
        elif self.internal_token is None or not hmac.compare_digest(
            (authorization or "").encode(), f"Bearer {self.internal_token}".encode()
        ):
            raise TokenRefused("the internal token is missing or wrong")


def expiry_of(token: str) -> float | None:
    """When the token says that it expires (Unix time); None for one that does not say. No statement about trust."""
    try:
        expires = jwt.decode(token, options={"verify_signature": False}).get("exp")
    except jwt.InvalidTokenError:
        return None
    return float(expires) if isinstance(expires, (int, float)) else None


# --- authorities ---------------------------------------------------------------------------------------


class Authority(Protocol):
    """Who makes tokens. ``proof`` is what its power rests on, for the cache key; it is never sent or shown."""

    @property
    def proof(self) -> str:
        """The secret or internal token."""
        ...

    async def tokens(self, schema: str, receiver: str, run_ids: Sequence[str]) -> Mapping[str, str]:
        """A fresh token for each run."""
        ...


@attrs.frozen
class LocalMint:
    """Signs tokens itself, with the secret that it shares with the receiver."""

    secret: str = attrs.field(repr=False, validator=lambda _, __, value: check_secret(value) and None)
    lifetime_s: float = LIFETIME_S

    @property
    def proof(self) -> str:
        """The secret."""
        return self.secret

    async def tokens(self, schema: str, receiver: str, run_ids: Sequence[str]) -> Mapping[str, str]:
        """A fresh token for each run."""
        return {
            run_id: mint(
                self.secret, run_id=run_id, schema=schema, receiver=receiver, lifetime_s=self.lifetime_s
            )
            for run_id in run_ids
        }


@attrs.frozen
class Gateway:
    """Asks the receiver for tokens, with an internal token that allows asking and nothing else."""

    internal_token: str = attrs.field(repr=False)
    fetch: Callable[[str, str, Sequence[str]], Awaitable[Mapping[str, str]]] = attrs.field(repr=False)

    @property
    def proof(self) -> str:
        """The internal token."""
        return self.internal_token

    async def tokens(self, schema: str, receiver: str, run_ids: Sequence[str]) -> Mapping[str, str]:
        """A fresh token for each run, from the receiver."""
        return await self.fetch(schema, receiver, run_ids)


# --- the cache -----------------------------------------------------------------------------------------


class DispatchTokens:
    """Tokens of runs for one receiver, made by ``authority`` and used again while they last.

    The key of the cache is a digest of everything that gives a token its power: schema, run, receiver and the
    authority's proof. A token with less than ``margin_s`` of life left, or of unknown life, is not used again.
    """

    def __init__(
        self, authority: Authority, *, margin_s: float = MARGIN_S, capacity: int = _MOST_TOKENS
    ) -> None:
        self._authority = authority
        self._margin_s = margin_s
        self._capacity = capacity
        self._kept: OrderedDict[bytes, tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    async def of(
        self, schema: str, receiver: str, run_ids: Sequence[str], *, fresh: bool = False
    ) -> dict[str, str]:
        """A token for each run; ``fresh`` takes none from the cache, after one was refused."""
        usable_until = time.time() + self._margin_s
        keys = {run_id: self._key(schema, receiver, run_id) for run_id in run_ids}
        found: dict[str, str] = {}
        for run_id, key in keys.items():
            kept = self._kept.get(key)
            if kept is None:
                continue
            if fresh or kept[0] <= usable_until:
                del self._kept[key]
            else:
                self._kept.move_to_end(key)
                found[run_id] = kept[1]
        missing = [run_id for run_id in keys if run_id not in found]
        if missing:
            made = await self._authority.tokens(schema, receiver, missing)
            for run_id in missing:
                found[run_id] = made[run_id]
                self._keep(keys[run_id], made[run_id], usable_until)
        return found

    def _keep(self, key: bytes, token: str, usable_until: float) -> None:
        expires_at = expiry_of(token)
        if expires_at is None or expires_at <= usable_until:
            return
        self._kept[key] = (expires_at, token)
        # The least recently used come first: expired ones gather there, and the bound cuts there.
        while self._kept:
            oldest, (ends_at, _) = next(iter(self._kept.items()))
            if len(self._kept) <= self._capacity and ends_at > usable_until:
                return
            del self._kept[oldest]

    def _key(self, schema: str, receiver: str, run_id: str) -> bytes:
        digest = hashlib.sha256()
        for part in (schema, run_id, receiver, self._authority.proof):
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(4, "big") + encoded)
        return digest.digest()
