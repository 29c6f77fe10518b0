"""A pretended Daytona on loopback: the part of its REST API, and of the toolbox in a sandbox, that the client uses."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import attrs

from tests.support.boxes import Box, Mood

API_KEY = "dtn_pretended"
ORGANIZATION = "11111111-2222-3333-4444-555555555555"
_GONE_AFTER = 3


@attrs.define
class Made:
    """A sandbox: what was ordered, and how often it was looked at since its state began."""

    id: str
    order: dict[str, Any]
    box: Box
    state: str = "creating"
    looked: int = 0
    sessions: dict[str, list[tuple[str, str, subprocess.Popen[bytes]]]] = attrs.field(factory=dict)

    def look(self) -> None:
        """A look is a moment: a sandbox starts, and is destroyed, a little later than it was asked to."""
        self.looked += 1
        if self.state == "creating" and self.looked > 1:
            self.state = "started"
        if self.state == "destroying" and self.looked > _GONE_AFTER:
            self.state = "destroyed"


class Refused(Exception):
    """An answer with an error's status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Daytona:
    """The service. Sandboxes are folders and processes below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = ""
        self.mood = Mood()
        self.made: dict[str, Made] = {}
        self._lock = threading.RLock()

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        """What a request gets. Raises Refused."""
        with self._lock:
            for wanted, pattern, respond in ROUTES:
                found = re.fullmatch(pattern, path)
                if found and wanted == method:
                    return respond(self, *map(unquote, found.groups()), query=query, body=body)
        raise Refused(404, f"Cannot {method} {path}")

    def close(self) -> None:
        """End every process."""
        for made in self.made.values():
            made.box.destroy()

    def _live(self, which: str) -> Made:
        for made in self.made.values():
            if which in (made.id, made.order["name"]) and made.state != "destroyed":
                return made
        raise Refused(404, f"Sandbox with ID or name {which} not found")

    def _shown(self, made: Made) -> dict[str, Any]:
        order = made.order
        return {
            "id": made.id, "organizationId": ORGANIZATION, "name": order["name"], "user": "daytona",
            "env": order.get("env", {}), "labels": order.get("labels", {}), "public": False,
            "networkBlockAll": False, "kvm": False, "target": order.get("target", "us"), "cpu": 1, "gpu": 0,
            "memory": 1, "disk": 3, "state": made.state, "toolboxProxyUrl": f"{self.url}/toolbox",
        }  # fmt: skip

    # --- the API ---------------------------------------------------------------------------------------

    def create(self, query: dict[str, str], body: Any) -> Any:
        if any(one.order["name"] == body["name"] and one.state != "destroyed" for one in self.made.values()):
            raise Refused(409, f"Sandbox with name {body['name']} already exists")
        made = Made(str(uuid.uuid4()), body, Box(self.folder / uuid.uuid4().hex, body.get("env", {})))
        self.made[made.id] = made
        return self._shown(made)

    def get(self, which: str, query: dict[str, str], body: Any) -> Any:
        made = self._live(which)
        made.look()
        return self._shown(self._live(which))

    def delete(self, which: str, query: dict[str, str], body: Any) -> Any:
        made = self._live(which)
        made.box.destroy()
        made.state, made.looked = "destroying", 0
        return self._shown(made)

    def list(self, query: dict[str, str], body: Any) -> Any:
        labels = json.loads(query.get("labels", "{}")).items()
        known = [
            one
            for one in self.made.values()
            if one.state != "destroyed" and labels <= one.order.get("labels", {}).items()
        ]
        # A page for each: whoever reads only the first one is found out.
        at = int(query.get("cursor") or 0)
        more = str(at + 1) if at + 1 < len(known) else None
        return {"items": [self._shown(one) for one in known[at : at + 1]], "nextCursor": more}

    def current_key(self, query: dict[str, str], body: Any) -> Any:
        return {
            "name": "key", "value": "dtn_***", "createdAt": "2026-01-01T00:00:00Z", "permissions": [],
            "userId": "user", "organizationId": ORGANIZATION,
        }  # fmt: skip

    # --- the toolbox -----------------------------------------------------------------------------------

    def _started(self, which: str) -> Made:
        made = self._live(which)
        if made.state != "started":
            raise Refused(400, f"the sandbox is {made.state}")
        return made

    def create_session(self, which: str, query: dict[str, str], body: Any) -> Any:
        sessions = self._started(which).sessions
        if body["sessionId"] in sessions:
            raise Refused(409, "session already exists")
        sessions[body["sessionId"]] = []
        return None

    def get_session(self, which: str, session: str, query: dict[str, str], body: Any) -> Any:
        commands = self._session(which, session)
        shown = [{"id": name, "command": line, "exitCode": _code(ran)} for name, line, ran in commands]
        return {"sessionId": session, "commands": shown}

    def run_in_session(self, which: str, session: str, query: dict[str, str], body: Any) -> Any:
        commands = self._session(which, session)
        process = self._started(which).box.start(["sh", "-c", body["command"]])
        commands.append((uuid.uuid4().hex, body["command"], process))
        return {"cmdId": commands[-1][0]}

    def execute(self, which: str, query: dict[str, str], body: Any) -> Any:
        box = self._started(which).box
        done = subprocess.run(
            ["sh", "-c", body["command"]],
            env={"HOME": str(box.folder), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        return {"exitCode": done.returncode, "result": done.stdout}

    def _session(self, which: str, session: str) -> Any:
        try:
            return self._started(which).sessions[session]
        except KeyError:
            raise Refused(404, "session not found") from None


def _code(process: subprocess.Popen[bytes]) -> int | None:
    code = process.poll()
    return code if code is None or code >= 0 else 128 - code


_BOX = "/toolbox/([^/]+)/process"
ROUTES: list[tuple[str, str, Any]] = [
    ("POST", "/sandbox", Daytona.create),
    ("GET", "/sandbox", Daytona.list),
    ("GET", "/sandbox/([^/]+)", Daytona.get),
    ("DELETE", "/sandbox/([^/]+)", Daytona.delete),
    ("GET", "/api-keys/current", Daytona.current_key),
    ("POST", f"{_BOX}/session", Daytona.create_session),
    ("GET", f"{_BOX}/session/([^/]+)", Daytona.get_session),
    ("POST", f"{_BOX}/session/([^/]+)/exec", Daytona.run_in_session),
    ("POST", f"{_BOX}/execute", Daytona.execute),
]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    service: Daytona

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever gave up is not answered."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer in one piece
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _do(self) -> None:
        service = self.server.service
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        service.mood.wait()
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        status, answer = 200, None
        try:
            if self.headers.get("Authorization") != f"Bearer {API_KEY}":
                raise Refused(401, "Invalid credentials")
            if service.mood.failing:
                raise Refused(500, "out of order")
            answer = service.answer(self.command, address.path, query, json.loads(body) if body else None)
        except Refused as error:
            status, answer = error.status, {"statusCode": error.status, "message": str(error)}
        content = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = _do


@contextmanager
def pretended_daytona(folder: Path) -> Iterator[Daytona]:
    """The service at ``url``; its processes end with it."""
    service = Daytona(folder)
    server = _Server(("127.0.0.1", 0), _Handler)
    server.service = service
    service.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield service
    finally:
        service.mood.hang(False)
        server.shutdown()
        thread.join()
        server.server_close()
        service.close()
