"""What a contract reads: checked, remembered, and refused in one sentence."""

from __future__ import annotations

import pytest

from tests.contracts.pods import pod_of
from trainer_launch.contracts.source import MAX_FILE_BYTES, MAX_VALUE_BYTES, Marks, Source
from trainer_launch.model import Endpoint, Fact, NodeRange, Origin, value_parsers
from trainer_launch.model.errors import ContractError


def source(value: str | None = None, **files: str) -> Source:
    return Source(pod_of({} if value is None else {"X": value}, {f"/{k}": v for k, v in files.items()}), "c")


@pytest.mark.parametrize("value", ["", " ", "-1", "1.0", "0x1", "1e3", "١", "1_0", "9" * 13, "one", "+1"])  # noqa: RUF001
def test_only_plain_digits_are_numbers(value: str) -> None:
    with pytest.raises(ContractError, match=r"X is .*expected a whole number.*\(contract c\)"):
        source(value).count("X")


def test_numbers_may_have_blanks_and_zeros_around() -> None:
    assert source(" 007 ").count("X") == 7


def test_an_index_is_smaller_than_the_count() -> None:
    assert source("1").index("X", below=2) == 1
    with pytest.raises(ContractError, match="from 0 to 1"):
        source("2").index("X", below=2)


@pytest.mark.parametrize(("value", "want"), [("1", 1), ("65535", 65535)])
def test_ports_have_their_range(value: str, want: int) -> None:
    assert source(value).port("X") == want


@pytest.mark.parametrize("value", ["0", "65536", "ssh"])
def test_other_ports_are_refused(value: str) -> None:
    with pytest.raises(ContractError, match="a port from 1 to 65535"):
        source(value).port("X")


@pytest.mark.parametrize(("value", "want"), [("", True), ("0", False), ("1", True), ("2", True)])
def test_an_empty_flag_is_on(value: str, want: bool) -> None:
    assert source(value).flag("X") is want


@pytest.mark.parametrize("value", ["a.b", "10.0.0.1", "fd00::1", "fe80::1%eth0", "A_b-c.d."])
def test_hosts_are_names_or_addresses(value: str) -> None:
    assert source(value).host("X") == value


@pytest.mark.parametrize("value", ["", "a b", "$(X)", "-a", "a/b", "é", "a:b:c g", "x" * 300, "a\nb"])
def test_other_hosts_are_refused(value: str) -> None:
    with pytest.raises(ContractError, match="a host name or an IP address"):
        source(value).host("X")


def test_endpoints_split_at_the_port() -> None:
    assert source("a:1").endpoint("X") == Endpoint("a", 1)
    assert source("[::1]:0").endpoint("X") == Endpoint("::1", 0)
    assert source("a").endpoint("X", default_port=7) == Endpoint("a", 7)
    assert source("::1:7").endpoint("X", naked_ipv6=True) == Endpoint("::1", 7)


@pytest.mark.parametrize(
    "value", ["a", "a:", ":1", "::1:7", "[::1]", "[a]:1", "a:1:2", "a:65536", "[::1:7", "a:-1"]
)
def test_other_endpoints_are_refused(value: str) -> None:
    with pytest.raises(ContractError, match="HOST:PORT"):
        source(value).endpoint("X")


@pytest.mark.parametrize(("value", "want"), [("2", (2, 2)), ("1:3", (1, 3)), ("2:2", (2, 2))])
def test_node_ranges_have_one_or_two_numbers(value: str, want: tuple[int, int]) -> None:
    assert source(value).node_range("X") == NodeRange(*want)


@pytest.mark.parametrize("value", ["0", "0:1", "3:1", "1:2:3", ":", "1:", ":1", "a", "", ":" * 100_000])
def test_other_node_ranges_are_refused(value: str) -> None:
    with pytest.raises(ContractError, match="N or MIN:MAX"):
        source(value).node_range("X")


@pytest.mark.parametrize("value", ["a=", "=a", "a", "a=1,", ",", "a=1,,b=2"])
def test_conf_takes_no_empty_item(value: str) -> None:
    with pytest.raises(ContractError, match="k=v pairs"):
        source(value).conf("X")


@pytest.mark.parametrize(
    "value",
    [
        "[]",
        "1",
        '{"a":1,"a":2}',
        '{"a":NaN}',
        '{"a":{"b":1,"b":1}}',
        "{",
        "[" * 100_000,
        '{"a":' * 20_000,
        '{"a":1e}',
    ],
)
def test_json_is_one_object_without_repeats(value: str) -> None:
    with pytest.raises(ContractError, match="a JSON object without repeated keys"):
        source(value).json_object("X")


@pytest.mark.parametrize("value", ["hosts", "", "./x", "/a\nb", "/" + "a" * 5000])
def test_paths_are_absolute_and_plain(value: str) -> None:
    with pytest.raises(ContractError, match="an absolute path"):
        source(value).path("X")


def test_a_missing_variable_says_what_is_needed() -> None:
    with pytest.raises(ContractError, match=r"X is not set; contract c needs it as a port .*--contract"):
        source().port("X")


def test_a_default_stands_in_for_what_is_absent_but_not_for_what_is_wrong() -> None:
    assert source().port("X", default=None) is None
    with pytest.raises(ContractError):
        source("").port("X", default=None)


def test_a_value_that_is_no_text_is_refused() -> None:
    for value in ("a\udcff", "a\0", "x" * (MAX_VALUE_BYTES + 1)):
        with pytest.raises(ContractError) as caught:
            source(value).text("X")
        str(caught.value).encode()


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


def test_marks_say_what_they_saw() -> None:
    marks = Marks(any_of=("A", "X"), files=("/f",), shows=("B", "/g"))
    read = source("1", f="", g="")
    assert marks.fit(read)
    assert marks.present(read) == ("X", "/f", "/g")
    assert not Marks(none_of=("X",)).fit(read)


def test_shown_values_are_short_plain_and_printable() -> None:
    assert value_parsers.shown("a") == "'a'"
    for value in ("a\nb", "\udcff", "\U0010ffff" * 1000, "x" * 10_000_000, "'\"\\" * 100):
        assert value_parsers.shown(value).isprintable()
        assert len(value_parsers.shown(value)) <= 100
