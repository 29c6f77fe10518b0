"""The reference of unique keys: which run has one."""

from __future__ import annotations

import attrs


@attrs.frozen
class UniqueAsk:
    """What a run asks for: a key, for a window of seconds or (None) until it has ended, and what if it is taken."""

    key: str
    for_s: float | None
    on_conflict: str


@attrs.frozen
class UniqueModel:
    """Who has a key; ``until``: the end of its window, or None."""

    run_id: str
    until: float | None

    def held(self, now: float, alive: bool) -> bool:
        """Whether nobody else may have it; ``alive``: its run is there and has not ended."""
        return alive if self.until is None else self.until > now
