"""Run ids, and the rules for everything a caller passes beside the payload.

Owns the generation of run ids and the checks at the door. It never looks at payloads (``codec`` does) and
never asks the database.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from runtime.codec import preview, quoted
from sql.errors import InputRefused
from sql.types import ON_CONFLICT, RUN_ID_PATTERN

MAX_DELAY_S = 10 * 366 * 86_400.0
MAX_KEY_CHARS = 255
MAX_RECEIVER_CHARS = 128
MAX_RUNNING = 1_000_000
LIMITS = ("org", "sandbox", "sandbox_org")
"""What has limits that operators set."""
MAX_STEP_KEY_CHARS = 255
MAX_MAP_KEY_CHARS = 240  # the index of an item follows
MAX_LABELS = 32
MAX_LABEL_KEY_CHARS = 64
MAX_LABEL_VALUE_CHARS = 256
MIN_PRIORITY, MAX_PRIORITY = -2, 2

_RUN_ID = re.compile(RUN_ID_PATTERN)
# A UUIDv7, or the id of a child.
_DATED = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[78][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_RANDOM_BITS = 74
_STEP_BITS = 32


class _Uuid7:
    """UUIDs of version 7 (RFC 9562, 5.7), strictly rising within the process.

    The 74 bits below the timestamp start at random in each millisecond and are counted up by a random step
    within it (6.2, method 2). A clock that goes back, or a counter that runs over, continues from the last
    id, so that ids may be ahead of the clock but never behind each other.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the last id. A forked child calls it, so that it does not count on from its parent's."""
        self._lock = threading.Lock()
        self._last = 0
        # Unique, not secret: one draw from the system seeds a generator that costs nothing per id.
        self._bits = random.Random(os.urandom(32)).getrandbits

    def next(self) -> str:
        fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS
        # The top random bit starts as zero: room for the counter.
        fresh |= self._bits(_RANDOM_BITS - 1)
        with self._lock:
            if fresh >> _RANDOM_BITS <= self._last >> _RANDOM_BITS:
                fresh = self._last + 1 + self._bits(_STEP_BITS)
            self._last = fresh
        stamp, low = fresh >> _RANDOM_BITS, fresh & ((1 << _RANDOM_BITS) - 1)
        rand_a, rand_b = low >> 62, low & ((1 << 62) - 1)
        text = f"{(stamp << 80) | (7 << 76) | (rand_a << 64) | (2 << 62) | rand_b:032x}"
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


_uuid7 = _Uuid7()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_uuid7.reset)


def new_run_id() -> str:
    """A new run id: a UUIDv7 as text, greater than every earlier one of this process."""
    return _uuid7.next()


def child_run_id(parent_id: str, key: str) -> str:
    """The run id of the child that a run starts under ``key``: always the same, a UUID of version 8 (RFC 9562).

    It begins with its parent's timestamp, if that has one, so that a family lies together in every index.
    """
    digest = hashlib.sha256(f"{parent_id}\x1f{key}".encode()).hexdigest()
    stamp = parent_id.replace("-", "")[:12] if _DATED.fullmatch(parent_id) else digest[:12]
    return str(uuid.UUID(f"{stamp}8{digest[13:16]}{'89ab'[int(digest[16], 16) % 4]}{digest[17:32]}"))


def _checked_text(field: str, value: Any, most: int) -> str:
    if not isinstance(value, str):
        raise InputRefused(field, f"must be str, not {type(value).__name__}")
    if not 1 <= len(value) <= most:
        raise InputRefused(field, f"must have 1 to {most} characters, not {len(value)}")
    if "\x00" in value:
        raise InputRefused(field, "must not hold a NUL character")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputRefused(field, "must not hold a lone surrogate") from None
    return value


def check_run_id(value: Any) -> str:
    """``value``, or InputRefused naming the rule."""
    if not isinstance(value, str):
        raise InputRefused("run_id", f"must be str, not {type(value).__name__}")
    if not _RUN_ID.fullmatch(value):
        raise InputRefused(
            "run_id", f"must be 1 to 128 characters of A-Z a-z 0-9 . _ : -, not {quoted(value, 150)}"
        )
    return value


def check_idempotency_key(value: Any) -> str | None:
    """``value`` (None: no key), or InputRefused: 1 to 255 characters, no NUL."""
    return None if value is None else _checked_text("idempotency_key", value, MAX_KEY_CHARS)


def check_concurrency_key(value: Any) -> str | None:
    """``value`` (None: no key), or InputRefused: 1 to 255 characters, no NUL."""
    return None if value is None else _checked_text("concurrency_key", value, MAX_KEY_CHARS)


def check_limit(value: Any) -> int | None:
    """``value`` (None: no limit), or InputRefused: a whole number from 0 to 1000000."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_RUNNING:
        raise InputRefused(
            "max_running", f"must be an int from 0 to {MAX_RUNNING}, or None, not {preview(value)}"
        )
    return int(value)


def check_limit_of(kind: Any, name: Any) -> None:
    """InputRefused unless ``kind`` is one of ``LIMITS`` and ``name`` is of an organisation or a provider ("": all)."""
    if not isinstance(kind, str) or kind not in LIMITS:
        raise InputRefused(
            "kind", f"must be one of {', '.join(LIMITS)}, not {preview(kind)}; plays bring their own limits"
        )
    if name is None:
        raise InputRefused("name", "must be str, not NoneType")
    if kind != "sandbox":
        check_org_id(name)
    elif name != "":
        _checked_text("name", name, MAX_KEY_CHARS)


def check_event_name(value: Any) -> str:
    """``value``, or InputRefused: 1 to 255 characters, no NUL."""
    return _checked_text("name", value, MAX_KEY_CHARS)


def check_event_id(value: Any) -> str | None:
    """``value`` (None: no id of the caller's own), or InputRefused: 1 to 255 characters, no NUL."""
    return None if value is None else _checked_text("event_id", value, MAX_KEY_CHARS)


def check_shared_name(name: Any) -> str:
    """The name of a rate scope or of a dependency. Raises InputRefused."""
    if not isinstance(name, str) or not _RUN_ID.fullmatch(name):
        raise InputRefused("name", f"must be 1 to 128 of A-Z a-z 0-9 . _ : -, not {preview(name)}")
    return name


def check_org_id(value: Any) -> str | None:
    """``value`` (None: no organisation), or InputRefused: 1 to 255 characters, no NUL."""
    return None if value is None else _checked_text("org_id", value, MAX_KEY_CHARS)


def check_receiver(field: str, value: Any) -> str | None:
    """``value`` (None: no receiver of its own), or InputRefused naming ``field``: 1 to 128 characters, no NUL."""
    return None if value is None else _checked_text(field, value, MAX_RECEIVER_CHARS)


def check_choice(field: str, value: Any, allowed: Sequence[str]) -> str | None:
    """``value`` (None: not said), or InputRefused naming ``field`` and what is allowed."""
    if value is not None and not (isinstance(value, str) and value in allowed):
        raise InputRefused(field, f"must be one of {', '.join(allowed)}, not {preview(value)}")
    return value


def check_unique(key: Any, for_s: Any, on_conflict: Any) -> dict[str, Any] | None:
    """What a unique key asks for, None without one, or InputRefused naming the argument.

    ``for_s`` is None (until the run has ended) or a number of seconds, finite, above 0 and at most ten years.
    """
    choice = check_choice("on_conflict", on_conflict, ON_CONFLICT)
    if key is None:
        if for_s is not None or choice is not None:
            raise InputRefused("unique_key", "unique_for_s and on_conflict are of a unique key: give one")
        return None
    unique: dict[str, Any] = {
        "key": _checked_text("unique_key", key, MAX_KEY_CHARS),
        "on_conflict": choice or "reject",
    }
    if for_s is not None:
        number = isinstance(for_s, (int, float)) and not isinstance(for_s, bool)
        if not number or not 0 < for_s <= MAX_DELAY_S:
            raise InputRefused(
                "unique_for_s", f"must be above 0 and at most 10 years, in seconds, not {preview(for_s)}"
            )
        unique["for_s"] = float(for_s)
    return unique


def check_step_key(value: Any, *, most: int = MAX_STEP_KEY_CHARS) -> str:
    """``value``, or InputRefused: text of 1 to ``most`` printable characters, unique among the steps of its run."""
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
        shown = f"{len(value)} characters" if isinstance(value, str) and len(value) > most else preview(value)
        raise InputRefused("key", f"must be text of 1 to {most} printable characters, not {shown}")
    return value


def check_labels(value: Any) -> dict[str, str] | None:
    """A copy of ``value`` (None: no labels), or InputRefused naming the label."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InputRefused("labels", f"must be a dict of str to str, not {type(value).__name__}")
    if len(value) > MAX_LABELS:
        raise InputRefused("labels", f"at most {MAX_LABELS} labels, not {len(value)}")
    checked: dict[str, str] = {}
    for key, text in value.items():
        name = _checked_text("labels (a key)", key, MAX_LABEL_KEY_CHARS)
        checked[name] = _checked_text(f"labels[{name!a}]", text, MAX_LABEL_VALUE_CHARS)
    return checked


def check_priority(value: Any) -> int:
    """``value``, or InputRefused: a whole number from -2 (last) to 2 (first)."""
    if not isinstance(value, int) or isinstance(value, bool) or not MIN_PRIORITY <= value <= MAX_PRIORITY:
        allowed = f"an int from {MIN_PRIORITY} to {MAX_PRIORITY}"
        raise InputRefused("priority", f"must be {allowed}, not {preview(value)}")
    return int(value)


def check_when(delay: Any, at: Any) -> tuple[float | None, datetime | None]:
    """``(delay in seconds, at in UTC)``, at most one of them set, or InputRefused naming the argument.

    ``delay`` is finite, not negative and at most ten years; ``at`` is a timezone-aware datetime (one in the
    past means now).
    """
    if delay is not None and at is not None:
        raise InputRefused("delay", "delay and at exclude each other")
    if delay is not None:
        return _checked_delay(delay), None
    if at is not None:
        return None, _checked_at(at)
    return None, None


def _checked_delay(delay: Any) -> float:
    if isinstance(delay, bool) or not isinstance(delay, (int, float)):
        raise InputRefused("delay", f"must be a number of seconds, not {type(delay).__name__}")
    # Compare before converting: an int may be too large for a float.
    if not 0 <= delay <= MAX_DELAY_S or not math.isfinite(delay):
        raise InputRefused("delay", "must be from 0 to 10 years, in seconds, and finite")
    return float(delay)


def _checked_at(at: Any) -> datetime:
    if not isinstance(at, datetime):
        raise InputRefused("at", f"must be a datetime, not {type(at).__name__}")
    if at.tzinfo is None or at.utcoffset() is None:
        raise InputRefused("at", "must be timezone-aware, for example datetime.now(UTC)")
    try:
        return at.astimezone(UTC)
    except OverflowError:
        raise InputRefused("at", "is outside the years 1 to 9999 in UTC") from None
