"""How the doors call the kernel's functions.

Owns the text of a call: qualified with the schema, one placeholder per argument. It never looks at a result.
"""

from __future__ import annotations

import os
import random
from functools import cache

from sql import bundle

# Tokens have to be unique, not secret: one draw from the system seeds a generator that costs nothing per token.
_random = random.Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


@cache
def call(schema: str, function: str, arguments: int) -> str:
    """``SELECT * FROM "schema".function($1, …)``."""
    places = ", ".join(f"${n}" for n in range(1, arguments + 1))
    return f"SELECT * FROM {bundle.quote(schema)}.{function}({places})"


def new_token() -> int:
    """A random lease token. The client makes it, so that a claim whose answer was lost can be read back."""
    return _random.getrandbits(62) + 1


def channel(schema: str, kind: str) -> str:
    """The notification channel of a concern, as the kernel's ``channel()`` names it."""
    return f"{schema if len(schema.encode()) <= 40 else bundle.md5(schema)}_{kind}"
