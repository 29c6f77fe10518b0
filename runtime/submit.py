"""The door for new runs: what a caller gives becomes a submission, or is refused by name.

Owns every check of a submit before the database sees anything, and what the answers mean. It never writes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from typing import Any

import attrs

from runtime import ids
from runtime.codec import JsonCodec, preview
from runtime.config import RuntimeConfig
from runtime.plays import NAME_PATTERN, Play
from runtime.routes import Routes
from sql import admission
from sql.admission import Admitted, Registered, Submission
from sql.connection import Session
from sql.errors import DuplicateRun, IdempotencyConflict, InputRefused, UnknownPlay
from sql.types import PERFORMANCE, SCOPES, SURFACES, TRIGGERS

_NAME = re.compile(NAME_PATTERN)
_JSON = JsonCodec()
# Hosts that start meanwhile may bring a limit per key, or lift one.
_KEYED_S = 15.0


@attrs.frozen(kw_only=True)
class Submit:
    """One item of ``submit_many``: the play (or its name), its input, and the options of ``submit``."""

    play: Play | str = attrs.field(kw_only=False)
    input: Any = attrs.field(default=None, kw_only=False)
    run_id: str | None = None
    idempotency_key: str | None = None
    org_id: str | None = None
    priority: int = 0
    delay: float | None = None
    at: datetime | None = None
    labels: Mapping[str, str] | None = None
    unique_key: str | None = None
    unique_for_s: float | None = None
    on_conflict: str | None = None
    surface: str | None = None
    trigger: str | None = None
    scope: str | None = None
    terminal_receiver: str | None = None
    array_input_receiver: str | None = None
    terminal_performance: str | None = None
    concurrency_key: str | None = None
    receiver: str | None = None


FindPlay = Callable[[str], Awaitable[Registered | None]]
"""A play as its hosts have registered it; None for one that no host has."""


def plays_from(
    ask: Callable[[Callable[[Session], Awaitable[Any]]], Awaitable[Any]], config: RuntimeConfig
) -> FindPlay:
    """Looks plays up with ``ask(read)``, for this configuration's release and environment."""

    async def find(play: str) -> Registered | None:
        found: Registered | None = await ask(
            lambda session: admission.find_play(
                session, play, release_id=config.release_id, environment=config.environment
            )
        )
        return found

    return find


class Submissions:
    """Checks submits of one runtime. ``plays`` are its own; others are looked up with ``find``. ``routes`` say which
    ledgers it has for the facts of what is submitted here."""

    def __init__(
        self,
        config: RuntimeConfig,
        codec: JsonCodec,
        plays: Mapping[str, Play],
        find: FindPlay,
        routes: Routes,
    ) -> None:
        self._config = config
        self.codec = codec
        self._plays = plays
        self._find = find
        self._routes = routes
        self._found: dict[str, Registered] = {}
        self._found_at: dict[str, float] = {}

    async def prepare(self, item: Submit) -> Submission:
        """The submission of an item. Raises InputRefused (PayloadRefused, UnknownPlay) naming the field."""
        name = self._name(item.play)
        found = self._found.get(name) or await self._look_up(name)
        text = self.codec.encode(
            item.input,
            what="input",
            limit_bytes=self._config.max_payload_bytes,
            max_depth=self._config.max_depth,
        )
        key = self._concurrency_key(item, text)
        if key is None and self.known(item.play) is None:
            await self._check_keyless(name)
        priority = ids.check_priority(item.priority)
        delay_s, at = ids.check_when(item.delay, item.at)
        labels = ids.check_labels(item.labels)
        receiver = self._routes.receiver(item.receiver)
        return Submission(
            run_id=ids.new_run_id() if item.run_id is None else ids.check_run_id(item.run_id),
            named=item.run_id is not None,
            play=name,
            bucket=found.buckets[priority],
            priority=priority,
            input=text,
            org_id=ids.check_org_id(item.org_id),
            idempotency_key=ids.check_idempotency_key(item.idempotency_key),
            delay_s=delay_s or None,
            at=at,
            receiver=receiver,
            labels=None
            if not labels
            else _JSON.encode(labels, what="labels", limit_bytes=65_536, max_depth=2),
            extras=self._extras(item, key),
            replaces=item.on_conflict == "replace",
        )

    def known(self, play: Play | str) -> Play | None:
        """The play itself, where a caller gave it or this host has it."""
        return play if isinstance(play, Play) else self._plays.get(play)

    def _extras(self, item: Submit, concurrency_key: str | None) -> str | None:
        """The JSON text of what few runs have; None for a plain run."""
        given = {
            "unique": ids.check_unique(item.unique_key, item.unique_for_s, item.on_conflict),
            "surface": ids.check_choice("surface", item.surface, SURFACES),
            "trigger": ids.check_choice("trigger", item.trigger, TRIGGERS),
            "scope": ids.check_choice("scope", item.scope, SCOPES),
            "terminal_receiver": ids.check_receiver("terminal_receiver", item.terminal_receiver),
            "array_input_receiver": ids.check_receiver("array_input_receiver", item.array_input_receiver),
            "terminal_performance": ids.check_choice(
                "terminal_performance", item.terminal_performance, PERFORMANCE
            ),
            "concurrency_key": concurrency_key,
        }
        extras = {name: value for name, value in given.items() if value is not None}
        if not extras:
            return None
        return _JSON.encode(extras, what="options", limit_bytes=65_536, max_depth=3)

    def payload(self, value: Any) -> str:
        """The JSON text of an event's payload. Raises PayloadRefused."""
        return self.codec.encode(
            value,
            what="payload",
            limit_bytes=self._config.max_payload_bytes,
            max_depth=self._config.max_depth,
        )

    def _concurrency_key(self, item: Submit, text: str) -> str | None:
        """The run's key: the caller's, or what the play makes of the input, where the play is known here.

        Refuses an input that the play's own type refuses, on the way; its host does so anyway.
        """
        play = self.known(item.play)
        given = ids.check_concurrency_key(item.concurrency_key)
        wanted = play is not None and play.concurrency_key is not None and given is None
        if play is None or not (wanted or play.input_type is not None):
            return given
        data = self.codec.decode(text, what="input")
        if play.input_type is not None:
            data = self.codec.structure(data, play.input_type, what="input")
        if not wanted or play.concurrency_key is None:
            return given
        try:
            made = play.concurrency_key(data)
        except Exception as exc:  # the user's code, and the caller's input
            reason = f"the play's function raised {type(exc).__name__} for this input"
            raise InputRefused("concurrency_key", reason) from exc
        return ids.check_concurrency_key(made)

    def _name(self, play: Any) -> str:
        if isinstance(play, Play):
            return play.name
        if isinstance(play, str):
            return check_play_name(play)
        raise InputRefused("play", f"must be a play or its name, not {type(play).__name__}")

    async def _check_keyless(self, name: str) -> None:
        """Refuse a run without a concurrency key of a play that is not known here, if it has a limit per key.

        Whoever has the play, in whichever version, knows that the run has no key.
        """
        found = self._found[name]
        if time.monotonic() - self._found_at[name] > _KEYED_S:
            found = await self._look_up(name)
        if found.keyed:
            raise InputRefused(
                "concurrency_key",
                f"play {name!r} limits how many runs of one key go at once and is not known here: give the run's key",
            )

    async def _look_up(self, name: str) -> Registered:
        found = await self._find(name)
        if found is None:
            known = ", ".join(sorted(self._plays)) or "none"
            raise UnknownPlay(
                "play", f"no host has ever registered a play named {name[:140]!r} (hosted here: {known})"
            )
        self._found[name], self._found_at[name] = found, time.monotonic()
        return found


def check_play_name(name: Any) -> str:
    """``name``, or UnknownPlay: no play can have ever been registered under anything else."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UnknownPlay(
            "play", f"a name is 1 to 128 characters of A-Z a-z 0-9 . _ : -, not {preview(name)}"
        )
    return name


def check_admitted(item: Submission, answer: Admitted) -> None:
    """Raise IdempotencyConflict or DuplicateRun unless the run was created, or one exists that the caller asked for."""
    if answer.outcome in ("created", "existing"):
        return
    if answer.outcome == "duplicate":
        raise DuplicateRun(f"the unique key is held by run {answer.run_id!r}", answer.run_id)
    if answer.outcome == "two_runs":
        message = (
            f"run id {item.run_id!r} and idempotency key {item.idempotency_key!r} do not name the same run: "
            f"run {answer.run_id!r} has one of them"
        )
    else:
        taken = f"run id {item.run_id!r}" if item.idempotency_key is None else f"key {item.idempotency_key!r}"
        message = f"{taken} is taken by run {answer.run_id!r} with another play or input"
    raise IdempotencyConflict(message, answer.run_id)
