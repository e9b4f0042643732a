"""`torchrun --rdzv-backend trainer-launch`: no launcher anywhere, torch's own program and its own agent."""

from __future__ import annotations

import importlib.util
import signal
import uuid
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import script
from tests.conftest import require
from tests.ports import free_port
from tests.pytorch.torchrun.plugin import torchruns
from tests.waiting import eventually
from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import Client
from trainer_launch.model import Endpoint
from trainer_launch.planning import programs
from trainer_launch.supervisor.failure import parse_agent_failure

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.long("tests/pytorch/torchrun/test_supervised.py")]

REDUCE = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
said = f"sum {int(total)} rank {os.environ['RANK']} restarts {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n"
print(said, end="", flush=True)  # in one piece
dist.barrier()
"""
END = "os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here\n"


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    require(programs.loads_plug_ins(), "torchrun of this torch loads no plug-ins")


def options(port: int, *words: str, nodes: int = 2) -> list[str]:
    where = ["--rdzv-endpoint", f"localhost:{port}"] if nodes > 1 else []
    return ["--nnodes", str(nodes), "--rdzv-backend", "trainer-launch", *where, *words]


def test_one_node_needs_no_endpoint(tmp_path: Path) -> None:
    with torchruns(tmp_path, script(tmp_path, REDUCE + END), options(0, "--nproc-per-node=2", nodes=1)) as (only,):
        code, output = only.end()
    assert code == 0, output
    assert "sum 2 rank 1" in output


def test_a_worker_killed_on_the_other_node_is_started_again_with_all_others(tmp_path: Path) -> None:
    mark = tmp_path / "killed"
    kill = f"""
import os, signal
if os.environ["RANK"] == "1" and not os.path.exists({str(mark)!r}):
    open({str(mark)!r}, "x").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    port = free_port()
    each = [options(port, "--max-restarts=2", f"--rdzv-conf=node_rank={rank}") for rank in (1, 0)]
    with torchruns(tmp_path, script(tmp_path, kill + REDUCE + END), *each) as (other, host):
        (other_code, other_output), (host_code, host_output) = other.end(), host.end()
    assert (host_code, other_code) == (0, 0), host_output + other_output
    assert "sum 2 rank 0" in host_output
    assert "sum 2 rank 1" in other_output
    assert "rank 1 failed on node 1" in host_output


def test_a_node_lost_while_the_ranks_are_settled_makes_torchrun_start_again(tmp_path: Path) -> None:
    """Its store is gone or incomplete, on which torch's agent ends with a traceback."""
    port = free_port()
    with torchruns(tmp_path, script(tmp_path, REDUCE + END), options(port, "--rdzv-conf=node_rank=0")) as (host,):
        hello = say.Hello(say.VERSION, "none", 1, "lost", uuid.uuid4().hex)
        lost = Client(Endpoint("127.0.0.1", port), hello)
        lost.send(say.Join(hello.incarnation))
        met = lambda: isinstance(lost.receive(1.0), say.Go)  # noqa: E731
        eventually(met, "the nodes to meet")
        lost.send(say.Leave("gone"))
        lost.close()
        (tmp_path / "other").mkdir()
        again = options(port, "--rdzv-conf=node_rank=1")
        with torchruns(tmp_path / "other", script(tmp_path, REDUCE + END), again) as (other,):
            (host_code, host_output), (other_code, other_output) = host.end(), other.end()
    assert (host_code, other_code) == (0, 0), host_output + other_output
    assert "starting torchrun again" in host_output
    assert "sum 2 rank 1" in other_output


def test_a_node_whose_workers_are_done_starts_again_when_another_still_needs_them(tmp_path: Path) -> None:
    left = tmp_path / "left"
    early = f"""
import fcntl, os, signal, time
left = {str(left)!r}
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    while not os.path.exists(left):
        time.sleep(0.05)
    fcntl.flock(open(left), fcntl.LOCK_EX)  # rank 0 has it to its end
    time.sleep(0.5)  # torchrun looks at its workers each 0.1 s
    os.kill(os.getpid(), signal.SIGKILL)
print("leaves %s\\n" % os.environ["RANK"], end="", flush=True)
held = open(left + os.environ["RANK"], "a")
fcntl.flock(held, fcntl.LOCK_EX)
os.rename(held.name, left)
"""
    port = free_port()
    each = [options(port, "--max-restarts=2", f"--rdzv-conf=node_rank={rank}") for rank in (0, 1)]
    with torchruns(tmp_path, script(tmp_path, early), *each) as (host, other):
        (host_code, host_output), (other_code, other_output) = host.end(), other.end()
    assert (host_code, other_code) == (0, 0), host_output + other_output
    assert host_output.count("leaves 0") == 2
    assert "starting torchrun again" in host_output


def test_torchs_error_file_tells_the_first_failure_and_torchrun_exits_with_its_code(tmp_path: Path) -> None:
    fail = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(9)\ntime.sleep(60)\n"
    error = tmp_path / "error.json"
    words = options(0, "--nproc-per-node=2", "--max-restarts=5", "--rdzv-conf=max_restarts=1", nodes=1)
    with torchruns(tmp_path, script(tmp_path, fail), words, env={"TORCHELASTIC_ERROR_FILE": str(error)}) as (only,):
        code, output = only.end()
    assert code == 9, output
    told = parse_agent_failure(error.read_text())
    assert told is not None
    assert (told.rank, told.local_rank, told.exit_code, told.signal) == (1, 1, 9, None)


def test_the_others_hear_at_once_that_a_torchrun_was_asked_to_stop(tmp_path: Path) -> None:
    """Its workers may save for as long as they like; torch's handler ends the process without a word."""
    save = f"""
import os, signal, sys, time
def save(*_):
    while not os.path.exists({str(tmp_path / "heard")!r}):
        time.sleep(0.05)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
open({str(tmp_path)!r} + "/up-" + os.environ["RANK"], "w").close()
while True:
    time.sleep(0.05)
"""
    port = free_port()
    each = [options(port, f"--rdzv-conf=node_rank={rank}") for rank in (0, 1)]
    with torchruns(tmp_path, script(tmp_path, save), *each) as (host, other):
        eventually(lambda: all((tmp_path / f"up-{rank}").exists() for rank in (0, 1)), "workers to run")
        other.process.send_signal(signal.SIGTERM)
        assert host.process.stdout is not None
        for line in host.process.stdout:
            if "generation 1 is over: node 1" in line and "asked to stop" in line:
                break
        assert other.process.poll() is None, "it waits for its worker"
        (tmp_path / "heard").touch()
        assert other.end()[0] == 1
        host.process.send_signal(signal.SIGTERM)
        host.end()


def test_a_node_without_restarts_left_ends_the_job_for_all(tmp_path: Path) -> None:
    fail = "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(9)\ntime.sleep(60)\n"
    port = free_port()
    each = [options(port, f"--rdzv-conf=node_rank={rank},patience=60") for rank in (0, 1)]
    with torchruns(tmp_path, script(tmp_path, fail), *each) as (host, other):
        (host_code, host_output), (other_code, other_output) = host.end(), other.end()
    assert other_code == 1, other_output  # torch's own code
    assert host_code == 138, host_output
    assert "the job has failed: node 1" in host_output
    assert "has no restarts left" in host_output
    assert "Traceback" not in host_output


def test_a_node_above_the_maximum_waits_and_ends_with_0(tmp_path: Path) -> None:
    port, enough = free_port(), tmp_path / "enough"
    wait = f"""
import time
open({str(tmp_path)!r} + "/met-" + os.environ["RANK"] + "-of-" + os.environ["WORLD_SIZE"], "a").close()
while not os.path.exists({str(enough)!r}):
    time.sleep(0.05)
"""

    def all_are_there() -> bool:
        links = [link for link in psutil.net_connections("tcp") if link.laddr and link.laddr.port == port]
        met = all((tmp_path / f"met-{rank}-of-2").exists() for rank in range(2))
        return met and sum(link.status == psutil.CONN_ESTABLISHED for link in links) == 3

    each = ["--nnodes", "1:2", "--rdzv-backend", "trainer-launch", "--rdzv-endpoint", f"localhost:{port}"]
    with torchruns(tmp_path, script(tmp_path, REDUCE + wait + END), each, each, each) as nodes:
        eventually(all_are_there, "two that train, and a third")
        enough.touch()
        ends = [node.end() for node in nodes]
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert sorted("this is node" in output for _, output in ends) == [False, True, True], ends


def test_what_does_not_fit_is_one_sentence_and_2(tmp_path: Path) -> None:
    wrong = [options(free_port(), "--rdzv-conf=node_rnk=1"), ["--nnodes=2", "--rdzv-backend=trainer-launch"]]
    with torchruns(tmp_path, script(tmp_path, ""), *wrong) as (misspelled, nowhere):
        ends = [misspelled.end(), nowhere.end()]
    assert [code for code, _ in ends] == [2, 2], ends
    assert "did you mean node_rank?" in ends[0][1]
    assert "--rdzv-endpoint is missing" in ends[1][1]
    assert not any("Traceback" in output for _, output in ends)
