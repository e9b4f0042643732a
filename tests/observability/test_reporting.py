"""`trainer_launch.report()`, as training scripts call it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_launch
from trainer_launch.observability import progress

ROOT = Path(__file__).resolve().parents[2]
START = "import os, sys, trainer_launch\nfrom trainer_launch import report\n"


def run(text: str, folder: Path | None, **env: str) -> subprocess.CompletedProcess[str]:
    """A training script of its own; `folder` is what a launcher would name."""
    base = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env}
    named = {} if folder is None else {"TRAINER_LAUNCH_RUN_DIR": str(folder)}
    argv = [sys.executable, "-W", "error", "-c", START + text]
    return subprocess.run(argv, env={**base, **named}, text=True, capture_output=True, timeout=120, check=True)


def test_what_was_held_back_is_written_at_exit(tmp_path: Path) -> None:
    run("for i in range(100): report(step=i, progress=i / 100, eta_s=100 - i, metrics={'loss': i})", tmp_path)
    (one,) = progress.read(str(tmp_path))
    assert (one.step, one.progress, one.eta_s, one.metrics) == (99, 0.99, 1.0, {"loss": 99.0})
    assert (one.rank, one.local_rank) == (None, 0)
    assert os.listdir(tmp_path) == ["progress-0.json"]


def test_a_call_that_is_held_back_opens_and_renames_nothing(tmp_path: Path) -> None:
    text = """
seen = []
report(progress=0.1)
sys.addaudithook(lambda event, args: seen.append(event) if event.split(".")[0] in ("open", "os") else None)
for i in range(1000): report(progress=0.5, metrics={"loss": i})
assert seen == [], seen
report(progress=1.0)
assert "os.rename" in seen, "the end is told at once"
os._exit(0)
"""
    run(text, tmp_path)
    assert progress.read(str(tmp_path))[0].progress == 1.0


def test_a_checkpoint_that_a_loss_interrupts_is_over_for_the_survivor(tmp_path: Path) -> None:
    loss = "from trainer_launch.observability import report as own\nown.begin_again()"
    run(f"report(step=1, checkpointing=True)\n{loss}\nos._exit(0)", tmp_path)
    assert not progress.read(str(tmp_path))[0].checkpointing


def test_what_is_not_given_stays(tmp_path: Path) -> None:
    first = "report(step=7, progress=0.25, metrics={'a': 1, 'b': 2})"
    run(f"{first}\nreport(eta_s=7)\nreport(metrics={{'b': 3}})", tmp_path)
    (one,) = progress.read(str(tmp_path))
    assert (one.step, one.progress, one.eta_s, one.metrics) == (7, 0.25, 7.0, {"b": 3.0})


@pytest.mark.parametrize("eta_s", ["1e18", "1e308", "10**400", "float('inf')", "float('nan')", "-5"])
def test_an_estimate_of_any_size_leaves_the_rest_of_the_report_whole(tmp_path: Path, eta_s: str) -> None:
    run(f"report(step=6, progress=0.2, eta_s={eta_s}, metrics={{'loss': 1}})", tmp_path)
    (report,) = progress.read(str(tmp_path))
    assert (report.step, report.progress, report.metrics) == (6, 0.2, {"loss": 1.0})
    assert report.eta_s in (None, 0.0, 1e9)


@pytest.mark.parametrize(
    ("env", "rank", "local_rank"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1"}, 5, 1),
        ({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 3, 2),
        ({"PMI_RANK": "4", "MPI_LOCALRANKID": "0"}, 4, 0),
        ({"RANK": "none"}, None, 0),
    ],
)
def test_each_process_has_its_own_file(tmp_path: Path, env: dict[str, str], rank: object, local_rank: int) -> None:
    run("report(progress=0.5)", tmp_path, **env)
    (one,) = progress.read(str(tmp_path))
    assert (one.rank, one.local_rank) == (rank, local_rank)


def test_a_forked_process_is_somebody_else(tmp_path: Path) -> None:
    text = """
report(progress=0.1)
for local_rank in range(2):
    if os.fork() == 0:
        os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(local_rank + 1)
        report(progress=0.5 + local_rank / 10)
        os._exit(0)
    os.wait()
"""
    run(text, tmp_path)
    assert {(one.rank, one.progress) for one in progress.read(str(tmp_path))} == {(None, 0.1), (1, 0.5), (2, 0.6)}


def test_threads_and_signal_handlers_may_report_at_once(tmp_path: Path) -> None:
    text = """
import signal, threading
signal.signal(signal.SIGALRM, lambda number, frame: report(progress=0.2))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
threads = [threading.Thread(target=lambda: [report(progress=0.5) for _ in range(20000)]) for _ in range(4)]
[thread.start() for thread in threads]
for _ in range(50000): report(progress=0.3)
[thread.join() for thread in threads]
signal.setitimer(signal.ITIMER_REAL, 0)
report(progress=1.0, metrics={'done': 1})
"""
    run(text, tmp_path)
    (one,) = progress.read(str(tmp_path))
    assert (one.progress, one.metrics) == (1.0, {"done": 1.0})


@pytest.mark.parametrize("folder", [None, Path("/nonexistent"), Path("/dev/null"), Path("/proc")])
def test_without_a_launcher_or_its_folder_nothing_happens(folder: Path | None) -> None:
    ended = run("report(progress=0.5, eta_s=1, metrics={'loss': 1})\nreport()", folder)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import trainer_launch; print(*set(sys.modules) - before)"
    env = {"PYTHONPATH": str(ROOT)}
    told = subprocess.run([sys.executable, "-c", code], env=env, text=True, capture_output=True, check=True).stdout
    assert set(told.split()) - {"__future__"} == {"trainer_launch"}  # which some Pythons have loaded already


class Tensor:
    """As torch's: it could become a number, but that may wait for a device."""

    def item(self) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"step": 1.0}, TypeError, "step is a float; expected a whole number"),
        ({"step": True}, TypeError, "step is a bool"),
        ({"step": -1}, ValueError, "step is -1; expected a whole number from 0"),
        ({"step": 10**400}, ValueError, "expected a whole number from 0"),
        ({"progress": "half"}, TypeError, "progress is a str; expected a number"),
        ({"progress": 50}, ValueError, "progress is 50; expected a fraction from 0.0 to 1.0"),
        ({"progress": -0.1}, ValueError, "fraction"),
        ({"progress": math.nan}, ValueError, "fraction"),
        ({"eta_s": "soon"}, TypeError, "eta_s is a str"),
        ({"metrics": [1]}, TypeError, "metrics is a list; expected names mapped to numbers"),
        ({"metrics": {"loss": "low"}}, TypeError, "loss is a str"),
        ({"metrics": {"loss": Tensor()}}, TypeError, r"for a tensor, pass \.item\(\)"),
        ({"metrics": {1: 1.0}}, TypeError, "name is 1"),
        ({"metrics": {"": 1.0}}, ValueError, "1 to 64 characters"),
        ({"metrics": {"x" * 65: 1.0}}, ValueError, "1 to 64 characters"),
        ({"metrics": {str(i): 1.0 for i in range(257)}}, ValueError, "at most 256"),
    ],
)
def test_a_wrong_argument_is_told_in_a_sentence(given: dict[str, object], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        trainer_launch.report(**given)  # type: ignore[arg-type]


def test_an_estimate_that_was_off_ends_no_training(tmp_path: Path) -> None:
    run("report(progress=1.01, eta_s=-3, metrics={'n': 10**400, 'x': float('nan')})\nreport(eta_s=1e400)", tmp_path)
    (one,) = progress.read(str(tmp_path))
    assert (one.progress, one.eta_s, one.metrics["n"]) == (1.0, 0.0, math.inf)
    assert math.isnan(one.metrics["x"])


GOOD = {
    "rank": 0, "local_rank": 0, "pid": 1, "at_s": 1.0, "time_s": 2.0, "progress": 0.5, "eta_s": None,
    "metrics": {"loss": 1},
}  # fmt: skip


def test_a_file_is_read_as_it_was_meant() -> None:
    one, other = (progress.parse(json.dumps({**GOOD, **step}).encode()) for step in ({"step": 7}, {}))
    assert one is not None
    assert one.step == 7
    assert other is not None, "a script may bring an older version of this package"


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000,
        *(json.dumps({**GOOD, **change}).encode() for change in (
            {"rank": -1}, {"rank": True}, {"pid": "1"}, {"progress": 2}, {"progress": "x"}, {"eta_s": math.nan},
            {"time_s": 1e300}, {"metrics": [1]}, {"metrics": {"a": "b"}}, {"metrics": {"": 1}}, {"metrics": None},
            {"metrics": {"a": 10**400}}, {"step": -1}, {"step": 1.5}, {"step": "7"},
        )),
    ],
)  # fmt: skip
def test_what_is_no_report_is_left_out(text: bytes) -> None:
    assert progress.parse(text) is None


def test_the_lowest_rank_stands_for_all(tmp_path: Path) -> None:
    for local_rank, rank in ((0, 9), (1, 8), (2, None)):
        (tmp_path / f"progress-{local_rank}.json").write_text(
            json.dumps({**GOOD, "rank": rank, "local_rank": local_rank})
        )
    (tmp_path / "progress-3.json").write_text("half a li")
    os.mkfifo(tmp_path / "progress-4.json")
    first = progress.first(progress.read(str(tmp_path)))
    assert first is not None
    assert first.rank == 8
    assert progress.read("/nonexistent") == ()
