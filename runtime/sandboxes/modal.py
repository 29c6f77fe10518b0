"""Sandboxes at Modal, over its published Python SDK.

Owns how a sandbox is named, tagged, started, looked at and ended there. A sandbox of Modal is its command: when that
is over there is none any more, though Modal still says how it ended. Credentials go nowhere but into the SDK, the
runner's token nowhere but into the sandbox's environment.

The SDK works on a loop of its own, and only a task of asyncio can take a call back: each call is such a task, in a
thread, for as long as it may take.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from runtime.sandboxes.base import Created, Inspection, SandboxFault, SandboxRef, SandboxSpec
from runtime.sandboxes.remote import Calls, how_it_ended, limited, no_answer, not_installed, short_name
from sql.errors import ConfigError, InputRefused

if TYPE_CHECKING:
    import modal

T = TypeVar("T")

_OURS = {"runlane": "sandbox"}
_NAME = "runlane-name-"
_TAG_LENGTH = 63
_AT_ONCE = 20
_TAIL_ENTRIES = 100
_KILLED = 137
# Modal keeps no sandbox for longer.
_MOST_S = 86_400
_MARGIN_S = 1.0


class ModalProvider:
    """Makes each sandbox from ``image``, which has runlane and the plays in it: a ``modal.Image``, its id (``im-…``),
    or the name of one in a registry.

    Without ``token_id`` and ``token_secret`` the SDK takes what it finds (MODAL_TOKEN_ID and MODAL_TOKEN_SECRET, or a
    profile). ``app``: the app that its sandboxes belong to, made where there is none, in ``environment``. ``cpu``:
    cores. ``call_s``: what one question may take; ``create_s``: what making a sandbox may. Hosts whose provider has
    the same ``key`` reach the same workspace. Raises ConfigError without credentials or without the SDK
    (``runlane[modal]``).
    """

    remote = True
    finds_by_id = True

    def __init__(
        self,
        *,
        image: modal.Image | str,
        app: str = "runlane",
        token_id: str | None = None,
        token_secret: str | None = None,
        environment: str | None = None,
        region: str | Sequence[str] | None = None,
        cpu: float | None = None,
        key: str = "modal",
        call_s: float = 15.0,
        create_s: float = 100.0,
    ) -> None:
        try:
            import modal
        except ImportError as error:
            raise not_installed("ModalProvider", "modal", error) from None
        if (token_id is None) != (token_secret is None):
            raise InputRefused("token_secret", "token_id and token_secret go together")
        self.key = key
        try:
            if token_id is not None and token_secret is not None:
                self._client = modal.Client.from_credentials(token_id, token_secret)
            else:
                self._client = modal.Client.from_env()
        except modal.exception.AuthError:
            raise ConfigError(
                "ModalProvider has no credentials: give token_id= and token_secret=, or set MODAL_TOKEN_ID and "
                "MODAL_TOKEN_SECRET"
            ) from None
        if not isinstance(image, str):
            self._image = image
        elif image.startswith("im-"):
            self._image = modal.Image.from_id(image, client=self._client)
        else:
            self._image = modal.Image.from_registry(image)
        self._app_name = app
        self._app: modal.App | None = None
        self._environment = environment
        self._region = region
        self._cpu = cpu
        self._call_s, self._create_s = call_s, create_s
        self._calls = Calls(key)

    async def create(self, spec: SandboxSpec) -> Created:
        """Start the command as a sandbox; Modal keeps a name's second one out."""
        return await self._ask(lambda: self._make(spec), self._create_s)

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """Whether it runs. One that is over is absent, with what Modal still knows of it."""
        return await self._ask(lambda: self._inspect(ref), self._call_s)

    async def delete(self, ref: SandboxRef) -> str:
        """Terminate it."""
        return await self._ask(lambda: self._delete(ref), self._call_s)

    async def names(self) -> Sequence[str]:
        """By our tags; only those that run, which are all there are."""
        return await self._ask(self._names, 4 * self._call_s)

    # --- in a thread, on loops of asyncio ------------------------------------------------------------------

    async def _ask(self, call: Callable[[], Awaitable[T]], within_s: float) -> T:
        def answer() -> T:
            return asyncio.run(self._told(call, within_s))

        return await self._calls(answer, within_s=within_s + _MARGIN_S)

    async def _told(self, call: Callable[[], Awaitable[T]], within_s: float) -> T:
        from modal.exception import AuthError, PermissionDeniedError

        try:
            return await asyncio.wait_for(call(), within_s)
        except TimeoutError:
            raise no_answer(self.key, within_s) from None
        except Exception as error:  # the SDK's own, and what the libraries below it raise
            said = f"{type(error).__name__}: {error}"[:400]
            if isinstance(error, (AuthError, PermissionDeniedError)):
                said += "; check MODAL_TOKEN_ID and MODAL_TOKEN_SECRET and what the token is allowed"
            raise SandboxFault(f"{self.key}: {said}") from None

    async def _make(self, spec: SandboxSpec) -> Created:
        import modal

        command = spec.command
        if spec.cpu_s is not None:
            command = ("sh", "-c", limited(spec.command, cpu_s=spec.cpu_s))
        memory_mib = None if spec.memory_bytes is None else math.ceil(spec.memory_bytes / 2**20)
        try:
            box = await modal.Sandbox.create.aio(
                *command,
                app=await self._our_app(),
                name=short_name(spec.sandbox),
                tags={**_OURS, **_tags(spec.sandbox)},
                image=self._image,
                env=dict(spec.env),
                timeout=_MOST_S if spec.ceiling_s is None else min(_MOST_S, math.ceil(spec.ceiling_s)),
                region=self._region,
                cpu=self._cpu,
                memory=None if memory_mib is None else (memory_mib, memory_mib),
                client=self._client,
            )
        except modal.exception.AlreadyExistsError:
            box = await self._find(SandboxRef(spec.sandbox))
        return Created(box.object_id, self._environment)

    async def _our_app(self) -> modal.App:
        import modal

        if self._app is None:
            self._app = await modal.App.lookup.aio(
                self._app_name,
                client=self._client,
                environment_name=self._environment,
                create_if_missing=True,
            )
        return self._app

    async def _find(self, ref: SandboxRef) -> modal.Sandbox:
        """Raises NotFoundError."""
        import modal

        if ref.provider_id is not None:
            return await modal.Sandbox.from_id.aio(ref.provider_id, client=self._client)
        return await modal.Sandbox.from_name.aio(
            self._app_name,
            short_name(ref.sandbox),
            environment_name=ref.routing_domain or self._environment,
            client=self._client,
        )

    async def _inspect(self, ref: SandboxRef) -> Inspection:
        from modal.exception import NotFoundError

        where = ref.routing_domain or self._environment
        try:
            box = await self._find(ref)
            code = await box.poll.aio()
        except NotFoundError:
            return Inspection("absent", routing_domain=where)
        if code is None:
            return Inspection("running", routing_domain=where)
        # One that was killed, mostly by ourselves, had no last words.
        said = "" if code == _KILLED else await self._tail(box)
        return Inspection("absent", how_it_ended(code, said), where)

    async def _tail(self, box: modal.Sandbox) -> str:
        """What it said, which is only good to know: that it has ended is certain without it."""
        from modal.exception import Error

        try:
            async with asyncio.timeout(self._call_s / 3):
                return "".join([entry.message async for entry in box.logs.tail.aio(_TAIL_ENTRIES)])
        except (Error, TimeoutError):
            return ""

    async def _delete(self, ref: SandboxRef) -> str:
        from modal.exception import NotFoundError

        try:
            box = await self._find(ref)
            if await box.poll.aio() is not None:
                return "already_absent"
            await box.terminate.aio()
        except NotFoundError:
            return "already_absent"
        return "deleted"

    async def _names(self) -> list[str]:
        import modal

        app = await self._our_app()
        room = asyncio.Semaphore(_AT_ONCE)

        async def name(box: modal.Sandbox) -> str | None:
            try:
                async with room:
                    return _named(await box.get_tags.aio())
            except modal.exception.NotFoundError:
                return None  # it has ended meanwhile

        listed = modal.Sandbox.list.aio(app_id=app.app_id, tags=_OURS, client=self._client)
        boxes = [box async for box in listed]
        return sorted(filter(None, await asyncio.gather(*map(name, boxes))))


def _tags(sandbox: str) -> dict[str, str]:
    """Our name as tags, which are short and know no colon."""
    text = sandbox.replace("_", "_u").replace(":", "_c")
    parts = [text[at : at + _TAG_LENGTH] for at in range(0, len(text), _TAG_LENGTH)]
    return {f"{_NAME}{number}": part for number, part in enumerate(parts)}


def _named(tags: dict[str, str]) -> str | None:
    """Our name of what has these tags."""
    numbered = sorted(filter(lambda name: name.startswith(_NAME), tags), key=lambda name: (len(name), name))
    return "".join(tags[name] for name in numbered).replace("_c", ":").replace("_u", "_") or None
