"""Run a program both ways, forked and as `python -u`, and compare what the world sees of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.cli.launching import clean_env

DRIVER = Path(__file__).with_name("driver.py")
DEADLINE_S = 120
PYTHON = (sys.executable, "-u")


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it left."""

    code: int
    out: str
    err: str
    error: str | None  # what torch's error file says


class Forks:
    """A launcher with a fork server."""

    def __init__(
        self,
        folder: Path,
        preload: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        error: Any = None,
        python: str = sys.executable,
        **settings: Any,
    ) -> None:
        """`settings` are the server's."""
        self.folder = folder
        self._python = (python, "-u")
        self._process = subprocess.Popen(
            [python, str(DRIVER)],
            env=clean_env({"PYTHONPATH": os.getcwd(), **(env or {})}),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error,
            text=True,
        )
        self.pid = self._process.pid
        given = {"script": "train.py", "preload": list(preload), "cwd": str(folder), **settings}
        self.told = self._ask(given)
        self.reason, self.server = self.told["reason"], self.told["pid"]

    def run(self, folder: Path, *words: str, environment: dict[str, str] | None = None) -> Ended:
        """Fork one `python -u words`, and wait for its end."""
        given = {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(folder / "error"), **(environment or {})}
        worker = {"environment": given, "out": f"{folder}/out", "err": f"{folder}/err"}
        answer = self.ask("fork", argv=[*self._python, *words], workers=[worker], cwd=str(folder))
        assert "error" not in answer, answer
        code = self.hear()["codes"][0]
        error = folder / "error"
        said = json.loads(error.read_text())["message"]["message"] if error.exists() else None
        return Ended(code, (folder / "out").read_text(), (folder / "err").read_text(), said)

    def start(self, folder: Path, *words: str, count: int = 1) -> list[int]:
        """Fork some, which go on; their pids."""
        workers = [{"out": f"{folder}/out.{n}", "err": f"{folder}/err.{n}"} for n in range(count)]
        answer = self.ask("fork", argv=[*self._python, *words], workers=workers, cwd=str(folder), wait=False)
        assert "error" not in answer, answer
        pids: list[int] = answer["pids"]
        return pids

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Let the driver do something; its answer."""
        return self._ask({"do": do, **request})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The driver's next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the driver has died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, and whatever a failed test has left."""
        below = psutil.Process(self.pid).children(recursive=True) if self._process.poll() is None else []
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        for process in below:
            if process.pid != self.server:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends with the pipes
                    process.kill()
        self._process.wait(DEADLINE_S)


def are_gone(pids: Sequence[int]) -> bool:
    """Whether none of these processes runs any more."""
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)


def fresh(
    folder: Path, cwd: Path, *words: str, environment: dict[str, str] | None = None, python: str = sys.executable
) -> Ended:
    """Run `python -u words` in a new interpreter."""
    given = {"RANK": "0", "PYTHONPATH": os.getcwd(), "TORCHELASTIC_ERROR_FILE": str(folder / "error")}
    ended = subprocess.run(
        [python, "-u", *words],
        env=clean_env(given | (environment or {})),
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        timeout=DEADLINE_S,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, None)
