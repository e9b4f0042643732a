"""Processes that outlive their generation: who is spared, who is kept, and who is stopped after all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import call, create_autospec

import pytest

from tests.supervisor.fakes import KILL, TERM
from trainer_launch.model import Plan, Process
from trainer_launch.supervisor.processes import LEAVE_S, Processes, Rung
from trainer_launch.supervisor.run_observer import RunObserver
from trainer_launch.supervisor.system import System

SPECS = tuple(Process(name=f"rank {rank}", argv=("train",), env={}) for rank in range(3))
PIDS = {"rank 0": 10, "rank 1": 11, "rank 2": 12}


@pytest.fixture
def system() -> Any:
    fake = create_autospec(System, instance=True)
    fake.spawn.side_effect = [*PIDS.values()]
    fake.is_alone.return_value = True
    return fake


@pytest.fixture
def processes(system: Any) -> Processes:
    running = Processes(Plan(engine="test", processes=SPECS, grace_s=30.0), system, RunObserver())
    running.start(SPECS)
    return running


def signalled(system: Any) -> Sequence[object]:
    return [(each.args[0], each.args[1]) for each in system.signal_leader.call_args_list]


def test_a_generation_is_over_when_all_that_live_are_kept(processes: Processes, system: Any) -> None:
    processes.stop(1.0, sparing={"rank 1", "rank 2"})
    assert signalled(system) == [(10, TERM)]
    processes.reaped(10, -TERM, 1.1)
    processes.keep("rank 1")
    processes.tick(1.2)
    assert not processes.is_over
    processes.keep("rank 2")
    processes.tick(1.3)
    assert processes.is_over
    assert [*processes.kept] == [11, 12]
    assert system.keep.call_args_list == [call(11), call(12)]


def test_who_does_not_leave_in_time_is_stopped_as_others_are(processes: Processes, system: Any) -> None:
    processes.stop(1.0, sparing={"rank 0", "rank 1", "rank 2"})
    processes.keep("rank 0")
    processes.tick(1.0 + LEAVE_S - 0.1)
    assert processes.rung == Rung.LEADERS
    processes.tick(1.0 + LEAVE_S)
    assert int(processes.rung) == Rung.ALL
    assert system.signal_all.call_args.args[0] == TERM


def test_who_was_spared_is_stopped_once_no_generation_follows(processes: Processes, system: Any) -> None:
    processes.stop(1.0, sparing={"rank 0", "rank 1", "rank 2"})
    assert signalled(system) == []
    processes.stop(2.0, sparing={"rank 1"})
    assert signalled(system) == [(10, TERM), (12, TERM)]
    processes.stop(3.0)
    assert signalled(system) == [(10, TERM), (12, TERM), (11, TERM)]


def test_those_that_wait_in_vain_are_stopped_with_all_of_the_grace(processes: Processes, system: Any) -> None:
    processes.stop(1.0, sparing={*PIDS})
    for name in PIDS:
        processes.keep(name)
    processes.tick(1.0)
    assert processes.is_over
    assert processes.take_back()
    assert not processes.take_back()
    assert (processes.is_over, processes.pids()) == (False, PIDS)
    processes.stop(5.0)
    assert signalled(system) == [(10, TERM), (11, TERM), (12, TERM)]
    processes.tick(5.0 + 30.0)
    processes.tick(5.0 + 30.0)
    assert system.signal_all.call_args.args[0] == KILL


def test_who_is_kept_may_end_meanwhile_and_the_others_are_of_the_next_generation(processes: Processes) -> None:
    processes.stop(1.0, sparing={*PIDS})
    for name in PIDS:
        processes.keep(name)
    processes.tick(1.0)
    death = processes.reaped(11, -KILL, 2.0)
    assert death is not None
    assert (death.process, death.signal) == ("rank 1", KILL)
    processes.begin()
    processes.take(10, SPECS[0])
    assert (processes.pids(), [*processes.kept]) == ({"rank 0": 10}, [12])
