"""The demo's play: one installed distribution's files, verified against its RECORD.

Owns how a RECORD is read and a file is verified. Reading and hashing happen in threads, a few files at a time, so that
the loop stays free and a cancelled run stops soon. It never changes a file.
"""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import trio

from runtime.context import Context
from runtime.plays import play

_CHUNK_BYTES = 1 << 20
# A thread's turn: this many bytes or files, whichever comes first.
_TURN_BYTES = 4 << 20
_TURN_FILES = 50
# A broken environment must not make a run's output too large to be stored.
_MOST_REPORTED = 20


@attrs.frozen
class Entry:
    """One line of a RECORD. ``digest`` is the algorithm and its unpadded URL-safe base64 value."""

    name: str
    path: Path
    digest: tuple[str, str] | None
    size: int | None


@attrs.define
class Findings:
    """What an audit found. ``skipped`` files have no hash in the RECORD, as the RECORD itself."""

    verified: int = 0
    skipped: int = 0
    bytes: int = 0
    mismatches: list[str] = attrs.field(factory=list)


def installed() -> list[str]:
    """The names of all distributions in this environment, each once, sorted."""
    # A folder that a failed uninstallation left behind has no metadata.
    found = (str(one.metadata["Name"]) for one in metadata.distributions() if "Name" in one.metadata)
    names = {name.lower(): name for name in found}
    return [names[key] for key in sorted(names)]


def record_of(name: str) -> tuple[str, list[Entry] | None]:
    """The version of a distribution and the lines of its RECORD; None where it has none, as an egg-info.

    Blocks. Of several distributions of that name the first with a RECORD counts. Raises PackageNotFoundError.
    """
    found = list(metadata.distributions(name=name)) or [metadata.distribution(name)]
    for distribution in found:
        text = distribution.read_text("RECORD")
        if text is not None:
            rows = [[*row, "", ""][:3] for row in csv.reader(text.splitlines()) if row and row[0]]
            return distribution.version, [_entry(distribution, *row) for row in rows]
    return found[0].version, None


def _entry(distribution: metadata.Distribution, name: str, digest: str, size: str) -> Entry:
    kind, equals, value = digest.partition("=")
    return Entry(
        name=name,
        path=Path(str(distribution.locate_file(name))),
        digest=(kind, value) if equals and kind in hashlib.algorithms_guaranteed else None,
        size=int(size) if size.isdigit() else None,
    )


def turns(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """The entries in portions that one thread verifies at a time."""
    portion: list[Entry] = []
    weight = 0
    for entry in entries:
        portion.append(entry)
        weight += entry.size or 0
        if weight >= _TURN_BYTES or len(portion) >= _TURN_FILES:
            yield portion
            portion, weight = [], 0
    if portion:
        yield portion


def verify(entries: Sequence[Entry]) -> Findings:
    """Verify size and hash of each file. Blocks. An unreadable file is a mismatch, never an error."""
    findings = Findings()
    for entry in entries:
        if entry.digest is None:
            findings.skipped += 1
            continue
        try:
            problem, size = _compare(entry, *entry.digest)
        except FileNotFoundError:
            problem, size = "is missing", 0
        except OSError as error:
            problem, size = f"cannot be read: {error.strerror}", 0
        findings.bytes += size
        if problem is None:
            findings.verified += 1
        else:
            findings.mismatches.append(f"{entry.name} {problem}")
    return findings


def _compare(entry: Entry, kind: str, expected: str) -> tuple[str | None, int]:
    hasher, size = hashlib.new(kind), 0
    with entry.path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
            size += len(chunk)
    if entry.size is not None and size != entry.size:
        return f"has {size} bytes, its RECORD says {entry.size}", size
    found = base64.urlsafe_b64encode(hasher.digest()).rstrip(b"=").decode()
    if found != expected.rstrip("="):
        return f"has another {kind} than its RECORD says", size
    return None, size


@play("demo.audit", retries=2, backoff_s=0.2)
async def audit(ctx: Context, data: dict[str, Any]) -> dict[str, Any]:
    """Audit the distribution ``data["distribution"]``."""
    name = data["distribution"]
    version, entries = await trio.to_thread.run_sync(record_of, name)
    if entries is None:
        ctx.log("no RECORD: nothing to verify", distribution=name)
        entries = []
    total = Findings()
    done = 0
    for portion in turns(entries):
        found = await trio.to_thread.run_sync(verify, portion)
        total.verified += found.verified
        total.skipped += found.skipped
        total.bytes += found.bytes
        total.mismatches += found.mismatches
        for mismatch in found.mismatches[:_MOST_REPORTED]:
            ctx.log("mismatch", distribution=name, file=mismatch)
        done += len(portion)
        ctx.progress(done, len(entries))
    ctx.log("audited", distribution=name, verified=total.verified, skipped=total.skipped, bytes=total.bytes)
    return {
        "distribution": name,
        "version": version,
        "has_record": bool(entries),
        "verified": total.verified,
        "skipped": total.skipped,
        "bytes": total.bytes,
        "mismatched": len(total.mismatches),
        "mismatches": total.mismatches[:_MOST_REPORTED],
    }
