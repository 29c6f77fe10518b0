"""A ledger behind HTTP: deliveries as JSON to a receiver, and its answers as outcomes.

Owns which deliveries share a request and what every answer means. It repeats nothing but a request whose token was
refused, once, with a fresh one: the lane's own schedule is what repeats deliveries.
"""

from __future__ import annotations

import json
import logging
import math
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import trio

from actors.core import Life, Mailbox
from runtime import dispatch, wire
from runtime.codec import preview
from runtime.http_client import Answer, HttpClient, NoAnswer, check_base, check_headers
from runtime.ledger import AppendOutcome, LedgerNotCurrent, LedgerRejected, LedgerRetry, Limits
from runtime.wire import Capabilities
from sql.connection import SessionOptions
from sql.errors import InputRefused
from sql.types import Delivery

log = logging.getLogger("runlane.http_ledger")

MAX_FACTS = 8
"""Facts of one run in a delivery at most, whatever the receiver takes."""

_CAPABILITIES_S = 300.0
_TOKEN_TIMEOUT_S = 15.0
# Deliveries share a request up to this size, or the receiver's limit if that is less.
_SHARED_BYTES = 1_048_576
_TOKENS_AT_ONCE = 500
# Reserved in a request's size for each dispatch token.
_TOKEN_BYTES = 1_024


@attrs.frozen
class _Item:
    """A delivery on its way. ``index`` is its place in the call."""

    index: int
    delivery: Delivery
    encoded: bytes


class _Unauthorized(LedgerRetry):
    """The token was refused: worth one more request, with a fresh one."""


class _RequestRejected(LedgerRejected):
    """The request was refused for what is in it: without one of its deliveries it may go through."""


class HttpLedger:
    """Sends deliveries to a receiver (``runlane receive``, or anything that speaks the same contract).

    ``url`` is where the receiver's ``/v1/…`` begins; ``receiver`` its identity, by default the same: every token is
    for exactly that receiver. Give ``secret`` to sign dispatch tokens here, or ``internal_token`` to ask the receiver
    for them; with neither, ``headers`` have to say who we are. ``timeout_s`` is what one call gets, ``concurrency`` how
    many requests are out at once.

    What the receiver takes in a request is asked and kept for five minutes. Several facts of a run go in one request
    only if it says so and ``immutable`` holds: the URL will never lead to an older receiver, which could not honour a
    prefix that the present one has seen.
    """

    def __init__(
        self,
        url: str,
        *,
        secret: str | None = None,
        internal_token: str | None = None,
        receiver: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        concurrency: int = 8,
        immutable: bool = True,
        token_margin_s: float = dispatch.MARGIN_S,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        base = check_base(url)
        self.receiver = base if receiver is None else receiver
        self._timeout_s = _seconds("timeout_s", timeout_s)
        if isinstance(concurrency, bool) or not isinstance(concurrency, int) or not 1 <= concurrency <= 1_000:
            raise InputRefused("concurrency", f"must be 1 to 1000, not {preview(concurrency)}")
        self._concurrency = concurrency
        self._immutable = immutable
        self._authority = self._authority_of(secret, internal_token)
        self._tokens = None
        if self._authority is not None:
            self._tokens = dispatch.DispatchTokens(
                self._authority, margin_s=_seconds("token_margin_s", token_margin_s)
            )
        self._client = HttpClient(
            base,
            headers=check_headers(headers or {}, authorized=self._tokens is not None),
            concurrency=concurrency,
            ssl_context=ssl_context,
        )
        self._schema = str(attrs.fields(SessionOptions).schema.default)
        self._capabilities = Capabilities()
        self._ask_again_at = -math.inf
        self._asking = trio.Lock()

    def _authority_of(self, secret: str | None, internal_token: str | None) -> dispatch.Authority | None:
        if secret is not None and internal_token is not None:
            raise InputRefused("internal_token", "give secret or internal_token, not both")
        if secret is not None:
            return dispatch.LocalMint(dispatch.check_secret(secret))
        if internal_token is not None:
            return dispatch.Gateway(internal_token, self._fetch_tokens)
        return None

    # --- in a host -----------------------------------------------------------------------------------

    @property
    def mailboxes(self) -> Sequence[Mailbox[Any]]:
        """None: deliveries are sent by whoever brings them."""
        return ()

    @property
    def gatekeeper(self) -> dispatch.Gatekeeper:
        """Who may ask this host's gateway about its lanes: the receiver of its deliveries."""
        match self._authority:
            case dispatch.LocalMint(secret):
                return dispatch.Gatekeeper(dispatch.Verifier([secret], self.receiver, self._schema), None)
            case dispatch.Gateway(internal_token):
                return dispatch.Gatekeeper(None, internal_token)
        return dispatch.Gatekeeper(None, None)

    @property
    def limits(self) -> Limits:
        """What the receiver takes in one call, as far as is known."""
        capabilities = self._capabilities
        facts = min(MAX_FACTS, capabilities.max_facts) if self._immutable else 1
        return Limits(facts, capabilities.max_deliveries * self._concurrency)

    def use(self, options: SessionOptions) -> None:
        """Whose facts these are. Called by the host."""
        self._schema = options.schema

    async def run(self, life: Life) -> None:
        """Keep the connections until asked to stop, then close them."""
        try:
            life.ready()
            await life.stopping.wait()
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Close every connection. The next call opens new ones."""
        await self._client.aclose()

    # --- deliveries ----------------------------------------------------------------------------------

    async def append(self, delivery: Delivery) -> None:
        """Deliver one. Raises LedgerRetry, LedgerRejected or LedgerNotCurrent."""
        (outcome,) = await self.append_many([delivery])
        if outcome is not None:
            raise outcome

    async def append_many(self, deliveries: Sequence[Delivery]) -> Sequence[AppendOutcome]:
        """Deliver each, in as few requests as the receiver allows; one outcome each.

        What has no answer within ``timeout_s`` is to be delivered again; the others keep theirs.
        """
        outcomes: list[AppendOutcome] = [
            LedgerRetry(reason=f"{self.receiver}: no answer within {self._timeout_s:g} s")
        ] * len(deliveries)
        with trio.move_on_after(self._timeout_s):
            try:
                await self._know()
            except LedgerRetry as retry:
                return [retry] * len(deliveries)
            groups = list(self._grouped(self._encoded(deliveries, outcomes)))
            if len(groups) == 1:
                await self._send(groups[0], outcomes)
            else:
                async with trio.open_nursery() as nursery:
                    for group in groups:
                        nursery.start_soon(self._send, group, outcomes)
        return outcomes

    def _encoded(self, deliveries: Sequence[Delivery], outcomes: list[AppendOutcome]) -> Iterator[_Item]:
        most = self._capabilities.max_facts
        for index, delivery in enumerate(deliveries):
            if len(delivery.facts) > most:
                reason = (
                    f"{self.receiver}: takes {most} facts in a delivery, this one has {len(delivery.facts)}"
                )
                outcomes[index] = LedgerRetry(reason=reason)
                continue
            try:
                yield _Item(index, delivery, wire.encode(delivery))
            except (ValueError, RecursionError) as error:
                outcomes[index] = LedgerRejected(
                    f"{delivery.delivery_key} cannot be written as JSON: {error}"
                )

    def _grouped(self, items: Iterator[_Item]) -> Iterator[list[_Item]]:
        """Deliveries that share a request. A single one always goes: only the receiver says that it is too large."""
        most_bytes = min(_SHARED_BYTES, self._capabilities.max_body_bytes)
        group: list[_Item] = []
        size = 0
        for item in items:
            cost = len(item.encoded) + _TOKEN_BYTES
            full = len(group) >= self._capabilities.max_deliveries
            if group and (full or size + cost > most_bytes):
                yield group
                group, size = [], 0
            group.append(item)
            size += cost
        if group:
            yield group

    async def _send(
        self, group: Sequence[_Item], outcomes: list[AppendOutcome], *, fresh: bool = False
    ) -> None:
        """One request for the group; a second one for those whose token was refused."""
        try:
            found = await self._request(group, fresh=fresh)
        except (LedgerRetry, LedgerRejected, LedgerNotCurrent) as error:
            if isinstance(error, _RequestRejected) and len(group) > 1:
                # The rest must not be blocked for the delivery that caused it.
                middle = len(group) // 2
                await self._send(group[:middle], outcomes)
                await self._send(group[middle:], outcomes)
                return
            found = [error] * len(group)
        again = []
        for item, outcome in zip(group, found, strict=True):
            outcomes[item.index] = outcome
            if isinstance(outcome, _Unauthorized) and not fresh and self._tokens is not None:
                again.append(item)
        if again:
            await self._send(again, outcomes, fresh=True)

    async def _request(self, group: Sequence[_Item], *, fresh: bool) -> Sequence[AppendOutcome]:
        tokens: Mapping[str, str] = {}
        if self._tokens is not None:
            run_ids = [item.delivery.run_id for item in group]
            tokens = await self._tokens.of(self._schema, self.receiver, run_ids, fresh=fresh)
        alone = group[0].delivery if len(group) == 1 else None
        headers = {}
        if alone is not None:
            headers["idempotency-key"] = alone.delivery_key
            if alone.run_id in tokens:
                headers["authorization"] = f"Bearer {tokens[alone.run_id]}"
                tokens = {}
        body = wire.body_of((item.encoded, tokens.get(item.delivery.run_id)) for item in group)
        answer = await self._call("POST", wire.DELIVERIES, headers, body)
        return self._outcomes(answer, len(group))

    # --- what answers mean ---------------------------------------------------------------------------

    def _outcomes(self, answer: Answer, count: int) -> Sequence[AppendOutcome]:
        """One outcome for each delivery of a request. Raises the one of all of them when there are no results."""
        body = answer.json()
        results = body.get("results") if isinstance(body, Mapping) else None
        if isinstance(results, list) and len(results) == count:
            return [self._outcome(result, answer) for result in results]
        if answer.status < 300 and count > 1:
            raise LedgerRetry(reason=f"{self._said(answer)} without a result for each of {count} deliveries")
        outcome = self._of_status(answer, body if isinstance(body, Mapping) else {})
        if outcome is not None:
            raise outcome
        return [None]

    def _outcome(self, result: Any, answer: Answer) -> AppendOutcome:
        if not isinstance(result, Mapping) or result.get("outcome") not in wire.OUTCOMES:
            return LedgerRetry(reason=f"{self._said(answer)} with a result nobody knows: {preview(result)}")
        outcome = result["outcome"]
        if outcome in (wire.APPLIED, wire.DUPLICATE):
            return None
        reason = f"{self.receiver}: {result.get('reason') or outcome}"
        if outcome == wire.REJECTED:
            return LedgerRejected(reason)
        if outcome == wire.GAP:
            # It had acknowledged what it misses now: no waiting brings that back.
            return LedgerRejected(f"{reason}; it has lost facts that it had acknowledged")
        if outcome == wire.NOT_CURRENT:
            return LedgerNotCurrent(reason)
        if outcome == wire.UNAUTHORIZED:
            return _Unauthorized(reason=reason)
        after = result.get("retry_after_s")
        if not isinstance(after, (int, float)) or isinstance(after, bool) or not 0 <= after < math.inf:
            after = answer.retry_after_s()
        return LedgerRetry(after, reason)

    def _of_status(self, answer: Answer, body: Mapping[str, Any]) -> AppendOutcome:
        """What the status alone says; 409 needs a word more, which the body may give as ``outcome``."""
        status = answer.status
        if 200 <= status < 300:
            return None
        if body.get("outcome") in wire.OUTCOMES and status in (409, 412, 422):
            return self._outcome(body, answer)
        said = self._said(answer)
        if reason := body.get("reason") or body.get("error"):
            said += f": {reason}"
        if status == 401:
            return _Unauthorized(reason=said)
        if status == 412:
            return LedgerNotCurrent(said)
        if status in (408, 425, 429) or not 400 <= status < 500:
            # Redirects, too: whoever sends them is not the receiver, and we deliver to nobody else.
            return LedgerRetry(answer.retry_after_s(), said)
        return (_RequestRejected if status in (400, 413, 422) else LedgerRejected)(said)

    def _said(self, answer: Answer) -> str:
        return f"{self.receiver}: answered {answer.status}"

    # --- capabilities and tokens ---------------------------------------------------------------------

    async def _know(self) -> None:
        """Ask the receiver what it takes, unless that is known. Raises LedgerRetry when it cannot be asked."""
        if time.monotonic() < self._ask_again_at:
            return
        async with self._asking:
            if time.monotonic() < self._ask_again_at:
                return
            answer = await self._call("GET", wire.CAPABILITIES)
            if answer.status >= 500 or answer.status in (408, 425, 429):
                raise LedgerRetry(answer.retry_after_s(), f"{self._said(answer)} to {wire.CAPABILITIES}")
            found = Capabilities()
            if answer.status == 200:
                try:
                    found = Capabilities.from_json(answer.json())
                except InputRefused as error:
                    log.warning("event=capabilities_ignored receiver=%s error=%s", self.receiver, error)
            if found.receiver is not None and found.receiver != self.receiver:
                raise LedgerRetry(
                    reason=f"{self.receiver}: calls itself {found.receiver}; no token of ours is for it"
                )
            self._capabilities = found
            self._ask_again_at = time.monotonic() + _CAPABILITIES_S

    async def _fetch_tokens(self, schema: str, receiver: str, run_ids: Sequence[str]) -> Mapping[str, str]:
        """Tokens from the receiver's own endpoint, for the internal token."""
        assert isinstance(self._authority, dispatch.Gateway)
        headers = {"authorization": f"Bearer {self._authority.internal_token}"}
        found: dict[str, str] = {}
        with trio.move_on_after(_TOKEN_TIMEOUT_S) as limit:
            for start in range(0, len(run_ids), _TOKENS_AT_ONCE):
                asked = list(run_ids[start : start + _TOKENS_AT_ONCE])
                request = {"schema": schema, "receiver": receiver, "run_ids": asked}
                answer = await self._call("POST", wire.DISPATCH_TOKEN, headers, json.dumps(request).encode())
                body = answer.json()
                tokens = body.get("tokens") if isinstance(body, Mapping) else None
                if answer.status != 200 or not isinstance(tokens, Mapping):
                    raise LedgerRetry(
                        answer.retry_after_s(), f"{self._said(answer)} to {wire.DISPATCH_TOKEN}{_why(body)}"
                    )
                found |= {run_id: token for run_id, token in tokens.items() if isinstance(token, str)}
        if limit.cancelled_caught:
            raise LedgerRetry(reason=f"{self.receiver}: no dispatch token within {_TOKEN_TIMEOUT_S:g} s")
        if missing := [run_id for run_id in run_ids if run_id not in found]:
            raise LedgerRetry(reason=f"{self.receiver}: no dispatch token for run {missing[0]}")
        return found

    async def _call(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Answer:
        try:
            return await self._client.call(method, path, headers, body)
        except NoAnswer as error:
            raise LedgerRetry(reason=f"{self.receiver}: {error}") from error


def _why(body: Any) -> str:
    error = body.get("error") if isinstance(body, Mapping) else None
    return f": {error}" if isinstance(error, str) else ""


def _seconds(field: str, value: object) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < float(value) < math.inf:  # type: ignore[arg-type]
        raise InputRefused(field, f"must be a finite number of seconds above 0, not {preview(value)}")
    return float(value)  # type: ignore[arg-type]
