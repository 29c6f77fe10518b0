"""Imports go one way, and the packages that are imported are ours.

The import-linter contracts in pyproject.toml say the same about modules that can be imported; this reads the
source, so that an import inside a function or under TYPE_CHECKING counts too.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import runtime

ROOT = Path(__file__).parent.parent
LAYERS = ("sql", "actors", "runtime")
ASYNCIO = {"asyncio", "asyncpg", "trio_asyncio"}
# The two sessions, and the module that translates what their driver raises.
BORDER = {"sql.connection", "sql.plain", "sql.faults"}
# Programs on asyncio await a runtime that runs in a thread, and calls of one SDK are taken back by it alone.
ASYNCIO_TOO = {"runtime.thread", "runtime.sandboxes.modal"}


def shared_by_actors() -> set[str]:
    """The modules in actors that are no actor, as the import-linter contract lists them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "independence")
    targets = (line.split(" -> actors.")[1] for line in contract["ignore_imports"])
    return {target.split(".")[0] for target in targets}


SHARED = shared_by_actors()


def imported(source: str, module: str) -> Iterator[str]:
    """Every module that the source imports, in full (``from a import b`` gives both ``a`` and ``a.b``)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def refused(module: str, target: str) -> str | None:
    """Why the module may not import the target, or None."""
    layer, top = module.split(".")[0], target.split(".")[0]
    if top in ASYNCIO and module not in BORDER and not (top == "asyncio" and module in ASYNCIO_TOO):
        return "only the border knows asyncio and asyncpg"
    if top in ("bench", "tests"):
        return "the product imports neither bench nor tests"
    if top in LAYERS and LAYERS.index(top) > LAYERS.index(layer):
        return f"{layer} is below {top}"
    if layer == top == "actors":
        concern, other = module.split(".")[1:2], target.split(".")[1:2]
        if other and other != concern and other[0] not in SHARED:
            return "an actor imports no other actor"
    return None


def violations(module: str, source: str) -> list[str]:
    return [
        f"{module} imports {target}: {why}"
        for target in imported(source, module)
        if (why := refused(module, target)) is not None
    ]


def modules() -> Iterator[tuple[str, Path]]:
    for layer in LAYERS:
        for file in sorted((ROOT / layer).rglob("*.py")):
            yield ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), file


def test_what_actors_share_is_named() -> None:
    assert "core" in SHARED
    assert {f"actors.{name}" for name in SHARED} <= {module for module, _ in modules()}


def test_imports_go_one_way() -> None:
    found = dict(modules())
    assert {"sql.errors", "runtime.embedded"} <= set(found)
    assert [line for module, file in found.items() for line in violations(module, file.read_text())] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sql.claim", "import actors.claim"),
        ("sql.claim", "def f():\n    from runtime import config"),
        ("actors.claim", "from runtime.config import RuntimeConfig"),
        ("actors.claim", "from actors import settle"),
        ("actors.claim", "from .settle import Settle"),
        ("actors.core.mailbox", "from actors.claim import Claim"),
        ("sql.claim", "import asyncpg"),
        ("actors.claim", "if TYPE_CHECKING:\n    from asyncpg import Record"),
        ("runtime.host", "import asyncio.events"),
        ("runtime.host", "import tests.support"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("sql.connection", "import asyncio\nfrom asyncpg.exceptions import PostgresError"),
        ("actors.claim", "from actors.core.mailbox import Mailbox\nfrom sql import claim"),
        ("actors.core.supervisor", "from actors.core import groups"),
        ("runtime.host", "from actors import claim\nimport trio"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def undeclared(module: str, source: str) -> list[str]:
    """What the source imports that is neither Python's, ours, nor declared for those who install runlane."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for name in extras if name != "test" for line in extras[name])]
    declared = {plain(re.split(r"[^\w.-]", line)[0]) for line in lines}
    if module == "runtime.testing":  # a plugin of pytest's
        declared.add("pytest")
    tops = {target.split(".")[0] for target in imported(source, module)} - {*sys.stdlib_module_names, *LAYERS}
    return [top for top in sorted(tops) if not declared & set(map(plain, distributions().get(top, ())))]


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Who brings a package, of what is installed here."""
    return importlib.metadata.packages_distributions()


def plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_what_is_imported_is_declared() -> None:
    """An install has the dependencies only: what the tests bring along is not there."""
    found = {module: undeclared(module, file.read_text()) for module, file in modules()}
    assert {module: tops for module, tops in found.items() if tops} == {}
    assert undeclared("runtime.runner", "import httpx, trio, sql.errors, modal, json, pytest") == [
        "httpx",
        "pytest",
    ]


def test_the_markers_are_the_version() -> None:
    version = importlib.metadata.version("runlane")
    markers = {importlib.import_module(name).__runlane__ for name in LAYERS}
    assert markers == {version}


@pytest.mark.parametrize("name", ["sql", "actors"])
@pytest.mark.parametrize("shape", ["{}/__init__.py", "{}.py"])
def test_a_folder_that_shadows_ours_is_named_in_one_line(tmp_path: Path, name: str, shape: str) -> None:
    stray = tmp_path / shape.format(name)
    stray.parent.mkdir(exist_ok=True)
    stray.touch()
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r}); import runtime"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert f"{name!r}" in last
    assert str(tmp_path / name) in last


def test_no_sdk_of_a_provider_is_imported_before_it_is_used() -> None:
    program = (
        "import sys, runtime, runtime.sandboxes; "
        "sys.exit(' '.join({'modal', 'daytona_api_client', 'daytona_toolbox_api_client'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_errors_are_called_what_programs_import() -> None:
    public = [vars(runtime)[name] for name in runtime.__all__]
    errors = [one for one in public if isinstance(one, type) and issubclass(one, BaseException)]
    assert runtime.Fatal in errors
    assert {error.__module__ for error in errors} == {"runtime"}


def test_a_wheel_has_every_package_of_the_product() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for layer in LAYERS
        for file in (ROOT / layer).rglob("__init__.py")
    }
    assert set(listed) == there
