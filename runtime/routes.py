"""Routes: which of a host's ledgers gets the facts of which runs.

Owns the names of a host's ledgers and what is stored with a run so that all its facts go to the same one, whatever
other hosts are configured with. It never delivers anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import attrs

from runtime import ids
from runtime.codec import preview
from runtime.ledger import Ledger, check_ledger, receiver_of
from sql.errors import InputRefused
from sql.lanes import OWN_LEDGER


@attrs.frozen
class Route:
    """One ledger: ``name`` in this host (empty for its own), and the receivers whose lanes it gets. New runs carry
    the last of these."""

    name: str
    ledger: Ledger
    receivers: tuple[str, ...]


class Routes:
    """The ledgers of one host. ``ledger`` None: it has none of its own, so runs that it submits go to the own ledger of
    whoever hosts plays.

    A run carries its ledger's ``receiver`` where it has one; else the name that the ledger has in ``receivers``.
    Raises InputRefused for what is no ledger, for names that cannot be, and for two ledgers with one receiver.
    """

    def __init__(self, ledger: Ledger | None, receivers: Mapping[str, Ledger]) -> None:
        self._routes: dict[str, Route] = {}
        if ledger is not None:
            check_ledger("ledger", ledger)
            own = receiver_of(ledger)
            # What names no receiver is for every host's own ledger, whether or not that has one.
            values = (OWN_LEDGER,) if own is None else (OWN_LEDGER, own)
            self._routes[OWN_LEDGER] = Route(OWN_LEDGER, ledger, values)
        for name, other in receivers.items():
            ids.check_receiver("receivers", name)
            check_ledger(f"receivers[{name!r}]", other)
            self._routes[name] = Route(name, other, (receiver_of(other) or name,))
        taken: dict[str, str] = {}
        for route in self:
            for receiver in route.receivers:
                if receiver in taken:
                    both = f"{taken[receiver]!r} and {route.name!r}"
                    raise InputRefused("receivers", f"{both} are the same receiver, {receiver!r}")
                taken[receiver] = route.name

    def __iter__(self) -> Iterator[Route]:
        return iter(self._routes.values())

    @property
    def receivers(self) -> tuple[str, ...]:
        """All receivers that have a ledger here."""
        return tuple(chain.from_iterable(route.receivers for route in self))

    def receiver(self, name: str | None) -> str:
        """What a run carries that is submitted for the ledger of that name; None: for the host's own.

        A name may also be a receiver as runs carry it. A host without any ledger takes every receiver: others serve it.
        """
        if name is None:
            own = self._routes.get(OWN_LEDGER)
            return OWN_LEDGER if own is None else own.receivers[-1]
        ids.check_receiver("receiver", name)
        if name in self._routes:
            return self._routes[name].receivers[-1]
        if not self._routes or name in self.receivers:
            return name
        known = ", ".join(sorted(filter(None, self._routes))) or "none"
        raise InputRefused(
            "receiver", f"{preview(name)} is not a ledger of this host; its receivers: {known}"
        )
