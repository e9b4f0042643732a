"""An MPI job's start and its loss of a host, beside bare mpirun and horovodrun with the same keys and sshd."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import peers
from benchmarks.measuring import Case, Failed, Section, Setup, keep_running
from benchmarks.peers import Absent, versions_here
from tests import pods
from tests.cli.launching import LAUNCHER
from tests.frameworks import building
from tests.hosts import mpi
from trainer_launch.model import Job
from trainer_launch.mpi import ssh_client

HOSTS = 8
LIMIT_S = 90.0
OURS, BARE = WHOS = ("trainer-launch", "bare")
START = f"on {HOSTS} hosts, all sshd up: from the start to the first line"
MPIRUN, HOROVODRUN = f"mpirun {START}", f"horovodrun {START}"
LOSS = f"mpirun, one of {HOSTS} hosts is killed: to the others' next step"
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

Line = tuple[tuple[str, ...], dict[str, str]]  # words and variables


def first_line(job: mpi.Job, row: str, argv: tuple[str, ...], env: Mapping[str, str]) -> Mapping[str, float]:
    """From the start of something on the launcher's host to the first line of the program, `first`."""
    begun_s = time.monotonic()
    process = job.launcher.start(argv, env)
    assert process.stdout is not None
    said, took_s = [], None
    for line in process.stdout:
        said.append(line.strip())
        if took_s is None and "first" in line and "echo" not in line:
            took_s = time.monotonic() - begun_s
    process.stdout.close()
    if process.wait() != 0 or took_s is None:
        raise Failed(f"ended with {process.returncode}: {' '.join(said[-2:])}")
    return {row: took_s}


def commands(job: mpi.Job, *, has_horovod: bool) -> dict[tuple[str, str], Line]:
    """What starts `echo first` on all hosts, and its variables. Bare ones get our ssh configuration."""
    folder = tempfile.mkdtemp(dir=job.folder)
    keys = ssh_client.prepared(Job(contract="b", ssh_dir=str(job.mount)), f"{folder}/ssh", port=mpi.PORT)
    ours = (*LAUNCHER, "run", "--log-level", "error", "--")
    program = ("echo", "first")
    plain = {
        (MPIRUN, OURS): ((*ours, "mpirun", *program), job.env),
        (MPIRUN, BARE): (
            ("mpirun", "--allow-run-as-root", *program),
            {**job.env, "OMPI_MCA_plm_rsh_args": f"-F {keys.files.client}"},
        ),
    }
    return plain | (_horovod(job, Path(folder), ours, str(keys.files.client), program) if has_horovod else {})


def _has_horovod() -> bool:
    with contextlib.suppress(Absent):
        peers.made("horovod.sh")
        return True
    return False


def _horovod(
    job: mpi.Job, folder: Path, ours: tuple[str, ...], config: str, program: tuple[str, ...]
) -> dict[tuple[str, str], Line]:
    building.command(folder / "bin")
    ssh = folder / "bare" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {config} "$@"\n')
    ssh.chmod(0o755)
    path = f"{folder}/bin:{os.environ['PATH']}"
    hosts = ",".join(f"{host.name}:1" for host in job.workers)
    words = ("-np", str(len(job.workers)), "--gloo", "--network-interfaces", "eth0")
    typed = ("horovodrun", "--disable-cache", *words, "-H", hosts, "-p", str(mpi.PORT), *program)
    env = {**building.env(), **job.env, "K_MPI_JOB_ROLE": "launcher"}
    return {
        (HOROVODRUN, OURS): ((*ours, "horovodrun", *words, *program), {**env, "PATH": path}),
        (HOROVODRUN, BARE): (typed, {**env, "PATH": f"{ssh.parent}:{path}"}),
    }


def up(job: mpi.Job) -> subprocess.Popen[str]:
    """Something that ends when every worker's sshd has answered, and says when that was."""
    addresses = [host.address for host in job.workers]
    argv = (*job.launcher.enter("net"), sys.executable, "-c", ALL_UP, str(mpi.PORT), *addresses)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def at_s(watcher: subprocess.Popen[str]) -> float:
    """When it was; waits for it."""
    return float(watcher.communicate(timeout=LIMIT_S)[0])


def loss(job: mpi.Job) -> Mapping[str, float]:
    """A host is killed; to the next step of the others. None of its ranks may be left on them."""
    job.start_workers()
    at_s(up(job))
    job.checkpoint.unlink(missing_ok=True)
    run = job.launch(
        "mpirun",
        *job.train(100_000),
        options=("--min-nodes", "2", "--shrink-after", "0", "--log-level", "error"),
    )
    run.read_until(f"step 20 of {HOSTS} ")
    killed_s = time.monotonic()
    job.kill(job.workers[1].name)
    run.read_until(f" of {HOSTS - 1} ranks")
    took_s = time.monotonic() - killed_s
    ranks = [text.partition(":")[0] for text in job.strays() if "train.py" in text]
    if len(ranks) != len(set(ranks)):  # each survivor has one rank, of the new start
        raise Failed("ranks of the first start were left")
    run.terminate()
    run.end()
    return {LOSS: took_s}


def opened() -> Setup:
    """Hosts whose sshd stay up, and hosts of which one is killed."""
    with contextlib.ExitStack() as undo:
        folders = [Path(undo.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        steady, changing = (undo.enter_context(mpi.job(folder, HOSTS)) for folder in folders)
        has_horovod = _has_horovod()
        steady.start_workers(env=building.env() if has_horovod else {})
        at_s(up(steady))
        keep_running()
        lines = commands(steady, has_horovod=has_horovod)
        cases = [
            Case(who, {row: "s"}, functools.partial(first_line, steady, row, *line), LIMIT_S, 3.0)
            for (row, who), line in lines.items()
        ]
        cases.append(Case(OURS, {LOSS: "s"}, functools.partial(loss, changing), LIMIT_S, 10.0))
        why = "Horovod cannot be built here: make horovod says why"
        return Setup(cases, {} if has_horovod else {"horovodrun": why}, undo.pop_all())


def missing() -> str | None:
    """What this machine lacks for it."""
    lacking = [name for name in ("mpirun.openmpi", "ssh") if not shutil.which(name)]
    return pods.missing() or (f"needs {', '.join(lacking)}" if lacking else None)


SECTION = Section(
    name="mpi",
    title="MPI jobs",
    about=f"{HOSTS} hosts as network namespaces, beside bare mpirun and horovodrun with the same sshd and keys.",
    loses_because="A Python interpreter starts first and looks at each host; bare mpirun waits for none.",
    open=opened,
    versions=lambda: {
        **versions_here("trainer-launch"),
        "Open MPI": peers.version_of_debian("openmpi-bin"),
        "OpenSSH": peers.version_of_debian("openssh-server"),
        "Horovod": peers.horovod_version(),
    },
    shows=(MPIRUN, HOROVODRUN, LOSS),
    whos=WHOS,
    missing=missing,
)
