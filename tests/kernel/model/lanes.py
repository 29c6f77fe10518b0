"""The reference of lanes: one run's facts, the cursor over them, and the lease of whoever delivers."""

from __future__ import annotations

import attrs

NEVER = float("inf")


@attrs.define
class LaneModel:
    """One run's lane: the facts' types, the cursor and the lease."""

    due: float
    types: list[str] = attrs.field(factory=list)
    acked: int = 0
    frozen: int | None = None
    attempts: int = 0
    token: int | None = None
    expires: float | None = None
    error: str | None = None
    generation: int = 0
    quiet: set[int] = attrs.field(factory=set)  # facts without effect
    alone: int | None = None  # the terminal, if it goes elsewhere

    @property
    def last(self) -> int:
        return len(self.types)

    @property
    def elsewhere(self) -> bool:
        """Whether it stands right before a terminal that goes elsewhere."""
        return self.acked + 1 == self.alone

    @property
    def passed(self) -> int:
        """How many facts right before the cursor its receiver may not have: those without effect, or all of them."""
        if self.elsewhere:
            return self.acked
        return next(n for n in range(self.acked + 1) if self.acked - n not in self.quiet)

    @property
    def pending(self) -> bool:
        return self.acked < self.last

    def append(self, now: float, *types: str) -> None:
        if types and not self.pending:
            self.due = now
        self.types += types

    def claimable(self, now: float) -> bool:
        return (
            self.pending
            and self.error is None
            and self.due <= now
            and (self.expires is None or self.expires <= now)
        )

    def freeze(self, prefix: int) -> int:
        end = min(self.last, self.acked + prefix)
        if self.alone is not None and not self.elsewhere:
            end = min(end, self.alone - 1)
        return self.frozen or end

    def pass_quiet(self) -> None:
        while self.frozen is None and self.acked + 1 in self.quiet:
            self.acked += 1

    def claim(self, now: float, token: int, prefix: int, lease: float) -> None:
        self.frozen = self.freeze(prefix)
        self.attempts += 1
        self.token, self.expires, self.due = token, now + lease, now + lease

    def held_by(self, token: int) -> bool:
        return self.token == token and self.expires is not None

    def acknowledge(self, now: float, token: int, through: int, prefix: int, lease: float) -> str:
        if self.held_by(token) and self.acked < through and self.frozen == through:
            self.acked, self.frozen, self.attempts, self.expires, self.due = through, None, 0, None, now
            self.pass_quiet()
            if prefix and self.pending and not self.elsewhere:
                self.claim(now, token, prefix, lease)
        elif self.acked < through:
            return "lost"
        return "acked"

    def hand_back(self, now: float, token: int, ending: str, delay: float) -> str:
        if self.token != token:
            return "lost"
        if self.expires is not None:
            blocked = ending == "blocked"
            self.expires, self.error = None, "rejected" if blocked else None
            self.due = NEVER if blocked else now + delay
            if ending == "unsent":
                self.frozen = None if self.attempts == 1 else self.frozen
                self.attempts -= 1
            elif ending == "given_up":
                self.attempts = max(1, self.attempts - 1)
        return "done"

    def retry(self, now: float) -> None:
        self.error, self.due, self.attempts, self.expires = None, now, 1, None

    def skip(self, now: float, seq: int) -> None:
        self.error, self.due, self.attempts, self.expires = None, now, 0, None
        self.acked, self.frozen, self.generation = seq, None, self.generation + 1

    def renew(self, now: float, token: int, lease: float) -> str:
        if not self.held_by(token):
            return "lost"
        self.expires = max(self.expires or now, now + lease)
        self.due = max(self.due, now + lease)
        return "renewed"

    def deliver(self, now: float, prefix: int) -> None:
        self.acked = self.freeze(prefix)
        self.frozen, self.attempts, self.expires, self.due = None, 0, None, now
