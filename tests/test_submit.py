"""The door for new runs: what it refuses before the database sees anything."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import pytest

from runtime import Context, JsonCodec, PayloadRefused, Play, RuntimeConfig, Submit, play
from runtime.routes import Routes
from runtime.submit import Submissions
from sql.admission import Registered


@attrs.frozen
class Greeting:
    name: str
    times: int = 1


@dataclasses.dataclass
class Order:
    number: int


@play("greet")
async def greet(ctx: Context, data: Greeting) -> None: ...


@play("order")
async def order(ctx: Context, data: Order) -> None: ...


@play("anything")
async def anything(ctx: Context, data: Any) -> None: ...


@pytest.fixture
def hosted() -> list[Play]:
    return [greet, anything]


@pytest.fixture
def submissions(hosted: list[Play]) -> Submissions:
    async def find(_: str) -> Registered:
        return Registered({0: 1}, keyed=False)

    return Submissions(
        RuntimeConfig(), JsonCodec(), {one.name: one for one in hosted}, find, Routes(None, {})
    )


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (Submit(greet, {"nam": "b"}), ["nam", "name"]),
        (Submit("greet", {"nam": "b"}), ["nam", "name"]),
        (Submit("greet", {"name": 5}), ["name", "expected str"]),
        (Submit("greet"), ["Greeting"]),
        (Submit("greet", Order(1)), ["number"]),
        (Submit(order, {"number": "1"}), ["number", "expected int"]),  # hosted elsewhere, but known
    ],
)
async def test_an_input_of_another_shape_than_the_plays_type_is_refused_by_field(
    submissions: Submissions, item: Submit, words: list[str]
) -> None:
    with pytest.raises(PayloadRefused) as caught:
        await submissions.prepare(item)
    assert caught.value.field == "input"
    for word in words:
        assert word in caught.value.reason


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (Submit(greet, {"name": "b"}), '{"name":"b"}'),
        (Submit("greet", Greeting("b")), '{"name":"b","times":1}'),
        (Submit(anything, {"nam": "b"}), '{"nam":"b"}'),
        (Submit("order", {"nam": "b"}), '{"nam":"b"}'),  # its type is known to its own hosts only
    ],
)
async def test_an_input_that_fits_is_stored_as_it_was_given(
    submissions: Submissions, item: Submit, text: str
) -> None:
    assert (await submissions.prepare(item)).input == text
