"""The reference of schedules: what has fired, and what fires next."""

from __future__ import annotations

import attrs

MISSED_AFTER_S = 60.0


@attrs.define
class ScheduleModel:
    """One schedule that fires every so many seconds."""

    play: str
    input: int
    every_s: int
    missed: str
    org: str | None
    next: float
    revision: int = 1
    paused: bool = False

    @property
    def definition(self) -> tuple[str, int, int, str, str | None]:
        return self.play, self.input, self.every_s, self.missed, self.org

    def fires(self, now: float) -> tuple[list[float], float]:
        """What fires of it now that it is due, and when it fires next."""
        missed = [self.next + self.every_s * n for n in range(int((now - self.next) // self.every_s) + 1)]
        fires = missed if self.missed == "all" else missed[-1:]
        if self.missed == "skip":
            fires = [moment for moment in fires if now - moment <= MISSED_AFTER_S]
        return fires, missed[-1] + self.every_s


@attrs.define
class FireModel:
    """One fire: the run that it has now, and those that were lost before."""

    run_id: str
    lost: list[str] = attrs.field(factory=list)
