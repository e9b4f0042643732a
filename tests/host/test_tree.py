"""Who lives below whom, from a small /proc."""

from __future__ import annotations

import os

from trainer_launch.host import process_tree


def stat(pid, parent, state="S", name="x", session=1):
    return f"{pid} ({name}) {state} {parent} {session} {session} " + " ".join(["0"] * 15) + f" {pid * 10} 0 0"


def proc(folder, *lines):
    for line in lines:
        pid = line.split()[0]
        (folder / pid).mkdir()
        (folder / pid / "stat").write_text(line)
    (folder / "meminfo").touch()
    return str(folder)


def test_a_name_may_hold_anything():
    entry = process_tree.parse_stat(stat(7, 1, "D", name="a) (b c"))
    assert (entry.pid, entry.name, entry.parent, entry.key) == (7, "a) (b c", 1, (7, 70))
    assert str(entry) == "pid 7 (a) (b c, stuck in the kernel (state D))"


def test_all_below_whatever_session_they_made_and_no_zombies(tmp_path):
    lines = [stat(1, 0), stat(2, 1), stat(3, 2, session=3), stat(4, 2, "Z"), stat(5, 4), stat(6, 9), stat(9, 0)]
    found = process_tree.descendants(1, proc(tmp_path, *lines))
    assert sorted(entry.pid for entry in found) == [2, 3, 5]


def test_the_environment_that_a_process_was_started_with(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"RANK=3\0EMPTY=\0ODD\0PATH=/a=b\0\xff=\xfe\0")
    assert process_tree.environment(7, str(tmp_path)) == {
        "RANK": "3",
        "EMPTY": "",
        "ODD": "",
        "PATH": "/a=b",
        "\udcff": "\udcfe",
    }
    assert process_tree.environment(8, str(tmp_path)) is None


def test_a_process_that_holds_up_who_reads_its_environment_is_not_waited_for(tmp_path):
    (tmp_path / "7").mkdir()
    os.mkfifo(tmp_path / "7" / "environ")
    assert process_tree.environment(7, str(tmp_path)) is None
    os.close(os.open(tmp_path / "7" / "environ", os.O_RDWR))  # who waits there goes on
