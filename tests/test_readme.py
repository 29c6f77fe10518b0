"""README.md and docs/ tell the truth: their settings, examples, verbs and links are the code's."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

import runtime
from runtime import Context, HttpLedger, Runtime, RuntimeConfig
from runtime.cli import cli
from tests.support.hosts import until

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = {
    str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
    for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
ALL = "\n".join(DOCUMENTS.values())
PROGRAMS: list[str] = re.findall(r"```python\n(.*?)```", ALL, re.DOTALL)


def program(begins: str) -> str:
    """The one program that begins so."""
    (found,) = [text for text in PROGRAMS if text.startswith(begins)]
    return found


def shown(default: Any) -> str:
    if default is None:
        return "none"
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


def test_every_setting_is_listed_with_its_default() -> None:
    listed = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", README, re.MULTILINE))
    assert listed == {field.name: shown(field.default) for field in attrs.fields(RuntimeConfig)}


@pytest.mark.parametrize("text", PROGRAMS)
def test_every_program_compiles(text: str) -> None:
    compile(text, "README.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_example_is_at_most_twenty_lines_and_compiles() -> None:
    example = program("import trio\n")
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    names: dict[str, Any] = {}
    exec(compile(example.replace("trio.run(main)", ""), "README.md", "exec", dont_inherit=True), names)
    assert names["greet"].name == "greet"


async def test_the_play_with_an_approval_runs(dsn: str, schema: str, notify: bool) -> None:
    names: dict[str, Any] = {"__name__": "orders"}
    exec(compile(program("# orders.py"), "orders.py", "exec", dont_inherit=True), names)
    config = RuntimeConfig(dsn=dsn, schema=schema, notify=notify)
    async with Runtime.open(config, plays=[names["order"], names["pack"]]) as rt:
        handle = await rt.submit("order", {"item": "lamp", "price": 1200}, run_id="order-7")
        await until(rt, "order-7", "waiting")
        await rt.send_event("order-7", "approval", {"approved": True, "by": "Ada"})
        assert await handle.result(timeout=20) == {"receipt": "1200 paid, order-7", "parcel": "lamp, packed"}
        refused = await rt.submit("order", {"item": "lamp", "price": 1200})
        await rt.send_event(refused.run_id, "approval", {"approved": False, "by": "Ada"})
        with pytest.raises(runtime.RunFailed, match="refused by Ada"):
            await refused.result(timeout=20)


def test_the_web_app_serves(tmp_path: Path, dsn: str, schema: str) -> None:
    (tmp_path / "orders.py").write_text(program("# orders.py"))
    (tmp_path / "web.py").write_text(program("from contextlib import asynccontextmanager"))
    client = (
        "from fastapi.testclient import TestClient; import web\n"
        "with TestClient(web.app) as client:\n"
        "    run = client.post('/orders', json={'item': 'lamp', 'price': 12}).json()['run']\n"
        "    print(web.app.state.runs.result(run, timeout=20)['parcel'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", client],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RUNLANE_DSN": dsn, "RUNLANE_SCHEMA": schema},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "lamp, packed\n"), done.stderr


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"`rt\.(\w+)", ALL))))
def test_verbs_exist(verb: str) -> None:
    assert hasattr(Runtime, verb)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bctx\.(\w+)", ALL))))
def test_what_a_play_asks_of_its_context_exists(name: str) -> None:
    assert hasattr(Context, name) or f"self.{name} = " in inspect.getsource(Context.__init__)


@pytest.mark.parametrize("verb", sorted(set(re.findall(r"(?:`|\$ )runlane ([a-z][a-z-]*)", ALL))))
def test_verbs_of_the_command_line_exist(verb: str) -> None:
    assert verb in cli.commands


def test_the_http_ledger_takes_what_is_listed() -> None:
    (listed,) = re.findall(r"`HttpLedger\((url, \*.*?)\)`", ALL, re.DOTALL)
    names = re.findall(r"(\w+)(?:=\w+)?(?:, |$)", " ".join(listed.split()))
    assert set(names) == set(inspect.signature(HttpLedger).parameters)


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_links_lead_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", DOCUMENTS[document]):
        if target.startswith("https://"):
            continue
        file, _, anchor = " ".join(target.split()).partition("#")
        place = (ROOT / document).parent / file if file else ROOT / document
        assert place.is_file(), target
        headings = re.findall(r"^#+ (.+)$", place.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, target


def test_errors_and_ledgers_that_it_names_are_public() -> None:
    for name in (
        "RunFailed",
        "RunCancelled",
        "ResultTimeout",
        "IdempotencyConflict",
        "OutcomeUnknown",
        "HostFailed",
    ):
        assert name in README
        assert name in runtime.__all__
