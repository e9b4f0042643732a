"""Real Horovod over real sshd on hosts of their own: static and elastic jobs under `trainer-launch run`."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.frameworks import building
from tests.hosts import mpi
from tests.hosts.mpi import no_strays

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(building.BUILD_S),
    pytest.mark.long("tests/process/test_horovod_ssh.py"),
]
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


HOSTS = tuple(f"job-node-0-{number}.job" for number in range(3))
READY = r"ready \d"  # of a rank; the launcher says how many hosts are ready


@pytest.fixture
def job(tmp_path: Path) -> Iterator[mpi.Job]:
    """A launcher and its workers, the first two of which the controller lists."""
    building.command(tmp_path / "bin")
    with mpi.job(tmp_path, len(HOSTS)) as made:
        lists(made, 0, 1)
        yield made


def lists(job: mpi.Job, *numbers: int) -> None:
    """What the controller says: the list of hosts, and the script for those whose pods run."""
    job.hostfile.write_text("".join(f"{HOSTS[number]} slots=1\n" for number in numbers))
    beside = job.folder / "discover.new"
    beside.write_text("#!/bin/sh\n" + "".join(f"echo {HOSTS[number]}:1\n" for number in numbers))
    beside.chmod(0o755)
    beside.replace(job.folder / "discover_hosts.sh")


def starts(job: mpi.Job, *numbers: int) -> None:
    job.start_workers(*(HOSTS[number] for number in numbers), env=building.env())


def launched(job: mpi.Job, *words: str, text: str = "", options: tuple[str, ...] = (), **env: str) -> mpi.Run:
    """`trainer-launch run -- horovodrun` in the launcher's pod, with a script of this text."""
    (job.folder / "train.py").write_text(text)
    told = {
        **building.env(),
        "PATH": f"{job.folder}/bin:{os.environ['PATH']}",
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_default_hostfile": str(job.hostfile),
        "OMPI_MCA_orte_set_default_slots": "1",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    }
    program = () if not text else (building.python(), str(job.folder / "train.py"))
    return job.launch("horovodrun", "-np", "2", *words, *program, options=options, env=told | env, platform=False)


def until(run: mpi.Run, pattern: str, times: int = 1) -> None:
    """Read until so many more lines match."""
    assert run.process.stdout is not None
    for line in run.process.stdout:
        run.lines.append(line)
        times -= bool(re.search(pattern, line))
        if not times:
            return
    raise AssertionError(f"ended before {pattern!r} was seen:\n{run.output}")


def test_a_static_job_reduces_over_the_hosts_of_the_platforms_list(job: mpi.Job) -> None:
    starts(job, 0, 1)
    run = launched(job, text=SUM, MY_TOKEN="secret", MY_SETTING="x")
    assert run.end() == 0, run.output
    sums = {line.strip().split(":", 1)[1] for line in run.lines if "sum" in line}
    assert sums == {f"sum 2 rank {rank} on {HOSTS[rank]}" for rank in (0, 1)}
    assert run.output.count("token None plain x") == 2


def test_a_failed_rank_ends_the_static_job_with_its_code_and_its_words(job: mpi.Job) -> None:
    starts(job, 0, 1)
    words = job.folder / "last-words"
    run = launched(job, text=FAIL, options=("--termination-log", str(words), "--max-restarts", "0"))
    assert run.end() == 1, run.output
    assert "rank 1" in words.read_text().splitlines()[0]
    assert "the reason why" in words.read_text()
    no_strays(job)


def test_sigterm_lets_every_rank_save_within_the_grace(job: mpi.Job) -> None:
    starts(job, 0, 1)
    run = launched(job, text=SAVE, options=("--grace", "60"))
    until(run, READY, times=2)
    run.terminate()
    assert run.end() == 143, run.output
    assert run.output.count("saved") == 2
    no_strays(job)


def test_an_elastic_job_goes_on_without_a_killed_host_and_grows_by_new_ones_until_it_is_stopped(
    job: mpi.Job,
) -> None:
    starts(job)
    program = shutil.copy(ELASTIC, job.folder)
    elastic = ("--min-np", "1", "--max-np", "3", "--host-discovery-script", str(job.folder / "discover_hosts.sh"))
    run = launched(job, *elastic, building.python(), str(program), "200", "0.2")
    until(run, r"step \d+ rank 0 size 2", times=3)
    job.kill(HOSTS[1])
    until(run, r"step \d+ rank 0 size 1", times=3)
    lists(job, 0, 2)
    until(run, rf"step \d+ rank \d size 2 on {HOSTS[2]}", times=3)
    starts(job, 1)
    lists(job, 0, 2, 1)
    until(run, rf"step \d+ rank \d size 3 on {HOSTS[1]}", times=3)
    steps = [int(step) for step in re.findall(rf"step (\d+) rank \d+ size \d+ on {HOSTS[0]}", run.output)]
    run.terminate()
    assert run.end() == 143, run.output
    # From the last commit on: no step is lost, and at most the one that was under way is done again.
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(steps)), steps
    no_strays(job)


def test_a_static_job_waits_for_a_killed_host_and_starts_again(job: mpi.Job) -> None:
    starts(job, 0, 1)
    run = launched(job, text=SAVE)
    until(run, READY, times=2)
    job.kill(HOSTS[1])
    until(run, rf"{re.escape(HOSTS[1])}.* is lost")
    starts(job, 1)
    until(run, READY, times=2)
