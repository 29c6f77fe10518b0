"""Rules of unique keys: runs that ask for one, whoever has it."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from tests.kernel.model.unique import UniqueAsk
from tests.kernel.rules.machine import Machine, at

ASKS = st.builds(
    UniqueAsk,
    st.sampled_from(["u", "u", "v"]),
    st.sampled_from([None, None, 20.0, 100.0]),
    st.sampled_from(["reject", "existing", "replace"]),
)
then = st.sampled_from(["", "", "claimed", "ends", "time goes by"])


class UniqueRules(Machine):
    """Few keys, so that they meet."""

    @rule(acts=st.lists(st.tuples(ASKS, st.sampled_from([None, None, "o"]), then), min_size=1, max_size=6))
    def submit_unique(self, acts: list[tuple[UniqueAsk, str | None, str]]) -> None:
        """``acts``: a run that asks for a key, and what happens then to whoever has it."""
        for unique, org, happens in acts:
            self.submit(unique=unique, org=org, claimed=happens == "claimed")
            known = self.model.unique[org or "", "alpha", unique.key]
            if happens == "ends" and known.run_id in self.model.runs:
                expected = self.model.runs[known.run_id].cancel(self.model.now, "q")
                assert self.do(self.kernel.cancel, known.run_id, "q") == expected
            elif happens == "time goes by":
                self.advance(31.0)

    @precondition(Machine.few_open)
    @rule(unique=ASKS, key=st.sampled_from(["k", "l"]))
    def submit_unique_with_a_key(self, unique: UniqueAsk, key: str) -> None:
        self.submit(unique=unique, key=key)

    @invariant()
    def the_unique_keys_are_as_predicted(self) -> None:
        """One that is free may have been forgotten, one that is held never."""
        if not self.model.unique:
            return
        rows = {
            (row["org_id"], row["play"], row["key"]): (row["run_id"], at(row["expires_at"]))
            for row in self.do(
                self.kernel.fetch, "SELECT org_id, play, key, run_id, expires_at FROM @schema@.unique_keys"
            )
        }
        for key, known in self.model.unique.items():
            run = self.model.runs.get(known.run_id)
            found = rows.pop(key, None)
            if found is not None or known.held(self.model.now, run is not None and not run.over):
                assert found == (known.run_id, known.until)
        assert rows == {}
