"""The SQL text: reads the files of this package and renders them for one schema.

Owns the names of the files, their order and the placeholders in them. It never talks to a database.

Placeholders: ``@schema@`` the quoted schema, ``@schema_name@`` the bare one inside a literal, ``@seek@`` and
``@lookup@`` the planner settings of a function, and in ``lanes.sql`` what tells the two lanes apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

import attrs

from sql.errors import ConfigError
from sql.types import Lane

# Only a strictly newer bundle replaces the functions of a database. Raise it with every change to a function
# that has been released; tests/kernel/test_deployment.py holds the pair of version and checksum.
BUNDLE_VERSION = 1

# The oldest host that can live with this version's schema and functions.
HOST_VERSION = 1

SCHEMA_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")

_MIGRATION_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
_CONCURRENT = re.compile(r"\bCREATE\s+(UNIQUE\s+)?INDEX\s+CONCURRENTLY\b", re.IGNORECASE)

# Transitions must keep their index plan whatever the statistics say: none yet, stale, or the sixth execution's
# generic plan, made when the tables were still empty. Leave the planner nothing but nested loops over index seeks.
#
# That is why the functions look rows up as `key = ANY (ARRAY[x])`. With a plain `key = x` the planner may turn the
# loop around, walk the whole index and compare: right for a table of ten rows, and still the plan a long-lived
# session has when there are a million. It cannot sort or hash by the array form, so only the lookup is left.
_LOOKUP = """SET search_path = @schema@, pg_temp
SET jit = off
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off"""
_SEEK = f"""{_LOOKUP}
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_bitmapscan = off"""

_LANES = {
    Lane.LIFECYCLE: {
        "@lane@": "lifecycle",
        "@table@": "runs",
        "@number@": "0",
        "@bound@": "CASE WHEN l.terminal_receiver <> l.receiver THEN l.terminal_seq - 1 END",
    },
    Lane.OBSERVABILITY: {
        "@lane@": "observability",
        "@table@": "lanes",
        "@number@": "1",
        "@bound@": "NULL::integer",
    },
}


@attrs.frozen
class Part:
    """Tables and functions that fill a schema of their own. ``folder`` is below this package.

    ``borrows`` are files of the kernel's functions that this part has too. Only a strictly newer ``version`` replaces
    the functions of a database; ``host_version`` is the oldest program that can live with this one's schema.
    """

    folder: str
    version: int
    host_version: int
    borrows: tuple[str, ...] = ()


KERNEL = Part(".", BUNDLE_VERSION, HOST_VERSION)
RECEIVER = Part("receiver", 1, 1, borrows=("clock.sql",))


@attrs.frozen
class Migration:
    """One numbered step of the schema. ``concurrent`` steps are single statements outside a transaction."""

    version: int
    name: str
    text: str
    checksum: str
    concurrent: bool


def quote(name: str) -> str:
    """The schema name as an SQL identifier. Raises ``ConfigError`` for a name that is not a plain one."""
    if not SCHEMA_PATTERN.fullmatch(name):
        raise ConfigError(
            f"schema {name!r}: must be 1 to 63 letters, digits or _, and not begin with a digit"
        )
    return f'"{name}"'


def render(text: str, schema: str) -> str:
    """Fill in the placeholders that every file may use."""
    text = text.replace("@seek@", _SEEK).replace("@lookup@", _LOOKUP)
    return text.replace("@schema_name@", schema).replace("@schema@", quote(schema))


@cache
def migrations(part: Part = KERNEL) -> tuple[Migration, ...]:
    """All steps in order. Raises ``ConfigError`` when a file breaks the rules."""
    found = []
    for entry in _files(f"{part.folder}/schema"):
        match = _MIGRATION_NAME.fullmatch(entry.name)
        if match is None:
            raise ConfigError(f"sql/schema/{entry.name}: name must be NNNN_words.sql")
        text = entry.read_text(encoding="utf-8")
        concurrent = bool(_CONCURRENT.search(_without_comments(text)))
        if concurrent and len(list(_statements(text))) != 1:
            raise ConfigError(f"sql/schema/{entry.name}: a concurrent index is a step of its own")
        checksum = hashlib.sha256(text.encode()).hexdigest()
        found.append(Migration(int(match[1]), entry.name, text, checksum, concurrent))
    if len({step.version for step in found}) != len(found):
        raise ConfigError("sql/schema: each step needs a number of its own")
    return tuple(found)


@cache
def functions(part: Part = KERNEL) -> str:
    """A whole function bundle, placeholders still in it, lanes written out for both lanes."""
    parts = []
    borrowed = [entry for entry in _files("functions") if entry.name in part.borrows]
    for entry in [*borrowed, *_files(f"{part.folder}/functions")]:
        text = entry.read_text(encoding="utf-8")
        if entry.name == "lanes.sql":
            for names in _LANES.values():
                lane_text = text
                for placeholder, value in names.items():
                    lane_text = lane_text.replace(placeholder, value)
                parts.append(lane_text)
        else:
            parts.append(text)
    return "\n".join(parts)


def bundle_checksum(part: Part = KERNEL) -> str:
    """SHA-256 of the bundle before it is rendered for a schema."""
    return hashlib.sha256((functions(part) + _SEEK).encode()).hexdigest()


def _files(folder: str) -> list[Traversable]:
    return sorted(files("sql").joinpath(folder).iterdir(), key=lambda entry: entry.name)


@attrs.frozen
class Shape:
    """What must be there for hosts to work: names, never version numbers."""

    columns: frozenset[tuple[str, str]]
    indexes: frozenset[str]
    functions: frozenset[str]


@cache
def shape(part: Part = KERNEL) -> Shape:
    """The shape that the files of this version describe."""
    columns: set[tuple[str, str]] = set()
    indexes: set[str] = set()
    for step in migrations(part):
        text = _without_comments(step.text)
        for table, body in re.findall(r"CREATE TABLE @schema@\.(\w+) \((.*?)\n\)", text, re.DOTALL):
            columns |= {(table, name) for name in re.findall(r"^    ([a-z_]+)\s+[a-z]", body, re.MULTILINE)}
        columns |= set(re.findall(r"ALTER TABLE @schema@\.(\w+)\s+ADD COLUMN (\w+)", text))
        indexes |= set(re.findall(r"CREATE (?:UNIQUE )?INDEX (?:CONCURRENTLY )?(\w+)", text))
    names = set(re.findall(r"FUNCTION @schema@\.(\w+)", _without_comments(functions(part))))
    return Shape(frozenset(columns), frozenset(indexes), frozenset(names))


def _without_comments(text: str) -> str:
    return re.sub(r"--[^\n]*", "", text)


def _statements(text: str) -> Iterator[str]:
    return (part for part in _without_comments(text).split(";") if part.strip())


def md5(text: str) -> str:
    """The hash by which long names are shortened, the same as SQL's ``md5()``. Not for security."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
