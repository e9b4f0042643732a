"""Who is whose in a worker: values in, values out."""

from __future__ import annotations

from trainer_launch.host.process_tree import Entry
from trainer_launch.mpi import ssh_sessions

LAUNCHER = 1


def entry(pid: int, name: str, parent: int) -> Entry:
    return Entry(pid=pid, name=name, state="S", parent=parent, group=pid, session=pid, started=pid)


# A launcher with sshd, and two sessions: one with an MPI daemon, one that asks.
SSHD = entry(10, "sshd", LAUNCHER)
PRIVILEGED = entry(20, "sshd", 10)
SESSION = entry(21, "sshd", 20)
ORTED = entry(22, "orted", 21)
RANK = entry(23, "python", 22)
DETACHED = entry(30, "orted", LAUNCHER)
ITS_RANK = entry(31, "python", 30)
ASKING_SSHD = entry(40, "sshd", 10)
ASKER = entry(41, "sh", 40)
ITS_CHILD = entry(42, "python", 41)
ITS_OTHER_CHILD = entry(43, "sleep", 41)
ALL = (SSHD, PRIVILEGED, SESSION, ORTED, RANK, DETACHED, ITS_RANK, ASKING_SSHD, ASKER, ITS_CHILD, ITS_OTHER_CHILD)


def test_all_but_the_asker_and_what_it_stands_on_are_others() -> None:
    assert ssh_sessions.others_than(42, ALL) == (PRIVILEGED, SESSION, ORTED, RANK, DETACHED, ITS_RANK)


def test_a_sessions_command_is_sshds_own_child() -> None:
    assert ssh_sessions.commands(ALL) == {ORTED.key, ASKER.key}


def test_a_command_that_outlives_its_session_is_lost() -> None:
    known = ssh_sessions.commands(ALL)
    orphan = entry(22, "orted", LAUNCHER)
    assert ssh_sessions.lost(LAUNCHER, known, (SSHD, orphan, RANK)) == (orphan,)


def test_a_daemon_left_behind_on_purpose_is_not() -> None:
    assert ssh_sessions.lost(LAUNCHER, ssh_sessions.commands(ALL), ALL) == ()


def test_a_later_process_with_the_same_number_is_not() -> None:
    later = Entry(pid=22, name="sh", state="S", parent=LAUNCHER, group=22, session=22, started=99)
    assert ssh_sessions.lost(LAUNCHER, ssh_sessions.commands(ALL), (SSHD, later)) == ()


def test_what_is_below() -> None:
    assert set(ssh_sessions.below({20, 30}, ALL)) == {SESSION, ORTED, RANK, ITS_RANK}
