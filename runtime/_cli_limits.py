"""``rates``, ``limits`` and ``circuits``: what holds runs back, on all hosts.

Owns the verbs and their options. How each of them works is the kernel's.
"""

from __future__ import annotations

import click

from runtime import _cli_show as show
from runtime import _client, ids
from runtime._cli_base import database_options, json_option, settings_of_command
from sql import circuits, limits, rates
from sql.connection import Session
from sql.errors import InputRefused

# --- rates -------------------------------------------------------------------------------------------


@click.command("rates")
@json_option
@database_options
def rates_verb() -> None:
    """List rate scopes: what they allow, what is going on, and what providers have refused.

    "state" is open, blocked (a provider has refused) or probing. "measured" is the rate of the last minute at most,
    "refused at" the rate at which the provider last refused.

    \b
    Examples:
      runlane rates
      runlane rates --json
    """
    settings = settings_of_command()
    found = _client.ask(settings.config(), rates.read)
    show.show_list("rates", found, show.show_rates, as_json=settings.as_json, empty="no rate scopes")


@click.command("set-rate")
@json_option
@database_options
@click.argument("name")
@click.option("--per-s", type=float, help="Units per second; without it, only --max-in-flight limits.")
@click.option("--burst", type=float, default=1.0, show_default=True, help="Units that may go at once.")
@click.option("--max-in-flight", type=int, help="Permits held at once, over all hosts.")
def set_rate_verb(name: str, per_s: float | None, burst: float, max_in_flight: int | None) -> None:
    """Declare the rate scope NAME, or change it, for every host at once.

    \b
    Examples:
      runlane set-rate provider --per-s 5 --burst 10
      runlane set-rate browser --max-in-flight 20
    """
    settings = settings_of_command()
    if per_s is None and max_in_flight is None:
        raise click.UsageError("give --per-s or --max-in-flight: a scope limits something")

    async def body(session: Session) -> bool:
        return await rates.set_rate(session, name, per_s=per_s, burst=burst, max_in_flight=max_in_flight)

    changed = _client.ask(settings.config(), body)
    if settings.as_json:
        show.print_json({"name": name, "changed": changed})
    else:
        click.echo(f"rate scope {name} {'set' if changed else 'was so already'}")


# --- limits ------------------------------------------------------------------------------------------


@click.command("limits")
@json_option
@database_options
def limits_verb() -> None:
    """List limits of concurrency, with what runs under each now.

    "each key" is a limit of every concurrency key of a play. Limits of plays and keys are options of the play.

    \b
    Examples:
      runlane limits
      runlane limits --json
    """
    settings = settings_of_command()
    found = _client.ask(settings.config(), limits.read_all)
    show.show_list("limits", found, show.show_limits, as_json=settings.as_json, empty="no limits")


@click.command("set-limit", context_settings={"ignore_unknown_options": True})  # a -1 is told what is allowed
@json_option
@database_options
@click.argument("kind", type=click.Choice(ids.LIMITS))
@click.argument("name")
@click.argument("most", metavar="RUNS|none")
def set_limit_verb(kind: str, name: str, most: str) -> None:
    """Limit what there is at once, on all hosts: runs of the organisation NAME (org), sandboxes of the organisation
    NAME (sandbox_org) or of the provider NAME (sandbox; an empty NAME: of all providers together).

    0 holds them back, none lifts the limit. A lower limit ends nothing that runs.

    \b
    Examples:
      runlane set-limit org acme 10
      runlane set-limit sandbox "" 50
    """
    settings = settings_of_command()
    if most != "none" and not (most.isascii() and most.isdigit()):
        raise InputRefused("max_running", f"must be a whole number or none, not {most!r}")
    wanted = ids.check_limit(None if most == "none" else int(most))
    ids.check_limit_of(kind, name)

    async def body(session: Session) -> bool:
        return await limits.set_limit(session, kind, name, wanted)

    changed = _client.ask(settings.config(), body)
    if settings.as_json:
        show.print_json({"kind": kind, "name": name, "max_running": wanted, "changed": changed})
    else:
        stands = "no limit" if wanted is None else f"at most {wanted} at once"
        click.echo(f"{kind} {name}: {stands}{'' if changed else ', as before'}")


# --- circuits ----------------------------------------------------------------------------------------


@click.command("circuits")
@json_option
@database_options
@click.option("--close", "name", metavar="NAME", help="Close this one now, for every host.")
def circuits_verb(name: str | None) -> None:
    """List the circuits of dependencies: those that are not closed first.

    A circuit is listed once its dependency has failed. "failures" are in a row, of those that open it; while it is
    open, runs that need the dependency are deferred.

    \b
    Examples:
      runlane circuits --json
      runlane circuits --close crm
    """
    settings = settings_of_command()

    async def body(session: Session) -> list[circuits.Circuit]:
        if name is not None:
            await circuits.set_circuit(session, name, close=True)
        return await circuits.read(session)

    found = _client.ask(settings.config(), body)
    show.show_list("circuits", found, show.show_circuits, as_json=settings.as_json, empty="no circuits")
