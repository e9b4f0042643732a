"""What can be seen of a pod from outside while its job trains in peace: processes, memory, files, sockets."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.observability import exposition
from tests.schemas.validator import EVENTS
from tests.soak.faults import NODES
from tests.soak.pods import METRICS_PORT, Pods
from tests.survival.jobs import status_in
from trainer_launch.observability.event_log import LINE_BYTES

LAUNCHER = "launcher"
_CLOSE_WAIT = "08"
_HIDDEN = ".trainer-launch-before"  # the launcher's note of what lay in /dev/shm before it


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a pod that lives long."""

    role: str
    pid: int
    started_s: float
    memory_kb: int  # its own anonymous memory
    threads: int
    fds: int


@dataclass(frozen=True, slots=True)
class Look:
    """One pod at one moment."""

    node: int
    at_s: float
    roles: dict[str, int]  # how many processes of each kind
    long_lived: tuple[Process, ...]
    segments: int  # in /dev/shm
    tmp_files: int
    tmp_bytes: int
    close_wait: int
    incidents: int


def look(pods: Pods, node: int, at_s: float) -> Look:
    """Look at a pod whose workers train."""
    roles: Counter[str] = Counter()
    long_lived = []
    workers = {worker.pid for worker in pods.pods[node].workers()}
    for number, process in enumerate(pods.processes(node)):
        with contextlib.suppress(psutil.Error, OSError):
            role = "worker" if process.pid in workers else _role(process, number)
            roles[role] += 1
            if role not in ("worker", "sleep", "zombie"):
                long_lived.append(_measured(process, role))
    files = [path for path in pods.tmp(node).rglob("*") if path.is_file()]
    tcp = _tcp(long_lived[0].pid) if long_lived else []
    return Look(
        node=node,
        at_s=round(at_s, 1),
        roles=dict(roles),
        long_lived=tuple(long_lived),
        segments=sum(name != _HIDDEN for name in pods.shm(node)),
        tmp_files=len(files),
        tmp_bytes=sum(_size(path) for path in files),
        close_wait=tcp.count(_CLOSE_WAIT),
        incidents=len(list((pods.job.folder / f"incidents-{node}").iterdir())),
    )


def _role(process: psutil.Process, number: int) -> str:
    if process.status() == psutil.STATUS_ZOMBIE:
        return "zombie"
    if number == 0:
        return LAUNCHER
    words = process.cmdline()
    known = {"fork_server": "server", "sleep": "sleep"}
    return next((role for word, role in known.items() if any(word in one for one in words)), " ".join(words)[:60])


def _measured(process: psutil.Process, role: str) -> Process:
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    return Process(
        role,
        process.pid,
        round(process.create_time(), 1),
        int(status["RssAnon"].split()[0]),
        int(status["Threads"]),
        len(os.listdir(f"/proc/{process.pid}/fd")),
    )


def _tcp(pid: int) -> list[str]:
    """States of all TCP sockets of a pod's network, as the kernel numbers them."""
    states = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
            states += [line.split()[3] for line in lines]
    return states


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


@dataclass
class Events:
    """Reads a pod's `--events` as it grows: how many failures its generations know of, and what is no event."""

    path: Path
    charges: int = 0
    count: int = 0
    wrong: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # the exit codes that launchers told
    _offset: int = 0

    def read(self) -> None:
        """What has been added."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        self.count += 1
        try:
            values = json.loads(line)
            name = values["event"]
            is_right = name in EVENTS and len(line) < LINE_BYTES and values["time"].endswith("Z")
        except (ValueError, KeyError, TypeError, AttributeError):
            is_right = False
        if not is_right:
            self.wrong.append(f"{self.path.name} holds what is no event: {line[:200]!r}")
            return
        if name == "generation_formed":
            self.charges = max(self.charges, values["restarts"])
        if name == "finished":
            self.ends.append(values["exit_code"])


def asked(pods: Pods, node: int) -> list[str]:
    """Ask a pod, as a person and as a scraper do, while all train; what is wrong with the answers."""
    found = []
    try:
        said = status_in(pods.job, node)["job"]
        assert said["phase"] == "running", said
        assert said["n_nodes"] == NODES, said
    except (AssertionError, KeyError, TypeError) as problem:
        found.append(f"status in pod {node}: {problem}")
    inside = ("nsenter", "-t", str(pods.pods[node].launcher().pid), "--net")
    url = f"http://127.0.0.1:{METRICS_PORT}/metrics"
    get = f"import urllib.request as r; print(r.urlopen('{url}').read().decode(), end='')"
    scraped = subprocess.run((*inside, sys.executable, "-c", get), capture_output=True, text=True, timeout=120)
    try:
        values = exposition.parse(scraped.stdout)
        assert values["trainer_launch_step"], "no step"
    except (AssertionError, KeyError) as problem:
        found.append(f"metrics of pod {node}: {problem!r}; {scraped.stdout[-500:]} {scraped.stderr[-500:]}")
    return found
