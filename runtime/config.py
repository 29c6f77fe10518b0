"""The settings of a runtime.

Owns every setting's name, default, unit and range, how they depend on each other, and how they are read
from the environment. It opens nothing and looks nothing up.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

import attrs
import cattrs

from runtime.codec import preview
from sql.bundle import SCHEMA_PATTERN
from sql.errors import ConfigError

PREFIX = "RUNLANE_"
FOREIGN_PREFIXES = ("RUNLANE_TEST_", "RUNLANE_DEMO_", "RUNLANE_RECEIVE_", "RUNLANE_RUNNER_")
"""Variables of the test suite, the demo, receivers and runners in sandboxes: none of ours."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
MAX_DEPTH = 256
MAX_PAYLOAD_BYTES = 64 * 1_048_576

_SECRET = frozenset({"dsn", "listen_dsn", "ledger_secret", "ledger_internal_token", "gateway_secret"})
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_DAY_S = 86_400.0
_CENTURY_S = 36_525 * _DAY_S
_ALIKE = 0.65

_Check = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _name(field: str) -> str:
    return f"{field} ({PREFIX}{field.upper()})"


def _shown(field: str, value: Any) -> str:
    if field in _SECRET:
        return "the given value (not shown)"
    text = preview(value)
    return text if len(text) <= 80 else text[:79] + "…"


def _refuse(field: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{_name(field)} must be {allowed}, not {_shown(field, value)}")


def _whole(least: int, most: int, *, optional: bool = False) -> _Check:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _refuse(attribute.name, value, f"a whole number from {least} to {most}")

    return check


def _seconds(most: float = _DAY_S, *, zero: bool = False, optional: bool = False) -> _Check:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not 0 <= value <= most or (value == 0 and not zero):
            least = "a number of seconds from 0" if zero else "a number of seconds above 0"
            raise _refuse(attribute.name, value, f"{least} and at most {most:g}")

    return check


def _text(most: int, *, optional: bool = True) -> _Check:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
            raise _refuse(attribute.name, value, f"text of 1 to {most} printable characters")

    return check


def _flag(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(attribute.name, value, "true or false")


def _schema(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    fits = isinstance(value, str) and SCHEMA_PATTERN.fullmatch(value)
    if not fits or value.startswith("pg_") or value == "information_schema":
        allowed = "a schema name of 1 to 63 letters, digits or _ that is not one of Postgres' own (pg_…)"
        raise _refuse(attribute.name, value, allowed)


def _level(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value not in LOG_LEVELS:
        raise _refuse(attribute.name, value, "one of " + ", ".join(LOG_LEVELS))


def _hidden(value: str | None) -> str:
    return "None" if value is None else "'…'"


@attrs.frozen(slots=True, kw_only=True)
class RuntimeConfig:
    """The settings of one runtime. ``_s`` is seconds, ``_ms`` milliseconds.

    Raises ConfigError, naming the setting and what is allowed, for a value out of range and for budgets that
    do not nest.
    """

    # Where the runs are
    dsn: str | None = attrs.field(default=None, validator=_text(4_096), repr=_hidden)
    """Where Postgres is; None starts the embedded one."""
    listen_dsn: str | None = attrs.field(default=None, validator=_text(4_096), repr=_hidden)
    """A direct address for LISTEN, where ``dsn`` goes through a pooler."""
    schema: str = attrs.field(default="runlane", validator=_schema)
    embedded_dir: str | None = attrs.field(default=None, validator=_text(4_096))
    """Folder of the embedded Postgres; None chooses one."""
    pooled: bool = attrs.field(default=False, validator=_flag)
    """``dsn`` goes through a pooler in transaction mode: no session state, no LISTEN on it."""
    notify: bool = attrs.field(default=True, validator=_flag)
    """Send and use notifications; without them the backstop finds everything."""

    # Who this host is
    release_id: str | None = attrs.field(default=None, validator=_text(128))
    environment: str | None = attrs.field(default=None, validator=_text(128))
    host_name: str | None = attrs.field(default=None, validator=_text(128))
    """A name for people to read; identity is a fresh id per start. None is the machine's name."""

    # Work
    slots: int = attrs.field(default=200, validator=_whole(1, 10_000))
    """Attempts that run here at once."""
    threads: int = attrs.field(default=40, validator=_whole(1, 1_000))
    """Threads for plays that are a plain ``def``, and as many again for steps."""
    lease_s: float = attrs.field(default=60.0, validator=_seconds())
    renew_every_s: float = attrs.field(default=20.0, validator=_seconds())
    crash_cap: int = attrs.field(default=5, validator=_whole(1, 1_000))
    """Leases of one run that may expire before it fails, where its play does not say."""
    outage_max_s: float = attrs.field(default=900.0, validator=_seconds(30 * _DAY_S))
    """How long the outage of a dependency may defer a run before it fails, where its play does not say."""
    park_after_s: float = attrs.field(default=0.5, validator=_seconds(zero=True))
    """A sleep up to this long keeps its slot instead of parking."""
    flush_ms: int = attrs.field(default=250, validator=_whole(1, 60_000))
    """How long a log line or progress may wait for company."""

    # Shutdown
    grace_s: float = attrs.field(default=10.0, validator=_seconds(zero=True))
    """What running attempts get to end by themselves."""
    release_budget_s: float = attrs.field(default=5.0, validator=_seconds())
    """What handing back every lease may take."""
    shutdown_budget_s: float = attrs.field(default=30.0, validator=_seconds())
    """The whole shutdown; the service manager's must be longer still."""

    # The database
    operation_timeout_s: float = attrs.field(default=30.0, validator=_seconds())
    """A caller's deadline, after which it gets OutcomeUnknown."""
    statement_timeout_s: float = attrs.field(default=15.0, validator=_seconds())
    connect_timeout_s: float = attrs.field(default=10.0, validator=_seconds())
    backstop_s: float = attrs.field(default=12.0, validator=_seconds(3_600.0))
    """The longest time between two looks at the database when no notification comes."""

    # Payloads
    max_payload_bytes: int = attrs.field(default=1_048_576, validator=_whole(256, MAX_PAYLOAD_BYTES))
    max_depth: int = attrs.field(default=64, validator=_whole(1, MAX_DEPTH))
    """Nested containers in a payload."""

    # Delivery
    ledger_url: str | None = attrs.field(default=None, validator=_text(2_048))
    """A receiver's URL: hosts that are given no ledger deliver there, instead of keeping a read model of their own."""
    ledger_secret: str | None = attrs.field(default=None, validator=_text(1_024), repr=_hidden)
    """What its dispatch tokens are signed with."""
    ledger_internal_token: str | None = attrs.field(default=None, validator=_text(1_024), repr=_hidden)
    """Instead of the secret: what it gives dispatch tokens for."""
    lane_actors: int = attrs.field(default=4, validator=_whole(1, 64))
    lane_lease_s: float = attrs.field(default=30.0, validator=_seconds())
    delivery_prefix: int = attrs.field(default=8, validator=_whole(1, 1_000))
    """Facts in one delivery at most."""
    delivery_timeout_s: float = attrs.field(default=15.0, validator=_seconds())
    inline_delivery_ms: int = attrs.field(default=250, validator=_whole(0, 4_000))
    """What a ledger outside of the database gets to take a new run's first fact straight from its admission, before
    it is left to the lane actors. 0: always leave it to them."""

    # What is kept
    retention_s: float | None = attrs.field(
        default=30 * 86_400, validator=_seconds(_CENTURY_S, optional=True)
    )
    """From the end of a run until it goes with all that it has left; None: never."""
    log_retention_s: float | None = attrs.field(
        default=7 * 86_400, validator=_seconds(_CENTURY_S, optional=True)
    )
    """From a log line until its body goes, once it is delivered; None: with its run."""
    keep_ledger: bool = attrs.field(default=False, validator=_flag)
    """Rows of ``ledger_runs`` and ``ledger_logs`` stay when their run goes."""

    # Sandboxes
    gateway_url: str | None = attrs.field(default=None, validator=_text(2_048))
    """Where sandboxes reach this host's HTTP server; None: on ``health_host`` and its port."""
    gateway_secret: str | None = attrs.field(default=None, validator=_text(1_024), repr=_hidden)
    """What signs runners' tokens, the same on all hosts; None: one that the database keeps for them."""
    sandbox_create_s: float = attrs.field(default=120.0, validator=_seconds())
    """What a provider gets to make a sandbox."""
    heartbeat_timeout_s: float = attrs.field(default=60.0, validator=_seconds())
    """Silence of a runner after which its provider is asked."""
    cleanup_lease_s: float = attrs.field(default=60.0, validator=_seconds())
    """What a provider gets to delete a sandbox, before another host tries."""
    cleanup_failures: int = attrs.field(default=20, validator=_whole(1, 10_000))
    """Failed deletions after which an operator has to decide."""
    legacy_cleanup_table: str | None = attrs.field(default=None, validator=_text(200))
    """A table in which an older generation of workers keeps what it has to delete: cleanup adopts that. Without a
    schema in front it is looked for in ``schema``."""
    legacy_cleanup_provider: str = attrs.field(default="daytona", validator=_text(255, optional=False))
    """The ``key`` of the provider to which all of that belongs."""
    billing_grace_s: float = attrs.field(default=60.0, validator=_seconds(zero=True))
    """A sandbox that its provider never gave back is billed for its ceiling and this."""

    # Health and logs
    health_host: str = attrs.field(default="127.0.0.1", validator=_text(255, optional=False))
    health_port: int | None = attrs.field(default=None, validator=_whole(0, 65_535, optional=True))
    """None: no health server. 0: any free port."""
    log_level: str = attrs.field(default="INFO", validator=_level)

    @classmethod
    def given(cls, config: Any) -> RuntimeConfig:
        """What a program gave as its config: None reads the environment. Raises ConfigError for anything else."""
        if config is None:
            return cls.from_env()
        if isinstance(config, cls):
            return config
        raise ConfigError(f"config must be RuntimeConfig(dsn=…) or None, not {type(config).__name__}")

    def __attrs_post_init__(self) -> None:
        # A third, so that two renewals may fail before the lease lapses.
        if self.renew_every_s > self.lease_s / 3 * (1 + 1e-9):
            raise ConfigError(
                f"{_name('renew_every_s')} must be at most a third of lease_s ({self.lease_s:g}), "
                f"so at most {self.lease_s / 3:g}, not {self.renew_every_s:g}"
            )
        self._below("statement_timeout_s", "operation_timeout_s")
        self._below("delivery_timeout_s", "lane_lease_s")
        inner = self.grace_s + self.release_budget_s
        if inner >= self.shutdown_budget_s:
            raise ConfigError(
                f"{_name('shutdown_budget_s')} must be above grace_s + release_budget_s ({inner:g}), "
                f"not {self.shutdown_budget_s:g}"
            )

    def _below(self, child: str, parent: str) -> None:
        inner, outer = getattr(self, child), getattr(self, parent)
        if inner >= outer:
            raise ConfigError(f"{_name(child)} must be below {parent} ({outer:g}), not {inner:g}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> RuntimeConfig:
        """Settings from ``RUNLANE_<FIELD>`` variables of ``environ`` (the process's own by default).

        ``overrides`` win over the environment. An empty value of a setting that may be absent means absent.
        Raises ConfigError for a variable with our prefix that names no setting, and for a bad value.
        """
        environment = os.environ if environ is None else environ
        fields = {PREFIX + field.name.upper(): field.name for field in attrs.fields(cls)}
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for variable in sorted(environment):
            if not variable.startswith(PREFIX) or variable.startswith(FOREIGN_PREFIXES):
                continue
            if variable not in fields:
                raise ConfigError(_unknown(variable, list(fields)))
            field = fields[variable]
            values[field] = _parse(field, environment[variable], hints[field])
        return cls(**{**values, **overrides})


def _unknown(variable: str, known: list[str]) -> str:
    # Without the prefix, which alone would make any two of them alike.
    bare = [name.removeprefix(PREFIX) for name in known]
    close = difflib.get_close_matches(variable.removeprefix(PREFIX), bare, n=1, cutoff=_ALIKE)
    suggestion = f"; did you mean {PREFIX}{close[0]}?" if close else ""
    return f"{variable} is not a setting of runlane{suggestion}"


def _parse_bool(text: str, _: Any) -> bool:
    if text.lower() in _TRUE | _FALSE:
        return text.lower() in _TRUE
    raise ValueError("true or false (also 1/0, yes/no, on/off)")


def _parse_int(text: str, _: Any) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _parse_float(text: str, _: Any) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _parse_optional(kind: Any) -> Callable[[str, Any], Any]:
    (inner,) = [arg for arg in kind.__args__ if arg is not type(None)]
    return lambda text, _: None if text == "" else _converter.structure(text, inner)


def _is_optional(kind: Any) -> bool:
    return type(None) in getattr(kind, "__args__", ())


_converter = cattrs.Converter()
_converter.register_structure_hook(bool, _parse_bool)
_converter.register_structure_hook(int, _parse_int)
_converter.register_structure_hook(float, _parse_float)
_converter.register_structure_hook_factory(_is_optional, _parse_optional)


def _parse(field: str, text: str, kind: Any) -> Any:
    try:
        return _converter.structure(text.strip(), kind)
    except ValueError as error:
        raise _refuse(field, text, str(error)) from None
