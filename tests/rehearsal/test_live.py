"""The live table, in a real terminal: below the output, never in its way, and gone at the end."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.rehearsal.terminal import Terminal
from tests.rehearsal.test_story import histories
from tests.rehearsal.told import Tale
from tests.rehearsal.users.commanded import command
from trainer_launch.rehearsal.report.history import Doing, History, What
from trainer_launch.rehearsal.report.reporting import TableState, height

pytest.importorskip("rich")
SHOWING = str(Path(__file__).with_name("showing.py"))
ENV = {"PYTHONPATH": os.pathsep.join(sys.path)}


def board_of(tale: Tale, *faults: str) -> TableState:
    state = TableState.of("TrainJob demo", tale.pods, faults)
    for entry in tale.entries:
        state.take(entry)
    return state


# -- what it shows --------------------------------------------------------------------------------


def test_a_row_tells_status_creations_attempt_step_and_last_line() -> None:
    tale = Tale("a", "b").start(0.0).meet(1.0).steps(2.0, [1, 2]).meet(3.0, 2, "a").stop(4.0, "b")
    state = board_of(tale)
    assert state.cells("a", "loss 1.0\x1b[2J") == ("a", "Running", "1", "2", "2", "loss 1.0")
    assert state.cells("b", "")[:2] == ("b", "Terminating")


def test_the_head_tells_the_step_and_what_goes_wrong() -> None:
    tale = Tale("a").start(0.0).steps(1.0, [40])
    state = board_of(tale, "kill pod node=0 at=step:40", "oom at=90s", "add node")
    assert state.head(12.3) == "TrainJob demo · 12.3 s · step 40 · next: kill pod node=0 at=step:40 (and 2 more)"
    state.take(Tale("a").fault(2.0, "kill pod node=0 at=step:40", "a").entries[0])
    assert state.head(13.0) == "TrainJob demo · 13.0 s · step 40 · 1 fault injected · next: oom at=90s (and 1 more)"


def test_of_many_pods_those_in_trouble_are_shown() -> None:
    pods = tuple(f"p{number}" for number in range(50))
    tale = Tale(*pods).start(0.0).end(3.0, "p44", 137, "Pending").stop(3.0, "p17")
    rows, others = board_of(tale).rows(height(50, 30))
    assert [pod for pod, _ in rows][:3] == ["p44", "p17", "p0"]
    assert (len(rows), others) == (7, "and 43 more: 43 Running")
    assert board_of(tale).rows(50)[0] == [(pod, board_of(tale).pods[pod].walk.doing) for pod in pods]


@pytest.mark.parametrize(("pods", "rows", "shown"), [(2, 12, 2), (50, 12, 3), (50, 30, 8), (50, 200, 12)])
def test_the_table_takes_a_third_of_the_terminal_at_most(pods: int, rows: int, shown: int) -> None:
    assert height(pods, rows) == shown


@settings(max_examples=40)
@given(histories)
def test_whatever_happens_can_be_shown(history: History) -> None:
    state = TableState.of(history.name, history.pods, ())
    for entry in history.entries:
        state.take(entry)
    rows, _ = state.rows(5)
    assert all(state.cells(pod, "")[1] for pod, _ in rows)
    assert sum(state.pods[pod].walk.doing is Doing.DOWN for pod, _ in rows) == min(
        5, sum(one.walk.doing is Doing.DOWN for one in state.pods.values())
    )


def test_a_long_rehearsal_is_not_kept() -> None:
    state = board_of(Tale("a").start(0.0))
    for number in range(1000):
        state.take(Tale("a").add(float(number), What.GENERATION, "a", attempt=number).entries[0])
    assert state.pods["a"].walk.done == []


# -- in a terminal --------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path)
    yield made
    made.close()


def shows(pods: int = 2, lines: int = 50, stay_s: float = 60.0) -> tuple[str, ...]:
    return (sys.executable, SHOWING, str(pods), str(lines), str(stay_s))


@pytest.mark.process
def test_the_table_stands_below_the_output_that_scrolls(terminal: Terminal) -> None:
    terminal.start(shows(), ENV)
    lines = terminal.until(lambda lines: "Running" in "\n".join(lines) and "wrote" in "\n".join(lines))
    assert re.fullmatch(r"TrainJob demo · [\d.]+ s · step 7 · next: kill pod node=1 at=step:9000", lines[26])
    assert lines[27].split() == ["POD", "STATUS", "CREATED", "ATTEMPT", "STEP", "LAST", "LINE"]
    assert lines[28].split() == ["demo-node-0-0", "Running", "1", "1", "7", "step", "7", "of", "demo-node-0-0"]
    assert lines[29].split() == ["demo-node-0-1", "Restarting", "1", "1", "7", "step", "7", "of", "demo-node-0-1"]
    assert lines[23] == "line 49 of the job"
    assert (lines[24].startswith("wrote 50 lines"), lines[25]) == (True, "")


@pytest.mark.process
def test_after_ctrl_c_the_whole_terminal_scrolls_again_and_nothing_of_the_table_is_left(terminal: Terminal) -> None:
    terminal.start(shows(), ENV)
    terminal.until(lambda lines: "Running" in "\n".join(lines) and "wrote" in "\n".join(lines))
    terminal.type("C-c")
    lines = terminal.until(lambda lines: any("ended with" in line for line in lines))
    text = "\n".join(lines)
    assert ("interrupted" in text, "after" in text) == (True, True)
    assert "demo-node" not in text
    for number in range(40):
        terminal.type(f"typed {number}", "Enter")
    lines = terminal.until(lambda lines: any("typed 39" in line for line in lines))
    assert lines[28] == "typed 39", "the last rows scroll too"


@pytest.mark.process
def test_no_line_of_fast_output_is_lost_or_torn(terminal: Terminal) -> None:
    terminal.start(shows(lines=1500, stay_s=0.5), ENV)
    terminal.until(lambda lines: any("ended with 0" in line for line in lines))
    said = [line for line in terminal.screen(history=True) if line.startswith("line ")]
    assert said == [f"line {number} of the job" for number in range(1500)]


@pytest.mark.process
def test_the_table_of_50_pods_is_bounded_and_shows_the_one_in_trouble_first(terminal: Terminal) -> None:
    terminal.start(shows(pods=50), ENV)
    lines = terminal.until(lambda lines: "and 43 more: 43 Running" in lines[-1] and "wrote" in "\n".join(lines))
    assert lines[22].split()[:2] == ["demo-node-0-49", "Restarting"]
    assert lines[20].startswith("TrainJob demo")


@pytest.mark.process
def test_the_table_follows_the_terminals_size(terminal: Terminal) -> None:
    terminal.start(shows(), ENV)
    terminal.until(lambda lines: "Restarting" in lines[-1])
    terminal.resize(50, 20)
    lines = terminal.until(lambda lines: len(lines) == 20 and "Restarting" in lines[-1])
    assert lines[-3].split() == ["POD", "STATUS", "STEP"]
    assert max(map(len, lines)) <= 50
    terminal.resize(100, 8)
    terminal.until(lambda lines: "demo-node" not in "\n".join(lines[-4:]))


@pytest.mark.process
@pytest.mark.parametrize("unset", [{"CI": "true"}, {"TERM": "dumb"}])
def test_in_ci_or_on_a_dumb_terminal_there_is_no_table(terminal: Terminal, unset: dict[str, str]) -> None:
    terminal.start(shows(), {**ENV, **unset})
    assert "no table" in terminal.until(lambda lines: any("ended with" in line for line in lines))


@pytest.mark.process
def test_without_rich_there_is_no_table(terminal: Terminal) -> None:
    code = "import sys; sys.modules['rich'] = None; import importlib.util as u; u.find_spec = lambda name: None; "
    code += f"sys.argv = ['x', '2', '5', '5']; exec(open({SHOWING!r}).read())"
    terminal.start((sys.executable, "-c", code), ENV)
    assert "no table" in terminal.until(lambda lines: any("ended with" in line for line in lines))


@pytest.mark.process
def test_where_output_is_no_terminal_there_is_no_table() -> None:
    read_end, write_end = pty.openpty()
    done = subprocess.run(
        shows(), stdout=subprocess.PIPE, stderr=write_end, env={**os.environ, **ENV}, timeout=120, check=True
    )
    os.close(write_end)
    os.close(read_end)
    assert done.stdout == b"no table\n"


@pytest.mark.process
def test_a_rehearsal_shows_its_pods_until_ctrl_c_and_then_its_last_table(
    terminal: Terminal, tmp_path: Path
) -> None:
    argv = command(
        tmp_path, "survives", "--fault", "kill pod at=step:20", "--fault", "kill worker at=step:90000", last=99999
    )
    terminal.start(argv, ENV)
    row = re.compile(r"demo-master-0 +Running +2 +2 +\d+ +step \d+ loss 0\.\d+")
    lines = terminal.until(lambda lines: row.fullmatch(lines[-1]) is not None)
    assert re.match(
        r"PyTorchJob demo · [\d.]+ s · step \d+ · 1 fault injected · next: kill worker at=step:90000", lines[-3]
    )
    terminal.type("C-c")
    lines = terminal.until(lambda lines: any("ended with 130" in line for line in lines))
    text = "\n".join(lines)
    assert "PyTorchJob demo: stopped after" in text
    assert "next: kill" not in text
