"""Processes that serve others: they come back, and they stop after those they serve."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from tests.supervisor.fakes import FakeSystem
from trainer_launch.host import process_tree
from trainer_launch.model import Exit, Plan, Process, Verdict
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.loop import supervise

TERM, KILL = int(signal.SIGTERM), int(signal.SIGKILL)
PLAN = Plan(
    engine="sshd",
    processes=(Process(name="sshd", argv=("sshd",), env={}),),
    grace_s=10.0,
    respawns=2,
    daemons=frozenset({"sshd", "orted"}),
)


def ended(at_s: float, code: int | None = None, number: int | None = None) -> ev.Exited:
    return ev.Exited(at_s, Exit(process="sshd", code=code, signal=number, at_s=at_s))


def words(system: FakeSystem) -> list[tuple]:
    return [call[1:] for call in system.calls]


def test_one_that_crashes_comes_back_and_nothing_else_is_touched() -> None:
    system = FakeSystem(ended(5.0, number=11), ev.Signalled(9.0, TERM), ended(9.1, code=0))
    outcome = supervise(PLAN, system)
    assert outcome.verdict is Verdict.STOPPED
    assert outcome.failure is None
    assert words(system)[:3] == [("spawn", "sshd"), ("spawn", "sshd"), ("leader", "sshd", TERM)]


def test_the_last_crash_is_the_failure() -> None:
    system = FakeSystem(ended(5.0, number=11), ended(6.0, number=11), ended(7.0, number=11))
    outcome = supervise(PLAN, system)
    assert outcome.verdict is Verdict.FAILED
    assert outcome.failure is not None
    assert outcome.failure.exit_code == 128 + 11
    assert [word for word in words(system) if word[0] == "spawn"] == [("spawn", "sshd")] * 3


def test_one_that_ends_at_once_cannot_run_at_all() -> None:
    outcome = supervise(PLAN, FakeSystem(ended(0.5, code=255)))
    assert outcome.failure is not None
    assert outcome.failure.exit_code == 255


def test_one_that_ends_later_with_any_code_comes_back() -> None:
    system = FakeSystem(ended(100.0, code=255), ended(100.5, code=255))
    assert supervise(PLAN, system).verdict is Verdict.FAILED
    assert words(system).count(("spawn", "sshd")) == 2


def test_who_is_served_has_the_grace_and_daemons_are_asked_again_and_again_whether_they_are_alone() -> None:
    system = FakeSystem(ev.Signalled(1.0, TERM), ended(1.0, code=0), ev.Signalled(4.0, signal.SIGUSR1))
    supervise(PLAN, system)
    told = [(at_s, word) for at_s, word, *_ in system.calls if word.startswith("all")]
    assert told[0] == (1.0, "all but daemons")
    assert {word for at_s, word in told if at_s < 9.0} == {"all but daemons"}


def test_most_of_the_grace_later_daemons_are_asked_whatever_they_bear_and_then_all_is_killed() -> None:
    system = FakeSystem(ev.Signalled(0.0, TERM), ended(0.0, code=0), immortal=("pid 7",))
    outcome = supervise(PLAN, system)
    first_all = next(at_s for at_s, word, *_ in system.calls if word == "all")
    first_kill = next(call[0] for call in system.calls if call[1:] == ("all again", KILL))
    assert 8.0 <= first_all <= 8.5
    assert first_kill == pytest.approx(10.0)
    assert outcome.survivors == ("pid 7",)


def test_a_plan_without_daemons_is_as_it_was() -> None:
    plan = replace(PLAN, daemons=frozenset(), respawns=0)
    system = FakeSystem(ev.Signalled(0.0, TERM), ended(0.0, code=0))
    supervise(plan, system)
    assert ("all", TERM) in words(system)


# -- who bears whom ---------------------------------------------------------------------------


def entry(pid: int, name: str, parent: int) -> process_tree.Entry:
    return process_tree.Entry(pid=pid, name=name, state="S", parent=parent, group=pid, session=pid, started=pid)


def test_a_daemon_with_ranks_is_spared_with_all_above_it(monkeypatch) -> None:
    entries = (
        entry(10, "sshd", 1),
        entry(11, "sh", 10),  # the shell that ssh runs its command by
        entry(12, "orted", 11),
        entry(13, "python", 12),
        entry(20, "sshd", 1),
        entry(21, "orted", 20),  # has no rank any more
        entry(30, "sshd", 1),
        entry(31, "sleep", 30),
    )
    monkeypatch.setattr(process_tree, "descendants", lambda of, proc="/proc": entries)
    found = process_tree.bearing(1, frozenset({"sshd", "orted"}))
    assert {key[0] for key in found} == {10, 11, 12, 30}
