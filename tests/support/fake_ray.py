"""A pretended Ray on loopback: the part of its job interface that the provider uses.

It does what Ray does at the edges: a job waits before it starts, one that is under way cannot be deleted, and about one
that is deleted right after its end Ray still writes that it has failed.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.support.boxes import Box, Mood

_WAITS_S = 0.05
_ECHO_AFTER_S = 0.3
_OVER = ("SUCCEEDED", "FAILED", "STOPPED")


class Ray:
    """The service. Jobs are folders and processes below ``folder``. While it is ``full`` none finds room."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.mood = Mood()
        self.full = False
        self.jobs: dict[str, dict[str, Any]] = {}
        self._boxes: dict[str, Box] = {}
        self._stops: set[str] = set()
        self._watchers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and body of what a request gets."""
        if not path.startswith("/api/jobs/"):
            return 404, "404: Not Found"
        name, _, verb = path.removeprefix("/api/jobs/").partition("/")
        name = unquote(name)
        with self._lock:
            if not name:
                return (
                    self._submit(body)
                    if method == "POST"
                    else (200, [self._shown(each) for each in self.jobs])
                )
            if name not in self.jobs:
                return 404, f"Job {name} does not exist"
            if method == "DELETE":
                return self._delete(name)
            if verb == "stop":
                self._stops.add(name)
                return 200, {"stopped": self.jobs[name]["status"] not in _OVER}
            if verb == "logs":
                return 200, {"logs": self._boxes[name].said.read_text()}
            return 200, self._shown(name)

    def close(self) -> None:
        """End every job."""
        self.full = False
        with self._lock:
            self._stops.update(self.jobs)
        for watcher in self._watchers:
            watcher.join()
        for box in self._boxes.values():
            box.destroy()

    def _shown(self, name: str) -> dict[str, Any]:
        return {"submission_id": name, "type": "SUBMISSION", **self.jobs[name]}

    def _submit(self, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["submission_id"]
        if name in self.jobs:
            return 500, f"Traceback …\nValueError: Job with submission_id {name} already exists."
        self.jobs[name] = {**body, "status": "PENDING", "message": "It may be waiting for resources"}
        watcher = threading.Thread(target=self._run, args=(name, body))
        self._watchers.append(watcher)
        watcher.start()
        return 200, {"submission_id": name}

    def _delete(self, name: str) -> tuple[int, Any]:
        if self.jobs[name]["status"] not in _OVER:
            return 500, f"RuntimeError: Attempted to delete job '{name}', but it is in a non-terminal state"
        del self.jobs[name]
        return 200, {"deleted": True}

    def _run(self, name: str, body: dict[str, Any]) -> None:
        pause = threading.Event()
        pause.wait(_WAITS_S)
        while self.full:
            pause.wait(0.02)
        box = self._boxes[name] = Box(self.folder / name, body["runtime_env"]["env_vars"])
        box.folder.mkdir(exist_ok=True)
        box.said.write_text(
            f"Runtime env is setting up.\nRunning entrypoint for job {name}: {body['entrypoint']}\n"
        )
        process = box.start(["sh", "-c", body["entrypoint"]])
        self._change(name, status="RUNNING", driver_node_id="node", message="Job is currently running.")
        while process.poll() is None:
            pause.wait(0.01)
            if name in self._stops:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
        status = "STOPPED" if name in self._stops else "FAILED" if process.returncode else "SUCCEEDED"
        self._change(name, status=status, driver_exit_code=process.returncode, message="It has ended.")
        pause.wait(_ECHO_AFTER_S)
        with self._lock:
            self._stops.discard(name)
            if name not in self.jobs:
                self.jobs[name] = {
                    "status": "FAILED",
                    "entrypoint": "Entrypoint not found.",
                    "metadata": None,
                }

    def _change(self, name: str, **changes: Any) -> None:
        with self._lock:
            self.jobs[name] |= changes


@contextmanager
def pretended_ray(folder: Path) -> Iterator[Ray]:
    """One that listens until the block ends."""
    service = Ray(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            service.mood.wait()
            if service.mood.failing:
                status, told = 500, "the head node is not well"
            else:
                status, told = service.answer(self.command, self.path, json.loads(body) if body else None)
            content = (told if isinstance(told, str) else json.dumps(told)).encode()
            try:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
            except ConnectionError:  # whoever asked has gone
                self.close_connection = True

        do_GET = do_POST = do_DELETE = respond

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        service.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield service
        finally:
            service.mood.hang(False)
            service.close()
            server.shutdown()
