"""Real Horovod over real sshd on hosts of their own: static and elastic jobs under `trainer-launch run`."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.frameworks import building
from tests.mpi.ssh.secrets import require_openssh, secret
from tests.pods import Host, hosts
from tests.waiting import eventually

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(building.BUILD_S),
    pytest.mark.long("tests/mpi/test_horovod.py"),
]
PORT = 2222
LAUNCH = (sys.executable, "-m", "trainer_launch")
DEADLINE_S = 240  # for whatever has to happen next, on a busy machine
ELASTIC = Path(__file__).with_name("elastic.py")
SUM = """
import os, sys, time
import horovod.torch as hvd, torch
hvd.init()
total = int(hvd.allreduce(torch.ones(1), op=hvd.Sum))
print("token %s plain %s\\n" % (os.environ.get("MY_TOKEN"), os.environ.get("MY_SETTING")), end="", flush=True)
print("sum %s rank %s on %s\\n" % (total, hvd.rank(), os.uname().nodename), end="", flush=True)
"""
FAIL = """
import os, sys, time
print("ready %s\\n" % os.environ["HOROVOD_RANK"], end="", flush=True)
if os.environ["HOROVOD_RANK"] == "1":
    sys.exit("the reason why")
time.sleep(600)
"""
SAVE = """
import os, signal, sys, time
rank = os.environ["HOROVOD_RANK"]
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, f"saved {rank}\\n".encode()), sys.exit(0)))
os.write(1, f"ready {rank}\\n".encode())
time.sleep(600)
"""


READY = r"ready \d"  # of a rank; the launcher says how many hosts are ready


class Lines:
    """What a program prints, as it comes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.seen: list[str] = []
        self._came = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            with self._came:
                self.seen.append(line.rstrip())
                self._came.notify_all()

    def until(self, pattern: str, times: int = 1, after: int = 0) -> int:
        """Wait until so many lines match after a place in the output; the place after the last of them."""
        end_s = time.monotonic() + DEADLINE_S
        with self._came:
            while True:
                found = [n for n in range(after, len(self.seen)) if re.search(pattern, self.seen[n])]
                if len(found) >= times:
                    return found[times - 1] + 1
                assert self.process.poll() is None, f"ended before {pattern!r}:\n{self.text}"
                assert time.monotonic() < end_s, f"no {pattern!r}:\n{self.text}"
                self._came.wait(1.0)

    def end(self) -> int:
        code = self.process.wait(DEADLINE_S)
        self._thread.join(10)
        return code

    def close(self) -> None:
        """Of a process that was killed."""
        self.process.wait()
        self._thread.join(DEADLINE_S)
        assert self.process.stdout
        self.process.stdout.close()

    @property
    def text(self) -> str:
        return "\n".join(self.seen)


class Job:
    """A launcher and its workers, as mpi-operator makes them."""

    def __init__(self, folder: Path, launcher: Host, workers: Sequence[Host]) -> None:
        self.folder, self.launcher = folder, launcher
        self.workers = {worker.name: worker for worker in workers}
        self.mount = secret(folder / "keys")
        self.hostfile, self.script = folder / "hostfile", folder / "discover_hosts.sh"
        self.running: dict[str, subprocess.Popen[str]] = {}
        building.command(folder / "bin")
        self.lists(*self.workers)

    def lists(self, *names: str) -> None:
        """What the controller says: the list of hosts, and the script for those whose pods run."""
        self.hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
        beside = self.folder / "discover.new"
        beside.write_text("#!/bin/sh\n" + "".join(f"echo {name}:1\n" for name in names))
        beside.chmod(0o755)
        beside.replace(self.script)

    def starts(self, *names: str) -> None:
        for name in names:
            argv = (*LAUNCH, "sshd", "--ssh-dir", str(self.mount), "--ssh-port", str(PORT))
            self.running[name] = self.workers[name].start(argv, building.env())

    def kills(self, name: str) -> None:
        self.workers[name].kill(self.running[name])
        self.running.pop(name).communicate()

    @contextmanager
    def run(self, line: Sequence[str], *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Lines]:
        """`trainer-launch run` in the launcher's pod."""
        told = {
            **building.env(),
            "PATH": f"{self.folder}/bin:{os.environ['PATH']}",
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_default_hostfile": str(self.hostfile),
            "OMPI_MCA_orte_set_default_slots": "1",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        }
        argv = (*LAUNCH, "run", "--ssh-dir", str(self.mount), "--ssh-port", str(PORT), *flags, "--", *line)
        inside = ("env", *(f"{name}={value}" for name, value in {**told, **(env or {})}.items()), *argv)
        process = self.launcher.start(inside, {})
        lines = Lines(process)
        try:
            yield lines
        finally:
            process.kill()
            lines.close()

    def left(self) -> list[str]:
        """Ranks that still run on the workers."""
        found = []
        for host in self.workers.values():
            for process in host.processes():
                with contextlib.suppress(psutil.Error):
                    if "HOROVOD_RANK" in process.environ():
                        found.append(f"{process.pid} on {host.name}")
        return found

    def ends(self) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    require_openssh()
    building.site()
    with hosts("launcher", "w-0", "w-1", "w-2") as (launcher, *workers):
        made = Job(tmp_path, launcher, workers)
        try:
            yield made
        finally:
            made.ends()


def script(job: Job, text: str) -> tuple[str, str]:
    path = job.folder / "train.py"
    path.write_text(text)
    return building.python(), str(path)


def test_a_static_job_reduces_over_the_hosts_of_the_platforms_list(job: Job) -> None:
    job.lists("w-0", "w-1")
    job.starts("w-0", "w-1")
    with job.run(
        ("horovodrun", "-np", "2", *script(job, SUM)), env={"MY_TOKEN": "secret", "MY_SETTING": "x"}
    ) as lines:
        assert lines.end() == 0, lines.text
    assert {line.split(":", 1)[1] for line in lines.seen if "sum" in line} == {
        "sum 2 rank 0 on w-0",
        "sum 2 rank 1 on w-1",
    }
    assert lines.text.count("token None plain x") == 2


def test_a_failed_rank_ends_the_static_job_with_its_code_and_its_words(job: Job) -> None:
    job.lists("w-0", "w-1")
    job.starts("w-0", "w-1")
    words = job.folder / "last-words"
    flags = ("--termination-log", str(words), "--max-restarts", "0")
    with job.run(("horovodrun", "-np", "2", *script(job, FAIL)), *flags) as lines:
        assert lines.end() == 1, lines.text
    assert "rank 1" in words.read_text().splitlines()[0]
    assert "the reason why" in words.read_text()
    eventually(lambda: not job.left(), lambda: f"{job.left()} still run")


def test_sigterm_lets_every_rank_save_within_the_grace(job: Job) -> None:
    job.lists("w-0", "w-1")
    job.starts("w-0", "w-1")
    with job.run(("horovodrun", "-np", "2", *script(job, SAVE)), "--grace", "60") as lines:
        lines.until(READY, times=2)
        job.launcher.process_1(lines.process).send_signal(signal.SIGTERM)
        assert lines.end() == 143, lines.text
    assert lines.text.count("saved") == 2
    assert not job.left()


def test_an_elastic_job_goes_on_without_a_killed_host_and_grows_by_new_ones_until_it_is_stopped(job: Job) -> None:
    job.lists("w-0", "w-1")
    job.starts("w-0", "w-1", "w-2")
    line = ("horovodrun", "-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(job.script))
    program = shutil.copy(ELASTIC, job.folder)
    with job.run((*line, building.python(), str(program), "200", "0.2")) as lines:
        at = lines.until(r"step \d+ rank 0 size 2", times=3)
        job.kills("w-1")
        at = lines.until(r"step \d+ rank 0 size 1", times=3, after=at)
        job.lists("w-0", "w-2")
        at = lines.until(r"step \d+ rank \d size 2 on w-2", times=3, after=at)
        job.starts("w-1")
        job.lists("w-0", "w-2", "w-1")
        lines.until(r"step \d+ rank \d size 3 on w-1", times=3, after=at)
        steps = [int(found[1]) for found in re.finditer(r"step (\d+) rank \d+ size \d+ on w-0", lines.text)]
        job.launcher.process_1(lines.process).send_signal(signal.SIGTERM)
        assert lines.end() == 143, lines.text
    # From the last commit on: no step is lost, and at most the one that was under way is done again.
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(steps)), steps
    eventually(lambda: not job.left(), lambda: f"{job.left()} still run")


def test_a_static_job_waits_for_a_killed_host_and_starts_again(job: Job) -> None:
    job.lists("w-0", "w-1")
    job.starts("w-0", "w-1")
    with job.run(("horovodrun", "-np", "2", *script(job, SAVE))) as lines:
        at = lines.until(READY, times=2)
        job.kills("w-1")
        at = lines.until("w-1.* is lost", after=at)
        job.starts("w-1")
        lines.until(READY, times=2, after=at)
        eventually(lambda: len(job.left()) >= 2, lambda: f"only {job.left()} run")  # a host may be found lost twice
