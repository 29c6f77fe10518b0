"""When schedules fire: cron lines, intervals, and daylight saving time beside another library's answers."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import crondst
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.cron import Timing, zone
from runtime.schedules import check_moment, check_name, check_timing
from sql.errors import InputRefused

# The days around both changes of 2026, by zone.
CHANGES = {
    "Europe/Berlin": ("2026-03-28", "2026-10-24"),
    "America/New_York": ("2026-03-07", "2026-10-31"),
    "Australia/Sydney": ("2026-10-03", "2026-04-04"),
}
LINES = (
    "30 2 * * *",
    "30 1 * * *",
    "0 3 * * *",
    "0,30 2 * * *",
    "5 2,3 * * *",
    "0 1-4 * * *",
    "*/15 * * * *",
    "0 * * * *",
    "15 */2 * * *",
    "59 23 * * 6",
    "0 0 1 * *",
)


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def ours(line: str, name: str, start: datetime, end: datetime) -> list[datetime]:
    timing, found = Timing(line, None, name), [start]
    while found[-1] <= end:
        found.append(timing.after(found[-1]))
    return found[1:-1]


def theirs(line: str, name: str, start: datetime, end: datetime) -> list[datetime]:
    found = crondst.CronDst(line).iter(start.astimezone(ZoneInfo(name)))
    until = itertools.takewhile(lambda moment: moment <= end, (moment.astimezone(UTC) for moment in found))
    # Where several times fall into a gap it tells each of them; a fire has one.
    return sorted(set(until))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("name", "day"), [(name, day) for name, days in CHANGES.items() for day in days])
def test_both_changes_in_three_zones_as_another_library_says(name: str, day: str, line: str) -> None:
    start = datetime.fromisoformat(f"{day}T20:00").replace(tzinfo=ZoneInfo(name)).astimezone(UTC)
    end = start + timedelta(hours=34)
    assert ours(line, name, start, end) == theirs(line, name, start, end)


def test_a_skipped_time_fires_after_the_gap_and_a_repeated_one_at_its_first_coming() -> None:
    berlin = Timing("30 2 * * *", None, "Europe/Berlin")
    assert berlin.after(utc("2026-03-28T12:00")) == utc("2026-03-29T01:00")  # 03:00 local, for 02:30
    assert berlin.after(utc("2026-10-24T12:00")) == utc("2026-10-25T00:30")  # 02:30, summer time
    assert berlin.after(utc("2026-10-25T00:30")) == utc("2026-10-26T01:30")


@pytest.mark.parametrize(
    "moment", ["2026-10-25T00:31", "2026-10-25T01:00", "2026-10-25T01:29", "2026-10-25T01:31"]
)
def test_inside_the_repeated_hour_nothing_fires_in_the_past(moment: str) -> None:
    berlin = Timing("30 2 * * *", None, "Europe/Berlin")
    assert berlin.after(utc(moment)) == utc("2026-10-26T01:30")
    assert berlin.fires(utc("2026-10-20T00:30"), utc(moment), 1) == [utc("2026-10-25T00:30")]


def test_with_seconds_the_clock_is_followed_as_it_goes() -> None:
    berlin = Timing("15 30 2 * * *", None, "Europe/Berlin")
    assert berlin.after(utc("2026-03-28T12:00")) == utc("2026-03-30T00:30:15")
    assert berlin.after(utc("2026-10-25T00:30:15")) == utc("2026-10-25T01:30:15")


lines = st.sampled_from(
    [*LINES, "0 12 29 2 *", "*/7 * * * 1-5", "10 */20 * * * *", "0 9 L * *", "0 9 * * MON#2"]
)
moments = st.datetimes(datetime(2024, 1, 1), datetime(2028, 1, 1), timezones=st.just(UTC))


@given(
    lines, st.sampled_from([*CHANGES, "UTC", "Asia/Kolkata"]), moments, st.integers(1, 40), st.integers(1, 40)
)
def test_going_back_from_the_end_finds_what_going_forward_finds(
    line: str, name: str, start: datetime, steps: int, most: int
) -> None:
    timing = Timing(line, None, name)
    forward = [timing.after(start)]
    for _ in range(steps):
        forward.append(timing.after(forward[-1]))
    for now in (forward[-1], forward[-1] + timedelta(milliseconds=1)):
        assert timing.fires(forward[0], now, most) == forward[-most:]
    assert timing.next_after(forward[-2], forward[-2]) == forward[-1]


@given(st.integers(1, 100_000), moments, st.integers(0, 3_000), st.integers(1, 100))
def test_intervals(every_s: int, first: datetime, count: int, most: int) -> None:
    timing, step = Timing(None, every_s, "UTC"), timedelta(seconds=every_s)
    now = first + step * count + timedelta(milliseconds=1)
    found = timing.fires(first, now, most)
    assert found == [first + step * n for n in range(count + 1)][-most:]
    assert timing.next_after(found[-1], now) == found[-1] + step
    begun = timing.after(first)
    assert begun.microsecond == 0
    assert step <= begun - first < step + timedelta(seconds=1)


@pytest.mark.parametrize(
    ("cron", "every_s", "timezone", "field", "says"),
    [
        (None, None, "UTC", "cron", "a cron line or every_s"),
        ("0 3 * * *", 60, "UTC", "cron", "not both"),
        ("0 3 * *", None, "UTC", "cron", "wrong number of fields"),
        ("61 3 * * *", None, "UTC", "cron", "bad minute"),
        ("0 0 30 2 *", None, "UTC", "cron", "bad day-of-month"),
        ("* * */20 * 1L", None, "UTC", "cron", "within 50 years"),
        ("@daily", None, "UTC", "cron", "wrong number of fields"),
        ("", None, "UTC", "cron", "1 to 255 characters"),
        ("\x00 3 * * *", None, "UTC", "cron", "bad minute"),
        (3, None, "UTC", "cron", "must be text"),
        ("0 3 * * *", None, "Europe/Atlantis", "timezone", "Europe/Atlantis"),
        ("0 3 * * *", None, "../../etc/passwd", "timezone", "not a time zone"),
        ("0 3 * * *", None, "Europe", "timezone", "not a time zone"),
        ("0 3 * * *", None, "", "timezone", "Europe/Berlin"),
        ("0 3 * * *", None, None, "timezone", "Europe/Berlin"),
        (None, 0, "UTC", "every_s", "from 1 to"),
        (None, 1.5, "UTC", "every_s", "whole number"),
        (None, True, "UTC", "every_s", "whole number"),
        (None, 60, "Europe/Berlin", "timezone", "goes with a cron line"),
    ],
)
def test_bad_timings_are_refused_by_name(
    cron: Any, every_s: Any, timezone: Any, field: str, says: str
) -> None:
    with pytest.raises(InputRefused, match=says) as caught:
        check_timing(cron, every_s, timezone)
    assert caught.value.field == field


def test_good_timings_are_kept_in_one_form() -> None:
    assert check_timing("0  3 *\t* mon", None, "Europe/Berlin") == Timing(
        "0 3 * * mon", None, "Europe/Berlin"
    )
    assert check_timing(None, 60, "UTC") == Timing(None, 60, "UTC")
    assert zone("UTC").utcoffset(None) == timedelta(0)


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 129, None, 3])
def test_bad_names_are_refused(name: Any) -> None:
    with pytest.raises(InputRefused, match=r"^name: "):
        check_name(name)


@pytest.mark.parametrize("moment", [datetime(2026, 1, 1), "2026-01-01", None])
def test_moments_without_a_time_zone_are_refused(moment: Any) -> None:
    with pytest.raises(InputRefused, match=r"^fire_time: must be a datetime with a time zone"):
        check_moment("fire_time", moment)
