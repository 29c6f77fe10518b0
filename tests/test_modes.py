"""The server under test is in the mode that the environment asks for: else a pass would prove nothing."""

from __future__ import annotations

import os

import pytest

from tests.support.servers import ask

pytestmark = pytest.mark.modes


def test_default_isolation_is_the_asked_one(dsn: str) -> None:
    expected = os.environ.get("RUNLANE_TEST_ISOLATION") or "read committed"
    assert ask(dsn, "SHOW transaction_isolation")[0][0] == expected


def test_a_snapshot_is_held_exactly_when_asked_for(dsn: str) -> None:
    held = ask(
        dsn,
        """SELECT count(*) FROM pg_stat_activity
           WHERE application_name = 'held snapshot' AND datname = current_database()
             AND backend_xmin IS NOT NULL""",
    )
    assert held[0][0] == (os.environ.get("RUNLANE_TEST_HOLD_SNAPSHOT") == "1")


@pytest.mark.skipif(not os.environ.get("RUNLANE_TEST_PG_BIN"), reason="no other binaries asked for")
def test_the_asked_binaries_are_running(dsn: str) -> None:
    folder = os.environ["RUNLANE_TEST_PG_BIN"]
    version = ask(dsn, "SHOW server_version_num")[0][0]
    assert f"/{int(version) // 10000}/" in f"{folder}/"
