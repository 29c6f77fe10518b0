"""What becomes of an attempt whose play has failed: tried again, deferred, or the end of its run.

Owns that decision and the payload that says why. It never settles anything, and knows nothing of the database.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import TypeVar

import attrs

from actors.core import leaves
from runtime.codec import error_record
from runtime.plays import Play
from sql.errors import Deferral, DependencyUnavailable, Fatal, PayloadRefused, Retry, StepFailed

# Runs that were deferred together do not come back together, and none comes before it was told to.
_DEFERRAL_SPREAD = 0.2

T = TypeVar("T", bound=BaseException)


@attrs.frozen(kw_only=True)
class Verdict:
    """How an attempt is to be settled, in the words of ``sql.settle.Settlement``."""

    outcome: str
    payload: str
    delay_s: float = 0.0
    outage_max_s: float | None = None
    overdue: str = "{}"


def judge(play: Play, failure: BaseException, failures: int, *, outage_max_s: float) -> Verdict:
    """The verdict on what a play raised after ``failures`` earlier ones.

    Of an exception group every leaf counts: one that is final ends the run, and only a group of deferrals is one.
    ``outage_max_s`` is for plays without their own.
    """
    found = leaves(failure)
    deferrals = _of_type(found, Deferral)
    if len(deferrals) == len(found):
        bound = outage_max_s if play.outage_max_s is None else play.outage_max_s
        return _deferred(failure, failures, deferrals, bound)
    payload = json.dumps({"error": error_record(failure), "failures": failures + 1})
    final = bool(_of_type(found, (Fatal, PayloadRefused, *play.final)))
    final = final or any(leaf.final for leaf in _of_type(found, StepFailed))
    if failures >= play.retries or final:
        return Verdict(outcome="failed", payload=payload)
    asked = [leaf.after for leaf in _of_type(found, Retry) if leaf.after is not None]
    return Verdict(outcome="retried", payload=payload, delay_s=max(asked, default=backoff_s(play, failures)))


def backoff_s(play: Play, failures: int) -> float:
    """Seconds until the next try after ``failures`` earlier ones, less a random part by ``backoff_jitter``."""
    # The exponent is capped: a float overflows long after backoff_max_s is reached.
    full = min(play.backoff_max_s, play.backoff_s * play.backoff_factor ** min(failures, 64))
    return full * (1.0 - play.backoff_jitter * random.random())


def _deferred(
    failure: BaseException, failures: int, deferrals: Sequence[Deferral], outage_max_s: float
) -> Verdict:
    outages = _of_type(deferrals, DependencyUnavailable)
    record = error_record(failure)
    error = {"kind": (outages or deferrals)[0].kind, **record, "traceback": None}
    delay_s = max(deferral.retry_after for deferral in deferrals)
    delay_s *= 1.0 + _DEFERRAL_SPREAD * random.random()
    if not outages:
        return Verdict(outcome="deferred", payload=json.dumps({"error": error}), delay_s=delay_s)
    error["dependency"] = outages[0].dependency
    over = f"{record['message']}; the outage has lasted longer than outage_max_s={outage_max_s:g}"
    return Verdict(
        outcome="deferred",
        payload=json.dumps({"error": error}),
        delay_s=delay_s,
        outage_max_s=outage_max_s,
        overdue=json.dumps({"error": {**error, "message": over}, "failures": failures + 1}),
    )


def _of_type(found: Sequence[BaseException], kinds: type[T] | tuple[type[T], ...]) -> list[T]:
    return [leaf for leaf in found if isinstance(leaf, kinds)]
