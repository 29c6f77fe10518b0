"""``sandboxes`` and ``compute``: what detached runs stand in, what is left to delete, and what they have used.

Owns the verbs and their options, also that which takes over what an older generation has left to delete. It asks no
provider: what is shown is what the database knows.
"""

from __future__ import annotations

from datetime import datetime

import attrs
import click

from runtime import _cli_show as show
from runtime import _client, ids
from runtime._cli_base import FAILED, USAGE, Refusal, database_options, json_option, settings_of_command
from sql import adoption, billing
from sql import sandboxes as door
from sql.adoption import OldTable, Preview
from sql.billing import ComputeRecord
from sql.connection import Session
from sql.sandboxes import SandboxRecord


@click.group("sandboxes", invoke_without_command=True)
@json_option
@database_options
@click.option("--open", "only_open", is_flag=True, help="Only those that are not confirmed to be gone.")
@click.option("--run", "run_id", metavar="RUN", help="Only those of this run.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Sandboxes to list."
)
@click.option("--after", metavar="NAME", help="Go on after this sandbox, the last of the page before.")
@click.pass_context
def sandboxes_verbs(
    ctx: click.Context, only_open: bool, run_id: str | None, limit: int, after: str | None
) -> None:
    """List sandboxes that were ever asked for, highest name first.

    "state" is creating, live, deleting, deleted (the provider took it), gone (read back) or blocked: cleanup has
    failed too often, and only `sandboxes retry` goes on with it. With --json the answer has "next": the value for
    --after that gives the following page, or null.

    \b
    Examples:
      runlane sandboxes --open
      runlane sandboxes --run nightly-42 --json
    """
    if ctx.invoked_subcommand is not None:
        return
    settings = settings_of_command()
    if run_id is not None:
        ids.check_run_id(run_id)

    async def body(session: Session) -> list[SandboxRecord]:
        return await door.read(session, run_id=run_id, only_open=only_open, limit=limit, after=after)

    found = _client.ask(settings.config(), body)
    show.show_page(
        "sandboxes",
        found,
        show.show_sandboxes,
        as_json=settings.as_json,
        record=lambda one: {**attrs.asdict(one), "state": one.state},
        empty="no sandbox is open" if only_open else "no sandboxes",
        limit=limit,
        place=lambda one: one.sandbox,
    )


@sandboxes_verbs.command("retry")
@json_option
@database_options
@click.argument("name")
def retry_verb(name: str) -> None:
    """Let cleanup try the blocked sandbox NAME again. Exits 1 when it is not blocked.

    \b
    Example:
      runlane sandboxes retry NAME
    """
    settings = settings_of_command()

    async def body(session: Session) -> bool:
        return await door.retry(session, name)

    if not _client.ask(settings.config(), body):
        raise Refusal(f"sandbox {name!r} is not blocked", FAILED)
    if settings.as_json:
        show.print_json({"sandbox": name, "retried": True})
    else:
        click.echo(f"sandbox {name}: tried again")


@sandboxes_verbs.command("adopt")
@json_option
@database_options
@click.option("--table", help="Where the older generation keeps them  [RUNLANE_LEGACY_CLEANUP_TABLE]")
@click.option("--provider", help="Key of the provider of all of them  [RUNLANE_LEGACY_CLEANUP_PROVIDER]")
@click.option("--check", is_flag=True, help="Only say what there is to do.")
def adopt_verb(table: str | None, provider: str | None, check: bool) -> None:
    """Take over what an older generation of workers has left to delete in a table of its own.

    Open rows are copied, once, and deleted by the hosts that have the provider; rows whose sandbox is proven to be
    gone are marked as deleted. Older workers may go on meanwhile: what they write later is for the next time, or for
    hosts with the same two settings, which look by themselves. Exits 1 when nothing can be adopted from that table.

    \b
    Examples:
      runlane sandboxes adopt --table public.sandbox_cleanup_jobs --check
      runlane sandboxes adopt --table public.sandbox_cleanup_jobs --provider daytona
    """
    settings = settings_of_command()
    config = settings.config(legacy_cleanup_table=table, legacy_cleanup_provider=provider)
    if config.legacy_cleanup_table is None:
        raise Refusal("say which table: --table, or RUNLANE_LEGACY_CLEANUP_TABLE", USAGE)
    old = OldTable(config.legacy_cleanup_table, config.legacy_cleanup_provider)

    async def body(session: Session) -> tuple[Preview, int, int]:
        preview, copied, settled = await adoption.preview(session, old), 0, 0
        while preview.open and not check:
            done = await adoption.adopt(session, old, limit=1_000)
            if not done.copied and not done.settled:
                return await adoption.preview(session, old), copied, settled
            copied, settled = copied + done.copied, settled + done.settled
        return preview, copied, settled

    preview, copied, settled = _client.ask(config, body)
    if not preview.found:
        raise Refusal(f"there is no table {old.table}", FAILED)
    if preview.missing:
        raise Refusal(f"table {old.table} lacks {', '.join(preview.missing)}", FAILED)
    if settings.as_json:
        done = {} if check else {"copied": copied, "settled": settled}
        show.print_json({"table": old.table, "provider": old.provider, **done, **attrs.asdict(preview)})
    else:
        if not check:
            click.echo(f"copied {copied}, marked {settled} as deleted")
        show.show_adoption(preview)


@click.command("compute")
@json_option
@database_options
@click.option(
    "--limit", type=click.IntRange(1, 10_000), default=1_000, show_default=True, help="Records to list."
)
@click.option("--after", metavar="TIME/ID", help="Go on after this record, as the page before named it.")
def compute_verb(limit: int, after: str | None) -> None:
    """List what detached runs have used, in the order in which it was recorded: a page.

    Each record is told once its run has ended and its sandboxes are deleted, and never changes: count each record_id
    once. "runner" is an attempt, "sandbox" what it stood in, "late_sandbox" one that its provider never gave back, up
    to its ceiling. With --json it prints a line per record; "after" in each is the value for --after.

    \b
    Examples:
      runlane compute --json
      runlane compute --limit 100
    """
    settings = settings_of_command()
    place = None if after is None else _place(after)

    async def body(session: Session) -> list[ComputeRecord]:
        return await billing.read(session, after=place, limit=limit)

    found = _client.ask(settings.config(), body)
    if settings.as_json:
        for one in found:
            show.print_json({**attrs.asdict(one), "seconds": one.seconds, "after": _place_of(one)})
        return
    show.show_page(
        "compute",
        found,
        show.show_compute,
        as_json=False,
        empty="no compute records",
        limit=limit,
        place=_place_of,
    )


def _place_of(record: ComputeRecord) -> str:
    return f"{record.recorded_at.isoformat()}/{record.record_id}"


def _place(text: str) -> tuple[datetime, str]:
    moment, _, record_id = text.partition("/")
    try:
        at = datetime.fromisoformat(moment)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None or not record_id:
        raise Refusal(f"--after must be what the page before named, not {text!r}", USAGE)
    return at, record_id
