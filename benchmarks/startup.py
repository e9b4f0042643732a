"""What the launcher costs before, while and around the program that it runs. Prints figures, judges nothing.

    python benchmarks/startup.py

Every figure is read from /proc by the child, or about a child, so that measuring adds nothing to what is measured.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

RUNS = 11
IDLE_S = 5.0
LAUNCHER = (sys.executable, "-m", "trainer_launch")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python")

# The child tells what its parent had used at the moment when the child could first look.
ASK_PARENT = """
import os
stat = open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()
status = dict(line.split(":", 1) for line in open(f"/proc/{os.getppid()}/status"))
cpu_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
print("PARENT", cpu_s, int(status["VmRSS"].split()[0]) / 1024, int(status["VmHWM"].split()[0]) / 1024, flush=True)
"""

Row = tuple[str, str, str]


def main() -> None:
    print(machine())
    rows: list[Row] = [("", "measured", "target")]
    cpu_s, rss_mb, peak_mb = parent_at_first_spawn((*LAUNCHER, "run", "--engine", "plain", "--"))
    rows.append(("CPU time before the first child is spawned", f"{cpu_s * 1000:.0f} ms", "<= 250 ms"))
    rows.append(("RSS at that moment", f"{rss_mb:.1f} MB", "<= 40 MB"))
    rows.append(("RSS at its highest until then", f"{peak_mb:.1f} MB", "<= 40 MB"))
    rows.append(("explain --json, wall time", f"{wall_s((*LAUNCHER, 'explain', '--json')):.3f} s", "<= 0.35 s"))
    idle_mb, wakeups = while_child_sleeps((*LAUNCHER, "run", "--engine", "plain", "--"))
    rows.append(("RSS while the child sleeps", f"{idle_mb:.1f} MB", "<= 40 MB"))
    rows.append(("wake-ups while the child sleeps", f"{wakeups:.1f}/s", "0/s"))
    rows.append(("for scale: python -c pass, wall time", f"{wall_s((sys.executable, '-c', 'pass')):.3f} s", ""))
    if importlib.util.find_spec("torch"):
        cpu_s, rss_mb, _ = parent_at_first_spawn(TORCHRUN, runs=3)
        rows.append(("torchrun: CPU time before the first child", f"{cpu_s * 1000:.0f} ms", ""))
        rows.append(("torchrun: RSS at that moment", f"{rss_mb:.1f} MB", ""))
        idle_mb, wakeups = while_child_sleeps(TORCHRUN)
        rows.append(("torchrun: RSS while the child sleeps", f"{idle_mb:.1f} MB", ""))
        rows.append(("torchrun: wake-ups while the child sleeps", f"{wakeups:.1f}/s", ""))
    for what, value, target in rows:
        print(f"{what:<44}{value:>12}{target:>14}")


def machine() -> str:
    """One line: what the figures were taken on, and with which versions."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = models[0].partition(":")[2].strip() if models else platform.machine()
    versions = [f"Python {platform.python_version()}", f"Linux {platform.release()}"]
    for package in ("trainer-launch", "pydantic-settings", "psutil", "torch"):
        found = importlib.metadata.distributions(name=package)
        versions += [f"{package} {distribution.version}" for distribution in found]
    return f"{len(os.sched_getaffinity(0))} CPUs, {cpu}; {', '.join(versions)}\n"


def parent_at_first_spawn(launcher: Sequence[str], runs: int = RUNS) -> list[float]:
    """The medians of the launcher's CPU seconds, RSS and peak RSS in MB, as its first child sees them."""
    samples = []
    for _ in range(runs):
        output = run((*launcher, sys.executable, "-c", ASK_PARENT))
        line = next(line for line in output.splitlines() if "PARENT " in line)
        samples.append([float(word) for word in line.partition("PARENT ")[2].split()])
    return [statistics.median(column) for column in zip(*samples, strict=True)]


def wall_s(argv: Sequence[str]) -> float:
    """The median wall time of a command, after one run that warms the file cache."""
    times = []
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        run(argv)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def while_child_sleeps(launcher: Sequence[str]) -> tuple[float, float]:
    """The launcher's RSS in MB, and how often per second any of its threads wakes up, with nothing to do."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        sleeper = ("/bin/sh", "-c", 'touch "$0" && exec sleep 600', str(ready))
        with subprocess.Popen((*launcher, *sleeper), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            try:
                wait_for(ready, process)
                time.sleep(1)  # let the launcher settle
                before = switches(process.pid)
                time.sleep(IDLE_S)
                wakeups = (switches(process.pid) - before) / IDLE_S
                return rss_mb_of(process.pid), wakeups
            finally:
                process.send_signal(signal.SIGTERM)


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            errors = process.communicate(timeout=5)[1] if process.poll() is not None else b"(no sign of the child)"
            raise SystemExit(
                f"startup: {process.args!r} did not start its child:\n{errors.decode(errors='replace')}"
            )
        time.sleep(0.02)


def switches(pid: int) -> int:
    """Context switches so far, of all threads."""
    total = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = [line for line in status.read_text().splitlines() if "ctxt_switches" in line]
        total += sum(int(line.partition(":")[2]) for line in lines)
    return total


def rss_mb_of(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def run(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, text=True, capture_output=True, timeout=120)
    if done.returncode:
        raise SystemExit(f"startup: {argv!r} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
