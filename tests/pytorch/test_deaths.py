"""Each process of a torch pod is killed at each moment of a generation: one restart at most, nothing is left.

Deaths while workers train are those of tests/survival.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import Started, launch, script, start
from tests.ports import free_port
from tests.process.world import end_all, survivors
from tests.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.long("tests/survival/test_survival.py")]

IMPORTED = """
import os, time
here = os.path.dirname(os.path.abspath(__file__))
if "HELD" in os.environ:
    open(here + "/importing", "w").close()
    while not os.path.exists(here + "/imported"):
        time.sleep(0.02)
"""
TRAIN = """
import os, signal, sys, time
here, rank = os.path.dirname(os.path.abspath(__file__)), os.environ["RANK"]

def wait_for(name):
    while not os.path.exists(f"{here}/{name}"):
        time.sleep(0.02)

def is_first(name):
    try:
        return not os.close(os.open(f"{here}/{name}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False

def say(text):
    os.write(1, (text + chr(10)).encode())  # at once

def save(*_):
    say("saving")
    wait_for("saved")
    sys.exit(0)

"""
TRAINS = """
say(f"worker {rank}")
wait_for("enough")
"""
RANK_1_FAILS = """
if is_first(f"started-{rank}"):
    if rank == "1":
        wait_for("ready")
        sys.exit(3)
    signal.signal(signal.SIGTERM, save)
    open(f"{here}/ready", "w").close()
wait_for("enough")
"""
RANK_0_LEAVES = """
say(f"worker {rank}")
if rank == "1":
    wait_for("enough")
"""


@dataclass(frozen=True)
class Moment:
    """A point of a generation's life, and how a job gets there."""

    reached: Callable[[Job], object]  # waits for it
    body: str = TRAINS
    nodes: int = 1
    held: int | None = None  # the node whose fork server does not get to the end of its imports
    here: int = 0  # the node whose processes are killed


class Job:
    """One or two launchers on loopback."""

    def __init__(self, folder: Path, moment: Moment) -> None:
        self.folder, self.moment = folder, moment
        self.tokens = [uuid.uuid4().hex for _ in range(moment.nodes)]
        self.launchers: list[Started] = []
        self._port = free_port()
        self._open = contextlib.ExitStack()
        (folder / "mine.py").write_text(IMPORTED)
        self._script = script(folder, TRAIN + moment.body)
        for _ in range(moment.nodes):
            self.start_next()

    def start_next(self) -> None:
        node, nodes = len(self.launchers), self.moment.nodes
        workers = "1" if nodes > 1 else "2"
        env = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": workers, "PET_MASTER_PORT": str(self._port)}
        env |= {"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.2", "TOKEN": self.tokens[node]}
        env |= {"HELD": "1"} if node == self.moment.held else {}
        words = ("run", "--grace", "30", "--preload", "mine", "--", self._script)
        self.launchers.append(self._open.enter_context(start(*words, env=env)))

    @property
    def here(self) -> Started:
        return self.launchers[self.moment.here]

    def touch(self, *names: str) -> None:
        for name in names:
            (self.folder / name).touch()

    def finish(self) -> str:
        """Let it end well everywhere; all that was said."""
        self.touch("imported", "saved", "enough")
        ends = [launcher.end() for launcher in self.launchers]
        output = "\n".join(output for _, output in ends)
        assert [code for code, _ in ends] == [0] * len(ends), output
        assert [survivors(token) for token in self.tokens] == [[]] * len(self.tokens), output
        return output

    def close(self) -> None:
        self._open.close()
        print(*(line for launcher in self.launchers for line in launcher.lines), sep="")  # for a test that fails
        for token in self.tokens:
            end_all(token)


def said(pattern: str, node: int = 0) -> Callable[[Job], object]:
    return lambda job: job.launchers[node].read_until(pattern)


def both_train(job: Job) -> None:
    job.here.read_until("worker [01]", times=2)


def only_node_0_trains(job: Job) -> None:
    job.launchers[0].read_until("worker 0")
    eventually((job.folder / "importing").exists, "node 1 imports")


def node_0_is_done(job: Job) -> None:
    job.launchers[1].read_until("worker 1")
    job.launchers[0].read_until("worker 0")
    words = ("status", "--json", "--pid", str(job.launchers[0].pid))

    def is_known() -> bool:
        told = json.loads(launch(*words).stdout)["job"]
        return told is not None and "done" in [state for _, _, state, _ in told["nodes"]]

    eventually(is_known, "the coordinator knows that its worker has succeeded")


MOMENTS = {
    "importing": Moment(lambda job: eventually((job.folder / "importing").exists, "it imports"), held=0),
    "formed": Moment(only_node_0_trains, nodes=2, held=1, here=1),
    "running": Moment(both_train),
    "stopping": Moment(said("saving"), body=RANK_1_FAILS),
    "done": Moment(node_0_is_done, body=RANK_0_LEAVES, nodes=2),
}


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    """A job that has reached the moment."""
    made = Job(tmp_path, MOMENTS[request.param])
    try:
        made.moment.reached(made)
        yield made
    finally:
        made.close()


# -- who is killed --------------------------------------------------------------------------------


def forked_server(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return "fork_server_process" in " ".join(process.cmdline())
    return False


def children(launcher: Started) -> list[psutil.Process]:
    return [child for child in psutil.Process(launcher.pid).children() if not is_dead(child)]


def workers(job: Job) -> list[psutil.Process]:
    """In the order of their ranks."""
    return sorted((child for child in children(job.here) if not forked_server(child)), key=rank)


def rank(worker: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):  # it ends just now
        return worker.environ().get("RANK", "")
    return ""


def first_worker(job: Job) -> psutil.Process:
    return workers(job)[0]


def worker_of_node_1(job: Job) -> psutil.Process:
    return next(child for child in children(job.launchers[1]) if not forked_server(child))


def fork_server(job: Job) -> psutil.Process:
    return next(child for child in children(job.here) if forked_server(child) and not listens(child))


def store(job: Job) -> psutil.Process:
    return next(child for child in children(job.launchers[0]) if forked_server(child) and listens(child))


def listens(process: psutil.Process) -> bool:
    return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp"))


KILLED = r"the store process of generation 1 was killed \(signal 9\)"
ENDED = r"the fork server ended \(signal 9\); it is started again"
IMPORTS = r"the fork server (?:ended (?:during its imports )?\(signal 9\)|exited); it is started again"


def is_dead(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two questions
        return True


@pytest.mark.parametrize(
    ("job", "victim", "named", "failures"),
    [
        ("importing", fork_server, IMPORTS, 0),
        ("formed", fork_server, IMPORTS, 0),
        ("formed", store, KILLED, 1),
        ("stopping", first_worker, "rank 1 ended with exit code 3", 1),
        ("stopping", fork_server, ENDED, 1),
        ("stopping", store, "rank 1 ended with exit code 3", 1),
        ("done", worker_of_node_1, "generation 1 is over: rank 1 failed on node 1 .* by signal 9", 1),
        ("done", fork_server, ENDED, 0),
        ("done", store, KILLED, 0),
    ],
    indirect=["job"],
)
def test_a_killed_process_is_named_and_costs_at_most_one_restart(
    job: Job, victim: Callable[[Job], psutil.Process], named: str, failures: int
) -> None:
    process = victim(job)
    process.kill()
    eventually(lambda: is_dead(process), "it is dead")
    job.touch("saved")
    if not re.search(named, "".join(job.here.lines)):
        job.here.read_until(named)
    output = job.finish()
    assert max(map(int, re.findall(r"(\d+) restarts? so far", output))) == failures, output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("job", ["importing", "formed", "running", "stopping"], indirect=True)
def test_a_launcher_that_is_killed_leaves_no_worker_fork_server_or_store(job: Job) -> None:
    below = children(job.here)
    assert below, "something runs below it"
    os.kill(job.here.pid, signal.SIGKILL)
    token = job.tokens[job.moment.here]
    eventually(lambda: survivors(token) == [], lambda: f"nothing of it is left: {survivors(token)}")
