"""Cleanup: sandboxes that nobody needs any more are deleted, and it is seen that they are gone.

Owns the obligations of one provider from due to confirmed. What the provider took is written down the moment it is
known, because that is where billing ends. It never decides that a sandbox is not needed.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Awaitable, Callable, Sequence

import attrs
import trio

from actors.adoption import Adopter
from actors.core import Backoff, Life
from actors.hints import Hints
from sql import sandboxes as door
from sql.calls import new_token
from sql.connection import Session, SessionOptions
from sql.sandboxes import Obligation

log = logging.getLogger("runlane.cleanup")

_AT_ONCE = 20
_BACKOFF_S = (1.0, 300.0)
# How soon a sandbox whose deletion was taken is looked for again.
_CONFIRM_S = (0.5, 30.0)
_CENSUS_EVERY_S = 600.0


@attrs.frozen(slots=True)
class Step:
    """One answer of the provider about an obligation.

    ``kind``: ``accepted`` (it took the deletion), ``gone`` (read back), ``there`` (taken, and still there) or
    ``failed``. ``outcome``: ``deleted`` or ``already_absent``.
    """

    kind: str
    outcome: str = "deleted"
    routing_domain: str | None = None
    error: str = ""
    final: bool = False
    """It will never work: an operator has to decide."""


Delete = Callable[[Obligation, Callable[[Step], None]], Awaitable[None]]
"""Deletes at the provider and looks whether it is gone, telling each step as soon as it is known."""
Census = Callable[[], Awaitable[Sequence[str]]]
"""Our names of all sandboxes that exist at the provider."""


class Cleanup:
    """One per provider, so that one that hangs holds up nobody else's.

    ``most_failures``: after that many an obligation is blocked, visibly, until an operator decides. ``adopter``: this
    provider's obligations are also in the table of an older generation.
    """

    def __init__(
        self,
        options: SessionOptions,
        hints: Hints,
        delete: Delete,
        census: Census,
        *,
        provider: str,
        lease_s: float,
        most_failures: int,
        on_orphans: Callable[[str, Sequence[str]], None],
        adopter: Adopter | None = None,
    ) -> None:
        self._options = options
        self._hints = hints
        self.wake = hints.cleanup.join()
        self._delete = delete
        self._census = census
        self._provider = provider
        self._lease_s = lease_s
        self._most_failures = most_failures
        self._on_orphans = on_orphans
        self._adopter = adopter
        self._confirm = door.confirm if adopter is None else adopter.confirm
        self._under_way = 0

    async def run(self, life: Life) -> None:
        """Clean up until asked to stop: what is under way then is brought to its end."""
        self._under_way = 0
        held = Backoff(first_s=0.01, max_s=1.0)
        async with life.session(self._options) as session, trio.open_nursery() as deletions:
            # Deletions are made side by side; what becomes of them is written down one by one.
            turn = trio.Lock()
            life.ready()
            look_at = math.inf
            count_at = trio.current_time() + random.uniform(0.0, _CENSUS_EVERY_S)
            while True:
                adopt_at = math.inf if self._adopter is None else self._adopter.look_at
                await self.wake.wait(min(look_at, count_at, adopt_at))
                if life.stopping.is_set():
                    return
                life.beat()
                if self._adopter is not None:
                    async with turn:
                        await self._adopter.look(session)
                if trio.current_time() >= count_at:
                    count_at = trio.current_time() + _CENSUS_EVERY_S
                    await self._count(session, turn)
                look_at = math.inf
                if self._under_way == _AT_ONCE:
                    continue  # the first that ends wakes us
                async with turn:
                    due, next_due_s = await door.claim_cleanup(
                        session,
                        [self._provider],
                        token=new_token(),
                        limit=_AT_ONCE - self._under_way,
                        lease_s=self._lease_s,
                    )
                for obligation in due:
                    self._under_way += 1
                    deletions.start_soon(self._fulfil, session, turn, obligation)
                if due or next_due_s is None or next_due_s > 0:
                    held.reset()
                    wait_s = next_due_s
                else:
                    wait_s = held.next()  # what is due is locked by somebody
                if wait_s is not None:
                    look_at = trio.current_time() + max(0.0, wait_s) + random.uniform(0.0, 0.02)

    async def _fulfil(self, session: Session, turn: trio.Lock, obligation: Obligation) -> None:
        send, receive = trio.open_memory_channel[Step](math.inf)

        async def delete() -> None:
            with send:
                with trio.move_on_after(self._lease_s * 0.8) as limit:
                    await self._delete(obligation, send.send_nowait)
                if limit.cancelled_caught:
                    send.send_nowait(Step("failed", error=f"no answer within {self._lease_s * 0.8:g} s"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(delete)
            async for step in receive:
                async with turn:
                    await self._write(session, obligation, step)
        self._under_way -= 1
        self.wake.set()

    async def _write(self, session: Session, obligation: Obligation, step: Step) -> None:
        if step.kind == "accepted":
            answer = await self._insist(
                lambda: door.accept(
                    session, obligation, outcome=step.outcome, routing_domain=step.routing_domain
                )
            )
        elif step.kind == "gone":
            answer = await self._insist(
                lambda: self._confirm(
                    session, obligation, outcome=step.outcome, routing_domain=step.routing_domain
                )
            )
            if answer == "completed":
                self._hints.billing.set()
        elif step.kind == "there":
            await door.postpone(session, obligation, delay_s=_spread(obligation.tries, _CONFIRM_S))
            return
        else:
            await self._failed(session, obligation, step)
            return
        if answer not in ("accepted", "completed", "already_completed"):
            log.warning(
                "event=cleanup_%s sandbox=%s provider=%s run=%s",
                answer,
                obligation.sandbox,
                obligation.provider,
                obligation.run_id,
            )

    async def _failed(self, session: Session, obligation: Obligation, step: Step) -> None:
        failures = obligation.failures + 1
        blocked = step.final or failures >= self._most_failures
        log.log(
            logging.ERROR if blocked else logging.WARNING,
            "event=cleanup_%s sandbox=%s provider=%s run=%s failures=%d error=%r",
            "blocked" if blocked else "failed",
            obligation.sandbox,
            obligation.provider,
            obligation.run_id,
            failures,
            step.error,
        )
        await door.postpone(
            session,
            obligation,
            delay_s=_spread(failures, _BACKOFF_S),
            error=step.error,
            block=f"gave up after {failures} failures: {step.error}" if blocked else None,
        )

    async def _insist(self, write: Callable[[], Awaitable[str]]) -> str:
        """Ask again while the row is locked, as long as the obligation may be ours."""
        backoff = Backoff(first_s=0.002, max_s=0.25)
        give_up_at = trio.current_time() + self._lease_s * 0.1
        while True:
            answer = await write()
            if answer != "busy" or trio.current_time() >= give_up_at:
                return answer
            await trio.sleep(backoff.next())

    async def _count(self, session: Session, turn: trio.Lock) -> None:
        orphans = await self._unanswered_for(session, turn)
        if orphans:
            # Counted and asked about are two moments: what was deleted in between is not there the second time.
            still = set(await self._unanswered_for(session, turn))
            orphans = [name for name in orphans if name in still]
        if orphans:
            shown = ",".join(orphans[:10])
            log.error(
                "event=orphan_sandboxes provider=%s count=%d names=%s", self._provider, len(orphans), shown
            )
        self._on_orphans(self._provider, orphans)

    async def _unanswered_for(self, session: Session, turn: trio.Lock) -> Sequence[str]:
        names: Sequence[str] = ()
        with trio.move_on_after(self._lease_s * 0.8):
            names = await self._census()
        async with turn:
            return await door.unknown(session, names) if names else []


def _spread(tries: int, bounds: tuple[float, float]) -> float:
    """Exponential, with jitter."""
    first_s, most_s = bounds
    return min(most_s, first_s * 2.0 ** min(tries - 1, 30)) * random.uniform(0.5, 1.0)
