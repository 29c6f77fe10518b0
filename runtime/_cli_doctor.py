"""``doctor``: what may be wrong with the database, and what to do about it.

Owns the verb and its look. What is looked at, and how it is judged, is the doctor's.
"""

from __future__ import annotations

from functools import partial

import attrs
import click
import trio
from rich.text import Text

from runtime import _cli_show as show
from runtime import _client, doctor
from runtime._cli_base import FAILED, database_options, json_option, settings_of_command

_STYLES = {doctor.OK: "green", doctor.WARNING: "yellow", doctor.PROBLEM: "bold red"}


@click.command("doctor")
@json_option
@database_options
def doctor_verb() -> None:
    """Look for what may be wrong with the database, and say what to do about it.

    Looks at the server and its settings, connections, snapshots that are held, notifications, the schema, hosts, plays
    that nobody hosts, blocked lanes, sandboxes that could not be deleted and dead rows. Changes nothing. Exits 1 when
    there is a problem, 0 with warnings or none.

    \b
    Examples:
      runlane doctor
      runlane doctor --json | jq '.findings[] | select(.state != "ok")'
    """
    settings = settings_of_command()
    with _client.reachable(settings.config()) as config:
        found = trio.run(partial(doctor.examine, config))
    if settings.as_json:
        show.print_json({"findings": [attrs.asdict(finding) for finding in found]})
    else:
        _show(found)
    if any(finding.state == doctor.PROBLEM for finding in found):
        raise click.exceptions.Exit(FAILED)


def _show(found: list[doctor.Finding]) -> None:
    grid = show.table("check", "", "found")
    for finding in found:
        words = Text(finding.says)
        if finding.advice is not None:
            words.append(f"\n→ {finding.advice}", style="bold")
        grid.add_row(finding.check, Text(finding.state, style=_STYLES[finding.state]), words)
    show.console().print(grid)
