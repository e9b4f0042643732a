"""An MPI job's start, wait and loss of a host, beside bare mpirun with the same keys; and a wait for 500 hosts.

Run as root: PYTHONPATH=. python benchmarks/mpi.py [--repeats N] [--hosts N] [start late many loss]
Needs Open MPI 4, OpenSSH and iproute2. Hosts are network namespaces, workers are `trainer-launch sshd`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import resource
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cli.launching import LAUNCHER
from tests.hosts import mpi
from trainer_launch.model import Job
from trainer_launch.mpi.crew import Crew
from trainer_launch.mpi.probes import Probes
from trainer_launch.mpi.sights import Stage
from trainer_launch.ssh import client

PROGRAM = ("echo", "first")
MANY = 500
MANY_WITHIN_S = 3.0
LATE_WITHIN_S = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("what", nargs="*", default=["many", "start", "late", "loss"])
    args = parser.parse_args()
    if "many" in args.what:
        many(args.repeats)
    for what in ("start", "late", "loss"):
        if what in args.what:
            with tempfile.TemporaryDirectory() as folder, mpi.job(Path(folder), args.hosts) as job:
                {"start": start, "late": late, "loss": loss}[what](job, args.repeats)


def told(what: str, seconds: list[float]) -> float:
    median = statistics.median(seconds)
    print(
        f"{what:<58} {median:6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f}, {len(seconds)} runs)", flush=True
    )
    return median


# -- start, with bare mpirun ------------------------------------------------------------------


def bare(job: mpi.Job) -> float:
    """From the start of mpirun to its first line."""
    folder = tempfile.mkdtemp(dir=job.folder)
    keys = client.prepared(Job(contract="b", details={"ssh_dir": str(job.mount)}), f"{folder}/ssh", port=mpi.PORT)
    env = {**job.env, "OMPI_MCA_plm_rsh_args": f"-F {keys.config}"}
    return first_line(job, ("mpirun", "--allow-run-as-root", *PROGRAM), env)


def ours(job: mpi.Job) -> float:
    """From the start of the launcher to the first rank's first line."""
    return first_line(job, (*LAUNCHER, "run", "--log-level", "error", "--", "mpirun", *PROGRAM), job.env)


def first_line(job: mpi.Job, argv: tuple[str, ...], env: dict[str, str]) -> float:
    begun_s = time.monotonic()
    process = job.launcher.start(argv, env)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("first"):
            break
    took_s = time.monotonic() - begun_s
    process.stdout.read()
    process.stdout.close()
    assert process.wait() == 0
    return took_s


# Runs on the launcher's host beside what is measured; monotonic time is the same on all of them.
ALL_UP = """
import socket, sys, time
port, hosts = int(sys.argv[1]), set(sys.argv[2:])
while hosts:
    for host in sorted(hosts):
        try:
            with socket.create_connection((host, port), 0.5) as met:
                hosts -= {host} if met.recv(4) == b"SSH-" else set()
        except OSError:
            pass
    time.sleep(0.02)
print(time.monotonic())
"""


def up(job: mpi.Job) -> subprocess.Popen[str]:
    """Something that ends when every worker's sshd has answered, and says when that was."""
    addresses = [host.address for host in job.workers]
    argv = ("ip", "netns", "exec", job.launcher.namespace, sys.executable, "-c", ALL_UP, str(mpi.PORT), *addresses)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def at_s(watcher: subprocess.Popen[str]) -> float:
    """When it was; waits for it."""
    return float(watcher.communicate(timeout=60)[0])


def start(job: mpi.Job, repeats: int) -> None:
    job.start_workers()
    at_s(up(job))
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    bare(job)  # warms what both use
    for _ in range(repeats):
        seconds["bare"].append(bare(job))
        seconds["ours"].append(ours(job))
    n = len(job.workers)
    alone = told(f"bare mpirun, {n} hosts, all sshd up: to the first line", seconds["bare"])
    whole = told("trainer-launch run, the same", seconds["ours"])
    print(f"ratio {whole / alone:.2f}")


def late(job: mpi.Job, repeats: int) -> None:
    """sshd come up in random order; from the last one's first answer to the first line."""
    after: list[float] = []
    alone: list[float] = []
    for _ in range(repeats):
        after.append(_late_once(job))
        alone.append(bare(job))
        for host in job.workers:
            job.kill(host.name)
    without = told(f"bare mpirun, {len(job.workers)} hosts, all sshd up", alone)
    with_us = told("trainer-launch, from the last of sshd's banners", after)
    print(f"difference {with_us - without:+.2f} s, ratio {with_us / without:.2f}")


def _late_once(job: mpi.Job) -> float:
    run = job.launch("mpirun", *PROGRAM, options=("--log-level", "error"))
    watcher = up(job)
    timers = [
        threading.Timer(random.uniform(0, LATE_WITHIN_S), job.start_workers, (host.name,)) for host in job.workers
    ]
    for timer in timers:
        timer.start()
    run.read_until("first")
    now_s = time.monotonic()
    for timer in timers:
        timer.join()
    run.end()
    return now_s - at_s(watcher)


def loss(job: mpi.Job, repeats: int) -> None:
    """A host is killed; to the next step of the others."""
    seconds: list[float] = []
    strays = 0
    for _ in range(repeats):
        job.start_workers()
        at_s(up(job))
        job.checkpoint.unlink(missing_ok=True)
        options = ("--min-nodes", "2", "--shrink-after", "0", "--log-level", "error")
        run = job.launch("mpirun", *job.train(100_000), options=options)
        run.read_until(f"step 20 of {len(job.workers)} ")
        killed_s = time.monotonic()
        job.kill(job.workers[1].name)
        run.read_until(f" of {len(job.workers) - 1} ranks")
        seconds.append(time.monotonic() - killed_s)
        ranks = [text.partition(":")[0] for text in job.strays() if "train.py" in text]
        strays += len(ranks) - len(set(ranks))  # each survivor has one rank, of the new start
        run.terminate()
        run.end()
        for host in (job.workers[0], *job.workers[2:]):
            job.kill(host.name)
    told(f"one of {len(job.workers)} hosts is killed: to the survivors' next step", seconds)
    print(f"stray ranks on survivors then: {strays}")


# -- the wait for many hosts ------------------------------------------------------------------


def many(repeats: int) -> None:
    """Banners of many hosts on loopback addresses come up in random order; the table settles."""
    settled, memory = zip(*(_many_once() for _ in range(repeats)), strict=True)
    told(f"{MANY} hosts: from the last banner until all are seen", list(settled))
    print(
        f"memory {max(memory) / 1024:.0f} MB at most, {max(memory) / 1024 - _base_mb():.0f} MB of it for the hosts"
    )


def _many_once() -> tuple[float, int]:
    port = 20_000 + random.randrange(10_000)
    ours, theirs = multiprocessing.Pipe()
    banners = multiprocessing.Process(target=_banners, args=(port, theirs))
    banners.start()
    watcher_end, end = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(target=_watcher, args=(port, end))
    watcher.start()
    last_s = ours.recv()
    done_s, rss_kb = watcher_end.recv()
    banners.terminate()
    banners.join()
    watcher.join()
    return done_s - last_s, rss_kb


def _addresses() -> Iterator[str]:
    return (f"127.1.{n // 250}.{n % 250 + 1}" for n in range(MANY))


def _banners(port: int, told_to: multiprocessing.connection.Connection) -> None:
    """Hosts whose sshd come up one after the other."""
    addresses = list(_addresses())
    random.shuffle(addresses)
    selector = selectors.DefaultSelector()
    begun_s = time.monotonic()
    for number, address in enumerate(addresses):
        _serve(selector, begun_s + MANY_WITHIN_S * number / MANY)
        made = socket.create_server((address, port))
        made.setblocking(False)
        selector.register(made, selectors.EVENT_READ)
    told_to.send(time.monotonic())
    _serve(selector, float("inf"))


def _serve(selector: selectors.BaseSelector, until_s: float) -> None:
    while (left_s := until_s - time.monotonic()) > 0:
        for key, _ in selector.select(min(left_s, 1.0)):
            assert isinstance(key.fileobj, socket.socket)
            met, _ = key.fileobj.accept()
            met.sendall(b"SSH-2.0-benchmark\r\n")
            met.close()


def _watcher(port: int, told_to: multiprocessing.connection.Connection) -> None:
    """What the agent does while it waits, and nothing else."""
    hosts = {f"job-worker-{n}.job": (address, port) for n, address in enumerate(_addresses())}
    selector, crew = selectors.DefaultSelector(), Crew(16)
    selector.register(crew.fd, selectors.EVENT_READ, crew.settle)
    probes = Probes(selector, crew, port, lambda _: None, aliases=hosts)
    probes.watch(hosts)
    while any(sight.stage is not Stage.READY for sight in probes.sights.values()):
        due_s = probes.due_s
        for key, _ in selector.select(None if due_s is None else max(0.0, due_s - time.monotonic())):
            key.data()
        probes.tick(time.monotonic())
    told_to.send((time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    os._exit(0)


def _base_mb() -> float:
    """What Python with our modules takes without any host."""
    code = "import resource, trainer_launch.mpi.probes; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    return int(subprocess.check_output(("python3", "-c", code), text=True)) / 1024


if __name__ == "__main__":
    main()
