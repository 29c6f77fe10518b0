"""Time budgets that nest: a part never gets more than what is left of the whole.

Whether what is configured fits at all is refused where it is configured.
"""

from __future__ import annotations

import trio


class Budget:
    """``seconds`` from now on the trio clock, shared by several steps."""

    __slots__ = ("deadline",)

    def __init__(self, seconds: float) -> None:
        self.deadline = trio.current_time() + seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.deadline - trio.current_time())

    def share(self, seconds: float) -> float:
        """At most ``seconds``, and at most what is left."""
        return min(seconds, self.left())

    def scope(self, seconds: float | None = None) -> trio.CancelScope:
        """A cancel scope that ends with the budget, or after ``seconds`` if that is earlier."""
        return trio.move_on_after(self.left() if seconds is None else self.share(seconds))
