"""A host that dies before or after any step of a launch, of a result and of a deletion loses nothing.

Each point has a run and a host of its own, which is killed exactly there; then one sound host takes over everything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.detached import GATEWAY, TOKEN
from runtime.runner import GatewayClient, RunnerGone
from tests.support.doomed import PLAYS, POINTS, Filed, attempts_after
from tests.support.hosts import QUICK, ROOT, Hosts, eventually

BUDGETS: dict[str, Any] = {
    "lease_s": 5.0,
    "renew_every_s": 0.5,
    "sandbox_create_s": 5.0,
    "cleanup_lease_s": 3.0,
    "heartbeat_timeout_s": 60.0,
    "health_port": 0,
    "log_level": "ERROR",
}


class Runners:
    """The runners of all sandboxes: each asks what to do, and says that it is done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()
        self._clients: list[GatewayClient] = []
        self.survivor: list[str] = []

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                for path in self._folder.iterdir():
                    if path.name not in self._seen:
                        self._seen.add(path.name)
                        nursery.start_soon(self._work, json.loads(path.read_text()))
                await trio.sleep(0.02)

    async def _work(self, told: dict[str, str]) -> None:
        async with GatewayClient([*told[GATEWAY].split(), *self.survivor], told[TOKEN]) as gateway:
            self._clients.append(gateway)
            try:
                claimed = (await gateway.ask("start"))["claimed"]
                payload = json.dumps({"output": claimed["attempt"]})
                await gateway.ask("result", {"outcome": "completed", "payload": payload})
            except RunnerGone:
                pass  # its attempt was over before it began

    def learn(self, url: str) -> None:
        """Where the host is that lives."""
        self.survivor = [url]
        for client in self._clients:
            client.learn([url])


@pytest.mark.timeout(180)
async def test_a_host_that_dies_at_any_step_loses_nothing(hosts: Hosts, tmp_path: Path) -> None:
    provider = Filed(tmp_path / "boxes")
    provider.folder.mkdir()
    settings = {"dsn": hosts.dsn, "schema": hosts.schema, "notify": hosts.notify, **QUICK, **BUDGETS}
    runners = Runners(provider.folder)
    run_ids = {}
    async with hosts.open(*PLAYS.values(), sandboxes={"filed": provider}, **BUDGETS):
        pass  # the plays are known now
    async with hosts.open() as rt:
        for point in POINTS:
            run_ids[point] = (await rt.submit(point, {})).run_id
    async with trio.open_nursery() as nursery:
        nursery.start_soon(runners.run)
        died = await trio.to_thread.run_sync(
            partial(
                subprocess.run,
                [sys.executable, "-m", "tests.support.doomed", json.dumps(settings), str(provider.folder)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                check=True,
            )
        )
        assert [json.loads(line) for line in died.stdout.splitlines()] == [
            {"point": point, "died": True} for point in POINTS
        ]
        async with hosts.open(*PLAYS.values(), sandboxes={"filed": provider}, **BUDGETS) as rt:
            runners.learn(f"http://127.0.0.1:{rt.health_port}")
            found = {point: await rt.handle(run_id).result(timeout=30) for point, run_id in run_ids.items()}
            assert found == {point: attempts_after(point) for point in POINTS}

            async def settled() -> bool:
                return bool(
                    await hosts.value("""
                        SELECT NOT EXISTS (SELECT 1 FROM @.sandboxes WHERE confirmed_at IS NULL)
                           AND NOT EXISTS (SELECT 1 FROM @.billing_jobs WHERE finalised_at IS NULL)""")
                )

            await eventually(settled, within_s=30.0)
            await hosts.check(run_ids.values())
        nursery.cancel_scope.cancel()
    assert await provider.names() == []
    # Whatever was made had been written down before, and each is on one bill.
    made = set(provider.made.read_text().split())
    rows = await hosts.ask("""
        SELECT s.sandbox, count(c.record_id) AS bills FROM @.sandboxes s
          LEFT JOIN @.compute_records c ON c.run_id = s.run_id AND c.attempt = s.attempt AND c.kind = 'sandbox'
         GROUP BY s.sandbox""")
    assert made <= {row["sandbox"] for row in rows}
    assert {row["sandbox"]: row["bills"] for row in rows} == {
        row["sandbox"]: int(row["sandbox"] in made) for row in rows
    }
