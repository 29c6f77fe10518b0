"""Sandboxes at Daytona, over its REST API and its published Python clients.

Owns how a sandbox is named, labelled, started, looked at and deleted there. Its command runs in a session of its own:
Daytona starts sandboxes, not commands. Credentials go nowhere but into the requests, the runner's token nowhere but
into the sandbox's environment.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from runtime.sandboxes.base import TAIL_BYTES, Created, Inspection, SandboxFault, SandboxRef, SandboxSpec
from runtime.sandboxes.remote import (
    AT_ONCE,
    Calls,
    how_it_ended,
    limited,
    no_answer,
    not_installed,
    short_name,
)
from sql.errors import ConfigError, InputRefused

if TYPE_CHECKING:
    from daytona_api_client import Sandbox
    from daytona_toolbox_api_client import Command, ProcessApi

T = TypeVar("T")

_API_URL = "https://app.daytona.io/api"
_OURS = {"runlane": "sandbox"}
_NAME = "runlane-sandbox"
_SESSION = "runlane"
_LOOK_AGAIN_S = 0.2
_PAGE = 200

# Only the first one of two that are asked to start the command does: a session runs one after the other.
_FOLDER = '"${HOME:-/tmp}/.runlane"'
_SECOND = 75
_START = f"mkdir {_FOLDER} || exit {_SECOND}\nexec >{_FOLDER}/output 2>&1\n"
_TAIL = f"tail -c {TAIL_BYTES} {_FOLDER}/output"

_IN_THE_MAKING = frozenset(
    [
        "creating",
        "restoring",
        "starting",
        "pending_build",
        "building_snapshot",
        "pulling_snapshot",
        "resuming",
    ]
)
_ALIVE = _IN_THE_MAKING | {"started", "resizing", "snapshotting", "forking", "pausing", "paused"}
_OVER = frozenset(["stopping", "stopped", "error", "build_failed", "archiving", "archived", "destroying"])


class DaytonaProvider:
    """Makes each sandbox from a ``snapshot`` or from an ``image`` of a registry that has runlane and the plays in it.

    What is not given is taken from DAYTONA_API_KEY (or DAYTONA_JWT_TOKEN and DAYTONA_ORGANIZATION_ID), DAYTONA_API_URL
    and DAYTONA_TARGET. ``target``: the region. ``cpu`` (cores) and ``disk_gib`` of a sandbox go with an image; a
    snapshot has its own. ``call_s``: what one request may take. Hosts whose provider has the same ``key`` reach the
    same organisation. Raises ConfigError without credentials or without the client (``runlane[daytona]``).
    """

    remote = True
    finds_by_id = True

    def __init__(
        self,
        *,
        snapshot: str | None = None,
        image: str | None = None,
        api_key: str | None = None,
        jwt_token: str | None = None,
        organization_id: str | None = None,
        api_url: str | None = None,
        target: str | None = None,
        cpu: int | None = None,
        disk_gib: int | None = None,
        key: str = "daytona",
        call_s: float = 15.0,
    ) -> None:
        try:
            import daytona_api_client
            import daytona_toolbox_api_client  # noqa: F401
        except ImportError as error:
            raise not_installed("DaytonaProvider", "daytona", error) from None
        if (snapshot is None) == (image is None):
            raise InputRefused("snapshot", "give a snapshot or an image, one that has runlane in it")
        if image is None and (cpu, disk_gib) != (None, None):
            raise InputRefused("cpu", "cpu and disk_gib go with an image; a snapshot has its own")
        if api_key is None and jwt_token is None:
            api_key = os.environ.get("DAYTONA_API_KEY")
            jwt_token = None if api_key else os.environ.get("DAYTONA_JWT_TOKEN")
        self._organization = organization_id
        if not api_key and organization_id is None:  # a key has its own
            self._organization = os.environ.get("DAYTONA_ORGANIZATION_ID")
        credential = api_key or jwt_token
        if not credential or (not api_key and not self._organization):
            raise ConfigError(
                "DaytonaProvider has no credentials: give api_key= or set DAYTONA_API_KEY "
                "(or jwt_token= with organization_id=, DAYTONA_JWT_TOKEN with DAYTONA_ORGANIZATION_ID)"
            )
        self.key = key
        self._snapshot, self._image = snapshot, image
        self._target = target or os.environ.get("DAYTONA_TARGET")
        self._cpu, self._disk_gib = cpu, disk_gib
        self._call_s = float(call_s)
        self._calls = Calls(key)
        # Without retries of its own: a request then takes no longer than it may, and who asks asks again.
        self._client = daytona_api_client.ApiClient(
            daytona_api_client.Configuration(
                host=(api_url or os.environ.get("DAYTONA_API_URL") or _API_URL).rstrip("/"),
                connection_pool_maxsize=AT_ONCE,
                retries=0,
            )
        )
        self._headers = {"Authorization": f"Bearer {credential}", "X-Daytona-Source": "runlane"}
        if not api_key:
            self._headers["X-Daytona-Organization-ID"] = str(self._organization)
        self._client.default_headers.update(self._headers)
        self._sandboxes = daytona_api_client.SandboxApi(self._client)
        self._keys = daytona_api_client.ApiKeysApi(self._client)
        self._by_key = bool(api_key)

    async def create(self, spec: SandboxSpec) -> Created:
        """Make the sandbox, wait until it is up, and start the command in it, once."""
        made = await self._ask(lambda: self._make(spec))
        box: Sandbox | None = made
        while box is not None and (state := _state(box)) != "started":
            if state not in _IN_THE_MAKING:
                raise SandboxFault(f"{self.key}: sandbox {made.name} is {state}{_reason(box)}")
            await trio.sleep(_LOOK_AGAIN_S)
            box = await self._ask(lambda: self._get(made.id))
        if box is None:
            raise SandboxFault(f"{self.key}: sandbox {made.name} went away while it was made")
        await self._ask(lambda: self._start(made, spec))
        return Created(made.id, made.organization_id)

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """Whether the sandbox is there and its command still runs, and how it ended."""
        return await self._ask(lambda: self._inspect(ref))

    async def delete(self, ref: SandboxRef) -> str:
        """Ask for its end. Daytona takes it at once and destroys it a little later."""
        return await self._ask(lambda: self._delete(ref))

    async def names(self) -> Sequence[str]:
        """By our label, with all their pages."""
        return await self._ask(self._names)

    async def _ask(self, call: Callable[[], T]) -> T:
        return await self._calls(lambda: self._told(call), within_s=4 * self._call_s)

    # --- in a thread -----------------------------------------------------------------------------------

    def _told(self, call: Callable[[], T]) -> T:
        """The call's answer, or a fault that says what to do about it. What else the client raises may hold the whole
        answer, with the environment of a sandbox, so none of it is passed on."""
        from urllib3.exceptions import HTTPError, MaxRetryError, NewConnectionError, TimeoutError

        try:
            return call()
        except SandboxFault:
            raise
        except HTTPError as error:
            reason = error.reason if isinstance(error, MaxRetryError) else error
            if isinstance(reason, TimeoutError) and not isinstance(reason, NewConnectionError):
                raise no_answer(self.key, self._call_s) from None
            raise SandboxFault(f"{self.key}: not reached: {reason}") from None
        except Exception as error:  # the client's own, of two packages
            status = getattr(error, "status", None)
            if status is None:
                said = f"an answer that its client does not understand ({type(error).__name__})"
            else:
                said = f"{status}: {_message(error)}"
            if status in (401, 403):
                said += "; check DAYTONA_API_KEY and what the key is allowed"
            raise SandboxFault(f"{self.key}: {said}") from None

    def _make(self, spec: SandboxSpec) -> Sandbox:
        from daytona_api_client import CreateBuildInfo, CreateSandbox
        from daytona_api_client.exceptions import ApiException

        name = short_name(spec.sandbox)
        memory_gib = None if spec.memory_bytes is None else math.ceil(spec.memory_bytes / 2**30)
        order = CreateSandbox(
            name=name,
            snapshot=self._snapshot,
            build_info=None
            if self._image is None
            else CreateBuildInfo(dockerfile_content=f"FROM {self._image}\n"),
            cpu=self._cpu,
            disk=self._disk_gib,
            memory=memory_gib if self._image is not None else None,
            target=self._target,
            env=dict(spec.env),
            labels={**_OURS, _NAME: spec.sandbox},
            # Its runner is heard by the gateway, not by Daytona: quiet is no reason to stop it. But one that stops
            # goes, and none stays for ever, whatever becomes of us.
            auto_stop_interval=0,
            auto_delete_interval=0,
            ttl_minutes=None if spec.ceiling_s is None else max(1, math.ceil(spec.ceiling_s / 60)),
        )
        try:
            return self._sandboxes.create_sandbox(order, _request_timeout=self._call_s)
        except ApiException as error:
            # There may be one of this name: of a call that was cut short.
            known = None if error.status in (401, 403, 429) or error.status >= 500 else self._get(name)
            if known is None:
                raise
            return known

    def _get(self, which: str) -> Sandbox | None:
        from daytona_api_client.exceptions import NotFoundException

        try:
            box = self._sandboxes.get_sandbox(which, _request_timeout=self._call_s)
        except NotFoundException:
            return None
        self._organization = box.organization_id
        return None if _state(box) == "destroyed" else box

    def _find(self, ref: SandboxRef) -> Sandbox | None:
        box = self._get(ref.provider_id or short_name(ref.sandbox))
        if box is None and ref.routing_domain is not None:
            here = self._own_organization()
            if here not in (None, ref.routing_domain):
                raise SandboxFault(
                    f"{self.key}: the sandbox is in organisation {ref.routing_domain}, these credentials are "
                    f"of {here}: give the provider of each organisation a key= of its own"
                )
        return box

    def _own_organization(self) -> str | None:
        from daytona_api_client.exceptions import NotFoundException

        if self._organization is None and self._by_key:
            try:
                self._organization = self._keys.get_current_api_key(
                    _request_timeout=self._call_s
                ).organization_id
            except NotFoundException:
                return None  # an older server that does not say
        return self._organization

    @contextmanager
    def _processes(self, box: Sandbox) -> Iterator[ProcessApi]:
        """What runs in a sandbox is asked of a proxy, which may be another one for each."""
        from daytona_toolbox_api_client import ApiClient, Configuration, ProcessApi

        client = ApiClient(Configuration(host=f"{box.toolbox_proxy_url.rstrip('/')}/{box.id}", retries=0))
        client.default_headers.update(self._headers)
        try:
            yield ProcessApi(client)
        finally:
            client.rest_client.pool_manager.clear()

    def _commands(self, processes: ProcessApi) -> list[Command] | None:
        from daytona_toolbox_api_client.exceptions import NotFoundException

        try:
            return processes.get_session(_SESSION, _request_timeout=self._call_s).commands
        except NotFoundException:
            return None

    def _start(self, box: Sandbox, spec: SandboxSpec) -> None:
        from daytona_toolbox_api_client import CreateSessionRequest, SessionExecuteRequest
        from daytona_toolbox_api_client.exceptions import ApiException

        line = limited(
            spec.command, cpu_s=spec.cpu_s, memory_bytes=spec.memory_bytes if self._image is None else None
        )
        with self._processes(box) as processes:
            known = self._commands(processes)
            if known is None:
                try:
                    processes.create_session(
                        CreateSessionRequest(session_id=_SESSION), _request_timeout=self._call_s
                    )
                except ApiException:
                    if self._commands(processes) is None:  # it is not that somebody else was faster
                        raise
            if not known:
                processes.session_execute_command(
                    _SESSION,
                    SessionExecuteRequest(command=shlex.join(["sh", "-c", _START + line]), run_async=True),
                    _request_timeout=self._call_s,
                )

    def _inspect(self, ref: SandboxRef) -> Inspection:
        box = self._find(ref)
        if box is None:
            return Inspection("absent", routing_domain=self._organization)
        state, where = _state(box), box.organization_id
        if state in _OVER:
            return Inspection("ended", {"reason": f"the sandbox is {state}{_reason(box)}"}, where)
        if state not in _ALIVE:
            raise SandboxFault(f"{self.key}: sandbox {box.name} is in a state that is not known: {state}")
        if state == "started":
            with self._processes(box) as processes:
                commands = self._commands(processes) or []
                only = commands[0] if commands else None
                first = next((one for one in commands if one.exit_code != _SECOND), only)
                if first is not None and first.exit_code is not None:
                    return Inspection("ended", how_it_ended(first.exit_code, self._tail(processes)), where)
        return Inspection("running", routing_domain=where)

    def _tail(self, processes: ProcessApi) -> str:
        from daytona_toolbox_api_client import ExecuteRequest

        request = ExecuteRequest(command=shlex.join(["sh", "-c", _TAIL]))
        return processes.execute_command(request, _request_timeout=self._call_s).result or ""

    def _delete(self, ref: SandboxRef) -> str:
        from daytona_api_client.exceptions import NotFoundException

        box = self._find(ref)
        if box is None:
            return "already_absent"
        if _state(box) != "destroying":
            try:
                self._sandboxes.delete_sandbox(box.id, _request_timeout=self._call_s)
            except NotFoundException:
                return "already_absent"
        return "deleted"

    def _names(self) -> list[str]:
        found: list[str] = []
        cursor: str | None = None
        while True:
            page = self._sandboxes.list_sandboxes(
                labels=json.dumps(_OURS), cursor=cursor, limit=_PAGE, _request_timeout=self._call_s
            )
            ours = [box for box in page.items if _NAME in box.labels and _state(box) != "destroyed"]
            found += [box.labels[_NAME] for box in ours]
            cursor = page.next_cursor
            if not cursor:
                return sorted(found)


def _state(box: Any) -> str:
    return "unknown" if box.state is None else str(box.state.value)


def _reason(box: Sandbox) -> str:
    return f": {box.error_reason}" if box.error_reason else ""


def _message(error: Any) -> str:
    """What an error of the API says of itself."""
    try:
        said = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        said = error.reason
    return str(said)[:300]
