"""The fork-server, as the agent sees it: start it first of all, wait for its proof, renew it.

It is multiprocessing's own, so that torch's `start_method="forkserver"` finds it. The first one is forked from the
agent, which has just imported torch for both (`stem.py`); later ones are interpreters of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing import forkserver, resource_tracker
from typing import Any

from trainer_launch.child import stem
from trainer_launch.child.places import SERVER_SETTINGS

_PACE_S = 0.002
_PATIENCE_S = 600.0  # with modules that are named to be imported; without an answer workers start without


class ServerError(Exception):
    """No fork-server can be had."""


class Server:
    """One fork-server after the other."""

    def __init__(self, settings: dict[str, Any], folder: str) -> None:
        self.environment: dict[str, str] = {}  # the one that it was started with
        script, home = settings["script"], os.getcwd()
        self._settings = {
            "preload": settings["preload"],
            "directory": home if script is None else os.path.dirname(os.path.realpath(script)),
            "cwd": home,
            "status": os.path.join(folder, f"warm.{os.getpid()}"),
        }
        self._folder = folder
        self.is_required = bool(settings["required"])  # no other way to start workers is wanted
        self.apart: str | None = None  # why the first one has imported torch for itself
        self._said: dict[str, Any] | None = None  # what it has told of itself

    @property
    def reason(self) -> str | None:
        """Why workers cannot be forked from it."""
        return str(self._said["reason"]) if self._said and self._said["reason"] else None

    def start(self) -> None:
        """Import torch, and start the first one. Nothing else may have been done in this process.

        Raises:
            ImportError: torch cannot be imported.
            ServerError: none can be started.
        """
        self.environment = dict(os.environ)
        with contextlib.suppress(OSError):  # without it there is no server, which is told below
            resource_tracker.ensure_running()  # multiprocessing needs one; it starts while we import
        grown = stem.grow(self._settings["directory"])
        self.apart = grown.reason
        self._start(contextlib.nullcontext() if self.apart else stem.forking(grown), grown.held)

    def _start(self, way: contextlib.AbstractContextManager[None], held: Iterable[int] = ()) -> None:
        settings = json.dumps({**self._settings, "held": sorted(held)})
        forkserver.set_forkserver_preload(["trainer_launch.child.preload"])
        with _surroundings(self._folder, {SERVER_SETTINGS: settings, "PYTHONUNBUFFERED": "1"}), way:
            try:
                forkserver.ensure_running()
            except OSError as problem:
                raise ServerError(f"the fork server cannot be started ({problem})") from None

    def wait(self) -> None:
        """Wait until it is ready, or has told why it will never be.

        Raises:
            ServerError: it has ended instead.
        """
        end_s = time.monotonic() + _PATIENCE_S
        while self._said is None:
            with contextlib.suppress(FileNotFoundError), open(self._settings["status"], encoding="utf-8") as file:
                self._said = json.load(file)
                os.unlink(file.name)  # 100 KiB: an agent that is killed leaves none
            if self._said is None and not self._is_running():
                raise ServerError("the fork server exited during its imports")
            if time.monotonic() > end_s:
                raise ServerError(f"the fork server did not finish its imports within {_PATIENCE_S:g} s")
            time.sleep(_PACE_S)

    def renew(self) -> str | None:
        """Before workers start: replace one that has died, or whose modules have changed; why.

        Raises:
            ServerError: no new one can be had.
        """
        why = "the fork server exited" if not self._is_running() else self._changed()
        if why is None:
            return None
        self._end()
        self._said = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._settings["status"])
        address = getattr(forkserver._forkserver, "_forkserver_address", None)
        if address is not None:  # Python makes a new socket, and leaves the old one's file
            with contextlib.suppress(OSError):
                os.unlink(address)
        self.environment = dict(os.environ)
        self._start(contextlib.nullcontext())
        self.wait()
        return why

    def close(self) -> None:
        """End it, and the process that multiprocessing starts with it: nobody will use them."""
        self._end()
        tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
        if tracker is not None:
            _kill(tracker)

    def _changed(self) -> str | None:
        for name, (mtime_ns, size) in (self._said or {"files": {}})["files"].items():
            try:
                status = os.stat(name)
            except OSError:
                return f"{name} is gone"
            if (status.st_mtime_ns, status.st_size) != (mtime_ns, size):
                return f"{name} has changed"
        return None

    def _pid(self) -> int | None:
        # Python offers no public name for it.
        pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)
        return pid

    def _is_running(self) -> bool:
        pid = self._pid()
        if pid is None:
            return False
        try:
            return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def _end(self) -> None:
        pid = self._pid()
        if pid is not None and self._is_running():
            _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing collects it itself


@contextlib.contextmanager
def _surroundings(folder: str, variables: dict[str, str]) -> Iterator[None]:
    """Start it in a folder of ours: `python -c` takes modules from where it is, before Python's own."""
    before, home, temporary = dict(os.environ), os.getcwd(), tempfile.tempdir
    path = before.get("PYTHONPATH")
    if path:
        os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in path.split(os.pathsep))
    os.environ.update(variables)
    os.chdir(folder)
    tempfile.tempdir = folder  # multiprocessing puts its socket there, and only removes it at an ordinary exit
    try:
        yield
    finally:
        tempfile.tempdir = temporary
        os.chdir(home)
        os.environ.clear()
        os.environ.update(before)
