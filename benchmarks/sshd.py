"""What an MPI worker costs: `trainer-launch sshd` beside the same sshd alone. Prints figures, judges nothing.

    python -m benchmarks.sshd

Both have one configuration, the worker's; times are to the first bytes of the banner, from outside.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from benchmarks.results import machine
from tests.cli.launching import LAUNCHER
from trainer_launch.host import network, runtime_directory
from trainer_launch.model import Job
from trainer_launch.mpi import ssh_client

RUNS = 7
SESSIONS = 15
IDLE_S = 10.0
SETTLE_S = 1.0  # until the session has ended that looked for the banner


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        mount = f"{folder}/mount"
        ssh_client.make(mount)
        rows = [("", "trainer-launch sshd", "sshd alone")]
        ours, alone = worker(mount), bare(Path(folder), mount)
        starts = [f"{statistics.median(to_banner(command)):.3f} s" for command in (ours, alone)]
        rows.append(("start to banner", starts[0], starts[1]))
        rows += [compared("memory (PSS), no session", lambda p: f"{pss_mb(p):.1f} MB", ours, alone)]
        rows += [compared("one command by ssh", lambda p: f"{session_s(p, folder, mount):.3f} s", ours, alone)]
        rows += [compared("CPU while idle", lambda p: f"{idle_percent(p):.3f} %", ours, alone)]
    for row in rows:
        print(f"{row[0]:<28}{row[1]:>22}{row[2]:>14}")


Server = tuple[int, subprocess.Popen[bytes]]  # its port, and its process
Command = Callable[[int], Sequence[str]]


def worker(mount: str) -> Command:
    words = ("sshd", "--ssh-dir", mount, "--log-level", "error")
    return lambda port: (*LAUNCHER, *words, "--ssh-port", str(port))


def bare(folder: Path, mount: str) -> Command:
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    shutil.copy(f"{mount}/id_rsa", folder / "key")
    (folder / "key").chmod(0o600)
    text = f"ListenAddress 127.0.0.1\nHostKey {folder}/key\nAuthorizedKeysFile {mount}/authorized_keys\n"
    (folder / "config").write_text(f"{text}UsePAM no\nStrictModes no\nPidFile none\nLogLevel ERROR\n")
    return lambda port: (ssh_client.find("sshd", None), "-D", "-e", "-f", str(folder / "config"), "-p", str(port))


@contextmanager
def running(command: Command) -> Iterator[Server]:
    port = network.free_port()
    env = {**os.environ, "JOB_COMPLETION_INDEX": "0", runtime_directory.LISTEN_AT: "127.0.0.1"}
    process = subprocess.Popen(command(port), env=env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not banner(port):
            time.sleep(0.002)
        yield port, process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def banner(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as opened:
        return opened.recv(4) == b"SSH-"
    return False


def to_banner(command: Command) -> list[float]:
    taken = []
    for _ in range(RUNS):
        began_s = time.monotonic()
        with running(command):
            taken.append(time.monotonic() - began_s)
    return taken


def compared(what: str, measure: Callable[[Server], str], *commands: Command) -> tuple[str, str, str]:
    found = []
    for command in commands:
        with running(command) as server:
            time.sleep(SETTLE_S)
            found.append(measure(server))
    return (what, found[0], found[1])


def family(server: Server) -> list[psutil.Process]:
    process = psutil.Process(server[1].pid)
    return [process, *process.children(recursive=True)]


def pss_mb(server: Server) -> float:
    return sum(process.memory_full_info().pss for process in family(server)) / 1e6


def session_s(server: Server, folder: str, mount: str) -> float:
    job = Job(contract="bench", details={"ssh_dir": mount})
    reach = ssh_client.prepared(job, tempfile.mkdtemp(dir=folder) + "/ssh", port=server[0])
    taken = []
    for _ in range(SESSIONS):
        began_s = time.monotonic()
        subprocess.run(reach.argv("127.0.0.1", "true"), check=True, stdin=subprocess.DEVNULL)
        taken.append(time.monotonic() - began_s)
    return statistics.median(taken)


def idle_percent(server: Server) -> float:
    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family(server))

    before_s = used_s()
    time.sleep(IDLE_S)
    return 100 * (used_s() - before_s) / IDLE_S


if __name__ == "__main__":
    main()
