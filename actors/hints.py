"""Hints: who should look at the database now, on this host and on the others.

Owns coalesced wake-ups by cause. A hint carries no data and may be lost: every actor also looks when something is due,
and the listener looks for all of them at the backstop.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.core import WakeFan, WakeFlag


class LaneHints:
    """What one outbox waits for: ``lanes`` or ``logs`` to deliver (lifecycle, observability), ``started``: a run that
    will soon have more to tell, and ``given_up``: a lane that this host could not deliver in time, for others first."""

    def __init__(self) -> None:
        self.wake = WakeFlag()
        self.lanes = WakeFlag(forward=self.wake)
        self.logs = WakeFlag(forward=self.wake)
        self.started = WakeFlag(forward=self.wake)
        self.given_up = WakeFlag(forward=self.wake)


class Flags:
    """Flags that are set as one."""

    def __init__(self) -> None:
        self._flags: list[WakeFlag] = []

    def add(self, flag: WakeFlag) -> None:
        """One more."""
        self._flags.append(flag)

    def set(self) -> None:
        """Set all."""
        for flag in self._flags:
            flag.set()


class Hints:
    """One flag per cause, each of which also wakes the actor that waits for it.

    ``here`` wakes this host for one of the kinds that hosts tell each other: ``runs`` (something to claim), ``lanes``
    (something to deliver), ``terminals`` (a run has ended), ``control`` (a cancellation), ``schedules`` (one was
    changed), ``rates`` (a slot of a rate scope), ``wakes`` (an event, or a child's end). ``elsewhere`` collects what
    the listener sends to the others.
    """

    def __init__(self) -> None:
        self.wake_claim = WakeFlag()
        self.runs = WakeFlag(forward=self.wake_claim)
        self.freed = WakeFlag(forward=self.wake_claim)  # a slot

        # One of each per outbox: see LaneHints.
        self.lanes = Flags()
        self.logs = Flags()
        self.started = Flags()

        self.wake_leases = WakeFlag()
        self.renew = WakeFlag(forward=self.wake_leases)  # now: somebody may have lost one
        self.added = WakeFlag(forward=self.wake_leases)  # an attempt

        self.wake_watch = WakeFlag()
        self.terminals = WakeFlag(forward=self.wake_watch)

        self.wake_control = WakeFlag()
        self.control = WakeFlag(forward=self.wake_control)  # a cancellation is recorded

        self.wake_schedules = WakeFlag()
        self.schedules = WakeFlag(forward=self.wake_schedules)  # one is due, or was changed

        self.wake_rates = WakeFlag()
        self.rates = WakeFlag(forward=self.wake_rates)  # a slot of a rate scope may have become free

        self.wake_waits = WakeFlag()
        self.wakes = WakeFlag(forward=self.wake_waits)  # somebody has something for a run that waits

        self.chores = WakeFlag()  # of maintenance
        self.timers = WakeFlag()
        # One actor per sandbox provider.
        self.runners = WakeFan()  # an attempt was detached, or a result waits to be settled
        self.cleanup = WakeFan()  # sandboxes are wanted back
        self.billing = WakeFlag()
        self.to_send = WakeFlag()
        self._outgoing: set[str] = set()

    def outbox(self) -> LaneHints:
        """The flags of one more outbox."""
        own = LaneHints()
        self.lanes.add(own.lanes)
        self.logs.add(own.logs)
        self.started.add(own.started)
        return own

    def here(self, kind: str) -> None:
        """Wake this host's actor of that kind."""
        flag: WakeFlag | Flags = getattr(self, kind)
        flag.set()
        if kind == "control":
            # A cancellation shows first as a lost lease.
            self.renew.set()
        elif kind == "lanes":
            self.logs.set()

    def elsewhere(self, kind: str) -> None:
        """Let other hosts know, soon and once."""
        if kind not in self._outgoing:
            self._outgoing.add(kind)
            self.to_send.set()

    def everywhere(self, kinds: Iterable[str]) -> None:
        """Both."""
        for kind in kinds:
            self.here(kind)
            self.elsewhere(kind)

    def take_outgoing(self) -> list[str]:
        """What is to be sent, cleared."""
        kinds = sorted(self._outgoing)
        self._outgoing.clear()
        return kinds
