"""The reference of rate scopes: a bucket of units, slots in the order in which they were asked for, one probe."""

from __future__ import annotations

from collections.abc import Callable

import attrs

Fence = tuple[str, int]  # a run and its attempt


@attrs.define
class HoldModel:
    """A slot: reserved, and started once it is granted. ``slot`` and ``spent`` stand on the scope's clock."""

    number: int
    token: int
    fence: Fence
    cost: float
    slot: float
    spent: float
    started: float | None = None


@attrs.frozen
class Grant:
    """What was granted, for the budget that no window of time may exceed."""

    at: float
    token: int
    cost: float


@attrs.define
class RateModel:
    """One scope. Its clock is the time less ``lag``, and stands still while it is paused."""

    per_s: float | None
    burst: float
    most: int | None  # in flight
    spent: float
    started: float
    lag: float = 0.0
    used: float = 0.0
    paused: float | None = None
    blocked: float | None = None
    probe: int | None = None
    probe_until: float | None = None
    holds: dict[int, HoldModel] = attrs.field(factory=dict)
    numbers: int = 0
    grants: list[Grant] = attrs.field(factory=list)  # since the scope was last changed, probes apart

    @property
    def unit(self) -> float:
        return 0.0 if self.per_s is None else 1.0 / self.per_s

    def clock(self, now: float) -> float:
        return (now if self.paused is None else self.paused) - self.lag

    def in_flight(self, lives: Callable[[Fence], bool]) -> int:
        return sum(hold.started is not None and lives(hold.fence) for hold in self.holds.values())

    def ask(
        self,
        now: float,
        token: int,
        fence: Fence,
        cost: float,
        ahead_s: float,
        probe_s: float,
        lives: Callable[[Fence], bool],
    ) -> tuple[str, float | None]:
        """Answer and wait_s of one call for one slot."""
        clock = self.clock(now)
        mine, known = self.holds.get(token), self.probe
        news = mine is None
        if mine is None:
            free_at = max(self.spent, clock)
            self.spent = free_at + cost * self.unit
            slot = max(clock, free_at + (cost - self.burst) * self.unit)
            self.numbers += 1
            mine = self.holds[token] = HoldModel(self.numbers, token, fence, cost, slot, self.spent)
        probing = self.probe in self.holds and lives(self.holds[self.probe or 0].fence)
        if self.paused is not None and (not probing or (self.probe_until or 0.0) <= now):
            self.probe = None
        free = len(self.holds) if self.most is None else self.most - self.in_flight(lives)
        if self.paused is not None:
            shut = self.probe is not None or now < (self.blocked or 0.0)
            free = 0 if shut else min(1, free)
        before = mine.started
        ready = self.start(now, mine, clock, ahead_s, max(free, 0), lives)
        if mine.started == before and not news:
            self.probe = known  # nothing was written
        elif self.probe == token and before is None:
            self.probe_until = now + probe_s
        if mine.started is not None:
            return "granted", max(mine.started - now, 0.0)
        due = max(mine.slot, ready.get(token, mine.slot))
        waits = self.paused is None and due > clock + ahead_s
        if self.blocked is not None and now < self.blocked:
            return "held", self.blocked - now
        return ("wait", due - clock) if waits else ("held", None)

    def start(
        self,
        now: float,
        mine: HoldModel,
        clock: float,
        ahead_s: float,
        free: int,
        lives: Callable[[Fence], bool],
    ) -> dict[int, float]:
        """Start this one, if it is its turn; when each of those whose turn it is may start, by token."""
        if self.paused is not None:
            if mine.started is None and free:
                mine.started = now
                self.charge(clock, mine)
                self.probe = mine.token
            return {}
        until = clock + ahead_s
        line = [mine] if self.most is None else list(self.holds.values())
        line = [hold for hold in line if hold.started is None and hold.slot <= until]
        if self.most is not None:
            line = [hold for hold in line if lives(hold.fence)]
        line.sort(key=lambda hold: (hold.slot, hold.number))
        ready, at, full = {}, clock, self.started
        for hold in line[:free]:
            at = max(at, hold.slot, full + (hold.cost - self.burst) * self.unit)
            ready[hold.token] = at
            full = max(full, at - self.over(hold)) + hold.cost * self.unit
            if hold is mine and at <= until:
                mine.started = now + (at - clock)
                self.charge(at, mine)
                self.grants.append(Grant(mine.started, mine.token, mine.cost))
        return ready

    def over(self, hold: HoldModel) -> float:
        return max(hold.cost - self.burst, 0.0) * self.unit

    def charge(self, at: float, hold: HoldModel) -> None:
        self.started = max(self.started, at - self.over(hold)) + hold.cost * self.unit
        self.used += hold.cost

    def tell(self, now: float, token: int, result: str, retry_after_s: float) -> bool:
        """One report; whether somebody waits for what it may have set free."""
        hold = self.holds.get(token)
        opened = False
        if result == "unused" and hold is not None:
            self.unused(now, hold)
        if result == "refused":
            self.paused = now if self.paused is None else self.paused
            self.blocked = max(self.blocked or 0.0, now + retry_after_s)
        if self.probe == token:
            self.probe = self.probe_until = None
            if result == "done" and self.blocked is not None and self.blocked <= now:
                assert self.paused is not None
                self.lag += now - self.paused
                self.paused = self.blocked = None
                opened = True
        if result != "refused":
            self.holds.pop(token, None)
        return (opened or self.most is not None) and any(h.started is None for h in self.holds.values())

    def unused(self, now: float, hold: HoldModel) -> None:
        """What it had charged comes back, as far as time has not given it back."""
        del self.holds[hold.token]
        if hold.started is not None:
            self.used -= hold.cost
            since = (now if self.paused is None else self.paused) - hold.started
            charge = hold.cost * self.unit
            self.started -= min(charge, max(0.0, charge - self.over(hold) - since))
            self.grants = [grant for grant in self.grants if grant.token != hold.token]
        if hold.spent >= self.spent:
            self.spent -= hold.cost * self.unit

    def check_budget(self) -> None:
        """No window of time has more than the burst and what came in meanwhile; more than the burst may cost one."""
        if self.per_s is None:
            return
        grants = sorted(self.grants, key=lambda grant: grant.at)
        for first, begin in enumerate(grants):
            spent = 0.0
            for end in grants[first:]:
                spent += end.cost
                most = max(self.burst, begin.cost) + self.per_s * (end.at - begin.at)
                assert spent <= most + 1e-6, f"{spent} units in a window that has {most}: {grants}"
