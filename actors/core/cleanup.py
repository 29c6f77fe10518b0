"""The one helper that shields.

Owns the rule that a clean-up under cancellation needs a shield and a deadline, both. Nothing else in the
actors or the runtime may shield.
"""

from __future__ import annotations

import trio


def bounded_cleanup(seconds: float) -> trio.CancelScope:
    """``with bounded_cleanup(2.0):`` protects the awaits inside from cancellation, for at most ``seconds``.

    Past that they are cut, silently; ``cancelled_caught`` of the scope says so. What must happen in any case
    comes after the block and must not await.
    """
    return trio.move_on_after(seconds, shield=True)
