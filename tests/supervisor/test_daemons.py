"""Processes that serve others stop after those that they serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.supervisor.fakes import KILL, TERM, FakeSystem, Program
from trainer_launch.host import process_tree
from trainer_launch.model import Plan, Process
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_loop import ProgramLoop
from trainer_launch.supervisor.run_observer import RunObserver

PLAN = Plan(
    engine="sshd",
    processes=(Process(name="sshd", argv=("sshd",), env={}),),
    grace_s=10.0,
    daemons=frozenset({"sshd", "orted"}),
)
LEAVES = Program(term_code=0, term_s=0, leaves=(Program(term_s=2),))


def asked(system: FakeSystem) -> list[tuple]:
    return [call for call in system.calls if str(call[1]).startswith("all")]


def test_who_is_served_has_the_grace_and_daemons_are_asked_again_and_again_whether_they_are_alone() -> None:
    system = FakeSystem({"sshd": [LEAVES]}).signalled(1, TERM)
    ProgramLoop(Processes(PLAN, system, RunObserver())).run()
    early = [(at_s, word) for at_s, word, *_ in asked(system) if at_s < 9]
    assert early[:2] == [(1, "all but daemons"), (1.25, "all but daemons")]
    assert {word for _, word in early} == {"all but daemons"}


def test_most_of_the_grace_later_daemons_are_asked_whatever_they_bear_and_then_all_is_killed() -> None:
    deaf = replace(LEAVES, leaves=(Program(term_s=None),))
    system = FakeSystem({"sshd": [deaf]}).signalled(0, TERM)
    ProgramLoop(Processes(PLAN, system, RunObserver())).run()
    first_all = next(call[0] for call in asked(system) if call[1] == "all")
    first_kill = next(call[0] for call in asked(system) if call[2] == KILL)
    assert (first_all, first_kill) == (pytest.approx(8.0, abs=0.5), pytest.approx(10.0))


# -- who bears whom ---------------------------------------------------------------------------


def entry(pid: int, name: str, parent: int) -> process_tree.ProcessEntry:
    return process_tree.ProcessEntry(
        pid=pid, name=name, state="S", parent=parent, group=pid, session=pid, started=pid
    )


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
