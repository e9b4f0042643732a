"""The live table of a rehearsal, in a real terminal: below the output, never in its way, and gone at the end."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import pytorch, replica, runtime, trainjob
from tests.rehearsal.terminal import Terminal
from tests.rehearsal.users.commanded import command
from trainer_launch.observability import live
from trainer_launch.rehearsal.reporting import live_rows, live_title

SHOWING = str(Path(__file__).with_name("showing.py"))
ENV = {"PYTHONPATH": os.pathsep.join(sys.path)}


def job_of(count: int) -> Job:
    return Job(runtime(), trainjob(f"{{numNodes: {count}}}", "demo"))


def table_of(job: Job, most: int = 12, **steps: int) -> list[list[str]]:
    """The cells of the live table's lines."""
    by_pod = {name.replace("_", "-"): step for name, step in steps.items()}
    return [list(row) for row in live_rows(job.state, by_pod, lambda pod: f"line\x1b[2J of {pod.name}", most)]


# -- what it shows --------------------------------------------------------------------------------


def test_a_row_tells_status_step_creations_restarts_exit_code_and_last_line() -> None:
    job = job_of(2)
    job.delete("demo-node-0-1", grace_s=5.0)
    head, first, second = table_of(job, demo_node_0_0=2000)
    assert head == ["POD", "STATUS", "STEP", "CREATED", "RESTARTS", "EXIT", "LAST LINE"]
    assert first == ["demo-node-0-0", "Running", "2,000", "1", "0", "-", "line of demo-node-0-0"]
    assert second == ["demo-node-0-1", "Terminating", "-", "1", "0", "-", "line of demo-node-0-1"]


def test_a_container_that_waits_for_its_next_start_is_restarting() -> None:
    worker = replica("pytorch", spec="replicas: 1, restartPolicy: OnFailure")
    job = Job(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {worker}}}}}"))
    for _ in range(2):  # the first restart is at once
        job.end("job-worker-0", 3)
        job.wait(0.0)
    assert table_of(job)[1][:6] == ["job-worker-0", "Restarting", "-", "1", "2", "3"]


def test_the_title_tells_the_step_the_faults_and_how_the_job_ended() -> None:
    job = job_of(1)
    title = live_title("TrainJob demo", job.state, 12.3, 40, 1)
    assert title == "TrainJob demo · 12.3 s · step 40 · 1 fault injected"
    job.end("demo-node-0-0")
    title = live_title("TrainJob demo", job.state, 2.0, None, 0)
    assert title.startswith("TrainJob demo · 2.0 s · Succeeded (")


def test_of_many_pods_those_in_trouble_are_shown() -> None:
    job = job_of(50)
    job.delete("demo-node-0-44")
    job.end("demo-node-0-44", 137)
    job.delete("demo-node-0-17", grace_s=5.0)
    _, *rows, others = table_of(job, 8)
    assert [row[0] for row in rows][:3] == ["demo-node-0-44", "demo-node-0-17", "demo-node-0-0"]
    assert (len(rows), others) == (7, ["and 43 more: 43 Running"])
    assert [row[0] for row in table_of(job, 50)[1:]] == list(job.state.pods)


# -- in a terminal --------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.close()


def shown(terminal: Terminal, holds: Callable[[list[str]], bool]) -> list[str]:
    """The screen down to the last line that is not empty, once it is as it should be."""

    def text(lines: list[str]) -> list[str]:
        return [line for line in lines if line] or [""]

    return text(terminal.until(lambda lines: holds(text(lines))))


def shows(lines: int = 50) -> tuple[str, ...]:
    return (sys.executable, SHOWING, str(lines))


@pytest.mark.process
def test_the_table_stands_below_the_output_that_scrolls_and_is_gone_after_ctrl_c(terminal: Terminal) -> None:
    terminal.start(shows(lines=1500), ENV)
    lines = shown(terminal, lambda lines: "wrote 1500 lines" in "\n".join(lines) and "Restarting" in lines[-1])
    assert re.fullmatch(r"TrainJob demo · [\d.]+ s · step 7", lines[-4])
    assert lines[-3].split() == ["POD", "STATUS", "STEP", "CREATED", "RESTARTS", "EXIT", "LAST", "LINE"]
    assert re.split(" {2,}", lines[-2]) == [
        "demo-node-0-0",
        "Running",
        "7",
        "1",
        "0",
        "-",
        "step 7 of demo-node-0-0",
    ]
    assert re.split(" {2,}", lines[-1])[:6] == ["demo-node-0-1", "Restarting", "7", "1", "0", "137"]
    assert lines[-6] == "line 1499 of the job"
    terminal.type("C-c")
    lines = shown(terminal, lambda lines: any("ended with" in line for line in lines))
    text = "\n".join(lines)
    assert ("interrupted" in text, "after" in text, "demo-node" in text) == (True, True, False)
    assert "half a line" in lines
    output = [line for line in terminal.screen(history=True) if line.startswith("line ")]
    assert output == [f"line {number} of the job" for number in range(1500)], "none is lost or torn"


@pytest.mark.parametrize(
    ("env", "is_tty", "wanted"),
    [({}, True, True), ({"CI": "true"}, True, False), ({"TERM": "dumb"}, True, False), ({}, False, False)],
)
def test_in_ci_or_without_a_terminal_there_is_no_table(
    env: dict[str, str], is_tty: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CI", raising=False)
    for name, value in {"TERM": "xterm", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "isatty", lambda fd: is_tty or fd == 2)
    assert live.is_wanted() is wanted


@pytest.mark.process
def test_a_list_of_steps_shows_what_runs_and_what_has_passed(terminal: Terminal) -> None:
    terminal.start((sys.executable, SHOWING, "steps"), ENV)
    lines = shown(terminal, lambda lines: "beside" in "\n".join(lines) and "PASS" in "\n".join(lines))
    assert lines[-3].split() == ["network", "PASS", "fine"]
    assert re.fullmatch(r"gpu +\S", lines[-2]), "a spinner"
    assert lines[-1] == "storage"


@pytest.mark.process
def test_a_rehearsal_shows_its_pods_until_ctrl_c_and_then_its_last_table(
    terminal: Terminal, tmp_path: Path
) -> None:
    argv = command(
        tmp_path, "survives", "--fault", "kill pod at=step:20", "--fault", "kill worker at=step:90000", last=99999
    )
    terminal.start(argv, ENV)
    row = re.compile(r"demo-master-0 +Running +\d+ +2 +0 +- +step \d+ loss 0\.\d+")
    lines = shown(terminal, lambda lines: row.fullmatch(lines[-1]) is not None)
    assert re.match(r"PyTorchJob demo · [\d.]+ s · step \d+ · 1 fault injected", lines[-3])
    terminal.type("C-c")
    lines = terminal.until(lambda lines: any("ended with 130" in line for line in lines))
    text = "\n".join(lines)
    assert "PyTorchJob demo: stopped after" in text
