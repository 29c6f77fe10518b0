"""Cron lines, time zones and intervals: when a schedule fires.

Owns the arithmetic of fire times, the rules of daylight saving time among it, which are those of cronsim: of a cron
line with five fields whose minute and hour both do not start with ``*``, a time that the clock skips fires right after
the gap, and a time that comes twice fires at its first coming. Everything else (wildcards, lines with seconds) follows
the clock as it goes: skipped times do not fire, repeated ones fire each time.

It never looks at a clock. Every moment is a datetime with a time zone; what it answers is in UTC, in whole seconds.
"""

from __future__ import annotations

import itertools
import zoneinfo
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

import attrs
import cronsim

from sql.errors import InputRefused

_LONGEST_SHIFT = timedelta(hours=2)


@attrs.frozen
class Timing:
    """When a schedule fires: by a cron line in a time zone, or every so many seconds."""

    cron: str | None
    every_s: int | None
    timezone: str

    def after(self, moment: datetime) -> datetime:
        """The first fire after ``moment``; an interval begins there, at the next whole second.

        Raises InputRefused naming ``cron`` or ``timezone`` when they cannot be read or never fire.
        """
        if self.every_s is not None:
            whole = moment.astimezone(UTC).replace(microsecond=0)
            return whole + timedelta(seconds=self.every_s + (moment.microsecond > 0))
        for found in self._forward(moment):
            return found
        raise InputRefused("cron", f"{self.cron!r} does not fire within 50 years")

    def fires(self, first: datetime, now: datetime, most: int) -> list[datetime]:
        """The fires from ``first``, which is one, up to ``now``, oldest first; of more than ``most`` the latest."""
        first = first.astimezone(UTC)
        if self.every_s is not None:
            step = timedelta(seconds=self.every_s)
            count = (now - first) // step + 1
            return [first + step * number for number in range(max(0, count - most), count)]
        found = [first]
        for moment in self._forward(first):
            if moment > now:
                return found
            found.append(moment)
            if len(found) > most:  # how many there are may take years to count: go back from the end instead
                break
        return list(itertools.islice(self._backward(now), most))[::-1]

    def next_after(self, last: datetime, now: datetime) -> datetime:
        """The first fire after ``now``; ``last`` is the latest up to then."""
        if self.every_s is not None:
            return last.astimezone(UTC) + timedelta(seconds=self.every_s)
        return self.after(now)

    def _forward(self, start: datetime) -> Iterator[datetime]:
        """Fires after ``start``, each once: several times in a gap are one, and a time does not come again."""
        last = start
        for moment in self._simulation(start.astimezone(zone(self.timezone)), reverse=False):
            found = moment.astimezone(UTC)
            if found > last:
                last = found
                yield found

    def _backward(self, end: datetime) -> Iterator[datetime]:
        """Fires up to ``end``, latest first."""
        last = end + timedelta(microseconds=1)
        # In an hour that comes twice a simulation that begins in the second one would not see the first.
        start = (end + _LONGEST_SHIFT).astimezone(zone(self.timezone))
        for moment in self._simulation(start, reverse=True):
            found = moment.astimezone(UTC)
            if found < last:
                last = found
                yield found

    def _simulation(self, start: datetime, *, reverse: bool) -> Iterator[datetime]:
        assert self.cron is not None
        try:
            return cronsim.CronSim(self.cron, start, reverse=reverse)
        except cronsim.CronSimError as exc:
            raise InputRefused("cron", f"{self.cron!r} is no cron line: {str(exc).lower()}") from exc


def zone(name: str) -> tzinfo:
    """The time zone of an IANA name. Raises InputRefused."""
    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, ValueError, OSError) as exc:  # the name may be a path, a folder, or not even text
        raise InputRefused("timezone", f"{name!r} is not a time zone as in 'Europe/Berlin'") from exc
