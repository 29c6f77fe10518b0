"""Detached plays: a sandbox is reserved, made and handed over; a silent one is judged; an unneeded one deleted.

Owns what the actors ask of sandbox providers, and in which order a launch writes down what it does: the obligation to
delete comes before the sandbox. It never touches the database itself.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import trio

from actors.attempts import Attempt, Why
from actors.cleanup import Census, Delete, Step
from actors.core import Mailbox, bounded_cleanup
from actors.custody import Entry, GivenUp
from actors.executors import released
from actors.liveness import Judge, Judgement
from runtime.codec import JsonCodec, preview, scrub
from runtime.executor import Executor
from runtime.plays import Play
from runtime.runner_tokens import Bearer, RunnerTokens
from runtime.sandboxes import Created, Inspection, SandboxProvider, SandboxRef, SandboxSpec
from runtime.sandboxes.base import SandboxFault
from sql import adoption
from sql.errors import CapacityUnavailable, Deferral, DependencyUnavailable, PayloadRefused
from sql.runners import Detachment, Silent, Verdict
from sql.sandboxes import Custody, Obligation, Reservation
from sql.settle import Settlement

T = TypeVar("T")

log = logging.getLogger("runlane.detached")

# What a runner is told through its environment. Gateways are one or more URLs with spaces between: a runner goes to the
# next when one is away.
GATEWAY = "RUNLANE_RUNNER_GATEWAY"
TOKEN = "RUNLANE_RUNNER_TOKEN"
PLAYS = "RUNLANE_RUNNER_PLAYS"

_RETRY_S = 5.0
_WRITE_S = 10.0
# A runner whose sandbox lives, but that has not been heard of for this many timeouts, is frozen: it is taken for lost.
_FROZEN_AFTER = 3.0
# A sandbox that lives and was never heard of may still be starting.
_STARTED_WITHIN_S = 120.0
# No moment that a provider tells is later than this, in seconds since the epoch.
_LAST_MOMENT = 2.0**33
# What a deletion may answer.
_OUTCOMES = ("deleted", "already_absent")
# Of each thing that a provider says.
_MOST_WORDS = 16_384
_MOST_DEPTH = 32
# A token outlives the ceiling by this: a last word may be late.
_TOKEN_GRACE_S = 3_600.0


@attrs.frozen(kw_only=True)
class Launch:
    """How runners are started: what they are told, and how long things may take."""

    gateways: Callable[[], Awaitable[Sequence[str]]]
    tokens: RunnerTokens
    create_s: float
    heartbeat_timeout_s: float


class Launcher:
    """Starts the runner of a detached play's attempt and hands the attempt over to it."""

    def __init__(
        self, providers: Mapping[str, SandboxProvider], entries: Mailbox[Entry], launch: Launch
    ) -> None:
        self._providers = providers
        self._entries = entries
        self._launch = launch

    async def __call__(self, play: Play, attempt: Attempt) -> bool:
        """True: the attempt is its runner's now. False: it was lost meanwhile.

        Raises CapacityUnavailable and DependencyUnavailable, which cost the run nothing, and what the database has to
        say. Whatever happens, the sandbox is deleted unless the attempt was handed over.
        """
        assert play.sandbox is not None
        provider = self._providers[play.sandbox]
        tag = self._launch.tokens.tag
        sandbox = f"{tag}-{attempt.run_id}.{attempt.attempt}.{attempt.token % 2**32:08x}"
        needed = True
        try:
            answer = await self._tell(
                Reservation(attempt.run_id, attempt.attempt, attempt.token, sandbox, provider.key)
            )
            if answer != "reserved":
                needed = False  # nothing was written down
                if answer == "full":
                    raise CapacityUnavailable(
                        f"no room for another {play.sandbox} sandbox", retry_after=_RETRY_S
                    )
                return False
            created = await self._create(provider, play, await self._spec(play, attempt, sandbox))
            # From here on what we know must not be lost to a stop: it is written down, whoever is in a hurry.
            with bounded_cleanup(_WRITE_S):
                await self._tell(Custody(sandbox, created.provider_id, created.routing_domain))
                detachment = Detachment(
                    attempt.run_id,
                    attempt.attempt,
                    attempt.token,
                    sandbox,
                    self._launch.heartbeat_timeout_s,
                    play.ceiling_s,
                )
                needed = await self._tell(detachment) != "done"
            return not needed
        finally:
            if needed:
                with bounded_cleanup(_WRITE_S):
                    await self._tell(GivenUp(sandbox))

    async def _create(self, provider: SandboxProvider, play: Play, spec: SandboxSpec) -> Created:
        try:
            with trio.fail_after(self._launch.create_s):
                return _answer(Created, await provider.create(spec))
        except trio.TooSlowError:
            reason = f"no answer within {self._launch.create_s:g} s"
        except Exception as exc:  # the provider's own: whatever it raises, there is no sandbox to speak of
            reason = f"{type(exc).__name__}: {exc}"
        log.warning("event=sandbox_failed run=%s provider=%s error=%r", spec.run_id, provider.key, reason)
        raise DependencyUnavailable(
            f"sandbox:{play.sandbox}", f"sandbox provider {play.sandbox}: {reason}", retry_after=_RETRY_S
        )

    async def _spec(self, play: Play, attempt: Attempt, sandbox: str) -> SandboxSpec:
        bearer = Bearer(attempt.run_id, attempt.attempt, attempt.token)
        ceiling_s = play.ceiling_s
        lifetime_s = (ceiling_s or 365 * 86_400.0) + _TOKEN_GRACE_S
        return SandboxSpec(
            sandbox=sandbox,
            run_id=attempt.run_id,
            attempt=attempt.attempt,
            command=("python", "-m", "runtime", "runner"),
            env={
                GATEWAY: " ".join(await self._launch.gateways()),
                TOKEN: self._launch.tokens.mint(bearer, lifetime_s=lifetime_s),
                PLAYS: play.home,
            },
            memory_bytes=play.memory_bytes,
            cpu_s=play.cpu_s,
            ceiling_s=None if ceiling_s is None else ceiling_s + self._launch.heartbeat_timeout_s,
        )

    async def _tell(self, item: Reservation | Custody | Detachment | GivenUp) -> str:
        entry = Entry(item)
        await self._entries.send(entry)
        return await entry.reply.wait()


class LaunchingExecutor:
    """Executes attempts: of a detached play by launching its runner, of any other here."""

    def __init__(self, plays: Mapping[str, Play], execute: Executor, launch: Launcher) -> None:
        self._plays = plays
        self._execute = execute
        self._launch = launch

    async def __call__(self, attempt: Attempt) -> Settlement | None:
        """The attempt's settlement; None when there is nothing to settle, or it is its runner's now."""
        play = self._plays[attempt.claimed.play]
        if play.sandbox is None:
            return await self._execute(attempt)
        failure: Deferral | None = None
        with attempt.scope:
            try:
                await self._launch(play, attempt)
                return None
            except Deferral as exc:
                failure = exc
        if attempt.why in (Why.CANCELLED, Why.LOST):
            return None
        return released(attempt) if failure is None else self._execute.failed(play, attempt, failure)


def _answer(kind: type[T], said: Any) -> T:
    """What a provider's call answered, if it is that at all: anybody may write one."""
    if not isinstance(said, kind):
        raise SandboxFault(f"answered {preview(said)}, not {kind.__name__}(…)")
    return said


def judge_with(provider: SandboxProvider, heard_s: Callable[[], float]) -> Judge:
    """How silent runners of this provider are judged. ``heard_s``: since when this host's gateway could be heard.

    A host that has just come up, after an outage of all of them say, has to listen for a while before it may take for
    frozen what was silent before.
    """

    async def judge(silent: Silent) -> Judgement:
        over = silent.finding == "ceiling"
        why = "the run was over its ceiling_s in its sandbox"
        timed_out = Judgement(_verdict(silent, "ceiling", "SandboxTimedOut", why))
        if over and silent.over_s >= silent.heartbeat_timeout_s:
            return timed_out  # that it has ended may be the provider's own doing, for this reason
        try:
            ref = SandboxRef(silent.sandbox, silent.provider_id, silent.routing_domain)
            inspection = _answer(Inspection, await provider.inspect(ref))
            inspection = attrs.evolve(inspection, diagnostics=_storable(inspection.diagnostics))
        except Exception as exc:  # the provider's own: nothing is known, so only the ceiling counts
            log.warning("event=inspection_failed sandbox=%s error=%r", silent.sandbox, exc)
            return timed_out if over else Judgement(None)
        found: dict[str, object] = {}
        if inspection.state == "running":
            if over:
                return timed_out
            patience_s = _FROZEN_AFTER * silent.heartbeat_timeout_s
            if silent.heartbeat_at is None:
                patience_s = max(patience_s, _STARTED_WITHIN_S)
            if silent.silent_s < patience_s or heard_s() < silent.heartbeat_timeout_s:
                return Judgement(None)
            why = f"its sandbox lives, but it was not heard of for {silent.silent_s:.0f} s"
        else:
            found = _end_of(silent, inspection)
            gone = inspection.state == "absent" and not inspection.diagnostics
            why = "its sandbox is gone" if gone else _why(inspection)
        return Judgement(_verdict(silent, "lost", "RunnerLost", why), found)

    return judge


def _storable(diagnostics: Mapping[str, Any]) -> dict[str, Any]:
    """What a provider says of an end, as the database takes it: a command prints anything, NUL too."""
    codec = JsonCodec()
    found: dict[str, Any] = {}
    for name, value in diagnostics.items():
        key = scrub(str(name), _MOST_WORDS)
        try:
            text = codec.encode(value, what=key, limit_bytes=_MOST_WORDS, max_depth=_MOST_DEPTH)
        except PayloadRefused:
            words = value if isinstance(value, str) else preview(value)
            found[key] = scrub(words, _MOST_WORDS, keep_end=True)
        else:
            found[key] = json.loads(text)
    return found


def _end_of(silent: Silent, inspection: Inspection) -> dict[str, object]:
    """What is known of a lost runner's end. ``ended_at``, in seconds since the epoch, is where its bill ends.

    A provider's clock is not the database's: what it saw counts from the last heartbeat on. Without it, as far as
    anybody knows, the last heartbeat was the end.
    """
    found = dict(inspection.diagnostics)
    seen = found.pop("ended_at", None)
    known = [silent.heartbeat_at.timestamp()] if silent.heartbeat_at is not None else []
    if isinstance(seen, int | float) and 0 <= seen < _LAST_MOMENT:
        known.append(seen)
    return {**found, "ended_at": max(known)} if known else found


def _why(inspection: Inspection) -> str:
    found = inspection.diagnostics
    code, signal = found.get("exit_code"), found.get("signal")
    how = f" by {signal}" if signal else "" if code is None else f" with exit code {code}"
    tail = str(found.get("output_tail") or "").strip()[-1_000:]
    return f"its sandbox has ended{how}" + (f"; it said: {tail}" if tail else "")


def _verdict(silent: Silent, verdict: str, error_type: str, message: str) -> Verdict:
    record = {"error_type": error_type, "message": message, "sandbox": silent.sandbox, "traceback": None}
    return Verdict(silent, verdict, json.dumps(record))


def delete_with(provider: SandboxProvider) -> Delete:
    """How sandboxes of this provider are deleted."""

    async def delete(obligation: Obligation, tell: Callable[[Step], None]) -> None:
        ref = SandboxRef(obligation.sandbox, obligation.provider_id, obligation.routing_domain)
        outcome = "deleted"
        if adoption.is_copy(obligation.sandbox) and not getattr(provider, "finds_by_id", False):
            tell(Step("failed", error=f"{provider.key} does not find sandboxes by their ids", final=True))
            return
        try:
            # One that was in the making may have come into being after its deletion was taken.
            if obligation.accepted_at is None or not obligation.certain:
                outcome = await provider.delete(ref)
                if outcome not in _OUTCOMES:
                    raise SandboxFault(
                        f"delete answered {preview(outcome)}, not one of {', '.join(_OUTCOMES)}"
                    )
                tell(Step("accepted", outcome, obligation.routing_domain))
            inspection = _answer(Inspection, await provider.inspect(ref))
        except Exception as exc:  # the provider's own
            tell(Step("failed", error=scrub(f"{type(exc).__name__}: {exc}", _MOST_WORDS)))
            return
        kind = "gone" if inspection.state == "absent" and obligation.certain else "there"
        tell(Step(kind, outcome, inspection.routing_domain))

    return delete


def census_with(provider: SandboxProvider, tag: str) -> Census:
    """How sandboxes that exist at this provider are counted: only ours, others may share it."""

    async def census() -> Sequence[str]:
        try:
            ours = [name for name in await provider.names() if name.startswith(f"{tag}-")]
            return [scrub(name, _MOST_WORDS) for name in ours]
        except Exception as exc:  # the provider's own: nothing is known
            log.warning("event=census_failed provider=%s error=%r", provider.key, exc)
            return []

    return census
