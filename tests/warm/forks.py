"""Run a program both ways, forked and as `python -u`, and compare what the world sees of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cli.launching import clean_env

DRIVER = Path(__file__).with_name("driver.py")
DEADLINE_S = 60
CLOSING_S = 5


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it left."""

    code: int
    out: str
    err: str
    error: str | None  # what torch's error file says


class Forks:
    """A fork-server, and who asks it."""

    def __init__(self, folder: Path, preload: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(DRIVER)],
            env=clean_env({"TRAINER_LAUNCH_RUN_DIR": str(folder), "PYTHONPATH": os.getcwd()}),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        settings = {"script": str(folder / "train.py"), "preload": list(preload), "required": False}
        said = self._ask(settings)
        self.reason, self.apart = said["reason"], said["apart"]

    def run(self, folder: Path, *words: str, environment: dict[str, str] | None = None) -> Ended:
        """Fork `python -u words`."""
        given = {"TORCHELASTIC_ERROR_FILE": str(folder / "error"), **(environment or {})}
        request = {"is_module": words[0] == "-m", "environment": given, "folder": str(folder)}
        code = self._ask({**request, "argv": [sys.executable, "-u", *words]})["code"]
        error = folder / "error"
        said = json.loads(error.read_text())["message"]["message"] if error.exists() else None
        return Ended(code, (folder / "out").read_text(), (folder / "err").read_text(), said)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        below = psutil.Process(self._process.pid).children(recursive=True)
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:  # a test has failed and left its program running
            for process in (*below, psutil.Process(self._process.pid)):
                process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the driver has died"
        answer: dict = json.loads(line)
        return answer


def fresh(folder: Path, cwd: Path, *words: str) -> Ended:
    """Run `python -u words` in a new interpreter."""
    ended = subprocess.run(
        [sys.executable, "-u", *words],
        env=clean_env({"RANK": "0", "PYTHONPATH": os.getcwd(), "TORCHELASTIC_ERROR_FILE": str(folder / "error")}),
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=DEADLINE_S,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, None)
