"""The faces of the verbs: whoever adds a verb adds it to each."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from runtime import Client, RunlaneError, Runtime, RuntimeConfig
from runtime.api import Verbs
from runtime.sync import SyncVerbs
from runtime.thread import AsyncioVerbs


@pytest.mark.parametrize("face", [SyncVerbs, AsyncioVerbs])
def test_no_verb_is_missing(face: type) -> None:
    verbs = {
        name for name, verb in vars(Verbs).items() if inspect.iscoroutinefunction(verb) and name[0] != "_"
    }
    assert verbs - set(vars(face)) == set(), f"add them to {face.__module__}.{face.__qualname__}"


@pytest.mark.parametrize("kind", [Runtime, Client])
def test_a_program_on_asyncio_is_told_what_to_use(kind: type[Runtime] | type[Client]) -> None:
    async def main() -> None:
        async with kind.open(RuntimeConfig(dsn="postgresql://nowhere/")):
            pass

    with pytest.raises(
        RunlaneError, match=rf"{kind.__name__}.open runs on trio.*start_in_thread or SyncClient"
    ):
        asyncio.run(main())
