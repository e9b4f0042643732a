"""Every fault comes once, at its time, its step or its line, or is said to have never come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_launch.model.value_parsers import MAX_LINE
from trainer_launch.rehearsal import faults
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState
from trainer_launch.rehearsal.faults import Faults
from trainer_launch.rehearsal.history import HistoryEntry, What


class Driver:
    """A job of one pod, which nothing befalls."""

    def __init__(self) -> None:
        draft = SimpleNamespace(role="node", hostname="job-0")
        running = PodState(phase=Phase.RUNNING, running=frozenset({"main"}))
        draft.template = SimpleNamespace(grace_s=30.0)
        self.state: Any = SimpleNamespace(
            condition=None, asked=0, pods={"job-0": SimpleNamespace(draft=draft)}, states={"job-0": running}
        )
        self.kubelet = SimpleNamespace(network=None)
        self.at_s = 0.0
        self.entries: list[HistoryEntry] = []

    def now_s(self) -> float:
        return self.at_s

    def record(self, entry: HistoryEntry) -> None:
        self.entries.append(entry)

    def delete(self, pod: str, grace_s: float, back_s: float | None) -> None:
        """Nothing becomes of the pod."""

    def came(self) -> list[str]:
        return [entry.text for entry in self.entries if entry.what is What.FAULT]


def begin(*texts: str) -> tuple[Faults, Driver]:
    driver: Any = Driver()
    return Faults(map(faults.parse, texts), driver), driver


def pass_time(faults: Faults, driver: Driver, at_s: float) -> list[str]:
    driver.at_s = at_s
    faults.pass_time()
    return driver.came()


def test_a_fault_comes_at_its_time_once() -> None:
    faults, driver = begin("kill pod at=2s", "term pod at=1s")
    assert (faults.due_s(), pass_time(faults, driver, 0.9)) == (1.0, [])
    assert (pass_time(faults, driver, 1.0), faults.due_s()) == (["term pod at=1s"], 2.0)
    assert pass_time(faults, driver, 60.0) == ["term pod at=1s", "kill pod at=2s"]
    assert (len(pass_time(faults, driver, 90.0)), faults.due_s()) == (2, None)


def test_a_step_that_was_jumped_over_counts_as_reached_once() -> None:
    faults, driver = begin("kill pod at=step:40", "kill pod at=step:60")
    for step in (39, 50, 40):
        faults.reached(step)
    assert driver.came() == ["kill pod at=step:40"]
    faults.finish()
    assert driver.entries[-1].why == "step 60 was not reached; the last one was 50"


def test_a_line_is_looked_through_for_the_pattern_up_to_a_length() -> None:
    faults, driver = begin(r"kill pod at=line:loss\s+nan")
    assert len(faults.patterns) == 1
    faults.printed("x" * MAX_LINE + "loss nan")
    assert driver.came() == []
    faults.printed("12:00 loss   nan!")
    faults.printed("loss nan")
    assert len(driver.came()) == 1
    assert not faults.patterns


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("kill pod at=step:40", "the steps are unknown. Print lines such as 'step 40' or call"),
        ("kill pod at=900s", "the job ended before 900 s"),
        ("kill pod at=line:nobody", "no line matched 'nobody'"),
    ],
)
def test_a_fault_that_never_came_has_its_reason(fault: str, why: str) -> None:
    faults, driver = begin(fault)
    faults.finish()
    assert why in driver.entries[-1].why


def test_a_fault_whose_pod_does_not_run_yet_waits_for_it() -> None:
    faults, driver = begin("kill pod at=step:3")
    driver.state.states["job-0"] = PodState()
    faults.reached(3)
    assert (driver.came(), faults.due_s()) == ([], 0.3)
    faults.finish()
    assert driver.entries[-1].why == "job-0 is not running"


def test_a_fault_that_waits_for_steps_says_so_after_a_minute_without_any(caplog: pytest.LogCaptureFixture) -> None:
    faults, driver = begin("kill pod at=step:40")
    assert faults.due_s() == 60.0
    pass_time(faults, driver, 59.9)
    assert caplog.messages == []
    pass_time(faults, driver, 60.0)
    pass_time(faults, driver, 90.0)
    (message,) = caplog.messages
    assert message.startswith(
        "no step in the first 60 s; fault 'kill pod at=step:40' waits for step 40. Print lines"
    )
    assert faults.due_s() is None


def test_a_fault_whose_steps_come_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    faults, driver = begin("kill pod at=step:40")
    faults.reached(1)
    assert (faults.due_s(), pass_time(faults, driver, 90.0), caplog.messages) == (None, [], [])
    others, driver = begin("kill pod at=2m")
    assert (others.due_s(), pass_time(others, driver, 90.0), caplog.messages) == (120.0, [], [])


class Network:
    """Pods that are cut off, or not."""

    def __init__(self) -> None:
        self.cut: list[str] = []

    def cut_off(self, pod: str) -> None:
        self.cut = [pod]

    def reconnect(self, pod: str) -> None:
        self.cut = []


@pytest.mark.parametrize(
    ("first", "second", "until_s"),
    [("for=5s", "for=6s", 8.0), ("for=7s", "for=3s", 8.0), ("for=5s", "", None)],
)
def test_a_pod_is_cut_off_until_the_last_of_its_partitions_is_over(
    first: str, second: str, until_s: float | None
) -> None:
    faults, driver = begin(f"partition node=0 {first} at=1s", f"partition node=0 {second} at=2s")
    network = Network()
    driver.kubelet = SimpleNamespace(network=network)
    cut = {}
    for at_s in (1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 60.0):
        pass_time(faults, driver, at_s)
        cut[at_s] = bool(network.cut)
    assert next((at_s for at_s, is_cut in cut.items() if not is_cut), None) == until_s
    assert sum(entry.what is What.FAULT_OVER for entry in driver.entries) == (1 if until_s is None else 2)
    assert faults.due_s() is None
