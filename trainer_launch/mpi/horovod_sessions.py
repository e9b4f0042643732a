"""The ssh sessions in which Horovod's ranks run on other hosts: how they are made, told signals, and found gone."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainer_launch.host import process_tree

_SHIM = Path(__file__).with_name("horovod_ssh.py")
_PIPES, _STOPPING, _TOLD = "sessions", "stopping", "ssh.json"  # as `mpi/horovod_ssh.py` has them
_RANK = "HOROVOD_RANK"


class Sessions:
    """A folder with an `ssh` for the front of PATH, and a pipe for each session that it was used for."""

    def __init__(self, folder: str, ssh: Sequence[str], python: str, grace_s: float) -> None:
        """Make the folder; `ssh` is the job's own, with its options, by its full path."""
        self._folder = Path(folder)
        self.bin = str(self._folder / "bin")
        for name in ("", "bin", _PIPES):
            (self._folder / name).mkdir(mode=0o700)
        (self._folder / _TOLD).write_text(json.dumps({"ssh": list(ssh), "grace_s": grace_s}), encoding="utf-8")
        script = shlex.join((python, "-I", "-S", str(_SHIM), folder))
        program = self._folder / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {script} "$@"\n', encoding="utf-8")
        program.chmod(0o700)

    def stop(self) -> None:
        """Let no session begin any more."""
        (self._folder / _STOPPING).touch()

    def tell(self, name: str, below: int) -> int:
        """Let all ranks have a signal, by its name without SIG; also those on this host, below process `below`."""
        told = 0
        for pipe in self._pipes():
            with contextlib.suppress(OSError):  # its ssh has just ended
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.write(descriptor, f"{name}\n".encode())
                    told += 1
                finally:
                    os.close(descriptor)
        return told + sum(1 for pid in _ranks_here(below) if _signalled(pid, name))

    def lost(self) -> tuple[str, ...]:
        """Hosts of which a rank's session has ended since the last call."""
        gone: dict[str, None] = {}
        for pipe in self._pipes():
            host, local_rank, pid = pipe.name.rsplit(".", 2)
            if not Path("/proc", pid).exists():
                with contextlib.suppress(FileNotFoundError):
                    pipe.unlink()
                if local_rank != "-":
                    gone[host] = None
        return tuple(gone)

    def _pipes(self) -> Iterable[Path]:
        return sorted((self._folder / _PIPES).iterdir())


def _ranks_here(below: int) -> list[int]:
    """Ranks that horovodrun has started without ssh: the first process of each that bears a rank."""
    found: list[int] = []
    ranks: set[int] = set()
    for entry in process_tree.descendants(below):  # parents first
        if _RANK in (process_tree.environment(entry.pid) or ()):
            ranks.add(entry.pid)
            if entry.parent not in ranks:
                found.append(entry.pid)
    return found


def _signalled(pid: int, name: str) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError, KeyError):
        os.kill(pid, signal.Signals[f"SIG{name}"])
        return True
    return False
