"""Places where sandboxes can be made, for the contract that every provider keeps.

Owns how each provider is put up for a test, and what is asked for there. A test says what must hold, the same for all
of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from runtime.sandboxes import Inspection, LocalProvider, RayProvider, SandboxProvider, SandboxRef, SandboxSpec
from runtime.sandboxes.daytona import DaytonaProvider
from runtime.sandboxes.modal import ModalProvider
from tests.support.fake_daytona import API_KEY, pretended_daytona
from tests.support.fake_modal import TOKEN_ID, TOKEN_SECRET, pretended_modal
from tests.support.fake_ray import pretended_ray
from tests.support.hosts import eventually

REF = SandboxRef("rl01234567-run.1.0a1b2c3d")
WITHIN_S = 20.0


@attrs.define
class Site:
    """A provider, and what can be done to the service behind it.

    ``hang`` and ``fail``: from now on it answers nothing, or nothing but errors (True), or all is well again (False).
    ``hasty`` is the same provider where a call may take half a second. None where there is no service.
    """

    provider: SandboxProvider
    hasty: SandboxProvider | None = None
    hang: Callable[[bool], None] | None = None
    fail: Callable[[bool], None] | None = None


@asynccontextmanager
async def local(folder: Path) -> AsyncIterator[Site]:
    """Processes of this machine."""
    yield Site(LocalProvider(folder / "sandboxes"))


@asynccontextmanager
async def daytona(folder: Path) -> AsyncIterator[Site]:
    """The real client against a pretended Daytona."""
    with pretended_daytona(folder) as service:

        def provider(call_s: float) -> DaytonaProvider:
            return DaytonaProvider(snapshot="runlane", api_key=API_KEY, api_url=service.url, call_s=call_s)

        yield Site(provider(15.0), provider(0.5), service.mood.hang, service.mood.fail)


@asynccontextmanager
async def modal(folder: Path) -> AsyncIterator[Site]:
    """The real SDK against a pretended Modal."""
    with pretended_modal(folder) as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODAL_SERVER_URL", service.url)

        def provider(call_s: float) -> ModalProvider:
            return ModalProvider(
                image="im-runlane", token_id=TOKEN_ID, token_secret=TOKEN_SECRET, call_s=call_s
            )

        patient, hasty = provider(15.0), provider(0.5)
        try:
            yield Site(patient, hasty, service.mood.hang, service.mood.fail)
        finally:
            for one in (patient, hasty):
                await trio.to_thread.run_sync(one._client.close)


@asynccontextmanager
async def ray(folder: Path) -> AsyncIterator[Site]:
    """A pretended Ray; ``test_ray`` has a real one."""
    with pretended_ray(folder) as service:
        hasty = RayProvider(service.url, call_s=0.5)
        yield Site(RayProvider(service.url), hasty, service.mood.hang, service.mood.fail)


SITES: dict[str, Callable[[Path], AbstractAsyncContextManager[Site]]] = {
    "local": local,
    "daytona": daytona,
    "modal": modal,
    "ray": ray,
}


def spec(program: str, sandbox: str = REF.sandbox, **more: Any) -> SandboxSpec:
    """A sandbox that runs a Python program."""
    command = ("python", "-c", program)
    return SandboxSpec(
        **{"sandbox": sandbox, "run_id": "run", "attempt": 1, "command": command, "env": {}, **more}
    )


async def ended(site: Site, ref: SandboxRef = REF) -> Inspection:
    """What is said of a sandbox once its command is over."""

    async def over() -> Inspection | None:
        found = await site.provider.inspect(ref)
        return None if found.state == "running" else found

    found: Inspection = await eventually(over, within_s=WITHIN_S, every_s=0.05)
    return found


async def gone(site: Site, ref: SandboxRef = REF) -> None:
    """Wait until the provider says that there is none."""

    async def absent() -> bool:
        return (await site.provider.inspect(ref)).state == "absent"

    await eventually(absent, within_s=WITHIN_S, every_s=0.05)
