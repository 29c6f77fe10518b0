"""Supervision: who runs, who is restarted, in which order everything stops.

Owns lives, restarts, outages, escalation and the stop order. It never knows what an actor does, and it is the
only place where any exception is caught.

How a failure is taken, by the leaves of its exception groups: all ``LinkError``: an outage, waited out
without limit; anything else: a crash, counted against the restart intensity. While a child is being stopped
every failure is noise.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

import attrs
import trio

from actors.core.backoff import Backoff
from actors.core.budget import Budget
from actors.core.cleanup import bounded_cleanup
from actors.core.groups import hidden_by, leaves, only
from actors.core.health import ActorHealth
from actors.core.mailbox import Mailbox
from actors.core.probes import Probe
from sql.connection import Backend, Session, SessionOptions, open_session
from sql.errors import LinkError, RunlaneError

log = logging.getLogger("runlane.supervisor")

# A life that was at work this long has proved itself: the next failure starts from the shortest delay.
_PROVEN_S = 5.0


class EscalatedActor(RunlaneError):
    """An actor crashed more often than its intensity allows; ``error`` is its last one."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(f"actor {name} gave up: {type(error).__name__}: {error}")
        self.name = name
        self.error = error


class ActorEnded(RunlaneError):
    """An actor's loop returned although nobody had asked it to stop."""


class Actor(Protocol):
    """Anything with one loop."""

    async def run(self, life: Life) -> None:
        """Serve until ``life.stopping`` or the end of the mailbox, then return."""
        ...


@attrs.frozen(kw_only=True)
class ChildSpec:
    """One supervised actor. Durations are seconds.

    ``stop`` asks it to finish (default: close its ``mailboxes``); it then has ``stop_budget_s`` to return, is
    cancelled, and has ``cancel_budget_s`` for its shielded releases. What is in flight in ``mailboxes`` is
    put back before each life and abandoned after the last.
    """

    name: str
    actor: Actor
    stop: Callable[[], None] | None = None
    stop_budget_s: float = 5.0
    cancel_budget_s: float = 5.0
    mailboxes: Sequence[Mailbox[Any]] = ()


class Life:
    """One run of an actor's loop, from start to its end; ``number`` counts from 1."""

    def __init__(self, child: _Child, number: int) -> None:
        self.name = child.spec.name
        self.number = number
        self.health = child.health
        self.probe = child.probe
        self.stopping = child.stopping
        self.hurried = child.hurried
        self._child = child

    def ready(self) -> None:
        """The actor is connected and at work. Idempotent."""
        self._child.became_ready()

    def beat(self) -> None:
        """The loop turned."""
        self.health.beat()

    @property
    def predecessor(self) -> Backend | None:
        """The backend of the last session remembered under the actor's own name."""
        return self.predecessor_of(self.name)

    def predecessor_of(self, session_name: str) -> Backend | None:
        """The backend of the last session remembered under ``session_name``."""
        return self._child.backends.get(session_name)

    def remember(self, session: Session) -> None:
        """Let the next life end this session's backend before it works."""
        self._child.backends[session.name] = session.backend

    @contextlib.asynccontextmanager
    async def session(
        self, options: SessionOptions, name: str | None = None, *, on_lost: Callable[[], None] | None = None
    ) -> AsyncIterator[Session]:
        """Open a session under ``name`` (default: the actor's), with its predecessor ended first."""
        name = name or self.name
        async with open_session(
            options, name, predecessor=self.predecessor_of(name), on_lost=on_lost
        ) as session:
            self.remember(session)
            yield session


class _Child:
    """The state of one child across its lives."""

    def __init__(self, spec: ChildSpec, backoff: Backoff, on_ready: Callable[[_Child], None]) -> None:
        self.spec = spec
        self.backoff = backoff
        self.health = ActorHealth(spec.name)
        self.probe = Probe(spec.name)
        self.stopping = trio.Event()
        self.hurried = trio.Event()
        self.first_ready = trio.Event()
        self.finished = trio.Event()
        self.backends: dict[str, Backend] = {}
        self.crashes: deque[float] = deque()
        self.scope: trio.CancelScope | None = None
        self.ready_at: float | None = None
        self.in_outage = False
        self._on_ready = on_ready

    def became_ready(self) -> None:
        if self.ready_at is None:
            self.ready_at = trio.current_time()
        if not self.stopping.is_set():
            self.health.become("ready")
        self.health.beat()
        self.first_ready.set()
        self._on_ready(self)


class Supervisor:
    """Starts ``children`` in order, keeps them alive, stops them in reverse order.

    More than ``intensity`` crashes of one child within ``period_s`` escalate. ``stop_budget_s`` bounds the
    whole stop (default: the sum of the children's budgets); ``hurried_budget_s`` replaces every grace period
    after :meth:`hurry`.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        intensity: int = 5,
        period_s: float = 30.0,
        backoff: Callable[[], Backoff] = Backoff,
        stop_budget_s: float | None = None,
        hurried_budget_s: float = 0.5,
    ) -> None:
        self.intensity = intensity
        self.period_s = period_s
        self.hurried_budget_s = hurried_budget_s
        self._children = [_Child(spec, backoff(), self._child_ready) for spec in children]
        whole = sum(spec.stop_budget_s + spec.cancel_budget_s for spec in children)
        self.stop_budget_s = whole if stop_budget_s is None else stop_budget_s
        self._stop_asked = trio.Event()
        self._finished = trio.Event()
        self._all_started = trio.Event()
        self._escalated: EscalatedActor | None = None
        self._outage_since: float | None = None

    # --- asked from outside --------------------------------------------------------------------------

    @property
    def health(self) -> dict[str, ActorHealth]:
        """Each actor's record, in start order."""
        return {child.spec.name: child.health for child in self._children}

    @property
    def ready(self) -> bool:
        """Whether every actor is at work and no stop was asked for."""
        return not self._stop_asked.is_set() and all(child.health.ready for child in self._children)

    @property
    def stopping(self) -> trio.Event:
        """Set when the stop begins."""
        return self._stop_asked

    def probe(self, name: str) -> Probe:
        """The probe of the actor ``name``."""
        return next(child.probe for child in self._children if child.spec.name == name)

    def request_stop(self) -> None:
        """Begin to stop. Idempotent, never blocks."""
        self._stop_asked.set()

    async def stop(self) -> None:
        """Stop in reverse order and wait for the end."""
        self.request_stop()
        await self._finished.wait()

    def hurry(self) -> None:
        """Stop, and skip what is left of every grace period; releases still run."""
        self.request_stop()
        for child in self._children:
            child.hurried.set()

    # --- the tree ------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[Supervisor] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until stopped. ``started()`` once every actor was ready.

        Raises ``EscalatedActor`` after everything else was stopped in order. A cancellation from outside is
        turned into a hurried, ordered, bounded stop.
        """
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._stop_when_cancelled)
                nursery.start_soon(self._keep_tree, nursery.cancel_scope)
                await self._all_started.wait()
                task_status.started(self)
        except BaseExceptionGroup as group:
            failure = only(group)
        finally:
            self._finished.set()
        if failure is not None:
            raise failure
        if self._escalated is not None:
            raise self._escalated

    async def _stop_when_cancelled(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.hurry()

    async def _keep_tree(self, outer: trio.CancelScope) -> None:
        # Shielded, so that a cancellation from outside reaches the children through the ordered stop only.
        # The deadline is set when the stop begins; from then on this is a bounded cleanup.
        with bounded_cleanup(math.inf) as tree:
            async with trio.open_nursery() as nursery:
                await self._start_all(nursery)
                await self._stop_asked.wait()
                tree.deadline = trio.current_time() + self.stop_budget_s + self.hurried_budget_s
                await self._stop_all()
                nursery.cancel_scope.cancel()
        if tree.cancelled_caught:
            log.error("event=stop_overran budget_s=%g", self.stop_budget_s)
        self._all_started.set()
        outer.cancel()

    async def _start_all(self, nursery: trio.Nursery) -> None:
        for child in self._children:
            if self._stop_asked.is_set():
                child.finished.set()
                child.health.become("stopped")
                continue
            nursery.start_soon(self._keep, child, name=f"runlane {child.spec.name}")
            await _first_of(child.first_ready, self._stop_asked, child.finished)
        self._all_started.set()

    async def _stop_all(self) -> None:
        budget = Budget(self.stop_budget_s)
        for child in reversed(self._children):
            await self._stop_child(child, budget)

    async def _stop_child(self, child: _Child, budget: Budget) -> None:
        spec = child.spec
        child.stopping.set()
        if not child.finished.is_set():
            child.health.become("stopping")
        self._ask(child)
        with budget.scope(spec.stop_budget_s):
            await _first_of(child.finished, child.hurried)
        if not child.finished.is_set():
            with budget.scope(self.hurried_budget_s if child.hurried.is_set() else 0):
                await child.finished.wait()
        if not child.finished.is_set():
            log.info("event=stop_overdue actor=%s budget_s=%g", spec.name, spec.stop_budget_s)
            if child.scope is not None:
                child.scope.cancel()
            with trio.move_on_after(spec.cancel_budget_s):
                await child.finished.wait()
        if not child.finished.is_set():
            log.error("event=stuck actor=%s cancel_budget_s=%g", spec.name, spec.cancel_budget_s)

    def _ask(self, child: _Child) -> None:
        try:
            if child.spec.stop is not None:
                child.spec.stop()
            else:
                for box in child.spec.mailboxes:
                    box.close()
        except Exception as exc:
            log.error("event=stop_request_failed actor=%s", child.spec.name, exc_info=exc)
            if child.scope is not None:
                child.scope.cancel()

    # --- one child -----------------------------------------------------------------------------------

    # A Ctrl-C that lands in an actor would break the ordered stop: the main task gets it.
    @trio.lowlevel.enable_ki_protection
    async def _keep(self, child: _Child) -> None:
        number = 0
        try:
            while not child.stopping.is_set():
                number += 1
                error = await self._live(child, number)
                if child.stopping.is_set():
                    if error is not None:
                        log.debug("event=stop_noise actor=%s", child.spec.name, exc_info=error)
                    return
                delay_s = self._after(
                    child, error or ActorEnded(f"{child.spec.name}: returned without a stop")
                )
                if delay_s is None:
                    return
                with trio.move_on_after(delay_s):
                    await child.stopping.wait()
        finally:
            if child.health.state != "failed":
                child.health.become("stopped")
            for box in child.spec.mailboxes:
                box.abandon()
            child.in_outage = False  # it has ended, which is not to say that the outage is over
            child.finished.set()

    async def _live(self, child: _Child, number: int) -> BaseException | None:
        """One life; its failure, or None when it returned or was cancelled by its own scope."""
        for box in child.spec.mailboxes:
            box.requeue()
        child.ready_at = None
        if number > 1:
            child.health.restarts += 1
        if not child.in_outage:
            child.health.become("starting")
        try:
            with trio.CancelScope() as child.scope:
                if child.stopping.is_set():
                    return None
                try:
                    await child.spec.actor.run(Life(child, number))
                except BaseException as exc:
                    self._uncover(child, exc)
                    raise
        except Exception as exc:
            return exc
        except BaseExceptionGroup as group:
            # Cancelled from outside together with errors: the errors are noise of the stop. Anything harder
            # (KeyboardInterrupt) keeps its way.
            cancelled, rest = group.split(trio.Cancelled)
            if cancelled is None or (rest is not None and not isinstance(rest, Exception)):
                raise
            log.debug("event=stop_noise actor=%s", child.spec.name, exc_info=rest)
            raise cancelled from None
        finally:
            child.scope = None
        return None

    def _uncover(self, child: _Child, exc: BaseException) -> None:
        """Log what a cancellation that nobody here asked for may have hidden."""
        if child.scope is not None and child.scope.cancel_called:
            return
        for leaf in leaves(exc):
            hidden = hidden_by(leaf) if isinstance(leaf, trio.Cancelled) else None
            if hidden is not None and not isinstance(hidden, trio.WouldBlock):
                log.warning("event=hidden_by_cancellation actor=%s error=%r", child.spec.name, hidden)

    def _after(self, child: _Child, error: BaseException) -> float | None:
        """Classify a failure; the delay before the next life in seconds, or None to give up."""
        now = trio.current_time()
        causes = leaves(error)
        child.health.failed_with(causes[0])
        if child.ready_at is not None and now - child.ready_at >= _PROVEN_S:
            child.backoff.reset()
        if all(isinstance(cause, LinkError) for cause in causes):
            self._outage(child, causes[0])
            return child.backoff.next()
        self._recovered(child)
        for cause in causes:
            log.error(
                "event=crash actor=%s type=%s error=%r",
                child.spec.name,
                type(cause).__name__,
                str(cause),
                exc_info=cause,
            )
        child.crashes.append(now)
        while child.crashes[0] <= now - self.period_s:
            child.crashes.popleft()
        if len(child.crashes) <= self.intensity:
            child.health.become("restarting")
            return child.backoff.next()
        child.health.become("failed")
        log.critical(
            "event=escalated actor=%s crashes=%d period_s=%g",
            child.spec.name,
            len(child.crashes),
            self.period_s,
        )
        self._escalated = self._escalated or EscalatedActor(child.spec.name, only(error))
        self.request_stop()
        return None

    # --- outages: one line when one begins, one when it is over ----------------------------------------

    def _outage(self, child: _Child, cause: BaseException) -> None:
        child.in_outage = True
        child.health.become("outage")
        if self._outage_since is None:
            self._outage_since = trio.current_time()
            log.warning("event=outage actor=%s error=%r", child.spec.name, f"{type(cause).__name__}: {cause}")
        else:
            log.debug("event=outage_goes_on actor=%s error=%r", child.spec.name, str(cause))

    def _child_ready(self, child: _Child) -> None:
        self._recovered(child)

    def _recovered(self, child: _Child) -> None:
        child.in_outage = False
        if self._outage_since is not None and not any(other.in_outage for other in self._children):
            lasted_s = trio.current_time() - self._outage_since
            self._outage_since = None
            log.info("event=outage_over lasted_s=%.3f", lasted_s)


async def _first_of(*events: trio.Event) -> None:
    """Return when the first of the events is set."""

    async def watch(event: trio.Event) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for event in events:
            nursery.start_soon(watch, event)
