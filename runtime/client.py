"""Clients: programs that submit runs and look at them, and host none.

Owns the two ways to be one: ``Client`` in a program on trio, ``SyncClient`` in any other. What can be asked, and what
the answers mean, is the verbs' business.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from runtime.api import Runtime, Verbs
from runtime.codec import JsonCodec
from runtime.config import RuntimeConfig
from runtime.link import ActorLink


class Client(Verbs):
    """The verbs of a runtime without its host, for a program on trio. Made by ``Client.open``.

    It costs the database two connections, and never changes the schema.
    """

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, config: RuntimeConfig | None = None, *, codec: JsonCodec | None = None
    ) -> AsyncIterator[Client]:
        """Connect for the length of the block; an error of the block leaves it unwrapped.

        ``config`` None reads ``RUNLANE_*`` variables; what concerns hosts is not used. Raises SchemaNotReady where no
        host, and no ``runlane migrate``, has built the schema for this version.
        """
        async with Runtime._opened(config, (), None, codec, deploy=False) as runtime:
            yield cls(ActorLink(runtime._host))
