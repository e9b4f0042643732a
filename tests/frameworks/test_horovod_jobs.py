"""Real Horovod over real sshd on hosts of their own: static and elastic jobs under `trainer-launch run`."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launching import program
from tests.frameworks import building
from tests.hosts.mpi import Job, Run, job, no_strays

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(building.BUILD_S),
    pytest.mark.long("tests/mpi/test_horovod.py"),
]
ELASTIC = Path(__file__).with_name("elastic.py")
W0, W1, W2 = (f"job-node-0-{number}.job" for number in range(3))
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
print("listens %s\\n" % os.environ["HOROVOD_RANK"], end="", flush=True)
if os.environ["HOROVOD_RANK"] == "1":
    sys.exit("the reason why")
time.sleep(600)
"""
SAVE = """
import os, signal, sys, time
rank = os.environ["HOROVOD_RANK"]
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, f"written {rank}\\n".encode()))
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, f"saved {rank}\\n".encode()), sys.exit(0)))
os.write(1, f"listens {rank}\\n".encode())
while True:
    time.sleep(1)
"""


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Job]:
    """A job whose list has two of its three workers, which all run."""
    building.command(tmp_path / "bin")
    with job(tmp_path, 3) as it:
        it.start_workers(env=building.env())
        lists(it, W0, W1)
        yield it


def lists(it: Job, *names: str) -> None:
    """What the controller says: the list of hosts, and the script for those whose pods run."""
    it.hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
    beside = program(it.folder / "discover.new", "".join(f"echo {name}:1\n" for name in names))
    beside.replace(it.folder / "discover_hosts.sh")


def horovodrun(it: Job, text: str, *options: str, **env: str) -> Run:
    script = it.folder / "script.py"
    script.write_text(text)
    return launched(it, "-np", "2", building.python(), str(script), options=options, **env)


def launched(it: Job, *words: str, options: tuple[str, ...] = (), **env: str) -> Run:
    path = f"{it.folder}/bin:{os.environ['PATH']}"
    return it.launch("horovodrun", *words, options=options, env={**building.env(), "PATH": path, **env})


def test_a_static_job_reduces_over_the_hosts_of_the_platforms_list(three: Job) -> None:
    run = horovodrun(three, SUM, MY_TOKEN="secret", MY_SETTING="x")
    assert run.end() == 0, run.output
    sums = sorted(line.split(":", 1)[1] for line in run.lines if "sum" in line)
    assert sums == [f"sum 2 rank 0 on {W0}\n", f"sum 2 rank 1 on {W1}\n"]
    assert run.output.count("token None plain x") == 2


def test_a_failed_rank_ends_the_static_job_with_its_code_and_its_words(three: Job) -> None:
    words = three.folder / "last-words"
    run = horovodrun(three, FAIL, "--max-restarts", "0", "--termination-log", str(words))
    assert run.end() == 1, run.output
    assert "rank=1 exit=1 " in words.read_text()
    assert "the reason why" in words.read_text()
    no_strays(three)


def test_signals_reach_every_rank_and_sigterm_lets_each_save_within_the_grace(three: Job) -> None:
    run = horovodrun(three, SAVE, "--grace", "60")
    run.read_until("listens "), run.read_until("listens ")
    run.signal(signal.SIGUSR1)
    run.read_until("written "), run.read_until("written ")
    run.terminate()
    assert run.end() == 143, run.output
    assert run.output.count("saved") == 2
    no_strays(three)


def test_an_elastic_job_goes_on_without_a_killed_host_and_grows_by_new_ones_until_it_is_stopped(three: Job) -> None:
    bounds = ("-np", "2", "--min-np", "1", "--max-np", "3")
    script = str(three.folder / "discover_hosts.sh")
    program = (building.python(), str(shutil.copy(ELASTIC, three.folder)), "200", "0.2")
    run = launched(three, *bounds, "--host-discovery-script", script, *program)

    def awaits(pattern: str) -> None:
        for _ in range(3):
            run.read_until(pattern)

    awaits("rank 0 size 2")
    three.kill(W1)
    awaits("rank 0 size 1")
    lists(three, W0, W2)
    awaits("size 2 on job-node-0-2")
    three.start_workers(W1, env=building.env())
    lists(three, W0, W2, W1)
    awaits("size 3 on job-node-0-1")
    run.terminate()
    assert run.end() == 143, run.output
    # From the last commit on: no step is lost, and at most the one that was under way is done again.
    steps = [int(match[1]) for match in re.finditer(r"step (\d+) rank \d+ size \d+ on job-node-0-0", run.output)]
    assert all(after - before in (0, 1) for before, after in itertools.pairwise(steps)), run.output
    no_strays(three)


def test_a_static_job_waits_for_a_killed_host_and_starts_again(three: Job) -> None:
    run = horovodrun(three, SAVE, "--max-restarts", "0")
    run.read_until("listens "), run.read_until("listens ")
    three.kill(W1)
    run.read_until(f"{W1} is lost")
    three.start_workers(W1, env=building.env())
    run.read_until("listens "), run.read_until("listens ")
    run.terminate()
    assert run.end() == 143, run.output
