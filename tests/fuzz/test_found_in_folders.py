"""What fuzzing has found in files that processes leave for each other, and in what kernels and hosts tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_launch.child import hangs, kubectl, places, slate
from trainer_launch.host import net, tree
from trainer_launch.mpi import remote
from trainer_launch.ssh import client


@pytest.mark.parametrize(
    "line", [b"start x 7", b"start 12 -1", b"start 0 7", b"end", b"start 9999999 7", b"start 1 " + b"9" * 5000]
)
def test_a_line_of_the_journal_that_is_none_of_ours_neither_ends_the_agent_nor_lets_it_kill_others(
    line: bytes,
) -> None:
    told = b"start 12 13\n" + line + b"\nend 12 -9\n"
    assert list(places.noted(told)) == [(b"start", 12, 13), (b"end", 12, -9)]


@pytest.mark.parametrize(
    "note",
    [
        b"[]",
        b'{"at_s":"x"}',
        b'{"at_s":1,"rank":"3","local_rank":0,"message":"","lines":[]}',
        b'{"at_s":1,"rank":-3,"local_rank":0,"message":"","lines":[]}',
        b'{"at_s":1,"rank":3,"local_rank":0,"message":"","lines":5}',
        b"[" * 5000,
    ],
)
def test_a_note_about_a_hang_that_is_none_is_no_cause(note: bytes) -> None:
    assert hangs.read(note, 1.0) is None


def test_a_note_about_a_hang_counts_while_it_is_fresh() -> None:
    told = b'{"at_s":1.0,"rank":3,"local_rank":0,"message":"hangs","lines":["a"]}'
    assert hangs.read(told, 2.0) == hangs.Note(3, 0, "hangs", ("a",))
    assert hangs.read(told, 1000.0) is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"before":5}', b'{"before":[[1]]}', b'{"before":[["a",1e400]]}'])
def test_without_a_list_of_what_lay_before_nothing_is_ours(data: bytes) -> None:
    assert slate.lay_before(data) is None


def test_a_table_of_sockets_that_a_sandbox_cuts_short_tells_nothing() -> None:
    row = "0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 41 1"
    assert net.listening(f"sl\n{row}\n1: x 0 0A\n\n2: 0:zz 0 0A 0 0 0 0 0 5\n", 29500) == ["41"]


def test_children_that_are_no_numbers_are_not_told(tmp_path: Path) -> None:
    (tmp_path / "7/task/7").mkdir(parents=True)
    (tmp_path / "7/task/7/children").write_text("8 x")
    assert tree.children(7, str(tmp_path)) is None


def test_what_another_host_says_cannot_command_a_terminal() -> None:
    assert remote.words_of("a\n\x1b]0;title\x07 no entry\r\n\n") == "?]0;title? no entry"
    assert remote.words_of("\n \n") == ""


@pytest.mark.parametrize("said", ["port 99999", "port x", "port", "port 22 22", ""])
def test_a_port_that_is_none_is_not_taken_from_sshs_configuration(said: str) -> None:
    assert client.port_in(f"user root\n{said}\n") is None
    assert client.port_in(f"user root\nport 2222\n{said}\n") == 2222


@pytest.mark.parametrize("pod", ["..", "a/..", "pod/.", "no-such-pod"])
def test_a_pod_whose_name_climbs_is_not_found(pod: str, tmp_path: Path) -> None:
    (tmp_path / "pods").mkdir()
    (tmp_path / "default").write_text("main")
    (tmp_path / "main.json").write_text('{"env":{},"cwd":null,"enter":[]}')
    with pytest.raises(kubectl.RefusedError, match="not found"):
        kubectl._record(str(tmp_path / "pods"), pod, "")
