"""A memory cgroup for each pod of a rehearsal, below the one that we were given, so that the kernel's killer comes.

A tree of cgroups has one owner, so nothing is made in one that belongs to somebody else: it must be the container's
own, or delegated to us (systemd's word, https://systemd.io/CGROUP_DELEGATION). Version 1 knows no delegation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from trainer_launch.host import cgroup
from trainer_launch.model import Process
from trainer_launch.model.errors import NodeError
from trainer_launch.model.units import MIB

# How much is used, the limit, and no limit, by the version of cgroups.
_FILES = {
    1: ("memory.usage_in_bytes", "memory.limit_in_bytes", "-1"),
    2: ("memory.current", "memory.max", "max"),
}
_REST = "trainer-launch-rest"  # where we go ourselves: a group that has groups may have no processes
_ROOM = 2 * MIB  # what a squeezed group may have beyond what it uses; less, and the limit is not taken
_ROUNDS = 20
_SQUEEZE_S, _GONE_S, _PAUSE_S = 20.0, 5.0, 0.005
# Uses up what is left, slowly enough to be ended before it is the largest of all.
_EAT = "import time\nkept = []\nwhile True: kept.append(b'x' * (2 << 20)); time.sleep(0.01)"
_SCOPE = "start it as: systemd-run --user --scope -p Delegate=yes trainer-launch local ..."


def why_not(groups: cgroup.Groups | None = None) -> str:
    """Why no memory cgroup can be made for a pod here, and what to do; empty when it can be tried."""
    groups = cgroup.own_groups() if groups is None else groups
    if not groups.memory:
        return "this machine has no memory cgroups mounted; use kill worker instead"
    home = groups.memory[0]
    if not _is_ours(groups):
        hint = _SCOPE if groups.version == 2 else "use kill worker instead"
        return f"the cgroup {home} belongs to another program; {hint}"
    if groups.version == 2 and "memory" not in _text(home / "cgroup.controllers").split():
        return f"the cgroup {home} has no memory controller; {_SCOPE}"
    if not os.access(home / "cgroup.procs", os.W_OK) or os.statvfs(home).f_flag & os.ST_RDONLY:
        return f"the cgroup {home} is not writable; run in a --privileged container, or {_SCOPE}"
    return ""


class MemoryGroups:
    """The groups of one rehearsal."""

    def __init__(self) -> None:
        groups = cgroup.own_groups()
        self._version, self._home = groups.version, groups.memory[0]
        self._own = self._home / f"trainer-launch-{os.getpid()}"
        self._moved = False
        self._pods: dict[str, Path] = {}
        try:
            if _has_to_be_left(groups):
                (self._home / _REST).mkdir(exist_ok=True)
                self._move(self._home, self._home / _REST)
                self._moved = True
            self._divide(self._home)
            self._own.mkdir()
            self._divide(self._own)
        except OSError as problem:
            self.close()
            raise NodeError(f"cannot create a memory cgroup in {self._home}: {problem}") from None

    def wrap(self, pod: str, process: Process) -> Process:
        """The same process, in its pod's group from its beginning.

        Raises:
            NodeError: the group cannot be made.
        """
        self._pods[pod] = self._own / pod
        try:
            self._pods[pod].mkdir(exist_ok=True)
        except OSError as problem:
            raise NodeError(f"cannot create a memory cgroup for {pod}: {problem}") from None
        enter = ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(self._pods[pod] / "cgroup.procs"))
        return replace(process, argv=(*enter, *process.argv))

    def squeeze(self, pod: str) -> None:
        """Allow no more memory and have it used up, until the kernel has killed for it; then allow all again.

        Raises:
            NodeError: nobody was killed.
        """
        group = self._pods.get(pod)
        if group is None:
            raise NodeError(f"{pod} has not started")
        used, limit, no_limit = _FILES[self._version]
        enter = ("sh", "-c", 'echo $$ >"$0" && exec "$@"', str(group / "cgroup.procs"))
        before, end_s = _kills(group), time.monotonic() + _SQUEEZE_S
        try:
            (group / limit).write_text(str(int(_text(group / used)) + _ROOM))
            with subprocess.Popen(
                (*enter, sys.executable, "-I", "-S", "-c", _EAT), stdin=subprocess.DEVNULL
            ) as eater:
                while _kills(group) == before and time.monotonic() < end_s and eater.poll() is None:
                    time.sleep(_PAUSE_S)
                (group / limit).write_text(no_limit)
                eater.kill()
        except (OSError, ValueError) as problem:
            raise NodeError(f"cannot limit the memory of {pod}: {problem}") from None
        finally:
            with contextlib.suppress(OSError):
                (group / limit).write_text(no_limit)
        if _kills(group) == before:
            raise NodeError(f"the kernel killed no process of {pod}, although its memory limit was reached")

    def close(self) -> None:
        """Leave the tree as it was; whatever still runs in the groups is killed."""
        for group in (*self._pods.values(), self._own):
            for pid in _pids(group):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _remove(group)
        if self._moved:
            with contextlib.suppress(OSError):
                (self._home / "cgroup.subtree_control").write_text("-memory")
            with contextlib.suppress(OSError):
                self._move(self._home / _REST, self._home)
            _remove(self._home / _REST)

    def _divide(self, group: Path) -> None:
        if self._version == 2:
            (group / "cgroup.subtree_control").write_text("+memory")

    def _move(self, of: Path, to: Path) -> None:
        for _ in range(_ROUNDS):  # what was forked meanwhile is found the next time
            pids = list(_pids(of))
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    (to / "cgroup.procs").write_text(str(pid))
            if not pids:
                break


def _remove(group: Path) -> None:
    """An empty group; who was killed in it takes a moment to go."""
    end_s = time.monotonic() + _GONE_S
    while group.is_dir() and time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(_PAUSE_S)


def _is_ours(groups: cgroup.Groups) -> bool:
    """The root of what we see, as in a container, or marked as delegated."""
    if len(groups.memory) == 1:
        return True
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(groups.memory[0], name) == b"1":
                return True
    return False


def _has_to_be_left(groups: cgroup.Groups) -> bool:
    """Whether a group that is divided may have no processes itself: in version 2, but for the machine's root."""
    home = groups.memory[0]
    return groups.version == 2 and not (len(groups.memory) == 1 and not (home / "cgroup.type").exists())


def _pids(group: Path) -> Iterator[int]:
    yield from map(int, _text(group / "cgroup.procs").split())


def _kills(group: Path) -> int:
    version = 2 if (group / "memory.events").exists() else 1
    return cgroup.oom_kills(cgroup.Groups(version=version, memory=(group,))) or 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
