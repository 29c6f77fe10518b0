"""Hints: who should look at the database now, on this host and on the others.

Owns coalesced wake-ups by cause. A hint carries no data and may be lost: every actor also looks when something is due,
and the listener looks for all of them at the backstop.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.core import WakeFlag


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

        self.wake_outbox = WakeFlag()
        self.lanes = WakeFlag(forward=self.wake_outbox)
        self.logs = WakeFlag(forward=self.wake_outbox)  # on an observability lane
        self.started = WakeFlag(forward=self.wake_outbox)  # a run that will soon have more to tell

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

        self.timers = WakeFlag()
        self.to_send = WakeFlag()
        self._outgoing: set[str] = set()

    def here(self, kind: str) -> None:
        """Wake this host's actor of that kind."""
        flag: WakeFlag = getattr(self, kind)
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
