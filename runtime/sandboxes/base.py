"""What a sandbox provider has to be able to do.

Owns the protocol and its records. It never decides when a sandbox is made, looked at or deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from runtime.codec import preview, scrub
from sql.errors import InputRefused, RunlaneError

TAIL_BYTES = 4_096
"""How much of the end of a sandbox's output its diagnostics keep."""
# Of a provider's own name for something.
_MOST_BYTES = 2_000


class SandboxFault(RunlaneError):
    """A provider could not do what was asked; nothing is known of the sandbox but what is in the database."""


def check_output_bytes(value: int) -> int:
    """How much a keeper keeps of what a sandbox prints. Raises InputRefused."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1_024:
        raise InputRefused("output_bytes", "must be a whole number of bytes, 1024 or more")
    return value


def _writable(_: Any, field: attrs.Attribute[Any], value: Any) -> None:
    """What is written down: refused as it is said, so that it fails no more than its provider's call."""
    if not isinstance(value, str) or scrub(value, _MOST_BYTES) != value:
        raise SandboxFault(
            f"{field.name} must be text of at most {_MOST_BYTES} bytes without NUL or lone surrogates, "
            f"not {preview(value)}"
        )


@attrs.frozen(slots=True, kw_only=True)
class SandboxSpec:
    """A sandbox to make. ``sandbox`` is our own name for it, unique for ever, by which it has to be found again.

    ``command`` is what runs in it (``python`` is the sandbox's own), with ``env`` on top of what the provider gives.
    ``memory_bytes`` and ``cpu_s`` (CPU seconds of one process) are limits where the platform has them; ``ceiling_s``:
    it need not live longer than that.
    """

    sandbox: str
    run_id: str
    attempt: int
    command: Sequence[str]
    env: Mapping[str, str]
    memory_bytes: int | None = None
    cpu_s: float | None = None
    ceiling_s: float | None = None


@attrs.frozen(slots=True)
class SandboxRef:
    """A sandbox to look at or delete. Where ``provider_id`` and ``routing_domain`` were never learned (None) it is
    found by its name."""

    sandbox: str
    provider_id: str | None = None
    routing_domain: str | None = None


@attrs.frozen(slots=True)
class Created:
    """A sandbox that exists. ``routing_domain``: where at the provider it is, if that matters for finding it."""

    provider_id: str = attrs.field(validator=_writable)
    routing_domain: str | None = attrs.field(default=None, validator=attrs.validators.optional(_writable))


@attrs.frozen(slots=True)
class Inspection:
    """What a provider says of a sandbox.

    ``state``: ``running``, ``ended`` (its work is over, it still exists) or ``absent`` (confirmed: there is no such
    sandbox). ``diagnostics``: JSON for whoever asks why it ended: exit code, signal, the tail of its output; also of
    one that is absent, where the provider remembers it.
    """

    state: str = attrs.field(validator=attrs.validators.in_(("running", "ended", "absent")))
    diagnostics: Mapping[str, Any] = attrs.field(factory=dict)
    routing_domain: str | None = attrs.field(default=None, validator=attrs.validators.optional(_writable))


class SandboxProvider(Protocol):
    """Makes, inspects and deletes sandboxes. Every call may be cut short at any moment, and may be made again.

    ``key`` names the provider in the database: hosts whose provider has the same key reach the same sandboxes. An
    error of any call means "not known": only an answer counts. One whose sandboxes are on other machines has
    ``remote = True``: its hosts do not start without a ``gateway_url`` that can be reached from there.
    ``finds_by_id = True``: it finds a sandbox by its ``provider_id`` alone, also one that somebody else has made and
    named. No other provider is given sandboxes of an older generation: it would say of each that there is none.
    """

    key: str

    async def create(self, spec: SandboxSpec) -> Created:
        """Make the sandbox and start its command. Asked again with the same name, it answers the one there is."""
        ...

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """What it is now. ``absent`` only if the provider says that there is none."""
        ...

    async def delete(self, ref: SandboxRef) -> str:
        """Ask for its end: ``deleted`` (the provider took it; it may be there for a while) or ``already_absent``."""
        ...

    async def names(self) -> Sequence[str]:
        """Our names of all sandboxes that exist there."""
        ...
