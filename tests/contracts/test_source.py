"""What a contract reads: checked, remembered, and refused in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from tests.contracts.pods import pod_of
from trainer_launch.contracts.source import MAX_FILE_BYTES, MAX_VALUE_BYTES, Source
from trainer_launch.model import Endpoint, Fact, NodeRange, Origin, value_parsers
from trainer_launch.model.errors import ContractError


def source(value: str | None = None, **files: str) -> Source:
    return Source(pod_of({} if value is None else {"X": value}, {f"/{k}": v for k, v in files.items()}), "c")


@pytest.mark.parametrize(
    ("kind", "text", "more", "value"),
    [
        ("count", " 007 ", {}, 7),
        ("index", "1", {"below": 2}, 1),
        ("port", "1", {}, 1),
        ("port", "65535", {}, 65535),
        *(("flag", text, {}, text != "0") for text in ("", "0", "1", "2")),
        *(("host", text, {}, text) for text in ("a.b", "10.0.0.1", "fd00::1", "fe80::1%eth0", "A_b-c.d.")),
        ("host", "[0:0:0:0:0:0:0:1]", {}, "0:0:0:0:0:0:0:1"),
        ("endpoint", "a:1", {}, Endpoint("a", 1)),
        ("endpoint", "[::1]:0", {}, Endpoint("::1", 0)),
        ("endpoint", "a", {"default_port": 7}, Endpoint("a", 7)),
        ("endpoint", "::1:7", {"naked_ipv6": True}, Endpoint("::1", 7)),
        ("node_range", "2", {}, NodeRange(2, 2)),
        ("node_range", "1:3", {}, NodeRange(1, 3)),
    ],
)
def test_a_value_in_its_form_is_read(kind: str, text: str, more: dict[str, Any], value: object) -> None:
    assert getattr(source(text), kind)("X", **more) == value


REFUSED = {
    "count": ("a whole number", ["", " ", "-1", "1.0", "0x1", "1e3", "\u0661", "1_0", "9" * 13, "one", "+1"]),
    "port": ("a port from 1 to 65535", ["0", "65536", "ssh"]),
    "host": (
        "a host name or an IP address",
        ["", "a b", "$(X)", "-a", "a/b", "\xe9", "a:b g", "x" * 300, "a\nb", "[a]", "[::1", "[::1]:7"],
    ),
    "endpoint": ("HOST:PORT", ["a", "a:", ":1", "::1:7", "[::1]", "[a]:1", "a:1:2", "a:65536", "[::1:7", "a:-1"]),
    "node_range": ("N or MIN:MAX", ["0", "0:1", "3:1", "1:2:3", ":", "1:", ":1", "a", "", ":" * 100_000]),
    "conf": ("k=v pairs", ["a=", "=a", "a", "a=1,", ",", "a=1,,b=2"]),
    "path": ("an absolute path", ["hosts", "", "./x", "/a\nb", "/" + "a" * 5000]),
    "text": ("X is ", ["a\udcff", "a\0", "x" * (MAX_VALUE_BYTES + 1)]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_value_is_refused_with_what_was_expected(kind: str) -> None:
    expected, values = REFUSED[kind]
    for value in values:
        with pytest.raises(ContractError, match=f"X is .*{expected if kind != 'text' else ''}.*") as caught:
            getattr(source(value), kind)("X")
        str(caught.value).encode()


@pytest.mark.parametrize(
    "value", ["[]", "1", '{"a":NaN}', '{"a":1e400}', "{", "[" * 100_000, '{"a":' * 20_000, '{"a":"1"}', '{"a":1e}']
)
def test_json_of_another_form_is_refused(value: str) -> None:
    with pytest.raises(ContractError, match=r"X is .*expected JSON as its platform writes it"):
        source(value).json("X", dict[str, int])


def test_an_index_is_smaller_than_the_count() -> None:
    with pytest.raises(ContractError, match="from 0 to 1"):
        source("2").index("X", below=2)


def test_a_default_stands_in_for_what_is_absent_but_not_for_what_is_wrong() -> None:
    assert source().port("X", default=None) is None
    with pytest.raises(ContractError, match=r"X is not set; contract c needs it as a port .*--contract"):
        source().port("X")
    with pytest.raises(ContractError):
        source("").port("X", default=None)


def test_every_read_is_remembered_once_and_in_order() -> None:
    read = source("1", f="x")
    read.count("X", "nodes")
    read.file("/f", "hosts")
    read.count("X", "nodes")
    assert read.facts == (
        Fact(name="X", value="1", origin=Origin.ENV, field="nodes", became=1),
        Fact(name="/f", value="1 bytes", origin=Origin.FILE, field="hosts"),
    )


def test_files_are_text_of_bounded_size() -> None:
    assert source().file("/f") is None
    with pytest.raises(ContractError, match=r"/f is .*at most"):
        source(f="x" * (MAX_FILE_BYTES + 5)).file("/f")
    with pytest.raises(ContractError, match=r"/f is .*text in UTF-8"):
        source(f="a\udcff").file("/f")


def test_shown_values_are_short_plain_and_printable() -> None:
    assert value_parsers.shown("a") == "'a'"
    for value in ("a\nb", "\udcff", "\U0010ffff" * 1000, "x" * 10_000_000, "'\"\\" * 100):
        assert value_parsers.shown(value).isprintable()
        assert len(value_parsers.shown(value)) <= 100
