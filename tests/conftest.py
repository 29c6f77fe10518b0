"""Fixtures of the whole suite: one server per run, one schema per test.

The environment chooses what is tested:

- ``RUNLANE_TEST_DSN``: this server instead of the embedded one;
- ``RUNLANE_TEST_PG_BIN``: the embedded server, but with the binaries of this folder;
- ``RUNLANE_TEST_NOTIFY=0``: hosts under test neither send nor hear notifications;
- ``RUNLANE_TEST_ISOLATION``: the database's default isolation level;
- ``RUNLANE_TEST_HOLD_SNAPSHOT=1``: another session holds one snapshot during the whole run.
"""

from __future__ import annotations

import functools
import inspect
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio

from runtime.testing import run_inline, runlane
from tests.support import servers

__all__ = ["run_inline", "runlane"]  # fixtures, as users have them


def pytest_configure() -> None:
    # `timeout` and CI systems end a run with SIGTERM; fixtures must then stop their servers as after Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A run in the background of a script ignores Ctrl-C, and so would every program that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The time of one example says more about the machine than about the code.
    hypothesis.settings.register_profile("runlane", deadline=None)
    hypothesis.settings.load_profile("runlane")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if "server" in fixtures:
            item.add_marker("db")
        if isinstance(item, pytest.Function) and not {"mock_clock", "autojump_clock"} & set(fixtures):
            bound_by_a_deadline(item)


def bound_by_a_deadline(item: pytest.Function) -> None:
    """Let trio end a test that hangs, with its cleanup, before pytest-timeout ends the whole run without."""
    test = item.obj
    if not inspect.iscoroutinefunction(test):
        return
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))

    @functools.wraps(test)
    async def bounded(*args: Any, **kwargs: Any) -> None:
        with trio.fail_after(limit_s / 2):
            await test(*args, **kwargs)

    item.obj = bounded


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The DSN of the server under test, in the mode that the environment asks for."""
    with ExitStack() as stack:
        dsn = os.environ.get("RUNLANE_TEST_DSN")
        if not dsn:
            binaries = os.environ.get("RUNLANE_TEST_PG_BIN")
            dsn = stack.enter_context(servers.temporary_server(Path(binaries) if binaries else None))
        if isolation := os.environ.get("RUNLANE_TEST_ISOLATION"):
            dsn = stack.enter_context(servers.database_with_isolation(dsn, isolation))
        if os.environ.get("RUNLANE_TEST_HOLD_SNAPSHOT") == "1":
            stack.enter_context(servers.held_snapshot(dsn))
        yield dsn


@pytest.fixture(scope="session")
def runlane_server(server: str) -> str:
    """Where the plugin for users makes its schemas."""
    return server


@pytest.fixture
def dsn(server: str) -> str:
    """The DSN of the server under test."""
    return server


@pytest.fixture
def schema(server: str) -> Iterator[str]:
    """The name of a schema that does not exist yet; what the test makes of it is dropped afterwards."""
    name = f"t_{secrets.token_hex(6)}"
    yield name
    servers.ask(server, "SET lock_timeout = '10s'", f"DROP SCHEMA IF EXISTS {name} CASCADE")


@pytest.fixture(scope="session")
def notify() -> bool:
    """Whether hosts under test use notifications: ``RuntimeConfig(notify=notify)``."""
    return os.environ.get("RUNLANE_TEST_NOTIFY") != "0"
