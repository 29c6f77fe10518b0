"""A web app on asyncio with a runtime beside it: ``python -m tests.support.webapp SETTINGS``.

Serves on a free port, which it prints, until a signal. What it hosts is importable by others.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from fastapi import FastAPI, HTTPException
from hypercorn.asyncio import serve
from hypercorn.config import Config

from runtime import Context, DuplicateRun, RunNotFound, Runtime, RuntimeConfig, play


@play("double")
async def double(_: Context, data: int) -> int:
    return 2 * data


@play("forever")
async def forever(_: Context) -> None:
    await trio.sleep_forever()


def make_app(config: RuntimeConfig) -> FastAPI:
    """The app; its runtime lives as long as the app is served."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Runtime.start_in_thread(config, plays=[double, forever]) as beside:
            app.state.beside = beside
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/double/{number}")
    async def submit(number: int, wait: bool = True) -> Any:
        handle = await app.state.beside.aio.submit(double, number)
        return {"run": handle.run_id, "output": await handle.result(20) if wait else None}

    @app.get("/runs/{run_id}")
    def status(run_id: str) -> Any:  # in a worker thread of the framework: the blocking verbs
        try:
            return {"status": app.state.beside.status(run_id).status}
        except RunNotFound as exc:
            raise HTTPException(404, str(exc)) from None

    @app.post("/forever")
    async def start() -> Any:
        try:
            return {"run": (await app.state.beside.aio.submit("forever", unique_key="one")).run_id}
        except DuplicateRun as exc:
            raise HTTPException(409, exc.run_id) from None

    return app


async def main(settings: dict[str, Any]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.graceful_timeout = 2

    async def until_stopped() -> None:
        await stop.wait()

    app = make_app(RuntimeConfig(**settings))
    sockets = config.create_sockets()
    config.create_sockets = lambda: sockets  # type: ignore[method-assign]
    sys.stdout.write(json.dumps({"port": sockets.insecure_sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    await serve(app, config, shutdown_trigger=until_stopped)  # type: ignore[arg-type]
    sys.stdout.write(json.dumps({"stopped": True}) + "\n")


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
