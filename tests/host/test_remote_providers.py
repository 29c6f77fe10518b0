"""What Daytona and Modal have each for itself, against what is pretended of them (I-6, I-32, I-42)."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime import RuntimeConfig
from runtime.detached_host import providers_of
from runtime.sandboxes import DaytonaProvider, LocalProvider, ModalProvider, SandboxRef, SandboxSpec
from runtime.sandboxes.base import SandboxFault
from runtime.sandboxes.remote import how_it_ended, limited, short_name
from sql.errors import ConfigError, InputRefused
from tests.support import sandboxed, sites
from tests.support.fake_daytona import API_KEY, ORGANIZATION, Daytona, pretended_daytona
from tests.support.fake_modal import TOKEN_ID, TOKEN_SECRET, Modal, pretended_modal
from tests.support.hosts import eventually
from tests.support.sites import REF


def spec(**more: Any) -> SandboxSpec:
    """One that sleeps, and has a secret."""
    return sites.spec("import time; time.sleep(60)", env={"RUNLANE_RUNNER_TOKEN": "the-token"}, **more)


@pytest.fixture
def daytona(tmp_path: Path) -> Iterator[Daytona]:
    with pretended_daytona(tmp_path) as service:
        yield service


@pytest.fixture
async def modal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Modal]:
    with pretended_modal(tmp_path) as service:
        monkeypatch.setenv("MODAL_SERVER_URL", service.url)
        yield service


def at_daytona(service: Daytona, **more: Any) -> DaytonaProvider:
    return DaytonaProvider(**{"snapshot": "runlane", "api_key": API_KEY, "api_url": service.url, **more})


# --- what is refused at start -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "extra", "make"),
    [
        ("daytona_api_client", "daytona", lambda: DaytonaProvider(snapshot="s", api_key="k")),
        ("daytona_toolbox_api_client", "daytona", lambda: DaytonaProvider(snapshot="s", api_key="k")),
        ("modal", "modal", lambda: ModalProvider(image="im-1", token_id="i", token_secret="s")),
    ],
)
def test_a_missing_extra_is_named(
    module: str, extra: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"needs {module}: .*pip install '.\[{extra}\]"):
        make()


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("API_KEY", "JWT_TOKEN", "ORGANIZATION_ID"):
        monkeypatch.delenv(f"DAYTONA_{name}", raising=False)
    with pytest.raises(ConfigError, match="DAYTONA_API_KEY"):
        DaytonaProvider(snapshot="s")
    with pytest.raises(ConfigError, match="organization_id"):
        DaytonaProvider(snapshot="s", jwt_token="t")
    for name in ("TOKEN_ID", "TOKEN_SECRET", "PROFILE"):
        monkeypatch.delenv(f"MODAL_{name}", raising=False)
    monkeypatch.setattr("modal.config._user_config", {})
    with pytest.raises(ConfigError, match="MODAL_TOKEN_ID"):
        ModalProvider(image="im-1")
    with pytest.raises(InputRefused, match="token_secret"):
        ModalProvider(image="im-1", token_id="i")


def test_what_a_sandbox_is_made_of_has_to_be_said() -> None:
    for wrong in ({}, {"snapshot": "s", "image": "i"}, {"snapshot": "s", "cpu": 2}):
        with pytest.raises(InputRefused):
            DaytonaProvider(api_key="k", **wrong)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        (None, False),
        ("nonsense", False),
        ("http://[::1", False),
        ("http://localhost:8080", False),
        ("http://127.0.0.1:8080", False),
        ("http://[::1]:8080", False),
        ("http://0.0.0.0:8080", False),
        ("http://10.1.2.3:8080", True),
        ("https://runners.example", True),
    ],
)
def test_a_host_does_not_start_where_its_runners_would_not_find_it(url: str | None, found: bool) -> None:
    plays = {"boxed": sandboxed.boxed}
    config = RuntimeConfig(dsn="postgresql://nowhere", health_port=0, gateway_url=url)
    elsewhere = DaytonaProvider(snapshot="s", api_key="k")
    if found:
        assert providers_of(plays, {"local": elsewhere}, config) == {"local": elsewhere}
    else:
        with pytest.raises(ConfigError, match=r"'boxed'.*'local'.*RUNLANE_GATEWAY_URL"):
            providers_of(plays, {"local": elsewhere}, config)
    here = LocalProvider()
    assert providers_of(plays, {"local": here, "daytona": elsewhere}, config)["local"] is here


# --- names, limits, ends ------------------------------------------------------------------------------


def test_a_name_that_does_not_fit_keeps_its_beginning() -> None:
    assert short_name(REF.sandbox) == REF.sandbox
    long = [f"rl01234567-{'a:' * 60}.{number}" for number in (1, 2)]
    assert len({short_name(name) for name in long}) == 2
    for name in long:
        assert short_name(name).startswith("rl01234567-a-a-")
        assert len(short_name(name)) == 63


def test_limits_are_set_by_the_shell() -> None:
    assert limited(("python", "-c", "a b")) == "exec python -c 'a b'"
    assert limited(("a",), cpu_s=0.5, memory_bytes=2**30) == f"ulimit -t 1; ulimit -v {2**20}; exec a"


def test_a_signal_is_told_as_such() -> None:
    assert how_it_ended(137, "x" * 5_000) == {
        "reason": "its command has ended",
        "exit_code": None,
        "signal": "SIGKILL",
        "output_tail": "x" * 4_096,
    }
    assert how_it_ended(255, "")["exit_code"] == 255


# --- Daytona ------------------------------------------------------------------------------------------


async def test_what_is_ordered_of_daytona(daytona: Daytona) -> None:
    provider = at_daytona(daytona, snapshot=None, image="registry/runlane:1", cpu=2, target="eu")
    made = await provider.create(spec(memory_bytes=3 * 2**30 - 1, ceiling_s=90.0))
    order = daytona.made[made.provider_id].order
    assert order["buildInfo"] == {"dockerfileContent": "FROM registry/runlane:1\n"}
    assert (order["cpu"], order["memory"], order["target"]) == (2, 3, "eu")
    # Quiet is no reason to stop it; one that stops goes, and none outlives its ceiling by more than a minute.
    assert (order["autoStopInterval"], order["autoDeleteInterval"], order["ttlMinutes"]) == (0, 0, 2)
    assert order["env"] == {"RUNLANE_RUNNER_TOKEN": "the-token"}
    assert "the-token" not in str(order["labels"])
    assert made.routing_domain == ORGANIZATION


async def test_a_command_is_started_once_by_however_many(daytona: Daytona) -> None:
    """A host may die between the sandbox and its command, and another call of it may still be on its way."""
    provider = at_daytona(daytona)
    made = await trio.to_thread.run_sync(provider._make, spec())

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(provider.create, spec())

    commands = daytona.made[made.id].sessions["runlane"]

    async def one_is_left() -> bool:
        return [ran.poll() for _, _, ran in commands].count(None) == 1

    await eventually(one_is_left)
    assert (await provider.inspect(REF)).state == "running"


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("starting", "running"), ("paused", "running"), ("stopped", "ended"), ("error", "ended"),
        ("destroying", "ended"), ("destroyed", "absent"), ("archived", "ended"),
    ],
)  # fmt: skip
async def test_every_state_of_daytona_is_one_of_ours(state: str, told: str, daytona: Daytona) -> None:
    provider = at_daytona(daytona)
    made = await provider.create(spec())
    daytona.made[made.provider_id].state = state
    found = await provider.inspect(SandboxRef(REF.sandbox, made.provider_id))
    assert found.state == told
    if told == "ended":
        assert state in found.diagnostics["reason"]


async def test_a_state_that_nobody_knows_is_no_answer(daytona: Daytona) -> None:
    provider = at_daytona(daytona)
    made = await provider.create(spec())
    daytona.made[made.provider_id].state = "contemplating"
    with pytest.raises(SandboxFault, match="state that is not known"):
        await provider.inspect(REF)


async def test_a_sandbox_that_cannot_be_made_is_told(daytona: Daytona) -> None:
    provider = at_daytona(daytona)
    made = await trio.to_thread.run_sync(provider._make, spec())
    daytona.made[made.id].state = "build_failed"
    with pytest.raises(SandboxFault, match="build_failed"):
        await provider.create(spec())


async def test_not_found_in_another_organisation_is_no_proof(daytona: Daytona) -> None:
    """Credentials that were changed must not make a sandbox of the old organisation look deleted."""
    provider = at_daytona(daytona)
    elsewhere = SandboxRef(REF.sandbox, "there", "another-organisation")
    for ask in (provider.inspect, provider.delete):
        with pytest.raises(SandboxFault, match=f"another-organisation.*{ORGANIZATION}"):
            await ask(elsewhere)
    here = SandboxRef(REF.sandbox, "there", ORGANIZATION)
    assert (await provider.inspect(here)).state == "absent"
    assert await provider.delete(here) == "already_absent"


async def test_an_answer_that_is_not_understood_tells_no_secret(
    daytona: Daytona, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = at_daytona(daytona)
    monkeypatch.setattr(Daytona, "_shown", lambda self, made: {"env": made.order["env"], "name": 1})
    with pytest.raises(SandboxFault, match="does not understand") as caught:
        await provider.create(spec())
    assert caught.value.__cause__ is None
    assert "the-token" not in str(caught.value)


async def test_wrong_credentials_say_what_to_do(daytona: Daytona, modal: Modal) -> None:
    provider = at_daytona(daytona, api_key="dtn_wrong")
    with pytest.raises(SandboxFault, match=r"401: .*check DAYTONA_API_KEY") as caught:
        await provider.inspect(REF)
    assert "dtn_wrong" not in str(caught.value)
    other = ModalProvider(image="im-1", token_id="ak-wrong", token_secret="as-wrong")
    try:
        with pytest.raises(SandboxFault, match="check MODAL_TOKEN_ID") as caught:
            await other.inspect(REF)
        assert "wrong" not in str(caught.value)
    finally:
        await trio.to_thread.run_sync(other._client.close)


async def test_a_service_that_is_not_there_is_named() -> None:
    provider = DaytonaProvider(snapshot="s", api_key="k", api_url="http://127.0.0.1:1")
    with pytest.raises(SandboxFault, match=r"daytona: not reached: .*refused"):
        await provider.names()


# --- Modal --------------------------------------------------------------------------------------------


async def test_what_is_ordered_of_modal(modal: Modal) -> None:
    provider = ModalProvider(
        image="im-runlane", token_id=TOKEN_ID, token_secret=TOKEN_SECRET, app="plays", region="eu", cpu=0.5
    )
    try:
        made = await provider.create(spec(memory_bytes=2**30, cpu_s=5.0, ceiling_s=90.5))
        order = modal.made[made.provider_id].order
        asked = order.definition
        assert (order.app_id, asked.image_id, asked.timeout_secs) == ("ap-plays", "im-runlane", 91)
        assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (500, 1_024)
        assert asked.resources.memory_mb_max == 1_024
        assert list(asked.scheduler_placement.regions) == ["eu"]
        assert list(asked.entrypoint_args[:2]) == ["sh", "-c"]
        assert asked.entrypoint_args[2].startswith("ulimit -t 5; exec python ")
        assert list(asked.secret_ids) == []  # the token is in the sandbox, not kept beside it
        assert modal.made[made.provider_id].box.env == {"RUNLANE_RUNNER_TOKEN": "the-token"}
        without = await provider.create(spec(sandbox="rl01234567-other"))
        assert modal.made[without.provider_id].order.definition.timeout_secs == 86_400
        assert math.isclose(modal.made[without.provider_id].order.definition.resources.milli_cpu, 500)
    finally:
        await trio.to_thread.run_sync(provider._client.close)
