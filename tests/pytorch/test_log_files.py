"""Files of the workers' output, and what the console shows: under us as under the installed torchrun."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER, clean_env, launched

pytestmark = [pytest.mark.torch, pytest.mark.process]


def _under(start: Sequence[str], folder: Path, script: Path, options: dict[str, str]) -> list[Any]:
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    argv = (*start, "--nproc-per-node=2", f"--log-dir={folder}", "--rdzv-id=job", *words, str(script))
    done = subprocess.run(argv, capture_output=True, timeout=120, env=clean_env(), check=False)
    assert done.returncode == 0, done.stderr
    return [_console(done.stdout), _console(done.stderr), _files(folder)]


def _console(text: bytes) -> list[str]:
    """The workers' own lines, whose order is not sure."""
    return sorted(line for line in text.decode().splitlines() if re.search(r"(out|err) \d$", line))


def _files(folder: Path) -> dict[str, list[str]]:
    """By path, without the random part of the run's folder."""
    (run,) = folder.iterdir()
    files = (path for path in sorted(run.rglob("*")) if path.is_file())
    return {str(path.relative_to(run)): sorted(path.read_text().splitlines()) for path in files}


def test_a_worker_that_failed_leaves_its_error_and_its_output_in_its_attempts_folder(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE)
    options = {"redirects": "3"}
    start = (*LAUNCHER, "run", "--no-prefix", "--", "torchrun", "--max-restarts=1")
    out, err, files = _under(start, tmp_path / "logs", script, options)
    assert (out, err) == ([], [])
    assert [run.name[:4] for run in (tmp_path / "logs").iterdir()] == ["job_"]
    assert files["attempt_0/1/stdout.log"] == ["out 0"]
    assert "no luck" in files["attempt_0/1/error.json"][0]
    assert files["attempt_1/1/stdout.log"] == ["out 1"]
    assert "attempt_1/1/error.json" not in files


FAILS_ONCE = """
import os
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    print("out", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("no luck")

main()
"""


def test_a_log_file_that_cannot_be_opened_at_a_restart_is_this_nodes_failure(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nattempt = os.path.dirname(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))\n"
        "os.makedirs(attempt[:-1] + '1/0/stdout.log')\nraise SystemExit(1)"
    )
    words = ("--redirects=3", "--nproc-per-node=1", "--max-restarts=1", f"--log-dir={tmp_path / 'logs'}")
    launched("run", f"--termination-log={tmp_path / 'end'}", "--", "torchrun", *words, str(script), code=138)
    said = (tmp_path / "end").read_text()
    assert re.match(r"reason=NotStarted .* exit=138 attempt=2 retryable=true ", said), said
    assert re.search(r"\| cannot start rank 0: cannot open \S+/attempt_1/0/stdout.log: Is a directory", said), said


@pytest.mark.parametrize("method", ["auto", "exec"])
def test_a_torch_that_cannot_be_imported_is_the_cause_and_a_restart_will_not_help(
    tmp_path: Path, method: str
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "torch").mkdir()
    broken = "importing torch failed (OSError: libcudart.so.12: cannot open shared object file)"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise OSError({broken[33:-1]!r})")
    launched(
        *("run", f"--termination-log={tmp_path / 'end'}", f"--start-method={method}", "--", "torchrun", "train.py"),
        env={"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"},
        cwd=tmp_path,
        code=1,
    )
    said = (tmp_path / "end").read_text()
    assert re.match(r"reason=NotStarted .* exit=1 attempt=1 retryable=false ", said), said
    assert broken in said
