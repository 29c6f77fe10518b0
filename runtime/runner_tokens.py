"""Runner tokens: what allows a runner to speak for one attempt.

Owns the token (a JWT for one schema, run, attempt and lease) and its check. That the attempt is still live is not in
it: the database says.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time

import attrs
import jwt

from sql.errors import RunlaneError

AUDIENCE = "runlane-gateway"

_ALGORITHM = "HS256"
_LEEWAY_S = 10.0
_LEASE = re.compile(r"[0-9]{1,19}", re.ASCII)
_CLAIMS = ("iss", "aud", "exp", "iat", "schema", "run_id", "attempt", "lease")


class RunnerRefused(RunlaneError):
    """A runner's token does not allow what is asked; the message says why."""


@attrs.frozen
class Bearer:
    """Whom a token speaks for: one attempt and its lease."""

    run_id: str
    attempt: int
    token: int


@attrs.frozen
class RunnerTokens:
    """Makes and checks the tokens of one schema's runners."""

    secret: bytes = attrs.field(repr=False)
    schema: str

    @classmethod
    def of(cls, secret: str, schema: str) -> RunnerTokens:
        """With a key of its own, derived from the hosts' secret: no other token is ever taken for one of these."""
        key = hmac.new(secret.encode(), f"{AUDIENCE}\x1f{schema}".encode(), hashlib.sha256).digest()
        return cls(key, schema)

    @property
    def tag(self) -> str:
        """What the names of these hosts' sandboxes begin with: providers are shared, also by other schemas."""
        return "rl" + hmac.new(self.secret, b"sandboxes", hashlib.sha256).hexdigest()[:8]

    def mint(self, bearer: Bearer, *, lifetime_s: float) -> str:
        """A token that allows speaking for this attempt."""
        now = time.time()
        return jwt.encode(
            {
                "iss": "runlane",
                "aud": AUDIENCE,
                "schema": self.schema,
                "run_id": bearer.run_id,
                "attempt": bearer.attempt,
                "lease": str(bearer.token),  # more than JSON numbers hold exactly everywhere
                "iat": int(now),
                "exp": int(now + lifetime_s),
            },
            self.secret,
            algorithm=_ALGORITHM,
        )

    def check(self, authorization: str | None) -> Bearer:
        """The bearer of an ``Authorization`` header. Raises RunnerRefused saying what is wrong with it."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise RunnerRefused("there is no bearer token")
        try:
            claims = jwt.decode(
                token.strip(),
                self.secret,
                algorithms=[_ALGORITHM],
                audience=AUDIENCE,
                issuer="runlane",
                leeway=_LEEWAY_S,
                options={"require": list(_CLAIMS)},
            )
        except jwt.ExpiredSignatureError:
            raise RunnerRefused("the token has expired") from None
        except jwt.InvalidTokenError as error:
            raise RunnerRefused(f"the token is not valid: {error}") from None
        if claims["schema"] != self.schema:
            raise RunnerRefused("the token is for another schema")
        run_id, attempt, lease = claims["run_id"], claims["attempt"], claims["lease"]
        fits = (
            isinstance(run_id, str)
            and type(attempt) is int
            and 0 < attempt < 2**31
            and isinstance(lease, str)
            and _LEASE.fullmatch(lease)
            and int(lease) < 2**63
        )
        if not fits:
            raise RunnerRefused("the token's claims are malformed")
        return Bearer(run_id, attempt, int(lease))
