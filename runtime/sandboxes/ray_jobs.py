"""Sandboxes on a Ray cluster: each is a job of its own, asked for over the HTTP interface of Ray Jobs.

A job is a named, detached actor of Ray's, on a node with room for it, and one command below it: here a keeper, which
bounds what is printed and leaves no process behind. Jobs are found by their name and outlive the host. The host needs
no Ray: no connection that belongs to its whole process, no call without a deadline, no version that has to match.

Owns what is asked of Ray. A job that is over stays on Ray's list until its sandbox is deleted.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlsplit

import trio

from actors.core import Backoff, bounded_cleanup
from runtime.http_client import Answer, HttpClient, NoAnswer, check_base, check_headers
from runtime.sandboxes.base import (
    TAIL_BYTES,
    Created,
    Inspection,
    SandboxFault,
    SandboxRef,
    SandboxSpec,
    check_output_bytes,
)
from runtime.sandboxes.keeper import REPORT, SPEC_VARIABLE
from runtime.sandboxes.remote import no_answer
from sql.errors import InputRefused

_PREFIX = "runlane-"
_KEEPER_VARIABLE = "RUNLANE_RUNNER_KEEPER"
# Found without being imported: the keeper takes 10 MB and starts in a blink, the package sixty.
_KEEPER = (
    "import importlib.util as u, runpy, sys; found = u.find_spec('runtime'); "
    "found or sys.exit(f'runlane is not installed for {sys.executable}: it belongs into the image of the cluster, '"
    " 'or into the runtime_env of the provider'); "
    "runpy.run_path(found.submodule_search_locations[0] + '/sandboxes/keeper.py', run_name='__main__')"
)
_AT_ONCE = 20
_ANSWER_BYTES = 64 * 1_048_576
_UNDER_WAY = ("PENDING", "RUNNING")
_STOPPED_WITHIN_S = 20.0
# How long after a deletion Ray may still write that the job has failed.
_ECHO_S = 4.0


class RayProvider:
    """Runs each sandbox as a job of the Ray cluster whose dashboard is at ``url``.

    ``key`` names the cluster in the database; by default it is made of the URL, so hosts that reach one cluster by
    several URLs have to give it. ``headers`` go with every request: ``{"authorization": "Bearer …"}`` where Ray wants
    a token. ``num_cpus``, ``num_gpus`` and ``resources`` are reserved for each sandbox, as is its play's
    ``memory_bytes``; ``runtime_env`` is Ray's, and its ``env_vars`` may add to the environment. ``python`` is the
    interpreter on the nodes. Of what a sandbox prints ``output_bytes`` are kept, the beginning and the end.

    A job that has not started ``start_s`` seconds after it was submitted is given up; a request without an answer
    after ``call_s``. Raises InputRefused for what can never work.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8265",
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        python: str = "python",
        output_bytes: int = 65_536,
        start_s: float = 90.0,
        call_s: float = 15.0,
    ) -> None:
        if min(start_s, call_s) <= 0:
            raise InputRefused(
                "start_s" if start_s <= 0 else "call_s", "must be a positive number of seconds"
            )
        self.url = check_base(url)
        self.key = key or f"ray@{self.url}"
        self.remote = urlsplit(self.url).hostname not in ("127.0.0.1", "localhost", "::1")
        self._headers = check_headers(headers or {}, authorized=False)
        self._ssl_context = ssl_context
        self._reserved = {
            "entrypoint_num_cpus": num_cpus,
            "entrypoint_num_gpus": num_gpus,
            "entrypoint_resources": dict(resources or {}),
        }
        self._runtime_env = dict(runtime_env or {})
        try:
            json.dumps([self._reserved, self._runtime_env])
        except (TypeError, ValueError) as error:
            raise InputRefused(
                "runtime_env", f"must be JSON, like everything that Ray is told: {error}"
            ) from None
        self._entrypoint = f'exec {python} -c "${_KEEPER_VARIABLE}"'
        self._output_bytes = check_output_bytes(output_bytes)
        self._start_s = start_s
        self._call_s = call_s
        self._limiter = trio.CapacityLimiter(_AT_ONCE)
        # Sandboxes whose record was deleted just now, by the monotonic clock.
        self._echoes: dict[str, float] = {}

    async def create(self, spec: SandboxSpec) -> Created:
        """Submit the job and wait until it runs. Asked again, answers the job that is there."""
        job_id = _PREFIX + spec.sandbox
        answer = await self._call("POST", "/api/jobs/", self._job(job_id, spec))
        pause = Backoff(first_s=0.05, max_s=2.0)
        give_up_at = trio.current_time() + self._start_s
        while True:
            job = await self._find(spec.sandbox)
            if job is None:
                if answer.status != 200:
                    raise self._fault(f"submitting job {job_id}", answer)
                raise SandboxFault(f"{self.key}: job {job_id} was deleted before it had started")
            if job["status"] == "FAILED" and job.get("driver_node_id") is None:
                raise SandboxFault(
                    f"{self.key}: job {job_id} could not be started: {_short(job.get('message'))}"
                )
            if job["status"] != "PENDING":
                return Created(job_id)
            if trio.current_time() >= give_up_at:
                raise SandboxFault(
                    f"{self.key}: job {job_id} has not started within {self._start_s:g} s: {_short(job.get('message'))}"
                )
            await trio.sleep(pause.next())

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """What Ray says of the job, and how its command ended."""
        job = await self._find(ref.sandbox)
        while job is None and time.monotonic() < self._echoes.get(ref.sandbox, 0.0):
            # It is gone. What Ray still writes about it would be found as a failed job that never was.
            await trio.sleep(0.2)
            job = await self._find(ref.sandbox)
        self._echoes.pop(ref.sandbox, None)
        if job is None:
            return Inspection("absent")
        if job["status"] in _UNDER_WAY:
            return Inspection("running")
        return Inspection("ended", await self._diagnostics(ref.sandbox, job))

    async def delete(self, ref: SandboxRef) -> str:
        """Stop the job, which ends all of its processes, and take it off Ray's list.

        A job that waits for room can only be stopped once it has some, or when Ray gives it up (after 15 minutes):
        until then this raises.
        """
        job = await self._find(ref.sandbox)
        if job is None:
            return "already_absent"
        pause = Backoff(first_s=0.05, max_s=1.0)
        give_up_at = trio.current_time() + _STOPPED_WITHIN_S
        while job is not None and job["status"] in _UNDER_WAY:
            if trio.current_time() >= give_up_at:
                raise SandboxFault(
                    f"{self.key}: job {_PREFIX}{ref.sandbox} was asked to stop and is still {job['status']}:"
                    f" {_short(job.get('message'))}"
                )
            await self._call("POST", f"{_path(ref.sandbox)}/stop")
            await trio.sleep(pause.next())
            job = await self._find(ref.sandbox)
        if job is not None:
            await self._forget(ref.sandbox)
            now = time.monotonic()
            self._echoes = {each: until for each, until in self._echoes.items() if until > now}
            self._echoes[ref.sandbox] = now + _ECHO_S
        return "deleted"

    async def names(self) -> Sequence[str]:
        """The sandboxes that have a job on Ray's list."""
        answer = await self._call("GET", "/api/jobs/")
        jobs = await trio.to_thread.run_sync(answer.json, abandon_on_cancel=True)
        if answer.status != 200 or not isinstance(jobs, list):
            raise self._fault("listing the jobs", answer)
        ours = [job for job in jobs if str(job.get("submission_id")).startswith(_PREFIX)]
        for job in ours:
            if _is_echo(job):
                await self._forget(job["submission_id"].removeprefix(_PREFIX))
        return sorted(job["submission_id"].removeprefix(_PREFIX) for job in ours if not _is_echo(job))

    # --- what is asked of Ray ----------------------------------------------------------------------------

    def _job(self, job_id: str, spec: SandboxSpec) -> dict[str, Any]:
        kept = {
            "command": list(spec.command),
            "memory_bytes": spec.memory_bytes,
            "cpu_s": spec.cpu_s,
            "ceiling_s": spec.ceiling_s,
            "output_bytes": self._output_bytes,
        }
        environment = {
            **(self._runtime_env.get("env_vars") or {}),
            **spec.env,
            SPEC_VARIABLE: json.dumps(kept),
            _KEEPER_VARIABLE: _KEEPER,
        }
        return {
            "entrypoint": self._entrypoint,
            "submission_id": job_id,
            "metadata": {"runlane_run": spec.run_id, "runlane_attempt": str(spec.attempt)},
            "runtime_env": {**self._runtime_env, "env_vars": environment},
            **self._reserved,
            **({} if spec.memory_bytes is None else {"entrypoint_memory": spec.memory_bytes}),
        }

    async def _find(self, sandbox: str) -> dict[str, Any] | None:
        """The sandbox's job; None only if Ray says that there is none."""
        answer = await self._call("GET", _path(sandbox))
        if answer.status == 404 and b"does not exist" in answer.content:
            return None
        job = answer.json()
        if answer.status != 200 or not isinstance(job, dict) or "status" not in job:
            raise self._fault(f"looking for job {_PREFIX}{sandbox}", answer)
        if _is_echo(job):
            await self._forget(sandbox)
            self._echoes.pop(sandbox, None)
            return None
        return job

    async def _forget(self, sandbox: str) -> None:
        answer = await self._call("DELETE", _path(sandbox))
        if answer.status not in (200, 404):
            raise self._fault(f"deleting job {_PREFIX}{sandbox}", answer)

    async def _diagnostics(self, sandbox: str, job: Mapping[str, Any]) -> dict[str, Any]:
        found = {"exit_code": job.get("driver_exit_code"), "reason": _short(job.get("message"))}
        answer = await self._call("GET", f"{_path(sandbox)}/logs")
        told = answer.json() if answer.status == 200 else None
        if not isinstance(told, dict):  # its node is gone, and the log with it
            return found
        # Before the entrypoint Ray tells how it was set up.
        whole = str(told.get("logs") or "")
        said, _, report = (whole.partition(f": {self._entrypoint}\n")[2] or whole).rpartition(REPORT)
        try:
            found |= json.loads(report)
        except (ValueError, TypeError):
            said += report
        return {**found, "output_tail": said.strip()[-TAIL_BYTES:]}

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        async with self._limiter:
            # A connection of its own: providers are made before any event loop, and nobody closes them.
            client = HttpClient(
                self.url,
                headers=self._headers,
                concurrency=1,
                ssl_context=self._ssl_context,
                answer_bytes=_ANSWER_BYTES,
            )
            try:
                with trio.fail_after(self._call_s):
                    return await client.call(
                        method, path, body=b"" if body is None else json.dumps(body).encode()
                    )
            except trio.TooSlowError:
                raise no_answer(self.key, self._call_s) from None
            except NoAnswer as error:
                raise SandboxFault(f"{self.key}: no answer from the dashboard of Ray: {error}") from error
            finally:
                with bounded_cleanup(1.0):
                    await client.aclose()

    def _fault(self, what: str, answer: Answer) -> SandboxFault:
        hint = "; Ray wants a token: give it in headers=" if answer.status in (401, 403) else ""
        # The end: of a traceback that is what matters.
        said = answer.content[-500:].decode("utf-8", "replace")
        return SandboxFault(f"{self.key}: {what}: HTTP {answer.status}{hint}: {_short(said)}")


def _path(sandbox: str) -> str:
    return f"/api/jobs/{quote(_PREFIX + sandbox, safe='')}"


def _is_echo(job: Mapping[str, Any]) -> bool:
    """Whether it is no job, but what Ray wrote when it saw the end of one whose record had been deleted."""
    return not job.get("metadata")


def _short(said: object) -> str:
    """The beginning of a message, on one line."""
    return " ".join(str(said or "no reason given").split())[:500]
