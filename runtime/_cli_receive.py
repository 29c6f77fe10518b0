"""``receive``: a receiver as a process of its own, until a signal.

Owns the verb's options, where its secrets come from, and the line that says where it listens. What a receiver does is
``runtime.receiver``'s.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import Any

import attrs
import click
import trio

from runtime import _cli_show as show
from runtime import _client, logs
from runtime._cli_base import json_option, settings_of_command
from runtime.asgi import serve_app
from runtime.config import LOG_LEVELS, RuntimeConfig
from runtime.host import session_options
from runtime.receiver import SCHEMA, Receiver
from sql.connection import SessionOptions
from sql.errors import ConfigError

_GRACE_S = 5.0
# Above what senders keep a connection that is idle, so that it is they who close it.
_IDLE_S = 30.0


@click.command("receive")
@json_option
@click.option("--dsn", help="Where the receiver's ledger is; without one, the embedded server  [RUNLANE_DSN]")
@click.option(
    "--schema",
    default=SCHEMA,
    show_default=True,
    envvar="RUNLANE_RECEIVE_SCHEMA",
    show_envvar=True,
    help="Schema of its tables, which it builds.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where it listens.")
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=8087, show_default=True, help="0 takes any free one."
)
@click.option("--origin", help="Its URL as senders know it; by default where it listens.")
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    envvar="RUNLANE_RECEIVE_SECRET",
    show_envvar=True,
    help="What dispatch tokens are signed with. Repeatable (in the variable: with a space between): the first "
    "signs, all are accepted.",
)
@click.option(
    "--internal-token",
    envvar="RUNLANE_RECEIVE_INTERNAL_TOKEN",
    show_envvar=True,
    help="Who shows it may ask for dispatch tokens and read runs.",
)
@click.option("--prove-dsn", help="The runtime's database, to prove leases in; by default the same server.")
@click.option(
    "--prove-schema",
    default="runlane",
    show_default=True,
    help="The runtime's schema; facts of no other are taken.",
)
@click.option("--prove-url", help="Instead of its database: the health server of one of the runtime's hosts.")
@click.option("--no-proof", is_flag=True, help="Do not prove leases: believe whoever has a dispatch token.")
@click.option(
    "--max-facts", type=click.IntRange(1, 1_000), default=8, show_default=True, help="Facts in a delivery."
)
@click.option(
    "--max-deliveries",
    type=click.IntRange(1, 1_000),
    default=200,
    show_default=True,
    help="Deliveries in a request.",
)
@click.option(
    "--max-body-bytes",
    type=click.IntRange(1_024, 2**30),
    default=16_777_216,
    show_default=True,
    help="Size of a request.",
)
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS, case_sensitive=False),
    help="Least level logged.  [RUNLANE_LOG_LEVEL]",
)
def receive(
    dsn: str | None, schema: str, host: str, port: int, log_level: str | None, **options: Any
) -> None:
    """Receive deliveries over HTTP, and keep a ledger of them.

    Takes what hosts with an HttpLedger send, proves that each sender holds its lane, and applies facts in order and
    once to tables of its own. Prints one line when it listens; SIGTERM or Ctrl-C ends it. Give secrets by environment
    variable: options can be seen by everybody on the machine.

    \b
    Examples:
      RUNLANE_RECEIVE_SECRET=… runlane receive --dsn postgresql://ledger@db/ledger --prove-dsn postgresql://app@db/app
      RUNLANE_RECEIVE_SECRET=… runlane receive --prove-url http://host-1:8080 --port 9000
    """
    settings = settings_of_command()
    given: dict[str, Any] = {"dsn": dsn, "log_level": log_level and log_level.upper()}
    config = RuntimeConfig.from_env(**{name: value for name, value in given.items() if value is not None})
    if not options["secrets"]:
        raise ConfigError("a receiver needs a secret: set RUNLANE_RECEIVE_SECRET")
    logs.configure(config.log_level)

    def announce(receiver: Receiver, port: int) -> None:
        line = {"event": "ready", "pid": os.getpid(), "url": receiver.origin, "port": port, "schema": schema}
        if settings.as_json:
            show.print_json(line)
        else:
            click.echo(" ".join(f"{name}={value}" for name, value in line.items()))
        sys.stdout.flush()

    with _client.reachable(config) as found:
        ledger = attrs.evolve(session_options(found), schema=schema)
        receiver = _receiver(ledger, options)
        trio.run(partial(_serve, receiver, host, port, options["origin"] is None, announce))


def _receiver(ledger: SessionOptions, options: dict[str, Any]) -> Receiver:
    prove_in = None
    if options["prove_url"] is None and not options["no_proof"]:
        prove_in = attrs.evolve(
            ledger, dsn=options["prove_dsn"] or ledger.dsn, schema=options["prove_schema"]
        )
    return Receiver(
        ledger,
        origin=options["origin"],
        secrets=options["secrets"],
        source=options["prove_schema"],
        internal_token=options["internal_token"],
        prove_in=prove_in,
        prove_at=options["prove_url"],
        unproven=options["no_proof"],
        max_facts=options["max_facts"],
        max_deliveries=options["max_deliveries"],
        max_body_bytes=options["max_body_bytes"],
    )


async def _serve(receiver: Receiver, host: str, port: int, unnamed: bool, announce: Any) -> None:
    """Serve until SIGTERM or SIGINT; requests in flight have a moment to end."""
    shutdown = trio.Event()

    def on_bound(actual: int) -> None:
        if unnamed:
            receiver.be(f"http://{f'[{host}]' if ':' in host else host}:{actual}")
        announce(receiver, actual)

    async def watch(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                shutdown.set()

    async with receiver.running(), trio.open_nursery() as nursery:
        await nursery.start(watch)
        await serve_app(
            receiver.app,
            "receiver",
            host,
            port,
            on_bound=on_bound,
            shutdown=shutdown,
            grace_s=_GRACE_S,
            idle_s=_IDLE_S,
        )
        nursery.cancel_scope.cancel()
