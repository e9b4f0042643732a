"""A frozen dataclass comes back from JSON as it was; whatever does not fit its fields is one kind of error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from msgspec import Struct, field

from trainer_launch.model import json_lines
from trainer_launch.model.errors import InternalError
from trainer_launch.model.json_lines import Bound, Codec, Count, FreeText, MessageError, Name, Port, decode, encode


class Color(str, Enum):
    RED = "red"


class Pair(NamedTuple):
    name: Name
    port: Port | None


class Inner(Struct, frozen=True, kw_only=True):
    count: Count
    words: tuple[str, ...] = ()


class Whole(Struct, frozen=True, kw_only=True):
    inner: Inner
    pairs: Annotated[tuple[Pair, ...], Bound(0, 2)] = ()
    row: tuple[int, str] = (0, "")
    facts: Annotated[Mapping[str, float], Bound(0, 2)] = field(default_factory=dict)
    color: Color | None = None
    way: Literal["a", "b"] = "a"
    is_done: bool = False
    share: Annotated[float, Bound(0, 1)] = 0.0
    metric: Annotated[float, Bound(-math.inf, math.inf)] = 0.0
    note: FreeText | None = None


FULL = Whole(
    inner=Inner(count=3, words=("ü", "\udcff")),
    pairs=(Pair("n", 1), Pair("m", None)),
    row=(-5, "x"),
    facts={"a": 1.0},
    color=Color.RED,
    way="b",
    is_done=True,
    share=1.0,
    metric=math.inf,
    note="x",
)


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(encode(FULL)), **values}).encode()


@pytest.mark.parametrize("value", [FULL, Whole(inner=Inner(count=0))])
def test_a_value_comes_back_as_it_was(value: Whole) -> None:
    assert decode(Whole, encode(value)) == value


def test_what_has_a_default_may_be_missing_and_nothing_else() -> None:
    assert decode(Whole, b'{"inner":{"count":1}}') == Whole(inner=Inner(count=1))
    with pytest.raises(MessageError, match="a inner has the fields count, words"):
        decode(Whole, b'{"inner":{}}')


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"\xff", b"[" * 50_000, changed(more=1), changed(inner=None), changed(inner={"count": -1}),
        changed(inner={"count": True}), changed(inner={"count": 1, "words": "ab"}), changed(pairs=[["n", 0]]),
        changed(pairs=[["n"]]), changed(pairs=[["n", 1]] * 3), changed(pairs=[["a\nb", 1]]), changed(row=[1]),
        changed(facts={"a": 1, "b": 2, "c": 3}), changed(facts=[]), changed(color="blue"), changed(color=[]),
        changed(way="c"), changed(is_done=1), changed(share=1.5), changed(share=math.nan), changed(share=10**400),
        changed(metric=10**400), changed(metric="1"), changed(note="x" * 2001), changed(row=[2**60, ""]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(Whole, data)


def test_a_number_without_a_limit_may_be_none() -> None:
    assert math.isnan(decode(Whole, changed(metric=math.nan)).metric)


def test_a_free_text_is_cut_where_it_is_written() -> None:
    assert decode(Whole, encode(Whole(inner=Inner(count=0), note="x" * 5000))).note == "x" * 2000


def test_a_conversation_knows_its_messages_and_its_version() -> None:
    codec = Codec(Inner, version=2, max_bytes=100)
    line = codec.encode(Inner(count=1))
    assert line == b'{"v":2,"kind":"inner","count":1,"words":[]}\n'
    assert codec.decode(line) == Inner(count=1)
    for other in (line.replace(b'"v":2', b'"v":1'), line.replace(b"inner", b"whole"), b'{"v":2,"count":1}'):
        with pytest.raises(MessageError):
            codec.decode(other)
    with pytest.raises(MessageError, match="at most 100 bytes"):
        codec.encode(Inner(count=1, words=("x" * 100,)))


def test_a_launch_spec_that_is_not_ours_is_a_mistake_of_our_own() -> None:
    assert json_lines.parsed_spec(Whole, json_lines.printed_spec(FULL)) == FULL
    with pytest.raises(InternalError, match="version"):
        json_lines.parsed_spec(Whole, encode(FULL))
