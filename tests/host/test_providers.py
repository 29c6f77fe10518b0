"""What every provider of sandboxes keeps, whatever is behind it (I-6, I-22 to I-25)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from runtime.sandboxes import SandboxRef
from runtime.sandboxes.base import SandboxFault
from tests.support import sandboxed
from tests.support.hosts import Hosts, eventually
from tests.support.invariants import check_invariants
from tests.support.sites import REF, SITES, WITHIN_S, Site, ended, gone, spec

SLEEPS = "import time; time.sleep(60)"


@pytest.fixture(params=sorted(SITES))
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    async with SITES[request.param](tmp_path) as made:
        yield made


# Those that are a service somewhere, which may hang or fail.
served = pytest.mark.parametrize("site", sorted(set(SITES) - {"local"}), indirect=True)


async def test_a_sandbox_from_its_making_to_its_end(site: Site) -> None:
    provider = site.provider
    assert (await provider.inspect(REF)).state == "absent"
    assert await provider.delete(REF) == "already_absent"
    made = await provider.create(spec(SLEEPS))
    assert made.provider_id
    # Asked again, it answers the one there is.
    assert await provider.create(spec(SLEEPS)) == made
    # Found by its name alone, as after a host that died before it could write the id down.
    assert (await provider.inspect(REF)).state == "running"
    known = SandboxRef(REF.sandbox, made.provider_id, made.routing_domain)
    found = await provider.inspect(known)
    assert (found.state, found.routing_domain) == ("running", made.routing_domain)
    assert await provider.names() == [REF.sandbox]
    # Accepted is one thing, gone another.
    assert await provider.delete(known) == "deleted"
    await gone(site, known)
    assert await provider.delete(known) == "already_absent"
    assert await provider.delete(REF) == "already_absent"
    assert await provider.names() == []


async def test_deleted_by_its_name_alone(site: Site) -> None:
    await site.provider.create(spec(SLEEPS))
    assert await site.provider.delete(REF) == "deleted"
    await gone(site)


async def test_how_a_command_ended_is_told(site: Site) -> None:
    program = "import os; print(os.environ['SAID'] * 3_000, 'the end', flush=True); os._exit(3)"
    made = await site.provider.create(spec(program, env={"SAID": "words "}))
    known = SandboxRef(REF.sandbox, made.provider_id, made.routing_domain)
    found = await ended(site, known)
    assert found.diagnostics["exit_code"] == 3
    assert found.diagnostics["output_tail"].rstrip().endswith("words  the end")
    assert len(found.diagnostics["output_tail"]) <= 4_096
    await site.provider.delete(known)
    await gone(site, known)


async def test_every_name_that_a_run_may_have_is_found_again(site: Site) -> None:
    names = {f"rl01234567-{'a:_b.' * 25}run.{attempt}.0a1b2c3d" for attempt in (1, 2)}
    for name in names:
        await site.provider.create(spec(SLEEPS, name))
    assert set(await site.provider.names()) == names
    for name in names:
        assert (await site.provider.inspect(SandboxRef(name))).state == "running"
        assert await site.provider.delete(SandboxRef(name)) == "deleted"
        await gone(site, SandboxRef(name))


async def test_a_making_that_is_cut_short_leaves_nothing_that_its_deletion_does_not_find(site: Site) -> None:
    for after_s in (0.0, 0.003, 0.03, 0.3):
        with trio.move_on_after(after_s):
            await site.provider.create(spec(SLEEPS))

        async def away() -> bool:
            await site.provider.delete(REF)
            return (await site.provider.inspect(REF)).state == "absent"

        # What was in the making may come into being behind the first deletion's back, but not for ever.
        for _ in range(3):
            await eventually(away, within_s=WITHIN_S, every_s=0.05)
            await trio.sleep(0.05)
    assert await site.provider.names() == []


@served
async def test_one_that_hangs_is_given_up_and_holds_up_nobody_else(site: Site) -> None:
    assert site.hang is not None
    assert site.hasty is not None
    hasty = site.hasty
    await site.provider.create(spec(SLEEPS))
    assert (await hasty.inspect(REF)).state == "running"
    site.hang(True)
    given_up = 0

    async def ask() -> None:
        nonlocal given_up
        with pytest.raises(SandboxFault, match="no answer within"):
            await hasty.inspect(REF)
        given_up += 1

    with trio.fail_after(WITHIN_S):
        async with trio.open_nursery() as nursery:
            for _ in range(60):  # more than there are threads by default
                nursery.start_soon(ask)
            await trio.sleep(0.1)
            await trio.to_thread.run_sync(lambda: None)
            assert given_up == 0
    assert given_up == 60
    site.hang(False)

    async def answers() -> bool:
        try:
            return (await hasty.inspect(REF)).state == "running"
        except SandboxFault:
            return False

    await eventually(answers, within_s=WITHIN_S)
    assert await site.provider.delete(REF) == "deleted"
    await gone(site)


@served
async def test_an_error_is_no_answer(site: Site) -> None:
    assert site.fail is not None
    provider = site.provider
    made = await provider.create(spec(SLEEPS))
    known = SandboxRef(REF.sandbox, made.provider_id, made.routing_domain)
    site.fail(True)
    for ref in (REF, known):
        with pytest.raises(SandboxFault, match=provider.key):
            await provider.inspect(ref)
        with pytest.raises(SandboxFault, match=provider.key):
            await provider.delete(ref)
    with pytest.raises(SandboxFault, match=provider.key):
        await provider.names()
    with pytest.raises(SandboxFault, match=provider.key):
        await provider.create(spec(SLEEPS, "rl01234567-other"))
    site.fail(False)
    assert await provider.delete(known) == "deleted"
    await gone(site, known)


# Those of local sandboxes and of Ray, with a real cluster, have files of their own.
@pytest.mark.parametrize("kind", sorted(set(SITES) - {"local", "ray"}))
async def test_detached_runs_go_from_end_to_end(kind: str, hosts: Hosts, tmp_path: Path) -> None:
    """Made, run, lost and found out, deleted and confirmed, billed (H-12, I-22, I-25)."""
    async with SITES[kind](tmp_path) as site:
        # What is pretended runs on this machine, and finds the gateway.
        site.provider.remote = False  # type: ignore[attr-defined]
        plays = (sandboxed.boxed, sandboxed.boxed_dies)
        async with hosts.open(
            *plays, sandboxes={"local": site.provider}, health_port=0, heartbeat_timeout_s=2.0
        ) as rt:
            works = await rt.submit(sandboxed.boxed, {"echo": kind})
            dies = await rt.submit(sandboxed.boxed_dies, {})
            assert (await works.result(timeout=WITHIN_S))["echo"] == kind
            assert await dies.result(timeout=WITHIN_S) == 2
            lost, done = await rt.attempts(dies.run_id)
            assert (lost.outcome, done.outcome) == ("lost", "completed")
            assert lost.error is not None
            assert "exit code 7; it said: " in lost.error["message"]
            assert "about to die" in lost.error["message"]

            async def settled() -> bool:
                records = await rt.compute_records()
                billed = [one for one in records if one.kind == "sandbox"]
                return len(billed) == 3 and await rt.sandboxes(only_open=True) == []

            await eventually(settled, within_s=WITHIN_S, every_s=0.1)
        assert await site.provider.names() == []
        async with hosts.session() as session:
            await check_invariants(session)
