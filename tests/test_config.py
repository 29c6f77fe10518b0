"""Settings: ranges, budgets that nest, and the environment."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import attrs
import pytest

from runtime.config import RuntimeConfig
from sql.errors import ConfigError


def test_the_defaults_are_valid_and_an_empty_environment_gives_them() -> None:
    assert RuntimeConfig.from_env({}) == RuntimeConfig()


def test_what_a_program_gives_as_config() -> None:
    mine = RuntimeConfig(schema="mine")
    assert RuntimeConfig.given(mine) is mine
    with pytest.raises(ConfigError, match=r"RuntimeConfig\(dsn=…\).* not str"):
        RuntimeConfig.given("postgresql://db/app")


def test_every_duration_and_size_names_its_unit() -> None:
    durations = [name for name, hint in get_type_hints(RuntimeConfig).items() if hint is float]
    assert "lease_s" in durations
    assert all(name.endswith("_s") for name in durations)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"slots": 0}, ["slots (RUNLANE_SLOTS)", "1 to 10000", "not 0"]),
        ({"slots": True}, ["slots", "whole number"]),
        ({"slots": 1.5}, ["slots", "whole number"]),
        ({"slots": 10**9999}, ["slots"]),
        ({"lease_s": 0}, ["lease_s", "above 0"]),
        ({"lease_s": -1.0}, ["lease_s"]),
        ({"lease_s": math.nan}, ["lease_s"]),
        ({"lease_s": math.inf}, ["lease_s"]),
        ({"lease_s": "60"}, ["lease_s", "number of seconds"]),
        ({"lease_s": True}, ["lease_s"]),
        ({"grace_s": -1}, ["grace_s"]),
        ({"backstop_s": 3_601}, ["backstop_s", "3600"]),
        ({"schema": ""}, ["schema", "63 letters"]),
        ({"schema": "ä" * 32}, ["schema", "63 letters"]),
        ({"schema": "no-good"}, ["schema", "letters, digits or _"]),
        ({"schema": "a\x00"}, ["schema"]),
        ({"schema": "pg_mine"}, ["schema"]),
        ({"schema": None}, ["schema"]),
        ({"dsn": ""}, ["dsn"]),
        ({"dsn": 5}, ["dsn"]),
        ({"release_id": "a\nb"}, ["release_id", "printable"]),
        ({"environment": "x" * 129}, ["environment"]),
        ({"notify": 1}, ["notify", "true or false"]),
        ({"legacy_cleanup_provider": None}, ["legacy_cleanup_provider", "printable"]),
        ({"health_port": 65_536}, ["health_port", "65535"]),
        ({"health_host": None}, ["health_host"]),
        ({"log_level": "info"}, ["log_level", "INFO"]),
        ({"log_level": []}, ["log_level", "INFO"]),
        ({"max_depth": 257}, ["max_depth", "256"]),
        ({"max_payload_bytes": 0}, ["max_payload_bytes"]),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_allowed(
    settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"lease_s": 30.0}, "renew_every_s", "lease_s"),
        ({"lease_s": 3.0, "renew_every_s": 1.1}, "renew_every_s", "third"),
        ({"statement_timeout_s": 30.0}, "statement_timeout_s", "operation_timeout_s"),
        ({"delivery_timeout_s": 30}, "delivery_timeout_s", "lane_lease_s"),
        ({"grace_s": 25.0}, "shutdown_budget_s", "grace_s + release_budget_s"),
    ],
)
def test_budgets_that_do_not_nest_are_refused(settings: dict[str, Any], first: str, second: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig(**settings)
    assert first in str(caught.value)
    assert second in str(caught.value)


def test_the_shortest_nesting_budgets_are_allowed() -> None:
    assert RuntimeConfig(lease_s=3, renew_every_s=1, grace_s=0).renew_every_s == 1


def test_every_setting_can_come_from_the_environment() -> None:
    given: dict[str, Any] = {
        "dsn": "postgresql://u@h/db",
        "listen_dsn": "postgresql://u@h2/db",
        "schema": "other",
        "embedded_dir": "data",
        "pooled": True,
        "notify": False,
        "release_id": "r1",
        "environment": "staging",
        "host_name": "box",
        "slots": 3,
        "threads": 5,
        "lease_s": 9.0,
        "renew_every_s": 2.5,
        "crash_cap": 2,
        "outage_max_s": 60.0,
        "park_after_s": 0.0,
        "flush_ms": 10,
        "grace_s": 1.0,
        "release_budget_s": 2.0,
        "shutdown_budget_s": 4.0,
        "operation_timeout_s": 6.0,
        "statement_timeout_s": 5.0,
        "connect_timeout_s": 1.5,
        "backstop_s": 11.0,
        "max_payload_bytes": 4_096,
        "max_depth": 8,
        "ledger_url": "https://ledger.example",
        "ledger_secret": "a secret",
        "ledger_internal_token": "a token",
        "lane_actors": 2,
        "lane_lease_s": 7.0,
        "delivery_prefix": 4,
        "delivery_timeout_s": 6.5,
        "inline_delivery_ms": 100,
        "retention_s": 3_600.0,
        "log_retention_s": 600.0,
        "keep_ledger": True,
        "gateway_url": "https://runners.example",
        "gateway_secret": "s" * 40,
        "sandbox_create_s": 30.0,
        "heartbeat_timeout_s": 12.0,
        "cleanup_lease_s": 20.0,
        "cleanup_failures": 3,
        "legacy_cleanup_table": "public.jobs",
        "legacy_cleanup_provider": "modal",
        "billing_grace_s": 0.0,
        "health_host": "::1",
        "health_port": 0,
        "log_level": "DEBUG",
    }
    assert set(given) == {field.name for field in attrs.fields(RuntimeConfig)}
    environ = {f"RUNLANE_{name.upper()}": str(value) for name, value in given.items()}
    assert attrs.asdict(RuntimeConfig.from_env(environ)) == given


def test_the_process_environment_is_the_default_and_overrides_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNLANE_SLOTS", "7")
    monkeypatch.setenv("RUNLANE_SCHEMA", "one")
    config = RuntimeConfig.from_env(schema="two")
    assert (config.slots, config.schema) == (7, "two")


def test_variables_of_the_tests_the_demo_and_other_programs_are_left_alone() -> None:
    environ = {"RUNLANE_TEST_DSN": "x", "RUNLANE_DEMO_DIR": "y", "PATH": "z", "RUNLANES": "w"}
    assert RuntimeConfig.from_env(environ) == RuntimeConfig()


def test_an_unknown_variable_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"RUNLANE_LEASES_S is not a setting.*did you mean RUNLANE_LEASE_S"):
        RuntimeConfig.from_env({"RUNLANE_LEASES_S": "1"})
    with pytest.raises(ConfigError, match="RUNLANE_QQQQ is not a setting"):
        RuntimeConfig.from_env({"RUNLANE_QQQQ": "1"})


def test_a_name_that_is_like_nothing_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.from_env({"RUNLANE_BOGUS": "1"})
    assert str(caught.value) == "RUNLANE_BOGUS is not a setting of runlane"


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("RUNLANE_SLOTS", "many", "a whole number"),
        ("RUNLANE_SLOTS", "1.5", "a whole number"),
        ("RUNLANE_SLOTS", "", "a whole number"),
        ("RUNLANE_SLOTS", "9" * 5_000, "a whole number"),
        ("RUNLANE_SLOTS", "-1", "1 to 10000"),
        ("RUNLANE_LEASE_S", "1m", "a number"),
        ("RUNLANE_LEASE_S", "nan", "a number of seconds"),
        ("RUNLANE_NOTIFY", "maybe", "true or false"),
        ("RUNLANE_HEALTH_PORT", "http", "a whole number"),
        ("RUNLANE_HEALTH_PORT", "-1", "65535"),
        ("RUNLANE_LOG_LEVEL", "LOUD", "DEBUG, INFO"),
    ],
)
def test_a_bad_variable_is_refused_with_name_value_and_what_is_allowed(
    variable: str, value: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.from_env({variable: value})
    message = str(caught.value)
    assert variable in message
    assert value[:20] in message
    assert allowed in message
    assert len(message) < 300


@pytest.mark.parametrize("value", ["1", "true", "YES", "on", " True "])
def test_spellings_of_true(value: str) -> None:
    assert RuntimeConfig.from_env({"RUNLANE_POOLED": value}).pooled is True


@pytest.mark.parametrize("value", ["0", "false", "No", "off"])
def test_spellings_of_false(value: str) -> None:
    assert RuntimeConfig.from_env({"RUNLANE_NOTIFY": value}).notify is False


def test_an_empty_optional_variable_means_absent() -> None:
    config = RuntimeConfig.from_env({"RUNLANE_DSN": "", "RUNLANE_HEALTH_PORT": ""})
    assert (config.dsn, config.health_port) == (None, None)


def test_a_password_is_never_shown() -> None:
    config = RuntimeConfig(dsn="postgresql://u:hunter2@h/db", listen_dsn="postgresql://u:hunter2@h/db")
    assert "hunter2" not in repr(config)
    assert "hunter2" not in repr(RuntimeConfig(ledger_secret="hunter2", ledger_internal_token="hunter2"))
    with pytest.raises(ConfigError) as caught:
        RuntimeConfig.from_env({"RUNLANE_DSN": "postgresql://u:hunter2@h/db\n\x00"})
    assert "hunter2" not in str(caught.value)
