"""An MPI job on hosts with their own networks: keys, a list, workers' sshd, a launcher as Trainer v2 makes it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.cli.launching import LAUNCHER
from tests.conftest import require
from tests.mpi.ssh import pods
from tests.mpi.ssh.secrets import require_openssh, secret
from tests.pods import Host, hosts
from tests.waiting import eventually

PORT = 2222
# All-reduces once a step, and saves each; what is to happen at step 4 says the last argument.
TRAIN = """
import os, sys, time
from mpi4py import MPI
world, path, steps, fault = MPI.COMM_WORLD, sys.argv[1], int(sys.argv[2]), sys.argv[3]
first = int(open(path).read()) if os.path.exists(path) else 0
for step in range(first, steps):
    total = world.allreduce(1)
    if world.rank == 0:
        with open(path + ".new", "w") as file:
            file.write(str(step + 1))
        os.rename(path + ".new", path)
        print("step %s of %s ranks\\n" % (step, total), end="", flush=True)
    if fault == "always" and world.rank == 1 or fault == "once" and world.rank == 1 and step == 4 and first == 0:
        time.sleep(0.5)  # when a rank fails, mpirun may drop the line that another has just written
        os._exit(7)
    time.sleep(0.05)
"""
_OURS = ("sshd", "unshare", "trainer_launch", "hostname")


class Job:
    """Hosts of one job, the first of which is the launcher's."""

    def __init__(
        self, folder: Path, mount: Path, all_hosts: Sequence[Host], *, as_user: bool, has_entry: bool
    ) -> None:
        self.folder, self.mount, self._as_user, self._has_entry = folder, mount, as_user, has_entry
        self.launcher, self.workers = all_hosts[0], list(all_hosts[1:])
        self.hostfile = folder / "hostfile"
        self.hostfile.write_text("".join(f"{host.name} slots=1\n" for host in self.workers))
        self.sshd: dict[str, subprocess.Popen[str]] = {}
        self._started: list[subprocess.Popen[str]] = []
        self.checkpoint = folder / "checkpoint"
        (folder / "train.py").write_text(TRAIN)

    def start_workers(self, *names: str, mount: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        """Start `trainer-launch sshd` on these hosts, or on all; `mount` is another job's Secret."""
        for host in self.workers:
            if not names or host.name in names:
                argv = (
                    *LAUNCHER,
                    "sshd",
                    "--ssh-dir",
                    str(mount or self.mount),
                    "--ssh-port",
                    str(PORT),
                    "--log-level",
                    "error",
                )
                self.sshd[host.name] = host.start(
                    (*self._container(), *argv), {**({"HOME": "/tmp"} if self._as_user else {}), **(env or {})}
                )
                self._started.append(self.sshd[host.name])

    def kill(self, name: str) -> None:
        """Kill a worker's process 1, and all that runs there with it."""
        worker = next(host for host in self.workers if host.name == name)
        worker.kill(self.sshd[name])
        self.sshd[name].wait()

    @property
    def env(self) -> dict[str, str]:
        """What Trainer v2 gives a launcher."""
        return {
            "JOB_COMPLETION_INDEX": "0",
            "OMPI_MCA_orte_default_hostfile": str(self.hostfile),
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": "1",
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
            **self.keys,
        }

    @property
    def keys(self) -> dict[str, str]:
        """Where the job's key is, and the port of sshd."""
        return {"TRAINER_LAUNCH_SSH_DIR": str(self.mount), "TRAINER_LAUNCH_SSH_PORT": str(PORT)}

    def launch(
        self,
        *command: str,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        platform: bool = True,
    ) -> Run:
        """Start the launcher, with Trainer v2's variables for Open MPI unless `platform` is False."""
        argv = (*LAUNCHER, "run", *options, "--", *command)
        started = self.launcher.start(
            (*self._container(), *argv), {**(self.env if platform else self.keys), **(env or {})}
        )
        self._started.append(started)
        return Run(started, self.launcher)

    def _container(self) -> tuple[str, ...]:
        """What to put before a command, so that an ordinary user without a home runs it."""
        if not self._as_user:
            return ()
        own = self.folder / f"pod-{len(self._started)}"
        own.mkdir()
        user = (pods.made_up_user(own),) if self._has_entry else ()
        return pods.wrapped(pods.opened(own), *user, user=pods.UID)

    def close(self) -> None:
        """End everything."""
        for host in (self.launcher, *self.workers):
            for below in host.processes():  # another user's outlives the one that has started it
                with contextlib.suppress(psutil.NoSuchProcess):
                    below.kill()
        for process in self._started:
            process.kill()  # process 1 of the host goes with it
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def train(self, steps: int, fault: str = "none") -> tuple[str, ...]:
        """The command of a training."""
        return (sys.executable, str(self.folder / "train.py"), str(self.checkpoint), str(steps), fault)

    def strays(self) -> list[str]:
        """What runs on the workers beside sshd."""
        return [text for host in self.workers for text in _strays_on(host)]


class Run:
    """A launcher that runs."""

    def __init__(self, process: subprocess.Popen[str], host: Host) -> None:
        self.process, self._host = process, host
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        """Read lines until one contains `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"ended before {text!r} was seen:\n{self.output}")

    def terminate(self) -> None:
        """SIGTERM to the launcher, as kubelet sends it."""
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """A signal to the launcher."""
        self._host.process_1(self.process).send_signal(number)

    def end(self, timeout_s: float = 90.0) -> int:
        """Wait for the end; the exit code."""
        assert self.process.stdout is not None
        self.lines += (
            self.process.stdout
        )  # by the same buffer as `read_until`: `communicate` would skip what it holds
        return self.process.wait(timeout_s)

    @property
    def output(self) -> str:
        """Everything that was read."""
        return "".join(self.lines)

    @property
    def last_words(self) -> str:
        """The line that says how it ended; what to do stands below."""
        return next(line for line in reversed(self.lines) if " reason=" in line)

    def steps(self) -> list[int]:
        """The steps that were trained, as told."""
        return [int(line.split()[1]) for line in self.lines if line.startswith("step ")]


@contextlib.contextmanager
def job(folder: Path, workers: int, *, as_user: bool = False, has_entry: bool = True) -> Iterator[Job]:
    """Make the hosts of a job, on which root or an ordinary user works; all is taken down afterwards."""
    require_openssh()
    require(shutil.which("mpirun.openmpi"), "needs openmpi-bin")
    names = ("job-launcher-0-0", *(f"job-node-0-{n}.job" for n in range(workers)))
    with hosts(*names) as made:
        mount = secret(folder / "mount")
        if as_user:  # as Trainer v2 mounts it: root's, 0640, with the pod's fsGroup
            os.chown(mount / "id_rsa", 0, pods.GROUP)
            (mount / "id_rsa").chmod(0o640)
        it = Job(folder, mount, made, as_user=as_user, has_entry=has_entry)
        try:
            yield it
        finally:
            it.close()


def no_strays(it: Job) -> None:
    """Nothing of the job is left on any worker."""
    eventually(lambda: not it.strays(), lambda: f"{it.strays()} are gone")


def _strays_on(host: Host) -> list[str]:
    commands = []
    for process in host.processes():
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if command and not any(word in command.split("train.py")[0] for word in _OURS):
                commands.append(f"{host.name}: {command[:80]}")
    return commands
