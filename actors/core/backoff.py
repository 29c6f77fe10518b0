"""Exponential backoff with jitter.

Owns the arithmetic only; it never sleeps.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import attrs


@attrs.define
class Backoff:
    """Delays that grow from ``first_s`` by ``factor`` up to ``max_s``.

    Each is drawn from the upper part of its range: with ``jitter`` 0.5 between half of it and all of it, so
    that hosts which failed together do not come back together.
    """

    first_s: float = 0.1
    max_s: float = 5.0
    factor: float = 2.0
    jitter: float = 0.5
    random: Callable[[], float] = random.random
    _step: int = attrs.field(default=0, init=False)

    def next(self) -> float:
        """The next delay in seconds."""
        # The exponent is capped: a float overflows long after max_s is reached.
        full = min(self.max_s, self.first_s * self.factor ** min(self._step, 64))
        self._step += 1
        return full * (1.0 - self.jitter * self.random())

    def reset(self) -> None:
        """Start from ``first_s`` again."""
        self._step = 0
