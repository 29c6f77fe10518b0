"""What every verb of the command line shares: settings, errors with their exit codes, common options.

Owns the one place where an expected error becomes a line and a code. It knows no verb.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import attrs
import click

from runtime.config import RuntimeConfig
from runtime.embedded import EmbeddedError
from sql.errors import (
    ConfigError,
    DatabaseError,
    DuplicateRun,
    FireNotFound,
    IdempotencyConflict,
    InputRefused,
    InvalidDsn,
    InvalidPlay,
    MissingRights,
    RunCancelled,
    RunFailed,
    RunlaneError,
    RunNotFound,
    ScheduleNotFound,
    SchemaNotReady,
)

F = TypeVar("F", bound=Callable[..., Any])

OK, FAILED, USAGE, RUN_FAILED, RUN_CANCELLED, NOT_FOUND, NO_DATABASE = range(7)
INTERRUPTED = 130

EXIT_CODES = """\b
Exit codes:
  0  done
  1  failed
  2  wrong usage, a refused input, a run id or key taken by another one, or a bad setting
  3  the run failed (submit --wait)
  4  the run was cancelled (submit --wait)
  5  there is no such run, schedule or fire
  6  the database cannot be reached or used
  130  interrupted
"""


@attrs.define
class Settings:
    """What the options given before or after a verb say; the environment says the rest."""

    dsn: str | None = None
    schema: str | None = None
    as_json: bool = False

    def config(self, **overrides: Any) -> RuntimeConfig:
        """The settings from the environment, with the options on top. Raises ConfigError."""
        given = {"dsn": self.dsn, "schema": self.schema, **overrides}
        return RuntimeConfig.from_env(**{name: value for name, value in given.items() if value is not None})


# --- errors ------------------------------------------------------------------------------------------


class Refusal(Exception):
    """An expected error: one line on stderr and an exit code. Its notes go below that line."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(" ".join(message.split()))
        self.exit_code = exit_code


def exit_code_of(error: RunlaneError) -> int:
    """The exit code that an error has on the command line."""
    if isinstance(error, InvalidDsn) and error.sqlstate is None:
        return USAGE  # it cannot be read; no server was asked
    if isinstance(error, (DatabaseError, EmbeddedError)):
        return NO_DATABASE
    if isinstance(error, RunFailed):
        return RUN_FAILED
    if isinstance(error, RunCancelled):
        return RUN_CANCELLED
    if isinstance(error, (RunNotFound, ScheduleNotFound, FireNotFound)):
        return NOT_FOUND
    if isinstance(error, (ConfigError, DuplicateRun, IdempotencyConflict, InputRefused, InvalidPlay)):
        return USAGE
    return FAILED


def _refusal(error: RunlaneError) -> Refusal:
    message = str(error)
    if "runlane migrate" not in message:
        if isinstance(error, SchemaNotReady):
            message += "; `runlane migrate` builds what is missing"
        elif isinstance(error, MissingRights):
            message += "; see Deploying in the README"
    refusal = Refusal(message, exit_code_of(error))
    for note in getattr(error, "__notes__", ()):
        refusal.add_note(note)
    return refusal


class Verbs(click.Group):
    """A group whose verbs end with one line and a code on every expected error."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The verb's arguments among them, which must be text: no database could store anything else."""
        for arg in args:
            try:
                arg.encode()
            except UnicodeEncodeError:
                raise click.UsageError(f"an argument is not UTF-8: {arg!a}") from None
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except RunlaneError as error:
            refusal = _refusal(error)
        except Refusal as error:
            refusal = error
        except KeyboardInterrupt:
            refusal = Refusal("interrupted", INTERRUPTED)
        click.echo(f"Error: {refusal}", err=True)
        for note in getattr(refusal, "__notes__", ()):
            click.echo(note, err=True)
        raise click.exceptions.Exit(refusal.exit_code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The verbs in the order in which people need them."""
        return list(self.commands)


def moment_of(field: str, text: str) -> datetime:
    """A time on the command line, with its time zone. Raises InputRefused."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InputRefused(field, f"must be a time as in 2026-01-31T18:00:00Z, not {text!r}") from None
    if moment.tzinfo is None:
        hint = "add Z, or an offset as in 2026-01-31T18:00:00+01:00"
        raise InputRefused(field, f"{text} has no time zone: {hint}")
    return moment


# --- options that several verbs have -----------------------------------------------------------------


def _remember(ctx: click.Context, parameter: click.Parameter, value: Any) -> None:
    settings = ctx.ensure_object(Settings)  # the group's, or the verb's if the group was given none
    if value:
        setattr(settings, str(parameter.name), value)


def database_options(verb: F) -> F:
    """``--dsn`` and ``--schema``."""
    verb = click.option(
        "--schema",
        expose_value=False,
        callback=_remember,
        help="Schema of runlane's tables  [RUNLANE_SCHEMA]",
    )(verb)
    return click.option(
        "--dsn",
        expose_value=False,
        callback=_remember,
        help="Where Postgres is; without one, the embedded server  [RUNLANE_DSN]",
    )(verb)


def json_option(verb: F) -> F:
    """``--json``."""
    return click.option(
        "--json",
        "as_json",
        is_flag=True,
        expose_value=False,
        callback=_remember,
        help="Print JSON, one line, for programs.",
    )(verb)


def settings_of_command() -> Settings:
    """The settings of the command that runs."""
    return click.get_current_context().ensure_object(Settings)
