"""Time budgets that nest.

Owns the two rules: a part never gets more than what is left of the whole, and a configuration whose parts do
not fit into their whole is refused when it loads.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio

from sql.errors import ConfigError


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


def check_nested(
    parent: str, parent_s: float, children: Mapping[str, float], *, together: bool = False
) -> None:
    """Refuse budgets that do not nest: ``ConfigError`` naming both fields and both values.

    Each child must be shorter than the parent; with ``together`` their sum must be.
    """
    for name, seconds in children.items():
        if not seconds < parent_s:
            raise ConfigError(f"{name}={seconds:g} must be less than {parent}={parent_s:g}")
    total = sum(children.values())
    if together and not total < parent_s:
        raise ConfigError(f"{' + '.join(children)} = {total:g} must be less than {parent}={parent_s:g}")
