"""What ended processes have left behind is found by one look for all that have ended together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.waiting import eventually
from trainer_launch.host import tree
from trainer_launch.model import Process
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.system import System

pytestmark = pytest.mark.process

LEAVES = ("sh", "-c", "sleep 60 >/dev/null & exit 0")


@pytest.fixture
def system() -> Iterator[System]:
    made = System()
    try:
        yield made
    finally:
        made.signal_all(signal.SIGKILL, again=True)
        made.close()


def end_together(system: System, *argvs: tuple[str, ...]) -> list[str]:
    """Start these, and take their ends as one batch."""
    names = [f"rank {number}" for number in range(len(argvs))]
    pids = [
        system.spawn(Process(name=name, argv=argv, env=dict(os.environ)))
        for name, argv in zip(names, argvs, strict=True)
    ]
    for pid in pids:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    ended = {event.exit.process for event in system.wait(0) if isinstance(event, ev.Exited)}
    assert ended == set(names)
    return names


def test_workers_that_end_together_cost_one_look(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    genuine = tree.descendants

    def noted(of: int) -> tuple[tree.Entry, ...]:
        looks.append(of)
        return genuine(of)

    monkeypatch.setattr(tree, "descendants", noted)
    names = end_together(system, *[("true",)] * 4)
    looks.clear()
    assert [system.signal_group(name, signal.SIGTERM) for name in names] == [0, 0, 0, 0]
    assert system.signal_all(signal.SIGTERM, again=True) == 0
    assert len(looks) == 1


def test_what_one_of_them_has_left_behind_is_signalled(system: System) -> None:
    names = end_together(system, ("true",), LEAVES, ("true",), LEAVES)
    assert [system.signal_group(name, signal.SIGTERM) for name in names] == [0, 1, 0, 1]
    eventually(lambda: (system.wait(0), not system.descendants())[1], "the end of what was left")
