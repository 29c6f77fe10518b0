"""A host in a process of its own that delivers over HTTP: ``python -m tests.support.delivering SETTINGS URL SECRET``.

Says on stdout that it is ready. Its plays say things, wait, fail and retry, so that their lanes always have something.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import trio

from runtime import Context, HttpLedger, Runtime, RuntimeConfig, play


@play("chatty", retries=2, backoff_s=0.1, backoff_max_s=0.2)
async def chatty(ctx: Context, data: int) -> int:
    """Talks, naps, talks again; every seventh fails for good, every fifth at first."""
    for number in range(data % 4):
        ctx.log("line", number=number)
        ctx.progress(number, data)
        await trio.sleep(0.01)
    if data % 3 == 0:
        await ctx.sleep(0.6)
    ctx.log("after", attempt=ctx.attempt)
    if data % 7 == 6 or (data % 5 == 4 and ctx.failures == 0):
        raise ValueError(f"no {data}")
    return data


async def main(settings: dict[str, Any], url: str, secret: str) -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    ledger = HttpLedger(url, secret=secret, timeout_s=0.7)
    async with Runtime.open(RuntimeConfig(**settings), plays=[chatty], ledger=ledger) as runtime:
        sys.stdout.write(json.dumps({"host": runtime.host_id}) + "\n")
        sys.stdout.flush()
        await runtime.wait_for_signal()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]), sys.argv[2], sys.argv[3])
