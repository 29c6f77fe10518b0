"""``schedules``: look at schedules, pause, resume and delete them, repair a fire.

Owns the verbs' options and words. Schedules are declared by programs, whose plays they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import attrs
import click
import trio

from runtime import _cli_show as show
from runtime import _client
from runtime._cli_base import (
    FAILED,
    Refusal,
    Verbs,
    database_options,
    json_option,
    moment_of,
    settings_of_command,
)
from runtime.config import RuntimeConfig
from runtime.schedules import check_moment, check_name
from sql import due, schedules
from sql.connection import Session
from sql.errors import FireNotFound, ScheduleNotFound

T = TypeVar("T")

_PATIENCE_S = 5.0
_RETRY_S = 0.05


@click.group("schedules", cls=Verbs, invoke_without_command=True)
@json_option
@database_options
@click.pass_context
def schedules_group(context: click.Context) -> None:
    """List schedules; with a verb, do something to one.

    Schedules are declared by programs: Runtime.open(schedules=[...]), rt.schedule(...), or beside the plays that serve
    hosts.

    \b
    Examples:
      runlane schedules
      runlane schedules show nightly
    """
    if context.invoked_subcommand is None:
        _list()


@schedules_group.command("list")
@json_option
@database_options
def list_verb() -> None:
    """List schedules, as without a verb."""
    _list()


def _list() -> None:
    settings = settings_of_command()
    found = _client.ask(settings.config(), schedules.read)
    show.show_list("schedules", found, show.show_schedules, as_json=settings.as_json, empty="no schedules")


@schedules_group.command("show")
@json_option
@database_options
@click.argument("name")
@click.option(
    "--fires",
    "most",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Latest fires to show.",
)
def show_verb(name: str, most: int) -> None:
    """Show a schedule and what it has fired. A fire whose run is not there any more is "lost"."""
    settings = settings_of_command()
    check_name(name)

    async def body(session: Session) -> tuple[schedules.ScheduleStatus, list[schedules.Fire]]:
        found = await schedules.read(session, [name])
        if not found:
            raise ScheduleNotFound(name)
        return found[0], await schedules.fires(session, name, limit=most)

    schedule, fires = _client.ask(settings.config(), body)
    if settings.as_json:
        show.print_json({**attrs.asdict(schedule), "fires": [attrs.asdict(one) for one in fires]})
    else:
        show.show_schedule(schedule, fires)


@schedules_group.command("pause")
@json_option
@database_options
@click.argument("name")
def pause_verb(name: str) -> None:
    """Let a schedule fire nothing until it is resumed."""
    _set_paused(name, paused=True)


@schedules_group.command("resume")
@json_option
@database_options
@click.argument("name")
def resume_verb(name: str) -> None:
    """Let it fire again; what came during the pause was missed, and its rule for missed fires applies."""
    _set_paused(name, paused=False)


def _set_paused(name: str, *, paused: bool) -> None:
    _said(check_name(name), lambda session: schedules.pause(session, name, paused=paused), paused=paused)
    if not settings_of_command().as_json:
        click.echo(f"schedule {name} {'is paused' if paused else 'fires again'}")


@schedules_group.command("delete")
@json_option
@database_options
@click.argument("name")
def delete_verb(name: str) -> None:
    """Delete a schedule. Its runs go on, and a host that declares it makes it anew."""
    _said(check_name(name), lambda session: schedules.delete(session, name), deleted=True)
    if not settings_of_command().as_json:
        click.echo(f"schedule {name} is deleted")


def _said(name: str, call: Callable[[Session], Awaitable[str]], **told: bool) -> None:
    settings = settings_of_command()
    config = settings.config()

    async def once(session: Session) -> str | None:
        answer = await call(session)
        return None if answer == "busy" else answer

    if _changed(config, once, name) == "missing":
        raise ScheduleNotFound(name)
    if settings.as_json:
        show.print_json({"name": name, **told})


@schedules_group.command("repair")
@json_option
@database_options
@click.argument("name")
@click.argument("fire_time", metavar="TIME")
def repair_verb(name: str, fire_time: str) -> None:
    """Submit a fire again whose run is lost, as its schedule says now. TIME is as "show" prints it: ISO 8601.

    Prints the run's id. Where the run is there, nothing is submitted.
    """
    settings = settings_of_command()
    config = settings.config()
    check_name(name)
    moment = check_moment("fire_time", moment_of("fire_time", fire_time))

    async def once(session: Session) -> tuple[str, str | None] | None:
        answer = await schedules.repair(session, name, moment)
        return None if answer[0] == "busy" else answer

    answer, run_id = _changed(config, once, name)
    if answer == "no_schedule":
        raise ScheduleNotFound(name)
    if answer == "no_fire":
        raise FireNotFound(name, moment)
    if settings.as_json:
        show.print_json({"run_id": run_id, "repaired": answer == "repaired"})
        return
    click.echo(run_id)
    if answer == "existing":
        click.echo("the run was there: nothing was submitted", err=True)


def _changed(config: RuntimeConfig, make: Callable[[Session], Awaitable[T | None]], name: str) -> T:
    """The answer of a write, made again for a moment while somebody holds the schedule."""

    async def body(session: Session) -> T:
        with trio.move_on_after(_PATIENCE_S):
            while (answer := await make(session)) is None:  # noqa: ASYNC110 - it is in the database
                await trio.sleep(_RETRY_S)
            if config.notify:
                await due.notify(session, ["schedules", "runs"])
            return answer
        raise Refusal(f"schedule {name} is held by a transaction that is still open", FAILED)

    return _client.ask(config, body)
