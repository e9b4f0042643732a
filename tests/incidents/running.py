"""One situation of the incident catalogue, run as a user would, and what was told of it; every wait is bounded."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.cli.launching import LAUNCHER, clean_env
from tests.host.test_real_cgroup import IS_V2, limited
from tests.host.test_real_cgroup import ROOT as CGROUPS

JOB = Path(__file__).with_name("incident_job.py")
REPORT_S, TIMEOUT_S = "2", "4"  # --hang-report-after, --hang-timeout
REPORT = ("--hang-report-after", REPORT_S)
LIMIT_S = 100.0  # of one situation, on a busy machine
END_S = 40.0  # from the sentence to the end
MEMORY_BYTES = 1500 << 20  # more than two ranks take
_LOOK_S = 0.1
_HEAD = re.compile(r"reason=(\w+) .*?exit=(\d+) attempt=(\d+)(?: retryable=(\w+))?[^|]*(?:\| (.*))?$")
_RANK = re.compile(r" rank=(\d+)")
_NODE = r"(?:\[trainer-launch(?: 0)?\] )"
_HANG = re.compile(rf"{_NODE}suspected hang: (.*?)(?:; collected in \S+)?$", re.MULTILINE)
_QUIET = re.compile(
    rf"{_NODE}no progress: (?!.*all nodes are asked|.*collecting an incident)(.*?)(?:; collected in \S+)?$",
    re.MULTILINE,
)
_SUSPECT = re.compile(rf"{_HANG.pattern}|{_NODE}no progress: (?=.*never entered)", re.MULTILINE)
_UNTIL = {"drain": re.compile("^ready", re.MULTILINE), "nobody": _QUIET, "suspect": _SUSPECT}
_VERDICT = re.compile(r"\[trainer-launch(?: \d)?\] (?:suspected hang: |hang: |reason=\w+ .*exit=\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What happens, and what has to be told of it, word for word; an ellipsis stands for any words.

    Where several answers are right, they are a tuple; an empty one is for whatever is said.
    """

    act: str  # of incident_job
    text: str  # for the table
    sentence: str = ""  # of a healthy job: what is told of it without naming it a hang
    never: str = ""  # what no line of a launcher may have, as a regular expression
    reason: str | tuple[str, ...] = "Succeeded"
    exit_code: int | tuple[int, ...] = 0
    retryable: bool | tuple[bool | None, ...] | None = None  # of a reported hang: whether a restart helps
    rank: int | tuple[int | None, ...] | None = None  # in the termination message
    workers: int = 2  # of each node
    nodes: int = 1
    options: Sequence[str] = REPORT
    ends: str = ""
    attempt: int | tuple[int, ...] = 1
    any_rank: bool = field(default=False)  # which rank is the first to fail is chance
    long_s: float = 6.0  # what a healthy rank does takes so long
    is_healthy: bool = False
    needs: str = ""  # outside the job
    variables: Sequence[tuple[str, str]] = ()
    job: Path = JOB


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the launcher told of a situation."""

    sentence: str
    rank: int | None
    reason: str
    retryable: bool | None
    exit_code: int
    attempt: int
    accused: bool
    output: str
    seconds: float | None = None  # from the fault to the first line that tells its cause

    @property
    def launchers_lines(self) -> str:
        """What the launchers have said, without the workers' output."""
        return "\n".join(line for line in self.output.splitlines() if line.startswith("[trainer-launch"))


class Running:
    """A launcher and all below it."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], folder: Path) -> None:
        self._path = folder / "output"
        self.verdict_s: float | None = None  # when the first one was there
        with open(self._path, "wb") as file:
            self.process = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._path.read_text(errors="replace")

    def wait(self, pattern: re.Pattern[str] | None, until_s: float) -> bool:
        """Whether a line fitted before the deadline; without a pattern, whether the process ended."""
        while time.monotonic() < until_s:
            is_over = self.process.poll() is not None
            if self.verdict_s is None and _VERDICT.search(self.output):
                self.verdict_s = time.time()
            if pattern is not None and pattern.search(self.output):
                return True
            if is_over:
                return pattern is None
            time.sleep(_LOOK_S)
        return False

    def below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def close(self) -> None:
        """Kill what is left."""
        left = self.below()
        with contextlib.suppress(OSError):
            self.process.kill()
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


@contextlib.contextmanager
def _closed_gate(folder: Path) -> Iterator[int]:
    """Closed until the descriptor is."""
    fd = os.open(folder / "gate", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield fd
    finally:
        os.close(fd)


def _serve(server: socket.socket, pause_s: float) -> None:
    """Answer one request: it `resets` the connection, or pauses in the middle (`stalls`) or before its answer."""
    with contextlib.suppress(OSError), server.accept()[0] as peer:
        path, half = peer.recv(4096).split()[1], bytes(1024)
        head = b"HTTP/1.0 200 OK\r\nContent-Length: 2048\r\n\r\n" + half
        if path == b"/resets":
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if path == b"/stalls":
            peer.sendall(head)
        time.sleep(pause_s)
        peer.sendall(half if path == b"/stalls" else head + half)


def _slow_disk(path: Path, pause_s: float, takes: bool) -> None:
    """Take 64 KiB a second, or give 512 bytes a second, for so long; then take the rest."""
    with contextlib.suppress(OSError), open(path, "rb" if takes else "wb", buffering=0) as disk:
        for _ in range(int(pause_s)):
            disk.read(1 << 16) if takes else disk.write(bytes(512))
            time.sleep(1.0)
        while takes and disk.read(1 << 20):
            pass


@contextlib.contextmanager
def _outside(needs: str, folder: Path, pause_s: float) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Run what no launcher knows: a "server", also for "curl"; a disk that "takes" or "gives"; a limit of "memory".

    Yields the variables that name it, and the words before the command that enter it.
    """
    if needs in ("server", "curl"):
        with socket.create_server(("127.0.0.1", 0)) as server:
            threading.Thread(target=_serve, args=(server, pause_s), daemon=True).start()
            yield {"PORT": str(server.getsockname()[1])}, ()
            server.shutdown(socket.SHUT_RDWR)  # the thread may still wait for a request
    elif needs in ("takes", "gives"):
        disk = folder / "disk"
        os.mkfifo(disk)
        threading.Thread(target=_slow_disk, args=(disk, pause_s, needs == "takes"), daemon=True).start()
        yield {"DISK": str(disk)}, ()
        os.close(os.open(disk, os.O_RDWR | os.O_NONBLOCK))  # the thread may still wait for the job
    elif needs == "memory":
        name = "memory.max" if IS_V2 else "memory.limit_in_bytes"
        with limited("memory", {name: str(MEMORY_BYTES)}) as enter:
            yield {}, ("sh", "-c", enter)
    else:
        yield {}, ()


def missing(needs: str) -> str | None:
    """Why a situation cannot be made on this machine; None if it can."""
    if needs == "memory":
        has_it = "memory" in _text(CGROUPS / "cgroup.subtree_control") if IS_V2 else (CGROUPS / "memory").exists()
        is_ours = os.access(CGROUPS if IS_V2 else CGROUPS / "memory", os.W_OK)
        return None if has_it and is_ours else "a limit of memory needs root and the memory controller of cgroups"
    if needs == "curl":
        return None if shutil.which("curl") else "curl is not installed"
    return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def command(situation: Situation, folder: Path, variables: Mapping[str, str]) -> list[str]:
    """As somebody types it."""
    job = (str(situation.job), situation.act)
    workers = ("--nproc-per-node", str(situation.workers), *situation.options)
    watched = (
        "--incident-dir",
        str(folder / "incidents"),
        "--log-level",
        "info",
        "--grace",
        "3",
        *situation.options,
    )
    if situation.nodes == 1:
        return [*LAUNCHER, "run", *workers, *watched, "--", *job]
    # Pods of a rehearsal do not inherit what a shell has set.
    own = [f"{name}={value}" for name, value in variables.items()]
    how = ("rehearse", "--nodes", str(situation.nodes), *workers)
    return [*LAUNCHER, *how, *watched, "--", "env", *own, sys.executable, *job]


def _helps(place: Path) -> bool | None:
    """Whether a restart helps, as the incident of a hang has it."""
    found = [json.loads(path.read_text()) for path in sorted(place.glob("*/incident.json"))]
    return next((one["restart_helps"] for one in found if one["kind"] == "hang"), None)


def told(output: str, code: int, helps: bool | None, seconds: float | None = None) -> Told:
    """Read the messages of a run."""
    heads = [found for line in output.splitlines() if " exit=" in line and (found := _HEAD.search(line))]
    hangs = _HANG.findall(output)
    quiet = sorted(_QUIET.findall(output), key=lambda text: "never entered" not in text)
    heads.sort(
        key=lambda found: (found[1] == "PeerLost", " exit=138 " in found[0], _RANK.search(found[0]) is None)
    )  # the node that has the cause
    reason, _, attempt, retryable, message = heads[0].groups() if heads else ("", "", "0", None, None)
    rank = _RANK.search(heads[0][0]) if heads else None
    is_reported = reason in ("Succeeded", "Stopped") and bool(hangs)
    sentence = (hangs or quiet or [""])[0] if reason in ("Succeeded", "Stopped") else message or ""
    return Told(
        sentence=sentence.partition("; collected in ")[0],
        rank=int(rank[1]) if rank else None,
        reason=reason,
        retryable=helps if is_reported else {"true": True, "false": False}.get(retryable or ""),
        exit_code=code,
        attempt=int(attempt),
        accused=bool(hangs) or "hang: " in output,
        output=output,
        seconds=seconds,
    )


def _since_fault(gate: Path, verdict_s: float | None) -> float | None:
    """Seconds from the last fault before a verdict; the job has noted when each began."""
    begun = [float(word) for word in _text(Path(f"{gate}.begun")).split()]
    return min((verdict_s - at_s for at_s in begun if at_s < verdict_s), default=None) if verdict_s else None


def run(situation: Situation) -> Told:
    """Run one: it ends by itself, "goes on" once a hang or "nobody" was told, or is asked to "stop" or "drain".

    With "suspect" it is asked to stop once it was said who never entered, be it as information.
    """
    ends, long_s = situation.ends, situation.long_s
    with tempfile.TemporaryDirectory(prefix="incident-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _closed_gate(folder) as gate, _outside(situation.needs, folder, long_s) as (names, within):
            own = {"GATE": str(folder / "gate"), "LONG_S": str(long_s), **dict(situation.variables), **names}
            env = clean_env({**own, "OMP_NUM_THREADS": "1", "TMPDIR": name})
            running = Running([*within, *command(situation, folder, own)], env, folder)
            try:
                until_s = time.monotonic() + LIMIT_S + long_s
                if ends:
                    seen = running.wait(_UNTIL.get(ends, _HANG), until_s)
                    until_s = time.monotonic() + END_S
                    if ends in ("goes on", "nobody") and seen:
                        fcntl.flock(gate, fcntl.LOCK_UN)
                        for one in running.below():
                            with contextlib.suppress(psutil.Error):
                                one.resume()
                    else:
                        running.process.send_signal(signal.SIGTERM)
                ended = running.wait(None, until_s)
                code = running.process.returncode if ended else -1
                seconds = _since_fault(folder / "gate", running.verdict_s)
                return told(running.output, code, _helps(folder / "incidents"), seconds)
            finally:
                running.close()
