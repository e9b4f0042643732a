"""One situation of the incident catalogue, run as a user would, and what was told of it; every wait is bounded."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.cli.launching import LAUNCHER, clean_env

JOB = Path(__file__).with_name("incident_job.py")
REPORT_S, TIMEOUT_S = "2", "4"  # --hang-report-after, --hang-timeout
LIMIT_S = 100.0  # of one situation, on a busy machine
END_S = 40.0  # from the sentence to the end
_LOOK_S = 0.1
_HEAD = re.compile(r"reason=(\w+) .*?exit=(\d+) attempt=(\d+)(?: retryable=(\w+))?[^|]*(?:\| (.*))?$")
_RANK = re.compile(r" rank=(\d+)")
_NODE = r"(?:\[trainer-launch(?: 0)?\] )"
_HANG = re.compile(rf"{_NODE}suspected hang: (.*?)(?:; collected in \S+)?$", re.MULTILINE)
_QUIET = re.compile(
    rf"{_NODE}no progress: (?!.*all nodes are asked|.*collecting an incident)(.*?)(?:; collected in \S+)?$",
    re.MULTILINE,
)
_UNTIL = {"drain": re.compile("^ready", re.MULTILINE), "nobody": _QUIET}


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


class Running:
    """A launcher and all below it."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], folder: Path) -> None:
        self._path = folder / "output"
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


def command(
    act: str, workers: int, nodes: int, options: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> list[str]:
    """As somebody types it."""
    watched = ("--incident-dir", str(folder / "incidents"), "--log-level", "info", "--grace", "3", *options)
    if nodes == 1:
        return [*LAUNCHER, "run", "--nproc-per-node", str(workers), *watched, "--", str(JOB), act]
    # Pods of a rehearsal do not inherit what a shell has set.
    own = [f"{name}={value}" for name, value in variables.items()]
    how = ("rehearse", "--nodes", str(nodes), "--nproc-per-node", str(workers))
    return [*LAUNCHER, *how, *watched, "--", "env", *own, sys.executable, str(JOB), act]


def _helps(place: Path) -> bool | None:
    """Whether a restart helps, as the incident of a hang has it."""
    found = [json.loads(path.read_text()) for path in sorted(place.glob("*/incident.json"))]
    return next((one["restart_helps"] for one in found if one["kind"] == "hang"), None)


def told(output: str, code: int, helps: bool | None) -> Told:
    """Read the messages of a run."""
    heads = [found for line in output.splitlines() if " exit=" in line and (found := _HEAD.search(line))]
    hangs, quiet = _HANG.findall(output), _QUIET.findall(output)
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
    )


def run(
    act: str,
    *,
    workers: int = 2,
    nodes: int = 1,
    options: Sequence[str] = (),
    ends: str = "",
    long_s: float = 6.0,
) -> Told:
    """Run one: it ends by itself, "goes on" once a hang or "nobody" was told, or is asked to "stop" or "drain"."""
    with tempfile.TemporaryDirectory(prefix="incident-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with _closed_gate(folder) as gate:
            own = {"GATE": str(folder / "gate"), "LONG_S": str(long_s)}
            env = clean_env({**own, "OMP_NUM_THREADS": "1", "TMPDIR": name})
            running = Running(command(act, workers, nodes, options, folder, own), env, folder)
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
                return told(running.output, code, _helps(folder / "incidents"))
            finally:
                running.close()
