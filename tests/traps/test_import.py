"""T18: what importing us does to a process that also uses asyncio."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_does_not_touch_asyncio() -> None:
    """The patching import happens when a session opens, so that a client of the types alone pays nothing."""
    script = """
        import asyncio, sys
        before = (asyncio.get_event_loop_policy, asyncio.new_event_loop)
        import actors.core, sql.connection
        assert (asyncio.get_event_loop_policy, asyncio.new_event_loop) == before
        print("trio_asyncio" in sys.modules)
    """
    assert run(script) == "False"


@pytest.mark.parametrize("place", ["main", "thread"])
def test_asyncio_works_before_during_and_after_a_session(dsn: str, place: str) -> None:
    script = """
        import asyncio, sys, threading
        import trio
        from sql.connection import SessionOptions, open_session

        dsn, place = sys.argv[1:]
        results = []

        async def ordinary():
            await asyncio.sleep(0.01)
            reader = await asyncio.to_thread(lambda: 20)
            return reader + sum(await asyncio.gather(*[asyncio.sleep(0, 1) for _ in range(2)]))

        def use_asyncio():
            if place == "main":
                results.append(asyncio.run(ordinary()))
                return
            thread = threading.Thread(target=lambda: results.append(asyncio.run(ordinary())))
            thread.start()
            thread.join()

        async def use_session():
            async with open_session(SessionOptions(dsn), "test") as session:
                if place == "thread":
                    await trio.to_thread.run_sync(lambda: results.append(asyncio.run(ordinary())))
                return await session.fetchval("SELECT 1")

        use_asyncio()
        assert trio.run(use_session) == 1
        use_asyncio()
        print(set(results), len(results))
    """
    assert run(script, dsn, place) == ("{22} 2" if place == "main" else "{22} 3")
