"""A value comes back from JSON as it was; whatever does not fit its fields is one kind of error."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple

import pytest
from msgspec import Meta, Struct, field

from trainer_launch.model.codec import (
    Codec,
    Count,
    MessageError,
    Name,
    Port,
    Tagged,
    Text,
    decode,
    encode,
)
from trainer_launch.model.codec import Whole as WholeNumber


class Color(str, Enum):
    RED = "red"


class Pair(NamedTuple):
    name: Name
    port: Port | None


class Inner(Tagged, frozen=True, kw_only=True):
    count: Count
    words: tuple[str, ...] = ()


class Whole(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    inner: Inner
    pairs: Annotated[tuple[Pair, ...], Meta(max_length=2)] = ()
    row: tuple[WholeNumber, str] = (0, "")
    facts: Annotated[Mapping[str, float], Meta(max_length=2)] = field(default_factory=dict)
    color: Color | None = None
    way: Literal["a", "b"] = "a"
    is_done: bool = False
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    note: Text | None = None


FULL = Whole(
    inner=Inner(count=3, words=("ü", "\udcff")),
    pairs=(Pair("n", 1), Pair("m", None)),
    row=(-5, "x"),
    facts={"a": 1.0},
    color=Color.RED,
    way="b",
    is_done=True,
    share=1.0,
    note="x",
)


def changed(**values: Any) -> bytes:
    return json.dumps({**json.loads(encode(FULL)), **values}).encode()


@pytest.mark.parametrize("value", [FULL, Whole(inner=Inner(count=0))])
def test_a_value_comes_back_as_it_was(value: Whole) -> None:
    assert decode(Whole, encode(value)) == value


def test_what_has_a_default_may_be_missing_and_nothing_else() -> None:
    assert decode(Whole, b'{"inner":{"count":1}}') == Whole(inner=Inner(count=1))
    with pytest.raises(MessageError, match="missing required field `count`"):
        decode(Whole, b'{"inner":{}}')


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"\xff", b"[" * 50_000, changed(more=1), changed(inner=None), changed(inner={"count": -1}),
        changed(inner={"count": True}), changed(inner={"count": 1, "words": "ab"}), changed(pairs=[["n", 0]]),
        changed(pairs=[["n"]]), changed(pairs=[["n", 1]] * 3), changed(pairs=[["a\nb", 1]]), changed(row=[1]),
        changed(facts={"a": 1, "b": 2, "c": 3}), changed(facts=[]), changed(color="blue"), changed(color=[]),
        changed(way="c"), changed(is_done=1), changed(share=1.5), changed(share=math.nan), changed(share=10**400),
        changed(share="1"), changed(note="x" * 2001), changed(row=[2**60, ""]), b'{"inner":{"count":1}} x',
    ],
)  # fmt: skip
def test_what_does_not_fit_is_an_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(Whole, data)


def test_an_error_is_one_printable_sentence_whatever_a_stranger_sends() -> None:
    for name in ("more\n\x1b[31m", "x" * 10_000, "\u202e"):
        with pytest.raises(MessageError) as caught:
            decode(Whole, changed(**{name: 1}))
        text = str(caught.value)
        assert text.startswith("object contains unknown field `")
        assert text.isprintable()
        assert len(text) < 1000


def test_a_conversation_tells_its_messages_apart_by_their_kind_and_cuts_long_texts() -> None:
    codec: Codec[Inner] = Codec(Inner, max_bytes=100, max_text=20)
    line = codec.encode(Inner(count=1))
    assert line == b'{"kind":"inner","count":1,"words":[]}\n'
    assert codec.decode(line) == Inner(count=1)
    for other in (line.replace(b"inner", b"whole"), b'{"count":1,"words":[5]}', b'{"kind":["inner"],"count":1}'):
        with pytest.raises(MessageError):
            codec.decode(other)
    assert codec.decode(codec.encode(Inner(count=1, words=("x" * 1000,)))) == Inner(count=1, words=("x" * 20,))
    with pytest.raises(MessageError, match="at most 100 bytes"):
        codec.encode(Inner(count=1, words=("x" * 20,) * 5))


THREADS = """
import sys, threading
from typing import Annotated, Optional
from msgspec import Meta, defstruct
from trainer_launch.model import codec

sys.setswitchinterval(1e-6)
parts = [defstruct(f"Part{number}", [("a", Annotated[int, Meta(ge=0)])]) for number in range(300)]
shared = defstruct("Shared", [(f"part_{number}", Optional[part], None) for number, part in enumerate(parts)])
kinds = [defstruct(f"Kind{number}", [("shared", shared)]) for number in range(4)]
together = threading.Barrier(len(kinds))

def read(kind):
    together.wait()
    assert codec.decode(kind, b'{"shared": {"part_299": {"a": 5}}}').shared.part_299.a == 5
    sys.stdout.write("read\\n")

for thread in (threads := [threading.Thread(target=read, args=(kind,)) for kind in kinds]):
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.process
def test_threads_that_read_messages_for_the_first_time_do_not_crash_the_launcher() -> None:
    """Without a lock about half of these end by SIGSEGV: msgspec shows other threads what is not complete."""
    for _ in range(4):
        ended = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout.split()) == (0, ["read"] * 4), ended.stderr
