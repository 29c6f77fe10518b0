"""``lanes``: what is on its way to the ledgers, and what an operator decides about a lane that is blocked.

Owns the verbs and their options. What they may do, and what is refused, is the kernel's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import click

from runtime import _cli_show as show
from runtime import _client, ids
from runtime._cli_base import FAILED, USAGE, Refusal, database_options, json_option, settings_of_command
from sql import journal
from sql.connection import Session
from sql.errors import InputRefused
from sql.types import JournalEntry, Lane, LaneStatus

_LANES = {lane.label: lane for lane in Lane}
_BY = "command line"


@click.group("lanes", invoke_without_command=True)
@json_option
@database_options
@click.option("--blocked", is_flag=True, help="Only those that wait for an operator.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Lanes to list.")
@click.option("--after", metavar="PLACE", help="Go on after this place, as the page before named it.")
@click.pass_context
def lanes_verbs(ctx: click.Context, blocked: bool, limit: int, after: str | None) -> None:
    """List lanes that have facts to deliver, the blocked ones first.

    A lane is the ordered stream of one run's facts to its ledger. It is blocked when the ledger has rejected a
    delivery, or has failed too often; then only `lanes retry`, `skip` or `redeliver` moves it. "reason" says why it is
    blocked, or why its latest delivery failed. "rank" is how urgent the next fact is: 0 is a run's first, 1 an end, 2 a
    wait that people can see, 3 anything else. "facts" are those that the ledger does not have; what is "out" is or was
    being delivered, and comes again as it was. With --json the answer has "next": the value for --after that gives the
    following page, or null.

    \b
    Examples:
      runlane lanes --blocked
      runlane lanes --limit 100 --json
    """
    if ctx.invoked_subcommand is not None:
        return
    settings = settings_of_command()
    place = None if after is None else _place(after)

    async def body(session: Session) -> list[LaneStatus]:
        return await journal.list_lanes(session, blocked=blocked, limit=limit, after=place)

    found = _client.ask(settings.config(), body)
    show.show_page(
        "lanes",
        found,
        show.show_lanes,
        as_json=settings.as_json,
        record=show.lane_json,
        empty="no lane is blocked" if blocked else "everything is delivered",
        limit=limit,
        place=_place_of,
    )


def _place_of(lane: LaneStatus) -> str:
    return f"{'blocked' if lane.blocked else 'pending'}/{lane.lane.label}/{lane.run_id}"


def _place(text: str) -> tuple[bool, str, Lane]:
    state, _, rest = text.partition("/")
    label, _, run_id = rest.partition("/")
    if state not in ("blocked", "pending") or label not in _LANES:
        raise Refusal(f"--after must be what the page before named, not {text!r}", USAGE)
    return state == "blocked", ids.check_run_id(run_id), _LANES[label]


@lanes_verbs.command("retry")
@json_option
@database_options
@click.argument("run_id", metavar="RUN")
@click.option("--because", help="Why; kept in the journal.")
@click.option("--by", default=_BY, show_default=True, help="Who; kept in the journal.")
def retry_verb(run_id: str, because: str | None, by: str) -> None:
    """Deliver what is blocked in a run's lanes again.

    The same facts go out under the same key: right once the ledger would take them. Exits 1 when no lane of the run is
    blocked.

    \b
    Example:
      runlane lanes retry nightly-42 --because "the ledger is back"
    """
    settings = settings_of_command()
    config = settings.config()
    ids.check_run_id(run_id)

    async def body(session: Session) -> bool:
        return await journal.retry_lane(session, run_id, because=because, by=by, notify=config.notify)

    done = _client.ask(config, body)
    if settings.as_json:
        show.print_json({"run_id": run_id, "retried": done})
    if not done:
        raise Refusal(f"no lane of run {run_id} is blocked", FAILED)
    if not settings.as_json:
        click.echo("retried")


def _facts_options(command: Callable[..., None]) -> Callable[..., None]:
    """RUN, SEQ and what a verb on facts of a lane takes besides."""
    for option in (
        click.option("--by", default=_BY, show_default=True, help="Who; kept in the journal."),
        click.option(
            "--lane", "label", type=click.Choice(list(_LANES)), default="lifecycle", show_default=True
        ),
        click.option("--because", required=True, help="Why; kept in the journal."),
        click.argument("seq", type=click.IntRange(1, 2**31 - 1)),
        click.argument("run_id", metavar="RUN"),
    ):
        command = option(command)
    return command


def _on_facts(
    verb: Callable[..., Awaitable[tuple[int, int]]], run_id: str, seq: int, because: str, label: str, by: str
) -> tuple[int, int]:
    settings = settings_of_command()
    config = settings.config()
    ids.check_run_id(run_id)

    async def body(session: Session) -> tuple[int, int]:
        return await verb(
            session, run_id, seq, lane=_LANES[label], because=because, by=by, notify=config.notify
        )

    try:
        first, through = _client.ask(config, body)
    except InputRefused as error:
        if error.field != "run_id":
            raise
        raise Refusal(error.reason, FAILED) from error  # as for retry: the lane's state, not the words
    if settings.as_json:
        show.print_json({"run_id": run_id, "lane": label, "first": first, "through": through})
    return first, through


@lanes_verbs.command("skip")
@json_option
@database_options
@_facts_options
def skip_verb(run_id: str, seq: int, because: str, label: str, by: str) -> None:
    """Give up the facts of a run's blocked prefix, up to number SEQ.

    The ledger never gets them; what follows is delivered, and tells the ledger that the gap is meant. Exits 1 when the
    lane is not blocked, 2 for a SEQ that is not in the blocked prefix.

    \b
    Example:
      runlane lanes skip nightly-42 7 --because "the ledger has no place for it"
    """
    first, through = _on_facts(journal.skip_lane, run_id, seq, because, label, by)
    if not settings_of_command().as_json:
        click.echo(f"skipped facts {first} to {through}")


@lanes_verbs.command("redeliver")
@json_option
@database_options
@_facts_options
def redeliver_verb(run_id: str, seq: int, because: str, label: str, by: str) -> None:
    """Deliver a run's facts again, from number SEQ on.

    For a ledger that has lost what it had acknowledged: one that was restored from a backup, say. Facts that it still
    has do no harm. Exits 1 when the run has no such lane, 2 for a SEQ that has yet to be delivered.

    \b
    Example:
      runlane lanes redeliver nightly-42 1 --because "the ledger was restored"
    """
    first, through = _on_facts(journal.redeliver_lane, run_id, seq, because, label, by)
    if not settings_of_command().as_json:
        again = f"facts {first} to {through} are delivered again"
        click.echo(again if first <= through else f"fact {first} is the next one anyway")


@lanes_verbs.command("journal")
@json_option
@database_options
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Entries to list.")
@click.option(
    "--before", type=int, metavar="ID", help="Go on before this entry, the last of the page before."
)
def journal_verb(run_id: str | None, limit: int, before: int | None) -> None:
    """Show what operators did to lanes, newest first: of RUN, or of all.

    \b
    Example:
      runlane lanes journal nightly-42
    """
    settings = settings_of_command()
    if run_id is not None:
        ids.check_run_id(run_id)

    async def body(session: Session) -> Sequence[JournalEntry]:
        return await journal.read_journal(session, run_id=run_id, limit=limit, before=before)

    found = _client.ask(settings.config(), body)
    show.show_page(
        "journal",
        found,
        show.show_journal,
        as_json=settings.as_json,
        record=show.journal_json,
        empty="nobody did anything",
        limit=limit,
        place=lambda entry: entry.id,
        option="--before",
    )
