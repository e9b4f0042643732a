"""Users' scripts under faults, by the command itself: those that do not survive are shown up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal.users.commanded import RUN, clean, command

pytestmark = pytest.mark.process
RESUMES = """
import json
import os
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
step = int(open("saved").read()) if os.path.exists("saved") else 0
while step < 40:
    dist.all_reduce(torch.ones(1))
    step += 1
    if dist.get_rank() == 0:
        with open("new", "w") as file:
            file.write(str(step))
        os.replace("new", "saved")
        print(f"step {step}", flush=True)
    time.sleep(0.05)
dist.destroy_process_group()
"""
FAILS_ONCE = RESUMES.replace(
    "    time.sleep(0.05)",
    """
    if dist.get_rank() == 1 and step == 10 and not os.path.exists("failed"):
        open("failed", "x").close()
        raise RuntimeError(sys.argv[1])
    time.sleep(0.05)""",
).replace("import os", "import os\nimport sys")


class Ended:
    """A rehearsal that has ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.said = " ".join(done.stderr.split())


def rehearse(folder: Path, script: str, *flags: str, last: int = 200) -> Ended:
    """One pod runs a user's script up to step `last`."""
    return ended(command(folder, script, *flags, last=last), folder)


def ended(argv: tuple[str, ...], folder: Path) -> Ended:
    return Ended(
        subprocess.run(argv, text=True, capture_output=True, timeout=110, check=False, env=clean(), cwd=folder)
    )


def test_a_script_that_resumes_survives_being_killed_and_being_asked_to_stop(tmp_path: Path) -> None:
    faults = ("--fault", "kill pod at=step:25", "--fault", "term pod grace=10 at=step:45")
    done = rehearse(tmp_path, "survives", *faults, "--report", "out.html")
    assert (done.code, "does not survive" in done.said) == (0, False), done.err
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<h1>Survived 2 faults</h1>" in page
    assert re.search(r"<b>\d{1,2}</b><span>repeated steps</span>", page)


@pytest.mark.long("tests/rehearsal/test_survival.py")
@pytest.mark.parametrize(
    ("said", "exits"),
    [
        ("CUDA error: uncorrectable ECC error encountered", ["0", "138", "0"]),
        ("the batch is odd", ["0", "0", "0"]),
    ],
)
def test_a_node_whose_device_failed_is_quarantined_and_one_whose_program_failed_is_not(
    said: str, exits: list[str], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FAILS_ONCE)
    argv = (sys.executable, "-c", RUN, "rehearse", "--nodes", "2", "--spares", "1", "--", "train.py", said)
    done = ended(argv, tmp_path)
    assert done.code == 0, done.err
    table = [line.split() for line in done.err.splitlines() if line.startswith("local-node-0-")]
    assert [row[4] for row in table] == exits, done.err
    words = f"reason=Quarantined node=1 host={os.uname().nodename} exit=138 attempt=1 retryable=true"
    assert (words in done.said) == ("138" in exits), done.err
    assert (f"this node is quarantined: RuntimeError: {said}" in done.said) == ("138" in exits), done.err


@pytest.mark.long("tests/rehearsal/test_survival.py")
def test_old_lines_that_a_frameworks_launcher_prints_again_are_no_steps_lost(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "repeats", "--fault", "kill worker at=step:40", last=120)
    assert done.out.count("step 20\n") == 2, "shown once more"
    assert 0 <= int(re.findall(r"(\d+) repeated steps?;", done.said)[0]) <= 5, done.err
    assert (done.code, "does not survive" in done.said) == (0, False), done.err


def test_a_script_that_never_loads_its_checkpoint_is_shown_up(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "forgets", "--fault", "kill pod at=step:30", "--report", "out.html")
    assert done.code == 1, done.err
    assert re.search(
        r"FAILED: the script did not resume from its checkpoint, demo-master-0 at [\d.]+ s: "
        r"after 'kill pod[^']*' training restarted at step 1, "
        r"after it had reached step \d+ What to do: load the newest checkpoint",
        done.said,
    ), done.err
    assert "<h1>FAILED: the script did not resume from its checkpoint</h1>" in (tmp_path / "out.html").read_text(
        encoding="utf-8"
    )


def test_a_script_that_leaves_with_0_when_asked_to_stop_is_shown_up(tmp_path: Path) -> None:
    done = rehearse(tmp_path, "leaves_with_0", "--fault", "term pod grace=10 at=step:20")
    assert done.code == 1, done.err
    assert re.search(
        r"FAILED: the script exited with 0 on SIGTERM, demo-master-0 at [\d.]+ s: "
        r"the pod was asked to stop and exited with 0 at "
        r"step \d+ after [\d.]+ s, before its work was done What to do: on SIGTERM, save and exit with another",
        done.said,
    ), done.err


def test_the_report_of_a_rehearsal_that_is_interrupted_is_written_too(tmp_path: Path) -> None:
    argv = command(tmp_path, "survives", "--report", "out.html", last=100_000)
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=clean(), cwd=tmp_path
    ) as running:
        assert running.stdout is not None
        while b"step 12 " not in running.stdout.readline():
            pass
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=120)
    assert running.returncode == 130
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<h1>Stopped before the job ended</h1>" in page
    assert ">terminating<" in page
