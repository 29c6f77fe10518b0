"""The reference of circuits: closed, open, half open with one probe."""

from __future__ import annotations

from collections.abc import Callable

import attrs

Fence = tuple[str, int]  # a run and its attempt


@attrs.define
class Probe:
    """A call that was let through a half-open circuit."""

    token: int
    fence: Fence
    until: float


@attrs.define
class CircuitModel:
    """One circuit. ``failures`` are the calls that failed, in a row."""

    threshold: int = 5
    open_s: float = 10.0
    open_max_s: float = 300.0
    state: str = "closed"
    openings: int = 0
    open_until: float | None = None
    failures: list[int] = attrs.field(factory=list)
    probe: Probe | None = None
    sent: list[Probe] = attrs.field(factory=list)  # probes that have not come back since it last closed

    def enter(
        self, now: float, token: int, fence: Fence, probe_s: float, lives: Callable[[Fence], bool]
    ) -> tuple[str, int, float | None]:
        """Answer, failures, retry_after_s."""
        if self.state == "closed":
            return "closed", len(self.failures), None
        assert self.open_until is not None
        probe = self.probe
        if self.open_until <= now and (probe is None or probe.until <= now or not lives(probe.fence)):
            probe = self.probe = Probe(token, fence, now + probe_s)
            self.state = "half_open"
            self.sent.append(probe)
        if probe is not None and probe.token == token:
            return "probe", 0, None
        if self.open_until > now:
            return "open", 0, self.open_until - now
        assert probe is not None
        return "open", 0, min(self.open_s, probe.until - now)

    def report(self, now: float, token: int, result: str) -> None:
        self.sent = [probe for probe in self.sent if probe.token != token]
        if self.state == "closed" and token not in self.failures:
            if result == "ok":
                self.failures = []
            elif result == "failed":
                self.failures.append(token)
                if len(self.failures) >= self.threshold:
                    self.open(now)
        elif self.state == "half_open" and self.probe is not None and self.probe.token == token:
            self.probe = None
            if result == "ok":
                self.close()
            elif result == "failed":
                self.open(now)

    def open(self, now: float) -> None:
        self.state, self.failures, self.probe = "open", [], None
        self.open_until = now + min(self.open_max_s, self.open_s * 2**self.openings)
        self.openings += 1

    def close(self) -> None:
        self.state, self.failures, self.probe = "closed", [], None
        self.openings, self.open_until, self.sent = 0, None, []
