"""Real launchers and what they leave behind. Nothing sleeps for luck: conditions are awaited, with deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

from tests.conftest import require
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("driver.py")
WORKER = Path(__file__).with_name("worker.py")
PYTHON = (sys.executable, "-S", "-E")  # starts in 10 ms
PID1 = ("unshare", "-pf", "--kill-child", "--mount-proc")
DEADLINE_S = 120.0


def require_namespaces():
    ok = subprocess.run([*PID1, "true"], capture_output=True, check=False).returncode == 0
    require(ok, "a pid namespace of one's own needs root")


def worker(*words):
    """Return the argv of `worker.py`."""
    return [*PYTHON, str(WORKER), *map(str, words)]


class Launcher:
    """One driver process; `notes` is a file that workers append lines to."""

    def __init__(self, folder, *processes, wrap=(), stdout=None, **spec):
        self.token = uuid.uuid4().hex
        self.notes_path = folder / f"notes-{self.token}"
        self.notes_path.touch()
        self._err_path = folder / f"stderr-{self.token}"
        self._out_path = folder / f"stdout-{self.token}"
        env = {**os.environ, "TOKEN": self.token, "NOTES": str(self.notes_path), "PYTHONPATH": str(ROOT)}
        spec["processes"] = [p if isinstance(p, dict) else {"argv": p} for p in processes]
        argv = [*wrap, sys.executable, str(DRIVER), json.dumps(spec)]
        self.is_pid1 = wrap[:1] == PID1[:1] and "-pf" in wrap
        with self._err_path.open("wb") as err, self._out_path.open("wb") as out:
            self.popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=out if stdout is None else stdout, stderr=err
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()
        if self.popen.stdout:
            self.popen.stdout.close()
        end_all(self.token)

    @property
    def pid(self):
        """The launcher's own pid, seen from here."""
        return eventually(lambda: children(self.popen.pid), "PID 1 starts")[0] if self.is_pid1 else self.popen.pid

    def notes(self):
        return self.notes_path.read_text().split("\n")[:-1]

    def await_note(self, note, count=1):
        eventually(lambda: self.notes().count(note) >= count, lambda: f"{note!r} in {self.notes()}; {self.log()}")

    def await_log(self, text):
        eventually(lambda: text in self.log(), lambda: f"{text!r} in the log: {self.log()}")

    def send(self, number):
        os.kill(self.pid, number)

    def wait(self):
        return self.popen.wait(DEADLINE_S)

    def log(self):
        return self._err_path.read_text(errors="replace")

    def output(self):
        return self._out_path.read_bytes()


def end_all(token):
    """Leave nothing behind, whatever a broken launcher did."""
    for pid in survivors(token):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def survivors(token):
    """Pids of live processes that carry `token` in their environment; zombies have none."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"TOKEN={token}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found
