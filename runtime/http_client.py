"""Requests to one origin over HTTP/1.1, with connections that are kept.

Owns the connections, the bound on requests at once and on the size of an answer, and the one error for every way in
which no whole answer comes back. It repeats nothing, follows no redirect and knows no path; the caller's cancel scope
ends a request at once.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import attrs
import httpcore
import trio

from runtime.codec import preview
from sql.errors import InputRefused, RunlaneError

_ANSWER_BYTES = 1_048_576
# Below what servers usually give an idle connection, so that it is we who close it.
_KEEP_ALIVE_S = 4.0
_OURS = frozenset(
    {"host", "connection", "content-length", "content-type", "transfer-encoding", "idempotency-key"}
)


class NoAnswer(RunlaneError):
    """A request got no whole answer: it may have had its effect or not."""


@attrs.frozen
class Answer:
    """A whole answer; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def json(self) -> Any:
        """The body; None when it is no JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None

    def retry_after_s(self) -> float | None:
        """Seconds that the server asks for, given as a number or an HTTP date; None when it does not say."""
        text = self.headers.get("retry-after", "").strip()
        if text.isascii() and text.isdigit():
            return float(text[:9])
        try:
            moment = email.utils.parsedate_to_datetime(text)
        except ValueError:
            return None
        return max(0.0, moment.timestamp() - time.time())


class _Body:
    """A request's body. No generator: one that a cancelled request leaves half-way is complained about."""

    def __init__(self, content: bytes) -> None:
        self._left = [content] if content else []

    def __aiter__(self) -> _Body:
        return _Body(b"".join(self._left))

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


class HttpClient:
    """Sends requests to paths below ``base``, at most ``concurrency`` at once; ``headers`` go with each.

    An answer may have ``answer_bytes`` (``math.inf``: any number).
    """

    def __init__(
        self,
        base: str,
        *,
        headers: Mapping[str, str],
        concurrency: int,
        ssl_context: ssl.SSLContext | None = None,
        answer_bytes: float = _ANSWER_BYTES,
    ) -> None:
        self.base = base
        self._headers = {"host": urlsplit(base).netloc, "accept": "application/json", **headers}
        self._concurrency = concurrency
        self._ssl_context = ssl_context
        self._answer_bytes = answer_bytes
        self._pool: httpcore.AsyncConnectionPool | None = None

    async def call(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        """One request, once. Raises NoAnswer."""
        if self._pool is None:
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=self._ssl_context,
                max_connections=self._concurrency,
                max_keepalive_connections=self._concurrency,
                keepalive_expiry=_KEEP_ALIVE_S,
            )
        sent = {**self._headers, **(headers or {}), "content-length": str(len(body))}
        if body:
            sent["content-type"] = "application/json"
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
        try:
            async with self._pool.stream(
                method, self.base + path, headers=encoded, content=_Body(body)
            ) as response:
                content = bytearray()
                with trio.CancelScope() as reading:
                    async for chunk in response.aiter_stream():
                        content += chunk
                        if len(content) > self._answer_bytes:
                            # Leaving the loop would leave httpcore's generators half-way; a cancelled read ends them.
                            reading.cancel()
                if reading.cancel_called:
                    raise NoAnswer(f"answered more than {self._answer_bytes} bytes")
                return Answer(response.status, _decoded(response.headers), bytes(content))
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            raise NoAnswer(f"{type(error).__name__}: {_root(error)}") from error

    async def aclose(self) -> None:
        """Close every connection. The next call opens new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()


def _root(error: BaseException) -> str:
    """What the innermost cause says: httpcore and trio wrap what the system or TLS has to tell."""
    said = str(error)
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
        said = str(error) or said
    return said or "the connection broke"


def _decoded(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}


def check_base(url: object, field: str = "url") -> str:
    """The URL of an origin, possibly with a path, without a trailing slash. Raises InputRefused; shows no secret."""
    if isinstance(url, str) and url.isascii() and url.isprintable() and " " not in url:
        parts = urlsplit(url)
        with contextlib.suppress(ValueError):  # a port that is none
            plain = parts.username is None and not parts.query and not parts.fragment
            if plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
                return url.rstrip("/")
    raise InputRefused(
        field, "must be http:// or https:// with a host in ASCII, and without a user, query or fragment"
    )


def check_headers(headers: Mapping[str, str], *, authorized: bool) -> dict[str, str]:
    """Headers that a caller adds, names in lower case. Raises InputRefused for those that are ours, and bad ones."""
    found = {}
    for name, value in headers.items():
        lower = name.lower()
        if lower in _OURS or (authorized and lower == "authorization"):
            raise InputRefused("headers", f"{name} is set without you")
        good = lower.isascii() and lower.replace("-", "").replace("_", "").isalnum() and value.isprintable()
        try:
            value.encode("latin-1")
        except UnicodeEncodeError:
            good = False
        if not good:
            raise InputRefused("headers", f"{preview(name)} is not a header that HTTP can carry")
        found[lower] = value
    return found
