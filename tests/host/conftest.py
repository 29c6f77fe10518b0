"""Fixtures of the tests of whole hosts."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tests.support import servers
from tests.support.hosts import Hosts


@pytest.fixture
def hosts(dsn: str, schema: str, notify: bool) -> Hosts:
    """Opens hosts on a schema of this test's own."""
    return Hosts(dsn, schema, notify)


@pytest.fixture
def alone(server: str, notify: bool) -> Iterator[Hosts]:
    """The same in a database of its own, where every connection is one of this test's."""
    name = f"t_{secrets.token_hex(6)}"
    servers.ask(server, f"CREATE DATABASE {name}")
    yield Hosts(servers.with_database(server, name), "runlane", notify)
    servers.ask(server, f"DROP DATABASE {name} WITH (FORCE)")
