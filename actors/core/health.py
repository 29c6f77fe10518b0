"""What each actor's condition is, for readiness, metrics and people.

Owns plain records, written by the supervisor and by the actor itself through its life. It never decides
anything.
"""

from __future__ import annotations

import time
from typing import Any

import attrs

STATES = ("starting", "ready", "outage", "restarting", "stopping", "stopped", "failed")


@attrs.define
class ActorHealth:
    """One actor's condition. ``since`` and ``last_error_at`` are Unix times, ``last_beat`` is monotonic.

    States: ``starting`` (a life has begun, not ready yet), ``ready``, ``outage`` (waits for the database),
    ``restarting`` (waits out its backoff after a crash), ``stopping``, ``stopped``, ``failed`` (given up).
    """

    name: str
    state: str = "starting"
    restarts: int = 0
    last_error: str | None = None
    last_error_at: float | None = None
    since: float = attrs.field(factory=time.time)
    last_beat: float = attrs.field(factory=time.monotonic)

    @property
    def ready(self) -> bool:
        """Whether the actor is at work."""
        return self.state == "ready"

    def become(self, state: str) -> None:
        """Change the state and remember since when."""
        assert state in STATES, state
        if state != self.state:
            self.state = state
            self.since = time.time()

    def failed_with(self, error: BaseException) -> None:
        """Remember the last error, in one line of at most 500 characters."""
        text = f"{type(error).__name__}: {error}".replace("\n", " ")
        self.last_error = text[:500]
        self.last_error_at = time.time()

    def beat(self) -> None:
        """Say that the loop turned."""
        self.last_beat = time.monotonic()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "state": self.state,
            "since": self.since,
            "restarts": self.restarts,
            "last_error": self.last_error,
            "last_error_at": self.last_error_at,
            "beat_age_s": round(time.monotonic() - self.last_beat, 3),
        }
