"""Start `trainer-launch` as a user does, in an environment without any platform."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from typing_extensions import Self

from trainer_launch.rehearsal.controllers.local_jobs import own_environment

LAUNCHER = (sys.executable, "-m", "trainer_launch")
DEADLINE_S = 120.0
S = TypeVar("S", bound="Started")
# Of two workers, the one of rank 1 fails under torch's @record.
RECORDED = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")
    time.sleep(60)

main()
"""


def shm_of_its_own() -> tuple[str, ...]:
    """For tests that count what is removed from /dev/shm: other tests' launchers clear what nobody holds, too."""
    mount = 'mount -t tmpfs none /dev/shm && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", mount, "sh") if os.geteuid() == 0 else ()


def clean_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what a platform or another launcher left in it.

    Nor has it PYTHONUNBUFFERED, under which print() writes each piece by itself, and workers mix their lines. What
    is collected about failures goes with the tests, unless a test has a directory of its own for what is temporary.
    """
    extra = dict(extra or {})
    env = {name: value for name, value in own_environment(os.environ).items() if name != "PYTHONUNBUFFERED"}
    if "TMPDIR" not in extra:
        env["TRAINER_LAUNCH_INCIDENT_DIR"] = f"{tempfile.gettempdir()}/incidents-of-tests"
    return env | {"PYTHONWARNINGS": "ignore"} | extra


def launch(
    *words: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    within: Sequence[str] = (),
    timeout_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end, `within` what execs it."""
    return subprocess.run(
        [*within, *LAUNCHER, *words],
        env=clean_env(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
    )


def launched(*words: str, code: int = 0, **how: Any) -> subprocess.CompletedProcess[str]:
    """The same, for a command line that has to end with this code."""
    done = launch(*words, **how)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def ended(process: subprocess.Popen[str], timeout_s: float = DEADLINE_S) -> tuple[int, str]:
    """Exit code and all output; a process that does not end fails the test, with what it said."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"did not end in {timeout_s} s:\n{output}")
    return process.returncode, output


class Started:
    """A launcher that runs: its lines are read as they come; it is ended with its block at the latest."""

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: Path | None,
        launcher: Sequence[str] = LAUNCHER,
    ) -> None:
        self.process = subprocess.Popen(
            [*launcher, *words],
            env=clean_env(env),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self.process.pid
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_until(self, pattern: str, times: int = 1) -> list[str]:
        """Read until `times` matches were seen; what their groups (or the whole matches) hold.

        A line may hold several: workers share a pipe, and an unbuffered print() writes a line and its end apart.
        """
        assert self.process.stdout is not None
        found: list[str] = []
        while len(found) < times:
            line = self.process.stdout.readline()
            assert line, f"ended before {pattern!r} was seen {times} times:\n{''.join(self.lines)}"
            self.lines.append(line)
            print(line, end="")  # pytest shows it if the test hangs here
            found += [match.group(match.lastindex or 0) for match in re.finditer(pattern, line)]
        return found[:times]

    def signal(self, number: int) -> None:
        """Signal the launcher alone."""
        self.process.send_signal(number)

    def end(self, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
        """Wait for the end; exit code and all output."""
        assert self.process.stdout is not None
        rest: list[str] = []
        # Not by communicate(): it would lose what readline() has read ahead.
        reader = threading.Thread(target=lambda: rest.extend(self.process.stdout or ()), daemon=True)
        reader.start()
        reader.join(timeout_s)
        if reader.is_alive():
            print(*rest, sep="")  # pytest shows it
            raise subprocess.TimeoutExpired(self.process.args, timeout_s, "".join([*self.lines, *rest]))
        return self.process.wait(timeout_s), "".join([*self.lines, *rest])

    def ends_with(self, code: int, timeout_s: float = DEADLINE_S) -> str:
        """Wait for the end with this exit code; all output."""
        ended, output = self.end(timeout_s)
        assert ended == code, output
        return output

    def close(self) -> None:
        """Kill what a failed test left running; nothing after a test that passed."""
        if self.process.poll() is None:
            below = psutil.Process(self.pid).children(recursive=True)
            self.process.kill()
            for child in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def start(*words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Started:
    """Start a command line."""
    return Started(words, env, cwd)


def script(folder: Path, text: str) -> str:
    """Write a training script; its path."""
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def program(path: Path, text: str, interpreter: str = "/bin/sh") -> Path:
    """Write a program; its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!{interpreter}\n{text}\n")
    path.chmod(0o755)
    return path


def ends_of(nodes: Sequence[Started], timeout_s: float = DEADLINE_S) -> list[tuple[int, str]]:
    """Exit code and all output of each node of a job, once all have ended."""
    try:
        return [node.end(timeout_s=timeout_s) for node in nodes]
    finally:
        for node in nodes:
            node.close()
