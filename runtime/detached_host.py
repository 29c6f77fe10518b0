"""Detached work on a host: the actors, mailboxes and desk that plays in sandboxes need, put together.

Owns their composition for ``runtime.host``; a host without such plays has none of it. It never acts itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import trio

from actors.adoption import Adopter
from actors.billing import Billing
from actors.cleanup import Cleanup
from actors.core import Actor, Mailbox, Reply
from actors.custody import Entry, Keeping
from actors.hints import Hints
from actors.liveness import Liveness
from actors.runners import Runners, Word
from runtime.config import RuntimeConfig
from runtime.detached import Launch, Launcher, census_with, delete_with, judge_with
from runtime.gateway import Desk
from runtime.plays import Play
from runtime.runner_tokens import Bearer, RunnerTokens
from runtime.sandboxes import LocalProvider, SandboxProvider
from runtime.submit import Submit
from sql import runners
from sql.adoption import OldTable
from sql.claim import Claimed
from sql.connection import SessionOptions
from sql.errors import ConfigError, InvalidPlay
from sql.runners import Pushed
from sql.settle import Settlement

log = logging.getLogger("runlane.detached")

# What a provider gets to say whether a silent runner lives.
_LOOK_S = 30.0
_GATEWAYS_EVERY_S = 5.0


def providers_of(
    plays: Mapping[str, Play], given: Mapping[str, SandboxProvider] | None, config: RuntimeConfig
) -> dict[str, SandboxProvider]:
    """The providers that the plays name. Raises ConfigError for one that nobody has given, or whose sandboxes would not
    find this host, and InvalidPlay for a play that its runner would not find.
    """
    known: dict[str, SandboxProvider] = dict(given or {})
    wanted = {play.sandbox: play.name for play in plays.values() if play.sandbox is not None}
    if "local" in wanted and "local" not in known:
        known["local"] = LocalProvider()
    for one in plays.values():
        if one.sandbox is not None and not one.is_at_home:
            raise InvalidPlay(
                f"play {one.name!r} runs in a sandbox, whose runner looks for it at the top level of {one.home}: "
                "it is not there"
            )
    for sandbox, play in wanted.items():
        if sandbox not in known:
            names = ", ".join(sorted({*known, "local"}))
            raise ConfigError(
                f"play {play!r} wants sandbox {sandbox!r}: give it in sandboxes=, or with --sandboxes (known: {names})"
            )
        if getattr(known[sandbox], "remote", False) and not _found_from_elsewhere(config.gateway_url):
            raise ConfigError(
                f"play {play!r} runs in sandbox {sandbox!r}, on other machines: set gateway_url "
                "(RUNLANE_GATEWAY_URL) to a URL of this host's HTTP server that is reached from there, "
                f"not {config.gateway_url or 'nothing'}"
            )
    if wanted and config.health_port is None:
        raise ConfigError(
            "plays in sandboxes need the HTTP server that their runners speak to: set health_port"
        )
    return known


def _found_from_elsewhere(url: str | None) -> bool:
    """Whether it is a URL at all, and not one that every machine takes for itself."""
    try:
        name = urlsplit(url or "").hostname
    except ValueError:
        return False
    if name is None or name == "localhost" or name.endswith(".localhost"):
        return False
    try:
        address = ip_address(name)
    except ValueError:
        return True
    return not (address.is_loopback or address.is_unspecified)


class DetachedWork:
    """What a host with sandbox providers has on top."""

    def __init__(
        self,
        options: SessionOptions,
        config: RuntimeConfig,
        hints: Hints,
        plays: Mapping[str, Play],
        providers: Mapping[str, SandboxProvider],
        secret: str,
        *,
        owner: int,
        ask: Callable[[Callable[[Any], Awaitable[Any]]], Awaitable[Any]],
        register: Callable[[Claimed], Awaitable[str]],
        payload: Callable[[str, str], Awaitable[str | None]],
        rates: Mailbox[Any],
        receipts: Mailbox[Any],
        circuits: Mailbox[Any],
        start_run: Callable[[Claimed, str, Submit], Awaitable[str]],
        on_settled: Callable[[Settlement, Pushed], None],
        on_orphans: Callable[[str, Sequence[str]], None],
    ) -> None:
        self._options = options
        self._config = config
        self._hints = hints
        self._plays = plays
        self._providers = providers
        self._ask = ask
        self._owner = owner
        self._register = register
        self._payload = payload
        self._rates = rates
        self._receipts = receipts
        self._circuits = circuits
        self._start_run = start_run
        self._on_settled = on_settled
        self._on_orphans = on_orphans
        self._tokens = RunnerTokens.of(secret, config.schema)
        self._bound = trio.Event()
        self._bound_at = math.inf
        self._url = ""
        self._announced = False
        self._others: tuple[float, list[str]] = (-math.inf, [])
        self.entries: Mailbox[Entry] = Mailbox("custody", 10_000, abandon=_abandon)
        self.words: Mailbox[Word] = Mailbox("runners", 10_000, abandon=_abandon)
        launch = Launch(
            gateways=self._own_and_others,
            tokens=self._tokens,
            create_s=config.sandbox_create_s,
            heartbeat_timeout_s=config.heartbeat_timeout_s,
        )
        self.launcher = Launcher(providers, self.entries, launch)

    @property
    def keys(self) -> list[str]:
        """The providers' names in the database."""
        return sorted({provider.key for provider in self._providers.values()})

    def actors(self) -> list[tuple[str, Actor, Callable[[], None] | None, tuple[Mailbox[Any], ...]]]:
        """(name, actor, stop, mailboxes) in start order: launches stop first, ears for runners last."""
        config, hints = self._config, self._hints
        found: list[tuple[str, Actor, Callable[[], None] | None, tuple[Mailbox[Any], ...]]] = [
            (
                "runners",
                Runners(self._options, self.words, hints, on_settled=self._on_settled),
                None,
                (self.words,),
            ),
            (
                "billing",
                Billing(self._options, hints, grace_s=config.billing_grace_s),
                hints.billing.set,
                (),
            ),
        ]
        if config.legacy_cleanup_table is not None and config.legacy_cleanup_provider not in self.keys:
            log.warning(
                "event=adoption_idle provider=%s reason='no such provider on this host' known=%s",
                config.legacy_cleanup_provider,
                ",".join(self.keys),
            )
        for name, provider in sorted(self._providers.items()):
            cleanup = Cleanup(
                self._options,
                hints,
                delete_with(provider),
                census_with(provider, self._tokens.tag),
                provider=provider.key,
                lease_s=config.cleanup_lease_s,
                most_failures=config.cleanup_failures,
                on_orphans=self._on_orphans,
                adopter=self._adopter(provider),
            )
            liveness = Liveness(
                self._options,
                hints,
                judge_with(provider, self._heard_s),
                provider=provider.key,
                look_s=min(_LOOK_S, config.heartbeat_timeout_s),
                crash_cap=config.crash_cap,
            )
            found.append((f"cleanup-{name}", cleanup, cleanup.wake.set, ()))
            found.append((f"liveness-{name}", liveness, liveness.wake.set, ()))
        # A launch may take its obligation and its detachment in one go, so what is due is counted from the reservation.
        due_s = config.sandbox_create_s + 2 * config.lease_s
        keeping = Keeping(self._options, self.entries, hints, create_s=due_s)
        found.append(("custody", keeping, None, (self.entries,)))
        return found

    def _adopter(self, provider: SandboxProvider) -> Adopter | None:
        config, key = self._config, provider.key
        if config.legacy_cleanup_table is None or config.legacy_cleanup_provider != key:
            return None
        if not getattr(provider, "finds_by_id", False):
            raise ConfigError(
                f"legacy_cleanup_provider {key!r} does not find sandboxes by their ids (finds_by_id): nothing that "
                "others have made can be left to it"
            )
        return Adopter(OldTable(config.legacy_cleanup_table, key), every_s=config.backstop_s)

    def serve_on(self, port: int) -> None:
        """The HTTP server listens there now: launches may begin."""
        config = self._config
        url = config.gateway_url
        if url is None:
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.health_host, config.health_host)
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._url = url
        self._bound_at = trio.current_time()
        self._bound.set()

    def _heard_s(self) -> float:
        return trio.current_time() - self._bound_at

    async def _own_and_others(self) -> Sequence[str]:
        """Where a new runner may go, this host first."""
        await self._bound.wait()
        if not self._announced:
            await self._ask(lambda session: runners.set_gateway(session, self._owner, self._url))
            self._announced = True
        return [self._url, *(url for url in await self._gateways() if url != self._url)]

    async def _gateways(self) -> Sequence[str]:
        """Where else runners may go, read now and then."""
        read_at, known = self._others
        if trio.current_time() >= read_at + _GATEWAYS_EVERY_S:
            known = await self._ask(
                lambda session: runners.gateways(session, within_s=4 * self._config.backstop_s)
            )
            self._others = (trio.current_time(), known)
        return known

    def desk(self) -> Desk:
        """What the gateway needs."""
        config = self._config
        return Desk(
            tokens=self._tokens,
            say=self._say,
            register=self._register,
            payload=self._payload,
            rates=self._rates,
            receipts=self._receipts,
            circuits=self._circuits,
            start_run=self._start_run,
            gateways=self._gateways,
            read=self._read,
            manners={
                "heartbeat_s": config.heartbeat_timeout_s / 6,
                "flush_ms": config.flush_ms,
                "park_after_s": config.park_after_s,
                "max_payload_bytes": config.max_payload_bytes,
                "max_depth": config.max_depth,
                "outage_max_s": config.outage_max_s,
            },
            max_payload_bytes=config.max_payload_bytes,
        )

    async def _say(self, item: Any) -> Any:
        limit_s = self._config.operation_timeout_s
        word = Word(item, trio.current_time() + min(2.0, limit_s))
        await self.words.send(word)
        return await word.reply.wait(limit_s)

    async def _read(self, bearer: Bearer) -> Claimed | None:
        found: Claimed | None = await self._ask(
            lambda session: runners.read_attempt(session, bearer.run_id, bearer.attempt, bearer.token)
        )
        return found


def _abandon(item: Entry | Word, error: Exception) -> None:
    reply: Reply[Any] = item.reply
    reply.set_error(error)
