"""The reconcile door: it says so when the ledger lacks a fact, or has one twice."""

from __future__ import annotations

import pytest
import trio

from runtime import Runtime, RuntimeConfig
from sql import reconcile
from sql.connection import Session, SessionOptions, open_session
from sql.reconcile import Account
from tests.support.plays import echo
from tests.support.servers import ask


async def account_of(session: Session, run_id: str) -> Account:
    (account,) = await reconcile.accounts(session, [run_id, "no-such-run"])
    return account


@pytest.mark.modes
async def test_what_is_lost_or_doubled_is_counted(dsn: str, schema: str, notify: bool) -> None:
    config = RuntimeConfig(dsn=dsn, schema=schema, notify=notify)
    options = SessionOptions(dsn=dsn, schema=schema)
    async with open_session(options, "test") as session, Runtime.open(config, plays=[echo]) as rt:
        handle = await rt.submit(echo, 1)
        await handle.result(timeout=20)
        with trio.fail_after(20):
            while (sound := await account_of(session, handle.run_id)).lost:  # noqa: ASYNC110 - nothing notifies of it
                await trio.sleep(0.05)
        assert (sound.status, sound.terminals, sound.unbroken) == ("completed", 1, True)
        assert (sound.lifecycle, sound.logged) == (3, 1)
        assert (sound.facts, sound.applied, sound.duplicated) == (4, 4, 0)
        assert (sound.attempt, sound.attempts_ended, sound.attempts_expired) == (1, 1, 0)

        def change(statement: str) -> None:
            ask(dsn, statement.replace("@", f"{schema}."))

        change("UPDATE @ledger_runs SET applied_facts = applied_facts + 2")
        doubled = await account_of(session, handle.run_id)
        assert (doubled.duplicated, doubled.lost) == (2, 0)
        change("DELETE FROM @ledger_logs")
        # One too many in one lane must not hide one too few in the other.
        both = await account_of(session, handle.run_id)
        assert (both.duplicated, both.lost) == (2, 1)
        change("DELETE FROM @facts WHERE type = 'run.started'")
        assert not (await account_of(session, handle.run_id)).unbroken
