"""Run ids and the checks at the door."""

from __future__ import annotations

import os
import time
import uuid
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from runtime import ids
from sql.errors import InputRefused


def test_a_new_run_id_is_a_version_7_uuid_of_this_moment() -> None:
    before = time.time_ns() // 1_000_000
    made = uuid.UUID(ids.new_run_id())
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert before <= made.int >> 80 <= time.time_ns() // 1_000_000 + 1_000
    assert ids.check_run_id(str(made)) == str(made)


def test_run_ids_rise_and_never_repeat() -> None:
    made = [ids.new_run_id() for _ in range(20_000)]
    assert made == sorted(set(made))


@pytest.mark.parametrize("jump_ms", [-86_400_000, 0, 1])
def test_run_ids_rise_when_the_clock_does_not(monkeypatch: pytest.MonkeyPatch, jump_ms: int) -> None:
    source = ids._Uuid7()
    start = time.time_ns()
    moments = iter([start, *[start + jump_ms * 1_000_000] * 1_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(moments))
    made = [source.next() for _ in range(1_001)]
    assert made == sorted(set(made))


def test_a_counter_that_runs_over_continues_in_the_next_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ids._Uuid7()
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_000_000_000_000)
    monkeypatch.setattr(os, "urandom", lambda count: b"\xff" * count)
    source.next()
    source._last |= (1 << 74) - 1
    before, after = (uuid.UUID(source.next()) for _ in range(2))
    assert before < after
    assert (before.version, before.int >> 80) == (7, 1_700_000_000_001)


def test_a_forked_child_does_not_repeat_its_parents_ids() -> None:
    ids.new_run_id()
    source, twin = ids._Uuid7(), ids._Uuid7()
    source.next()
    twin._last = source._last
    twin.reset()
    assert twin._last == 0
    assert source.next() != twin.next()


@pytest.mark.parametrize("value", ["a", "A-Z.a_z:0", "x" * 128])
def test_good_run_ids(value: str) -> None:
    assert ids.check_run_id(value) == value


@pytest.mark.parametrize("value", ["", "x" * 129, "a b", "a\n", "a\x00", "ä", "a/b", "\ud800", None, 5, b"a"])
def test_bad_run_ids_are_refused_with_the_rule(value: Any) -> None:
    with pytest.raises(InputRefused) as caught:
        ids.check_run_id(value)
    assert caught.value.field == "run_id"
    assert "must be" in caught.value.reason
    str(caught.value).encode()


def test_a_long_bad_run_id_is_cut_in_the_refusal() -> None:
    with pytest.raises(InputRefused, match=r"xxx…'$"):
        ids.check_run_id("x" * 1_000)


@pytest.mark.parametrize("check", [ids.check_idempotency_key, ids.check_org_id])
def test_keys_and_organisations(check: Any) -> None:
    assert check(None) is None
    assert check("ä" * 255) == "ä" * 255
    for bad in ["", "x" * 256, "a\x00", "\ud800", 5, b"a"]:
        with pytest.raises(InputRefused) as caught:
            check(bad)
        assert caught.value.field in ("idempotency_key", "org_id")


def test_labels() -> None:
    given = {"k" * 64: "v" * 256}
    checked = ids.check_labels(given)
    assert checked == given
    assert checked is not given
    assert ids.check_labels(None) is None
    assert len(ids.check_labels({f"k{n}": "v" for n in range(32)}) or {}) == 32


@pytest.mark.parametrize(
    ("value", "field", "word"),
    [
        ([("a", "b")], "labels", "dict"),
        ({f"k{n}": "v" for n in range(33)}, "labels", "at most 32"),
        ({1: "a"}, "labels (a key)", "str"),
        ({"": "a"}, "labels (a key)", "1 to 64"),
        ({"k" * 65: "a"}, "labels (a key)", "1 to 64"),
        ({"a\x00": "a"}, "labels (a key)", "NUL"),
        ({"team": 5}, "labels['team']", "str"),
        ({"team": "x" * 257}, "labels['team']", "1 to 256"),
        ({"team": "\x00"}, "labels['team']", "NUL"),
        ({"team": "\udfff"}, "labels['team']", "surrogate"),
    ],
)
def test_bad_labels_are_refused_by_name(value: Any, field: str, word: str) -> None:
    with pytest.raises(InputRefused) as caught:
        ids.check_labels(value)
    assert caught.value.field == field
    assert word in caught.value.reason


def test_priority() -> None:
    assert [ids.check_priority(value) for value in range(-2, 3)] == [-2, -1, 0, 1, 2]
    for bad in [-3, 3, True, 1.0, "1", None, 10**9999]:
        with pytest.raises(InputRefused) as caught:
            ids.check_priority(bad)
        assert caught.value.field == "priority"
        assert "from -2 to 2" in caught.value.reason


def test_when() -> None:
    east = datetime(2030, 1, 1, 3, tzinfo=timezone(timedelta(hours=3)))
    assert ids.check_when(None, None) == (None, None)
    assert ids.check_when(0, None) == (0.0, None)
    assert ids.check_when(10 * 365 * 86_400, None) == (315_360_000.0, None)
    assert ids.check_when(None, east) == (None, datetime(2030, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    ("delay", "at", "field"),
    [
        (-1, None, "delay"),
        (float("nan"), None, "delay"),
        (float("inf"), None, "delay"),
        pytest.param(10**9999, None, "delay", id="more than a float holds"),
        (11 * 366 * 86_400, None, "delay"),
        (True, None, "delay"),
        ("5", None, "delay"),
        (timedelta(1), None, "delay"),
        (1, datetime(2030, 1, 1, tzinfo=UTC), "delay"),
        (None, datetime(2030, 1, 1), "at"),
        (None, "2030-01-01", "at"),
        (None, 5, "at"),
        (None, datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), "at"),
    ],
)
def test_a_bad_time_is_refused_by_name(delay: Any, at: Any, field: str) -> None:
    with pytest.raises(InputRefused) as caught:
        ids.check_when(delay, at)
    assert caught.value.field == field
