"""Hosts beside an older generation of workers: what those have left to delete is deleted."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from actors.cleanup import Step
from runtime import Runtime
from runtime.detached import delete_with
from runtime.sandboxes import Inspection, SandboxRef
from sql.errors import ConfigError
from sql.sandboxes import Obligation
from tests.kernel.test_adoption import TABLE
from tests.support import sandboxed
from tests.support.hosts import Hosts, eventually
from tests.support.sandboxed import Pretended
from tests.support.sites import SITES, spec

pytestmark = pytest.mark.modes


@attrs.define
class ById(Pretended):
    """A provider that made ``boxes`` for others, under names that we do not know."""

    key: str = "daytona"
    finds_by_id: bool = True
    boxes: set[str | None] = attrs.field(factory=set)

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """By its id, if it has one of those."""
        if ref.provider_id in self.boxes:
            return Inspection("running", routing_domain="eu")
        return await Pretended.inspect(self, ref)

    async def delete(self, ref: SandboxRef) -> str:
        """No such id any more."""
        if ref.provider_id in self.boxes:
            self.boxes.remove(ref.provider_id)
            return "deleted"
        return await Pretended.delete(self, ref)

    async def names(self) -> Sequence[str]:
        """Everything there is, as others call it."""
        return [*self.specs, *(str(box) for box in self.boxes)]


@asynccontextmanager
async def hosting(hosts: Hosts, provider: ById, **more: Any) -> AsyncIterator[Runtime]:
    """A host that adopts."""
    settings = {"health_port": 0, "legacy_cleanup_table": "sandbox_cleanup_jobs", "backstop_s": 0.3, **more}
    async with hosts.open(sandboxed.pretended, sandboxes={"pretended": provider}, **settings) as rt:
        yield rt


async def write(hosts: Hosts, *boxes: str) -> None:
    """Rows of an older worker, due now."""
    for box in boxes:
        await hosts.ask(
            "INSERT INTO @.sandbox_cleanup_jobs (sandbox_id, run_id, attempt, environment, available_at)"
            f" VALUES ('{box}', 'run', 1, 'prod', now())"
        )


async def said(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return words in caplog.text


async def ended(hosts: Hosts, copies: int) -> None:
    """Wait until nothing is open on either side; there were that many."""

    async def nothing_open() -> bool:
        ours = await hosts.value("SELECT count(*) FROM @.sandboxes WHERE confirmed_at IS NOT NULL")
        theirs = await hosts.value("SELECT count(*) FROM @.sandbox_cleanup_jobs WHERE status <> 'deleted'")
        return (ours, theirs) == (copies, 0)

    await eventually(nothing_open, within_s=20.0)
    assert await hosts.value("SELECT count(*) FROM @.sandboxes") == copies


async def test_what_older_workers_write_is_deleted_by_the_host(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runlane.cleanup")
    provider = ById(boxes={"a", "b", "late", "others"})
    async with hosting(hosts, provider) as rt:
        # The table comes after the host.
        await eventually(lambda: said(caplog, "there is no such table"))
        await hosts.ask(*[part.replace("@schema@.", "@.") for part in TABLE.split(";")[:-1]])
        await write(hosts, "a", "b", "gone before")
        await ended(hosts, 3)
        assert provider.boxes == {"late", "others"}
        await write(hosts, "late")
        await ended(hosts, 4)
        assert provider.boxes == {"others"}
        assert {one.provider_id: one.state for one in await rt.sandboxes()} == {
            "a": "gone",
            "b": "gone",
            "late": "gone",
            "gone before": "gone",
        }
        assert await rt.compute_records() == []
        ours = await hosts.ask("SELECT sandbox_id, deleted_at FROM @.sandbox_cleanup_jobs ORDER BY 1")
        theirs = await hosts.ask("SELECT provider_id, accepted_at FROM @.sandboxes ORDER BY 1")
        assert ours == theirs


async def test_a_table_that_is_wrong_holds_up_nothing_of_ours(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:  # I-9, I-10
    provider = ById()
    async with hosting(hosts, provider) as rt:
        await hosts.ask("CREATE TABLE @.sandbox_cleanup_jobs (id integer)")
        handle = await rt.submit(sandboxed.pretended, {})

        async def made() -> bool:
            return bool(provider.specs)

        await eventually(made, within_s=20.0)
        await eventually(lambda: said(caplog, "event=adoption_failed provider=daytona"))
        await handle.cancel()

        async def gone() -> bool:
            return await hosts.value("SELECT bool_and(confirmed_at IS NOT NULL) FROM @.sandboxes") is True

        await eventually(gone, within_s=20.0)
    assert caplog.text.count("event=adoption_failed") == 1
    assert "event=crash" not in caplog.text


async def test_a_setting_that_fits_no_provider_is_told(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosting(hosts, ById(), legacy_cleanup_provider="modal"):
        assert "no such provider on this host' known=daytona" in caplog.text


async def test_a_host_whose_provider_goes_by_names_is_refused(hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match=r"daytona.*finds_by_id"):
        async with hosting(hosts, ById(finds_by_id=False)):
            pass


@pytest.mark.parametrize("name", sorted(SITES))
async def test_a_provider_finds_what_others_have_named_or_says_that_it_cannot(
    name: str, tmp_path: Path
) -> None:
    """H-2: what cannot be found is never taken for gone."""
    async with SITES[name](tmp_path) as site:
        made = await site.provider.create(spec("import time; time.sleep(60)", "theirs"))
        copy = Obligation(
            "adopted:x:1", site.provider.key, made.provider_id, None, "run", 1, 1, 0, None, True, token=7
        )
        steps: list[Step] = []

        async def deleted() -> bool:
            await delete_with(site.provider)(copy, steps.append)
            return steps[-1].kind in ("gone", "failed")

        await eventually(deleted, within_s=20.0)
        if getattr(site.provider, "finds_by_id", False):
            assert (steps[0].kind, steps[-1].kind) == ("accepted", "gone")
            assert steps[0].outcome == "deleted"
            assert await site.provider.names() == []
        else:
            assert [(step.kind, step.final) for step in steps] == [("failed", True)]
            assert await site.provider.delete(SandboxRef("theirs")) == "deleted"
