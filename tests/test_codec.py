"""The JSON codec: round trips, one canonical text, and a refusal by path for everything else."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import hashlib
import json
import math
import uuid
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import attrs
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.codec import (
    MAX_INT_DIGITS,
    MESSAGE_BYTES,
    TRACEBACK_BYTES,
    JsonCodec,
    SealedCodec,
    error_record,
    preview,
    quoted,
    scrub,
)
from sql.errors import PayloadRefused

LIMIT = 1_048_576
DEPTH = 64
LIMITS: dict[str, Any] = {"limit_bytes": LIMIT, "max_depth": DEPTH}

codec = JsonCodec()


def encode(value: Any, *, limit_bytes: int = LIMIT, max_depth: int = DEPTH) -> str:
    return codec.encode(value, what="input", limit_bytes=limit_bytes, max_depth=max_depth)


def refusal(value: Any, *, limit_bytes: int = LIMIT, max_depth: int = DEPTH) -> PayloadRefused:
    with pytest.raises(PayloadRefused) as caught:
        encode(value, limit_bytes=limit_bytes, max_depth=max_depth)
    return caught.value


def nested(levels: int, inner: Any = None) -> Any:
    value: Any = [] if inner is None else [inner]
    for _ in range(levels - 1):
        value = [value]
    return value


def chain_of_dicts(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


# --- what is stored ----------------------------------------------------------------------------------

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=20)
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
leaves = st.none() | st.booleans() | numbers | text
documents = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(text, inner, max_size=5),
    max_leaves=25,
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.binary(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(documents)
def test_what_is_stored_comes_back_equal_and_of_the_same_types(value: Any) -> None:
    back = codec.decode(encode(value))
    assert back == value
    assert _types(back) == _types(value)


def _types(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_types(item) for item in value]
    return type(value)


@given(documents)
def test_the_text_is_canonical(value: Any) -> None:
    once = encode(value)
    assert encode(codec.decode(once)) == once
    once.encode()
    assert "\\u0000" not in once.replace("\\\\", "")


def _as_jsonb_prints(text: str) -> str:
    """Numbers as Postgres' numeric prints them: never an exponent, the scale kept."""
    written = json.loads(text, parse_float=decimal.Decimal)

    def render(value: Any) -> str:
        if isinstance(value, decimal.Decimal):
            return format(value, "f")
        if isinstance(value, dict):
            return "{" + ", ".join(f"{json.dumps(key)}: {render(item)}" for key, item in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ", ".join(render(item) for item in value) + "]"
        return json.dumps(value)

    return render(written)


@given(documents)
def test_the_text_survives_the_normalisation_of_jsonb(value: Any) -> None:
    once = encode(value)
    back = codec.decode(_as_jsonb_prints(once))
    assert back == value
    assert encode(back) == once


@given(anything)
def test_any_value_is_stored_or_refused_by_name_and_an_output_is_always_stored(value: Any) -> None:
    stored, reason = codec.encode_output(value, limit_bytes=LIMIT, max_depth=DEPTH)
    json.loads(stored, parse_constant=pytest.fail)
    if reason is None:
        assert encode(value) == stored
    else:
        assert refusal(value).field.startswith("input")
        assert codec.decode(stored)["$replaced"]["detail"] == reason


def test_keys_are_sorted_separators_compact_and_text_unescaped() -> None:
    assert encode({"b": (1, 2), "a": "ä😀", "": None}) == '{"":null,"a":"ä😀","b":[1,2]}'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (-0.0, "0.0"),
        ([-0.0, 0.0, 0], "[0.0,0.0,0]"),
        ({"a": {"b": -0.0}}, '{"a":{"b":0.0}}'),
        (1e22, "10000000000000000000000.0"),
        (1e15, "1000000000000000.0"),
        (1e-7, "1e-07"),
        (2**63, str(2**63)),
        (True, "true"),
        ("\\u0000", '"\\\\u0000"'),
        (["\x01\x7f\u2028"], '["\\u0001\x7f\u2028"]'),
    ],
)
def test_the_canonical_text_of(value: Any, expected: str) -> None:
    assert encode(value) == expected


def test_the_largest_float_comes_back_exactly() -> None:
    assert codec.decode(encode([1.7976931348623157e308, 5e-324, -1e23])) == [
        1.7976931348623157e308,
        5e-324,
        -1e23,
    ]


def test_subclasses_are_stored_as_what_they_are() -> None:
    class Colour(str, enum.Enum):  # noqa: UP042 - unlike StrEnum, str() of it is not its value
        RED = "red"

    class Level(enum.IntEnum):
        HIGH = 2

    class Loud(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("no code of the value may run")

        keys = values = __iter__ = __len__ = items

    assert encode({Colour.RED: Level.HIGH}) == '{"red":2}'
    assert encode(OrderedDict(b=1, a=2)) == '{"a":2,"b":1}'
    assert encode([Loud(a=1)]) == '[{"a":1}]'


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "field", "word"),
    [
        # fault 11.1: NUL anywhere
        ("a\x00", "input", "NUL"),
        ({"a": {"b": ["x", "y\x00"]}}, "input.a.b[1]", "NUL"),
        ({"a": {"k\x00": 1}}, "input.a", "NUL"),
        ({"a\x00": 1}, "input", "NUL"),
        # fault 11.2: lone surrogates
        (["\ud800"], "input[0]", "surrogate"),
        ({"a": "\ud83d\ude00"}, "input.a", "surrogate"),
        ({"k\udfff": 1}, "input", "surrogate"),
        # fault 11.3: numbers
        (math.nan, "input", "nan"),
        ({"a": [1.0, math.inf]}, "input.a[1]", "inf"),
        ([[-math.inf]], "input[0][0]", "inf"),
        ([1, 2**4000], "input[1]", "640 digits"),
        pytest.param(-(10**5000), "input", "640 digits", id="too many digits to print"),
        (decimal.Decimal("1"), "input", "decimal.Decimal is not JSON; store str(value)"),
        # other types
        ({"a": b"x"}, "input.a", "bytes is not JSON; store text, for example base64"),
        ([bytearray()], "input[0]", "bytearray"),
        ({"when": datetime(2026, 1, 1, tzinfo=UTC)}, "input.when", "isoformat"),
        ({"when": date(2026, 1, 1)}, "input.when", "isoformat"),
        ({"for": timedelta(1)}, "input.for", "total_seconds"),
        ({"a": {1, 2}}, "input.a", "set is not JSON; store a list"),
        ([frozenset()], "input[0]", "frozenset"),
        ([uuid.UUID(int=0)], "input[0]", "uuid.UUID"),
        ([object()], "input[0]", "object is not JSON"),
        ([int], "input[0]", "type is not JSON"),
        # keys
        ({1: "a"}, "input", "the key 1 is int; keys must be str"),
        ({"a": [{None: 1}]}, "input.a[0]", "the key None is NoneType"),
        ({"a": {True: 1}}, "input.a", "bool"),
        ({"a": {1.5: 1, "b": 2}}, "input.a", "float"),
        ({"a": {(1, 2): 1}}, "input.a", "tuple"),
        # paths that are no identifiers
        ({"a b": {"": [b""]}}, "input['a b'][''][0]", "bytes"),
        ({"ü": [b""]}, "input['\\xfc'][0]", "bytes"),
    ],
)
def test_a_refusal_names_the_path_and_the_reason(value: Any, field: str, word: str) -> None:
    error = refusal(value)
    assert error.field == field
    assert word in error.reason


def test_a_call_without_await_is_named() -> None:
    async def step() -> None: ...

    forgotten = step()
    assert refusal(forgotten).reason == "coroutine is not JSON; did you forget await?"
    forgotten.close()


def test_what_was_cut_ends_in_an_ellipsis() -> None:
    assert quoted("é" * 10, 10) == ascii("é" * 10)
    assert quoted("é" * 11, 10) == "'" + "\\xe9" * 9 + "…'"
    assert preview("x" * 500).endswith("x…'")
    assert refusal({"a b" * 100: [b""]}).field.endswith("…'][0]")


@pytest.mark.parametrize("build", [nested, chain_of_dicts])
def test_depth_is_counted_in_containers(build: Callable[[int], Any]) -> None:
    assert encode(build(DEPTH))
    assert "deeper than 64 levels" in refusal(build(DEPTH + 1)).reason
    assert encode(7, max_depth=1) == "7"


@pytest.mark.parametrize("build", [nested, chain_of_dicts])
def test_nesting_of_100_000_levels_is_refused_not_a_crash(build: Callable[[int], Any]) -> None:  # fault 11.6
    value = build(100_000)
    error = refusal(value)
    assert "deeper than 64 levels" in error.reason
    assert error.field.startswith("input")
    assert error.field.endswith("…")
    assert len(error.field) < 30
    stored, reason = codec.encode_output(value, limit_bytes=LIMIT, max_depth=DEPTH)
    assert reason is not None
    assert codec.decode(stored)["$replaced"]["reason"] == "payload_too_deep"


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "contains itself" in refusal(loop).reason


def test_shared_references_cannot_explode() -> None:
    value: Any = ["x" * 100]
    for _ in range(60):  # 2**60 copies when written out
        value = [value, value]
    assert "the limit is" in refusal(value).reason
    assert "the limit is" in refusal(["x" * 1_000_000] * 1_000_000).reason


def test_the_limit_counts_bytes_of_utf8() -> None:
    assert encode("ä" * 10, limit_bytes=22) == '"' + "ä" * 10 + '"'
    assert refusal("ä" * 10, limit_bytes=21).reason == "needs 22 bytes as JSON; the limit is 21 bytes"
    assert encode({"a": [-0.0]}, limit_bytes=11)  # the careful way counts the same
    assert "the limit is 10 bytes" in refusal({"a": [-0.0]}, limit_bytes=10).reason


@pytest.mark.parametrize("value", ["x" * 10_000_000, {"a": ["x" * 10_000_000]}, {"x" * 10_000_000: 1}])
def test_ten_megabytes_are_refused_with_the_size_and_the_limit(value: Any) -> None:
    error = refusal(value)
    assert error.field == "input"
    assert "1048576 bytes" in error.reason
    assert "1000" in error.reason


@pytest.mark.parametrize("digits", [MAX_INT_DIGITS, MAX_INT_DIGITS + 1])
def test_integers_up_to_640_digits_are_stored(digits: int) -> None:
    value = 10 ** (digits - 1)
    if digits <= MAX_INT_DIGITS:
        assert codec.decode(encode([value, -value])) == [value, -value]
    else:
        assert refusal([value]).field == "input[0]"


# --- outputs -----------------------------------------------------------------------------------------


def test_an_output_one_byte_over_the_limit_records_its_size() -> None:  # fault 11.4
    value = "x" * 999
    stored, reason = codec.encode_output(value, limit_bytes=1_000, max_depth=DEPTH)
    assert reason == "output: needs 1001 bytes as JSON; the limit is 1000 bytes"
    replaced = codec.decode(stored)["$replaced"]
    assert replaced["reason"] == "payload_too_large"
    assert replaced["bytes"] == 1_001
    assert replaced["type"] == "str"
    assert replaced["preview"].startswith("'xxx")
    assert codec.encode_output("x" * 998, limit_bytes=1_000, max_depth=DEPTH)[1] is None


def test_a_preview_runs_no_code_of_the_value() -> None:
    class Hostile:
        def __repr__(self) -> str:
            raise AssertionError("repr was called")

        __str__ = __repr__

    stored, reason = codec.encode_output({"a": Hostile(), "b": 10**9999}, limit_bytes=LIMIT, max_depth=DEPTH)
    assert "Hostile is not JSON" in (reason or "")
    replaced = codec.decode(stored)["$replaced"]
    assert replaced["reason"] == "payload_not_json"
    assert "Hostile>" in replaced["preview"]
    assert replaced["bytes"] is None


@pytest.mark.parametrize(
    "value", ["\x00" * 9, "\ud800" * 9, {"\x00\ud800": b"\x00"}, {"\x00": {"\x00" * 999}}]
)
def test_a_replacement_is_itself_storable(value: Any) -> None:
    stored, reason = codec.encode_output(value, limit_bytes=LIMIT, max_depth=DEPTH)
    assert reason is not None
    assert encode(codec.decode(stored)) == stored


# --- reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stored",
    [
        "",
        "{",
        "NaN",
        "[Infinity]",
        "1" * 5_000,
        "1" + "0" * 400 + ".5",
        "1e400",
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_a_stored_text_that_python_cannot_hold_is_refused_by_name(stored: str) -> None:  # fault 11.5
    with pytest.raises(PayloadRefused) as caught:
        codec.decode(stored, what="input")
    assert caught.value.field == "input"


# --- typed values ------------------------------------------------------------------------------------


@attrs.frozen
class Part:
    name: str
    weight: float = 1.0


@dataclasses.dataclass
class Order:
    number: int
    parts: list[Part]
    note: str | None = None


def test_attrs_and_dataclass_objects_round_trip() -> None:
    order = Order(7, [Part("a"), Part("b", 2.5)])
    stored = encode(order)
    assert stored == '{"note":null,"number":7,"parts":[{"name":"a","weight":1.0},{"name":"b","weight":2.5}]}'
    assert codec.structure(codec.decode(stored), Order, what="input") == order


class Address(pydantic.BaseModel):
    street: str
    since: datetime


class Person(pydantic.BaseModel):
    name: str
    user_id: int = pydantic.Field(alias="userId")
    addresses: list[Address] = []
    tags: set[str] = set()


@dataclasses.dataclass
class Parcel:
    to: Person
    weight: float


def test_pydantic_objects_round_trip() -> None:
    since = datetime(2026, 1, 31, tzinfo=UTC)
    person = Person(name="Ada", userId=7, addresses=[Address(street="Ü", since=since)], tags={"a"})
    stored = encode(person)
    assert json.loads(stored)["userId"] == 7
    assert codec.structure(codec.decode(stored), Person, what="input") == person
    parcel = Parcel(person, 1.5)
    assert codec.structure(codec.decode(encode(parcel)), Parcel, what="input") == parcel
    with pytest.raises(PayloadRefused, match=r"input: not a Person: input\.userId: Field required$"):
        codec.structure({"name": "Ada"}, Person, what="input")
    with pytest.raises(PayloadRefused, match=r"userId"):
        codec.structure({"to": {"name": "Ada"}, "weight": 1.0}, Parcel, what="input")


# --- sealed ----------------------------------------------------------------------------------------------


class Backwards:
    """Not a cipher, but nothing is where it was."""

    def __init__(self, name: str = "backwards", same: bool = True) -> None:
        self.name = name
        self._same = same
        self._count = 0

    def seal(self, text: bytes) -> str:
        self._count += 1  # as with a cipher, no two are alike
        return f"{self._count}:{text.decode()[::-1]}"

    def unseal(self, sealed: str) -> bytes:
        number, _, text = sealed.partition(":")
        if not number.isdecimal():
            raise ValueError("not mine")
        return text[::-1].encode()

    def same(self, text: bytes) -> str | None:
        return hashlib.sha256(text).hexdigest() if self._same else None


def test_a_sealed_payload_names_its_codec_and_is_read_with_it() -> None:
    sealed = SealedCodec(Backwards())
    one, two = (sealed.encode({"a": "secret"}, what="input", **LIMITS) for _ in range(2))
    assert "secret" not in one
    assert json.loads(one)["$codec"] == "backwards"
    assert one != two
    assert json.loads(one)["same"] == json.loads(two)["same"]
    assert sealed.decode(one) == sealed.decode(two) == {"a": "secret"}
    assert sealed.read(json.loads(one)) == {"a": "secret"}
    assert sealed.decode('{"a":"from before"}') == {"a": "from before"}
    for value in (None, 0, "text", [1], {"$codec": 5}, Order(1, [])):
        assert sealed.decode(sealed.encode(value, what="x", **LIMITS)) == json.loads(encode(value))


def test_a_codec_that_is_not_in_use_or_cannot_read_is_named() -> None:
    sealed = SealedCodec(Backwards())
    text = sealed.encode(1, what="input", **LIMITS)
    for other in (codec, SealedCodec(Backwards("other"))):
        with pytest.raises(PayloadRefused, match="input: was written with the codec 'backwards'"):
            other.decode(text, what="input")
    assert SealedCodec(Backwards("new"), Backwards()).decode(text) == 1
    with pytest.raises(PayloadRefused, match="cannot be read with the codec 'backwards': not mine"):
        sealed.decode('{"$codec":"backwards","data":"x"}')


@pytest.mark.parametrize("value", [{"$codec": "x", "data": "y"}, {"$codec": "x", "data": "y", "same": 1}])
def test_what_looks_like_a_sealed_payload_is_refused(value: Any) -> None:
    assert "form of an encoded payload" in refusal(value).reason
    text, replaced = codec.encode_output(value, **LIMITS)
    assert replaced is not None
    assert "$replaced" in text
    assert encode({**value, "more": 1})


def test_limits_of_a_sealed_payload_are_those_of_the_plain_one() -> None:
    sealed = SealedCodec(Backwards(same=False))
    text = sealed.encode("x" * 98, what="input", limit_bytes=100, max_depth=4)
    assert json.loads(text).keys() == {"$codec", "data"}
    with pytest.raises(PayloadRefused, match="limit is 100 bytes"):
        sealed.encode("x" * 99, what="input", limit_bytes=100, max_depth=4)


def test_what_a_typed_object_holds_is_checked_too() -> None:
    assert refusal([Order(1, [Part("a", math.nan)])]).field == "input[0].parts[0].weight"


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ({"number": 1}, "parts"),
        ({"number": "1", "parts": []}, "expected int"),
        ({"number": 1.5, "parts": []}, "expected int"),
        ({"number": True, "parts": []}, "expected int"),
        ({"number": 1, "parts": [], "more": 1}, "more"),
        ({"number": 1, "parts": [{"name": 3}]}, "expected str"),
        ([], "Order"),
        (None, "input"),
    ],
)
def test_data_of_another_shape_is_refused_by_name(value: Any, word: str) -> None:
    with pytest.raises(PayloadRefused) as caught:
        codec.structure(value, Order, what="input")
    assert word in str(caught.value)


# --- error records -----------------------------------------------------------------------------------


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def storable(record: dict[str, str]) -> dict[str, str]:
    assert set(record) == {"error_type", "message", "traceback"}
    assert codec.decode(encode(record)) == record
    assert len(record["message"].encode()) <= MESSAGE_BYTES
    assert len(record["traceback"].encode()) <= TRACEBACK_BYTES
    return record


def test_an_error_is_recorded_with_type_message_and_traceback() -> None:
    record = storable(error_record(raised(ValueError("no such file"))))
    assert record["error_type"] == "ValueError"
    assert record["message"] == "no such file"
    assert "in raised" in record["traceback"]
    assert record["traceback"].endswith("ValueError: no such file\n")
    assert storable(error_record(raised(KeyError())))["message"] == ""
    assert error_record(PayloadRefused("a", "b"))["error_type"] == "runtime.PayloadRefused"


def test_poison_in_an_error_is_escaped_and_cut() -> None:  # fault 11.2
    record = storable(error_record(raised(ValueError("a\x00b\ud800" + "x" * 10_000_000))))
    assert record["message"].startswith("a\\x00b\\ud800xxx")
    assert "bytes cut" in record["message"]
    assert "in raised" in record["traceback"]


def test_an_error_whose_text_cannot_be_made_is_recorded() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    record = storable(error_record(raised(Broken())))
    assert record["error_type"].endswith("Broken")
    assert "str() failed" in record["message"]


def test_a_group_around_one_error_is_that_error() -> None:  # T9
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [OSError(2, "gone")])])
    record = storable(error_record(raised(group)))
    assert record["error_type"] == "FileNotFoundError"
    assert record["message"] == "[Errno 2] gone"
    assert "outer" in record["traceback"]


def test_a_group_of_several_errors_names_them() -> None:  # T9
    group = ExceptionGroup("two things", [ValueError("a"), ExceptionGroup("more", [KeyError("b")])])
    record = storable(error_record(raised(group)))
    assert record["error_type"] == "ExceptionGroup"
    assert record["message"] == "two things (2 errors): ValueError: a; KeyError: 'b'"


def test_groups_and_causes_of_any_depth_are_recorded() -> None:
    group: ExceptionGroup[Exception] = ExceptionGroup("g", [ValueError("left"), ValueError("right")])
    for _ in range(3_000):
        group = ExceptionGroup("g", [group, ValueError("x")])
    assert storable(error_record(raised(group)))["error_type"] == "ExceptionGroup"
    error: BaseException = ValueError("first")
    for number in range(3_000):
        following = ValueError(str(number))
        following.__cause__ = error
        error = following
    assert storable(error_record(error))["message"] == "2999"


def test_endless_recursion_is_recorded_briefly() -> None:
    def forever() -> None:
        forever()

    with pytest.raises(RecursionError) as caught:
        forever()
    record = storable(error_record(caught.value))
    assert record["error_type"] == "RecursionError"
    assert "repeated" in record["traceback"]


@given(st.text(), st.integers(0, 200), st.booleans())
def test_scrubbed_text_is_storable_and_within_its_limit(value: str, limit: int, keep_end: bool) -> None:
    clean = scrub(value, 100 + limit, keep_end=keep_end)
    assert len(clean.encode()) <= 100 + limit
    assert "\x00" not in clean


def test_cutting_keeps_the_end_where_the_end_matters() -> None:
    assert scrub("a" * 500 + "END", 200, keep_end=True).endswith("END")
    assert not scrub("a" * 500 + "END", 200).endswith("END")
