"""Door of the concern performance: what a terminal says of how its run went.

Owns how that is read. It measures nothing: the transition that ends the run does. What another version has stored and
this one cannot read is dropped here, with a word why, and never passed on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sql.types import Performance, Usage

INVALID_USAGE = "invalid_usage"
INVALID_PERFORMANCE = "invalid_performance"


def performance_of(terminal: Mapping[str, Any] | None) -> tuple[Performance | None, str | None]:
    """Of a terminal's payload: how the run went, and what is missing of that; both None where nothing was asked for."""
    stored = (terminal or {}).get("performance")
    said = (terminal or {}).get("performance_unavailable")
    reason = said if said == INVALID_USAGE else None
    if stored is None:
        return None, reason
    try:
        return _performance(stored), reason
    except (TypeError, ValueError):
        return None, reason or INVALID_PERFORMANCE


def _performance(stored: Any) -> Performance:
    if not isinstance(stored, Mapping):
        raise TypeError
    usage = stored.get("usage")
    return Performance(
        total_s=_amount(stored.get("total_s")),
        queued_s=None if stored.get("queued_s") is None else _amount(stored["queued_s"]),
        host_s=_amount(stored.get("host_s")),
        sandbox_s=_amount(stored.get("sandbox_s")),
        attempts=int(_amount(stored.get("attempts"))),
        usage=None if usage is None else _usage(usage),
    )


def _usage(stored: Any) -> Usage:
    if not isinstance(stored, Mapping):
        raise TypeError
    return Usage(_amount(stored.get("cpu_s")), int(_amount(stored.get("peak_memory_bytes"))))


def _amount(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError
    return float(value)
