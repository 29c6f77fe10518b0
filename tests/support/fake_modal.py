"""A pretended Modal on loopback: a gRPC server with the calls that the SDK makes for sandboxes, and no others."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from grpclib import GRPCError, Status
from grpclib.events import RecvRequest, listen
from grpclib.server import Server
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

from tests.support.boxes import Box, Mood

TOKEN_ID, TOKEN_SECRET = "ak-pretended", "as-pretended"


@attrs.define
class Made:
    """A sandbox: what was ordered, and how it ended."""

    id: str
    order: api_pb2.SandboxCreateV2Request
    box: Box
    created_at: float = attrs.field(factory=time.time)
    terminated: bool = False

    @property
    def result(self) -> api_pb2.GenericResult:
        """What a poll is told; nothing as long as it runs."""
        (process,) = self.box.processes
        over_s = time.time() - self.created_at
        if process.poll() is None and over_s > self.order.definition.timeout_secs:
            self.box.destroy()
            return api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT)
        if process.poll() is None:
            return api_pb2.GenericResult()
        if self.terminated:
            return api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_TERMINATED)
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        good = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
        bad = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
        return api_pb2.GenericResult(status=bad if code else good, exitcode=code)


class Modal:
    """The service. Sandboxes are folders and processes below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.mood = Mood()
        self.made: dict[str, Made] = {}

    def close(self) -> None:
        """End every process."""
        for made in self.made.values():
            made.box.destroy()

    def live(self, app_id: str) -> list[Made]:
        """The sandboxes that run, youngest first."""
        known = [one for one in self.made.values() if one.order.app_id == app_id and not one.result.status]
        return sorted(known, key=lambda one: -one.created_at)

    def find(self, sandbox_id: str) -> Made:
        try:
            return self.made[sandbox_id]
        except KeyError:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox_id} not found") from None

    # --- the calls -------------------------------------------------------------------------------------

    def AuthTokenGet(self, asked: Any) -> Any:
        body = (
            base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 3_600}).encode()).decode().rstrip("=")
        )
        return api_pb2.AuthTokenGetResponse(token=f"e30.{body}.x")

    def AppGetOrCreate(self, asked: Any) -> Any:
        return api_pb2.AppGetOrCreateResponse(app_id=f"ap-{asked.app_name}")

    def ImageFromId(self, asked: Any) -> Any:
        return api_pb2.ImageFromIdResponse(image_id=asked.image_id)

    def SandboxCreateV2(self, asked: Any) -> Any:
        name = asked.definition.name
        if any(one.order.definition.name == name for one in self.live(asked.app_id)):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name {name} already exists")
        env = {name: value for source in asked.secret_sources for name, value in source.env.contents.items()}
        made = Made(f"sb-{uuid.uuid4().hex}", asked, Box(self.folder / uuid.uuid4().hex, env))
        made.box.start(list(asked.definition.entrypoint_args))
        self.made[made.id] = made
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=made.id,
            task_id=f"ta-{made.id}",
            metadata=api_pb2.SandboxHandleMetadata(app_id=asked.app_id),
        )

    def SandboxGetFromNameV2(self, asked: Any) -> Any:
        for one in self.live(f"ap-{asked.app_name}"):
            if one.order.definition.name == asked.sandbox_name:
                metadata = api_pb2.SandboxHandleMetadata(app_id=one.order.app_id)
                return api_pb2.SandboxGetFromNameResponse(sandbox_id=one.id, metadata=metadata)
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {asked.sandbox_name} not found")

    SandboxGetFromName = SandboxGetFromNameV2

    def SandboxWaitV2(self, asked: Any) -> Any:
        made = self.find(asked.sandbox_id)
        metadata = api_pb2.SandboxHandleMetadata(app_id=made.order.app_id)
        return api_pb2.SandboxWaitResponse(result=made.result, metadata=metadata)

    def SandboxTerminateV2(self, asked: Any) -> Any:
        made = self.find(asked.sandbox_id)
        if not made.result.status:
            made.terminated = True
            made.box.destroy()
        return api_pb2.SandboxTerminateResponse()

    def SandboxListV2(self, asked: Any) -> Any:
        tags = {tag.tag_name: tag.tag_value for tag in asked.tags}.items()
        found = [
            one
            for one in self.live(asked.app_id)
            if tags <= {tag.tag_name: tag.tag_value for tag in one.order.tags}.items()
            and (not asked.before_timestamp or one.created_at < asked.before_timestamp)
        ]
        # A page for each: whoever reads only the first one is found out.
        shown = [api_pb2.SandboxInfo(id=one.id, created_at=one.created_at) for one in found[:1]]
        return api_pb2.SandboxListResponse(sandboxes=shown)

    def SandboxTagsGetV2(self, asked: Any) -> Any:
        return api_pb2.SandboxTagsGetResponse(tags=self.find(asked.sandbox_id).order.tags)

    def SandboxGetTaskIdV2(self, asked: Any) -> Any:
        return api_pb2.SandboxGetTaskIdResponse(task_id=f"ta-{self.find(asked.sandbox_id).id}")

    def AppFetchLogs(self, asked: Any) -> Any:
        said = self.find(asked.task_id.removeprefix("ta-")).box.said.read_text()
        items = [
            api_pb2.TaskLogs(data=line, timestamp=time.time()) for line in said.splitlines(keepends=True)
        ]
        batch = api_pb2.TaskLogsBatch(task_id=asked.task_id, items=items)
        return api_pb2.AppFetchLogsResponse(batches=[batch])


def _servicer(service: Modal) -> ModalClientBase:
    """Every call of the API; those that nobody needs are not there."""

    def respond(name: str) -> Any:
        async def call(self: Any, stream: Any) -> None:
            asked = await stream.recv_message()
            await asyncio.get_running_loop().run_in_executor(None, service.mood.wait)
            if service.mood.failing:
                raise GRPCError(Status.PERMISSION_DENIED, "out of order")
            answer = getattr(service, name, None)
            if answer is None:
                raise GRPCError(Status.UNIMPLEMENTED, name)
            await stream.send_message(answer(asked))

        return call

    calls = {name: respond(name) for name in ModalClientBase.__abstractmethods__}
    made: ModalClientBase = type("Servicer", (ModalClientBase,), calls)()
    return made


async def _known(event: RecvRequest) -> None:
    if (event.metadata.get("x-modal-token-id"), event.metadata.get("x-modal-token-secret")) != (
        TOKEN_ID,
        TOKEN_SECRET,
    ):
        raise GRPCError(Status.UNAUTHENTICATED, "Token ID is invalid")


@contextmanager
def pretended_modal(folder: Path) -> Iterator[Modal]:
    """The service at ``url``; its processes end with it."""
    service = Modal(folder)
    started = threading.Event()
    stop: list[Any] = []

    async def serve() -> None:
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = Server([_servicer(service)])
        listen(server, RecvRequest, _known)
        await server.start("127.0.0.1", 0)
        port = server._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        service.url = f"http://127.0.0.1:{port}"
        stop.append(lambda: loop.call_soon_threadsafe(ending.set))
        started.set()
        await ending.wait()
        server.close()
        await server.wait_closed()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield service
    finally:
        service.mood.hang(False)
        stop[0]()
        thread.join()
        service.close()
