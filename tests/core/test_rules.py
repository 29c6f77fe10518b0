"""Rules of the async code that a reader would otherwise have to check by eye."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for package in ("sql", "actors", "runtime") for path in (ROOT / package).rglob("*.py"))
SHIELDING = {"actors/core/cleanup.py", "sql/connection.py"}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCES:
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text("utf-8"))


def test_there_is_something_to_check() -> None:
    assert len(SOURCES) > 10


def test_only_the_cleanup_helper_and_the_border_shield() -> None:
    """T8, fault 17.3: a shield has a deadline, and is never switched later."""
    found = set()
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "shield":
                found.add(name)
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    assert not (isinstance(target, ast.Attribute) and target.attr == "shield"), (
                        name,
                        node.lineno,
                    )
    assert found == SHIELDING


def test_no_async_generators() -> None:
    """T11: a scope across a yield leaks; only context managers with one yield are allowed."""
    for name, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.AsyncFunctionDef):
                continue
            yields = [inner for inner in ast.walk(node) if isinstance(inner, (ast.Yield, ast.YieldFrom))]
            own = [inner for inner in yields if owner(node, inner) is node]
            if own:
                decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
                assert decorators & {"asynccontextmanager", "contextlib.asynccontextmanager"}, (
                    name,
                    node.lineno,
                )


def owner(root: ast.AST, wanted: ast.AST) -> ast.AST | None:
    """The innermost function around ``wanted``."""

    def search(node: ast.AST, function: ast.AST | None) -> ast.AST | None:
        if node is wanted:
            return function
        inside = node if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) else function
        for child in ast.iter_child_nodes(node):
            if (found := search(child, inside)) is not None:
                return found
        return None

    return search(root, None)


def test_strict_exception_groups_stay() -> None:
    """T9."""
    for name, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword):
                assert node.arg != "strict_exception_groups", name


def test_awaits_in_finally_are_bounded() -> None:
    """T8, fault 17.2: an await in a finally block is inside the one helper, or in a function that is."""
    allowed = {"_close", "aclose"}
    for name, tree in trees():
        for node in ast.walk(tree):
            if name.startswith("sql/deployment") or not isinstance(node, ast.Try):
                continue  # the deployment gives its advisory lock back; the end of its session does so too
            for statement in node.finalbody:
                for awaited in unshielded_awaits(statement):
                    called = awaited.value.func if isinstance(awaited.value, ast.Call) else None
                    target = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
                    assert target in allowed, f"{name}:{awaited.lineno}: await {target} in finally"


def unshielded_awaits(statement: ast.AST) -> Iterator[ast.Await]:
    if isinstance(statement, ast.With) and any(
        "bounded_cleanup" in ast.unparse(item) for item in statement.items
    ):
        return
    if isinstance(statement, ast.Await):
        yield statement
    for child in ast.iter_child_nodes(statement):
        yield from unshielded_awaits(child)


@pytest.mark.parametrize("package", ["actors", "runtime"])
def test_nobody_above_the_border_imports_the_driver(package: str) -> None:
    for name, tree in trees():
        if not name.startswith(package):
            continue
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module or "")
            for module in modules:
                if (name, module) == ("runtime/thread.py", "asyncio"):
                    continue  # programs on asyncio await a runtime that runs in a thread
                if (name, module) == ("runtime/sandboxes/modal.py", "asyncio"):
                    continue  # the only way to take a call of its SDK back, in a thread of its own
                assert module.split(".")[0] not in {"asyncio", "asyncpg", "trio_asyncio"}, name
