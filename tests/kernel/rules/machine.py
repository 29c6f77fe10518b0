"""What all rules stand on: the model and the kernel side by side, and the one clock that both have."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from sql import claim
from sql.types import Lane
from tests.kernel.model.lanes import NEVER, LaneModel
from tests.kernel.model.runs import ELSEWHERE, Model, RunModel
from tests.support.invariants import check_invariants
from tests.support.kernel import LEASE_S, PLAYS, Kernel
from tests.support.portal import Portal

T = TypeVar("T")
START = datetime(2030, 1, 1, tzinfo=UTC)

# Whoever is due at the same moment goes in the order of the rows: where an example can be made again, they lie alike.
_RUNS = (
    "runs", "facts", "attempts", "waits", "events", "wakes", "lanes", "cancellations", "journal", "ledger_runs",
    "ledger_logs", "receipts",
)  # fmt: skip
# Mostly empty: looking is quicker than truncating.
_OTHERS = (
    "limits", "unique_keys", "rate_scopes", "rate_holds", "circuits", "schedules", "fires", "runners", "runner_results",
    "sandboxes", "sandbox_events", "billing_jobs", "compute_records",
)  # fmt: skip
_CLEAR = (
    f"TRUNCATE {', '.join(f'@schema@.{table}' for table in _RUNS)};"
    + "".join(f"DELETE FROM @schema@.{table};" for table in _OTHERS)
    # The walk of keys begins anywhere: here, at the same place.
    + "SELECT setseed(0.5); UPDATE @schema@.test_clock SET stands = '2030-01-01T00:00:00Z';"
)

index = st.integers(0, 999)
seldom = st.sampled_from([False, False, False, True])
delays = st.sampled_from([0.0, 0.0, 3.0, 20.0, 90.0])


class Machine(RuleBasedStateMachine):
    """A fence may be any attempt that there ever was. ``most_open``: with so many open runs no more are submitted."""

    portal: Portal
    most_open = 5

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.tokens = 100
        self.do(self.kernel.session.script, self.kernel.render(_CLEAR))

    @property
    def kernel(self) -> Kernel:
        return self.portal.kernel

    def do(self, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        return self.portal.call(function, *args, **kwargs)

    def twice(self, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        """Call, lose the answer, and ask again: both answers must be the same."""
        first, second = (self.do(function, *args, **kwargs) for _ in range(2))
        assert first == second
        return first

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    def run(self, pick: int) -> RunModel:
        return list(self.model.runs.values())[pick % len(self.model.runs)]

    def submit(
        self,
        play: str = "alpha",
        priority: int = 0,
        org: str | None = None,
        key: str | None = None,
        value: int = 1,
        delay: float = 0.0,
        named: bool = True,
        claimed: bool = False,
        **extras: Any,
    ) -> None:
        run = RunModel(
            f"run-{len(self.model.runs)}-{self.token()}", play, priority, org, key, value, self.token(),
            self.model.now + delay, LaneModel(self.model.now, ["run.created"]), kin=self.model.runs, **extras,
        )  # fmt: skip
        self.admit(run, named=named, claimed=claimed and delay == 0, delay_s=delay)

    def admit(self, run: RunModel, *, named: bool, claimed: bool, delay_s: float) -> None:
        item = self.kernel.submission(
            run.play, input=run.input, priority=run.priority, org_id=run.org, idempotency_key=run.key,
            delay_s=delay_s, claim=claimed, request=run.request, run_id=run.run_id, extras=run.extras,
        )  # fmt: skip
        item.named = named
        for _ in range(2):
            expected = self.model.admit(run, named=named, claim=claimed, owner=1, lease=LEASE_S)
            (answer,) = self.do(self.kernel.admit, [item])
            assert attrs.astuple(answer) == expected

    def order(self) -> dict[str, int]:
        """Runs in the order in which they came: the ids of some differ from one time to the next."""
        return {run_id: place for place, run_id in enumerate(self.model.runs)}

    def fence(self, pick: int, stale: bool) -> tuple[RunModel, claim.Claimed]:
        """A run that was started, with its latest fence or any earlier one."""
        begun = [run for run in self.model.runs.values() if run.fences]
        running = [run for run in begun if run.status == "running"]
        among = begun if stale or not running else running
        run = among[pick % len(among)]
        attempt, token = run.fences[pick % len(run.fences) if stale else -1]
        return run, claim.Claimed(run.run_id, attempt, token, run.play, "null")

    def begun(self) -> bool:
        return any(run.fences for run in self.model.runs.values())

    def some_due(self) -> bool:
        return any(run.status == "running" and run.due <= self.model.now for run in self.model.runs.values())

    def some_marked(self) -> bool:
        return any(run.marks for run in self.model.runs.values())

    def some_claimable(self) -> bool:
        return bool(self.model.claimable(PLAYS))

    def some_pending(self) -> bool:
        return any(self.model.lanes_claimable(lane, ["", ELSEWHERE]) for lane in Lane)

    def few_open(self) -> bool:
        return sum(not run.over for run in self.model.runs.values()) < self.most_open

    def many_open(self) -> bool:
        return sum(not run.over for run in self.model.runs.values()) > 2

    def advance(self, seconds: float) -> None:
        self.model.now += seconds
        self.do(self.kernel.advance, seconds)

    @invariant()
    def nothing_is_broken(self) -> None:
        self.do(check_invariants, self.kernel.session)


def at(moment: Any) -> float | None:
    """A moment of the database as seconds since the start. The driver gives infinity as the last of all moments."""
    if moment is None:
        return None
    return NEVER if moment.year == 9999 else (moment.replace(tzinfo=UTC) - START) / timedelta(seconds=1)


def moment(seconds: float) -> datetime:
    """Seconds since the start as a moment of the database."""
    return START + timedelta(seconds=seconds)
