"""The reference of limits: how many attempts may run at once, and whose turn it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from tests.kernel.model.runs import RunModel

Place = tuple[str, str]  # a limit: its kind and name; of a key the name is the play's and its own


@attrs.define
class LimitsModel:
    """What is set: by play, by play for each of its keys, by organisation; of sandboxes by provider ("": all), by
    organisation."""

    play: dict[str, int] = attrs.field(factory=dict)
    key: dict[str, int] = attrs.field(factory=dict)
    org: dict[str, int] = attrs.field(factory=dict)
    sandbox: dict[str, int] = attrs.field(factory=dict)
    sandbox_org: dict[str, int] = attrs.field(factory=dict)

    def places(self, run: RunModel) -> dict[Place, int]:
        """The limits that a run counts against. A key without a limit of its own play runs one at a time."""
        found = {}
        if run.play in self.play:
            found["play", run.play] = self.play[run.play]
        if run.org is not None and run.org in self.org:
            found["org", run.org] = self.org[run.org]
        if run.concurrency is not None:
            found["key", f"{run.play}/{run.concurrency}"] = self.key.get(run.play, 1)
        return found

    def running(self, runs: Iterable[RunModel]) -> Counter[Place]:
        """What runs under each limit."""
        return Counter(place for run in runs if run.status == "running" for place in self.places(run))

    def has_room(self, run: RunModel, running: Mapping[Place, int], *, but: str = "") -> bool:
        """Whether none of its limits, apart from those of one kind, holds a run back."""
        return all(
            running.get(place, 0) < most for place, most in self.places(run).items() if place[0] != but
        )


@attrs.define
class TurnsModel:
    """Fair turns of one host's walk through one bucket: whoever waits is passed by nobody twice."""

    passed: dict[str | None, Counter[str | None]] = attrs.field(factory=dict)

    def claimed(self, waiting: Iterable[str | None], served: Counter[str | None]) -> None:
        """One claim: who could have been served, and who was, how often. Fails when that was unfair."""
        waiting = set(waiting) - served.keys()
        self.passed = {turn: self.passed.get(turn, Counter()) + served for turn in waiting}
        for turn, by in self.passed.items():
            assert max(by.values(), default=0) <= 1, (
                f"{turn} waits while others have more than one turn: {by}"
            )


def turn_of(run: RunModel) -> str | None:
    """Whose turn a run is: its organisation's; None: that of all who have neither organisation nor key."""
    return run.org or "" if run.org is not None or run.concurrency is not None else None


def group_of(run: RunModel) -> tuple[str, str | None, str | None]:
    """Those among whom the longest due goes first."""
    return run.play, run.org, run.concurrency
