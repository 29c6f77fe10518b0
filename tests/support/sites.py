"""Places where sandboxes can be made, for the contract that every provider keeps.

Owns how each provider is put up for a test. A test says what must hold, the same for all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import attrs

from runtime.sandboxes import LocalProvider, SandboxProvider


@attrs.define
class Site:
    """A provider, and what can be done to the service behind it.

    ``hang`` and ``fail``: from now on it answers nothing, or nothing but errors (True), or all is well again (False);
    None where there is no service. ``call_s``: the most that one call of the provider may take when it hangs.
    """

    provider: SandboxProvider
    hang: Callable[[bool], None] | None = None
    fail: Callable[[bool], None] | None = None
    call_s: float = 0.0


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[Site]:
    """Processes of this machine."""
    yield Site(LocalProvider(folder / "sandboxes"))


SITES: dict[str, Callable[[Path], AbstractAsyncContextManager[Site]]] = {"local": local}
