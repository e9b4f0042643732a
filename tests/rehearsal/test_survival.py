"""Users' scripts under faults, by the command itself: those that do not survive are shown up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_launch.rehearsal.flags import RUN

USERS = Path(__file__).with_name("users")

pytestmark = pytest.mark.process
JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: demo}
spec:
  runPolicy: {backoffLimit: 5}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: any
              command: COMMAND
"""


class Ended:
    """A rehearsal that has ended."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.said = " ".join(done.stderr.split())


def rehearse(folder: Path, script: str, *flags: str, last: int = 60) -> Ended:
    """One pod runs a user's script up to step `last`."""
    command = [sys.executable, str(USERS / f"{script}.py"), str(folder / "checkpoint"), str(last)]
    (folder / "job.yaml").write_text(JOB.replace("COMMAND", repr(command)))
    argv = (sys.executable, "-c", RUN, "local", "-f", str(folder / "job.yaml"), *flags)
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_LAUNCH_")}
    return Ended(
        subprocess.run(argv, text=True, capture_output=True, timeout=100, check=False, env=env, cwd=folder)
    )


def test_a_script_that_resumes_survives_being_killed_and_being_asked_to_stop(tmp_path: Path) -> None:
    faults = ("--fault", "kill pod at=step:25", "--fault", "term pod grace=10 at=step:45")
    ended = rehearse(tmp_path, "survives", *faults, "--report", "out.html")
    assert (ended.code, "does not survive" in ended.said) == (0, False), ended.err
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "<h1>Survived 2 faults</h1>" in page
    assert re.search(r"<b>\d{1,2}</b><span>steps done twice</span>", page)


def test_a_script_that_never_loads_its_checkpoint_is_shown_up(tmp_path: Path) -> None:
    ended = rehearse(tmp_path, "forgets", "--fault", "kill pod at=step:30", "--report", "out.html")
    assert ended.code == 1, ended.err
    assert re.search(
        r"no resume, demo-master-0 at [\d.]+ s: after 'kill pod[^']*' training began again at step 1, though step "
        r"\d+ had been reached -> load the newest checkpoint",
        ended.said,
    ), ended.err
    assert "<h1>Broken promise: no resume</h1>" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_a_script_that_saves_too_rarely_is_shown_up_and_the_limit_is_the_users(tmp_path: Path) -> None:
    ended = rehearse(tmp_path, "saves_rarely", "--fault", "kill pod at=step:150", last=180)
    assert ended.code == 1, ended.err
    found = re.search(
        r"steps lost, demo-master-0 at [\d.]+ s: .*: (\d+) steps are done twice, more than 100", ended.said
    )
    assert found, ended.err
    assert 120 <= int(found[1]) <= 160
    (tmp_path / "checkpoint").unlink()
    ended = rehearse(
        tmp_path, "saves_rarely", "--fault", "kill pod at=step:150", "--max-lost-steps", "170", last=180
    )
    assert (ended.code, "does not survive" in ended.said) == (0, False), ended.err


def test_a_script_that_leaves_with_0_when_asked_to_stop_is_shown_up(tmp_path: Path) -> None:
    ended = rehearse(tmp_path, "leaves_with_0", "--fault", "term pod grace=10 at=step:20")
    assert ended.code == 1, ended.err
    assert re.search(
        r"exit 0 on SIGTERM, demo-master-0 at [\d.]+ s: container pytorch was asked to stop and ended with 0 at "
        r"step \d+ after [\d.]+ s, as if its work were done -> when asked to stop, save and leave with another",
        ended.said,
    ), ended.err


def test_a_script_that_ignores_sigterm_is_shown_up(tmp_path: Path) -> None:
    ended = rehearse(tmp_path, "ignores", "--fault", "term pod grace=1 at=step:20", last=150)
    assert ended.code == 1, ended.err
    assert "ignored SIGTERM, demo-master-0" in ended.said
    assert re.search(r"was killed 1\.\d s later, when its grace was over -> handle SIGTERM", ended.said), ended.err


def test_without_a_fault_nothing_is_held_against_a_script(tmp_path: Path) -> None:
    ended = rehearse(tmp_path, "forgets", "--report", "out.html", last=10)
    assert ended.code == 0, ended.err
    assert "<h1>The job succeeded</h1>" in (tmp_path / "out.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--report", "out.pdf"), "--report 'out.pdf' ends with neither .html nor .png; name a page or a picture"),
        (("--report", "no/out.html"), "--report 'no/out.html' cannot be written: No such file or directory"),
        (("--max-lost-steps", "few"), "--max-lost-steps is 'few'; expected a whole number, 0 or more"),
    ],
)
def test_what_cannot_be_written_or_read_is_refused_before_the_job_starts(
    tmp_path: Path, flags: tuple[str, str], sentence: str
) -> None:
    ended = rehearse(tmp_path, "survives", *flags)
    assert (ended.code, ended.out) == (2, "")
    assert sentence in ended.said
