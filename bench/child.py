"""The entry of a child process: ``python -m bench.child NAME SPEC``.

Owns which function a name means. It imports only that function's module: importing trio-asyncio changes what asyncio is
in the whole process, so the sides that measure plain asyncio must never do it.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys

from bench import children

CHILDREN = {
    "lifecycle": "bench.throughput:lifecycle",
    "kernel": "bench.kernel:lifecycle",
    "stages": "bench.kernel:stages",
    "drain": "bench.drain:drained",
    "latency": "bench.latency:sampled",
    "fairness": "bench.fairness:shared",
    "idle": "bench.idle:watched",
    "host": "bench.takeover:host",
    "delivery": "bench.delivery:delivered",
    "receiver": "bench.delivery:received",
    "detached": "bench.detached:hosted",
    "steps": "bench.steps:stepped",
    "bridge": "bench.bridge:crossed",
    "cancel": "bench.cancel:cancelled",
}


def main(name: str, text: str) -> None:
    """Run the child's function with its specification and print what it returns."""
    logging.basicConfig(level="ERROR", stream=sys.stderr)
    module, _, function = CHILDREN[name].partition(":")
    answer = getattr(importlib.import_module(module), function)(json.loads(text))
    if answer is not None:
        children.say(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
