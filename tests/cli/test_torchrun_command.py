"""Commands as torchrun's documentation has them: equal on every node, with a port that the script names as well."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import Started, ends_of, launch, launched, script, start
from tests.conftest import require
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process]

SAYS_RANK = """
import os, time
os.write(1, f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
while not os.path.exists('go'):
    time.sleep(0.05)
"""
MEETS_AT_A_TYPED_ADDRESS = """
import os, sys
import torch
import torch.distributed as dist

rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
dist.init_process_group('gloo', init_method=sys.argv[1], world_size=world, rank=rank)
number = torch.ones(1)
dist.all_reduce(number)
dist.destroy_process_group()
restarts = os.environ['TORCHELASTIC_RESTART_COUNT']
if restarts == '0':
    os.kill(os.getpid(), 9)
print(f"sum {number.item()} after {restarts} {os.environ['TORCHELASTIC_USE_AGENT_STORE']}\\n", end='', flush=True)
"""


class Nodes:
    """Launchers on this machine that are started by the same command."""

    def __init__(self, folder: Path, nodes: str, *options: str) -> None:
        self._folder, self._stack = folder, ExitStack()
        meeting = ("--rdzv-id=j", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
        torchrun = ("torchrun", f"--nnodes={nodes}", "--nproc-per-node=1", *meeting)
        self._words = ("run", *options, "--", *torchrun, script(folder, SAYS_RANK))

    def start(self) -> Started:
        """Start one more."""
        return self._stack.enter_context(start(*self._words, cwd=self._folder))

    def finish(self, *nodes: Started) -> list[tuple[int, str]]:
        """Let the workers end; how these launchers do."""
        (self._folder / "go").touch()
        return [node.end() for node in nodes]

    def close(self) -> None:
        """End what a failed test has left."""
        self._stack.close()


@pytest.fixture
def nodes_of(tmp_path: Path) -> Iterator[type[Nodes]]:
    made: list[Nodes] = []

    def make(*words: str) -> Nodes:
        made.append(Nodes(tmp_path, *words))
        return made[-1]

    yield make  # type: ignore[misc]
    for nodes in made:
        nodes.close()


RANK = r"rank (\d) of 2"


def rank_of(node: Started) -> str:
    """What its worker says of itself."""
    return node.read_until(RANK)[0]


def two_nodes(nodes_of: type[Nodes]) -> tuple[Nodes, Started, Started]:
    """A job whose second node has found the first."""
    nodes = nodes_of("2")  # type: ignore[arg-type,call-arg]
    first = nodes.start()
    first.read_until("waiting up to")
    second = nodes.start()
    assert (rank_of(first), rank_of(second)) == ("0", "1")
    return nodes, first, second


@pytest.mark.parametrize("number", ["2", "1:2"])
def test_the_same_command_twice_is_a_job_of_two_nodes(number: str, nodes_of: type[Nodes]) -> None:
    nodes = nodes_of(number)  # type: ignore[arg-type,call-arg]
    started = [nodes.start(), nodes.start()]
    assert {rank_of(node) for node in started} == {"0", "1"}
    assert [code for code, _ in nodes.finish(*started)] == [0, 0]


def test_a_node_that_is_killed_returns_to_its_rank_while_the_other_stays(nodes_of: type[Nodes]) -> None:
    nodes, first, second = two_nodes(nodes_of)
    second.close()
    first.read_until("generation 1 is over")
    again = nodes.start()
    assert (rank_of(first), rank_of(again)) == ("0", "1")
    ends = nodes.finish(first, again)
    assert [code for code, _ in ends] == [0, 0]
    assert "this is node 1" in ends[1][1]


def test_when_the_first_node_is_killed_the_other_waits_for_it_and_goes_on(nodes_of: type[Nodes]) -> None:
    nodes, first, second = two_nodes(nodes_of)
    first.close()
    second.read_until("the coordinator is unreachable")
    again = nodes.start()
    assert (rank_of(again), rank_of(second)) == ("0", "1")
    assert [code for code, _ in nodes.finish(again, second)] == [0, 0]


def test_one_node_more_waits_as_a_spare_and_takes_over(nodes_of: type[Nodes]) -> None:
    nodes, first, second = two_nodes(nodes_of)
    spare = nodes.start()
    spare.read_until("this node is a spare")
    second.close()
    assert (rank_of(first), rank_of(spare)) == ("0", "1")
    assert [code for code, _ in nodes.finish(first, spare)] == [0, 0]


def test_an_address_of_nobody_ends_with_its_name_and_this_machines(tmp_path: Path) -> None:
    words = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=head.invalid:29400", script(tmp_path, SAYS_RANK))
    ended = launched("run", "--wait-timeout", "2", "--", "torchrun", *words, code=138)
    assert "the coordinator at head.invalid:29400 did not answer for 2 s" in ended.stderr
    assert f"this is {os.uname().nodename}: no address for head.invalid yet" in ended.stderr


@pytest.mark.parametrize(
    ("shared", "method", "words"),
    [
        ("True", "auto", ("--master-addr=localhost", "--master-port={}")),
        ("False", "auto", ("--master-addr=localhost", "--master-port={}")),
        ("True", "exec", ("--master-addr=localhost", "--master-port={}")),
        ("True", "auto", ("--rdzv-endpoint=localhost:{}",)),
    ],
)
def test_a_typed_port_is_where_scripts_meet_also_after_a_restart(
    shared: str, method: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    port = str(free_port())
    words = ("--nproc-per-node=2", "--max-restarts=1", *(word.format(port) for word in words))
    program = (script(tmp_path, MEETS_AT_A_TYPED_ADDRESS), f"tcp://localhost:{port}")
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if shared == "False" else {}
    ended = launched("run", "--start-method", method, "--", "torchrun", *words, *program, env=env)
    assert ended.stdout.count(f"sum 2.0 after 1 {shared}") == 2, ended.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--node-rank={}", "--master-addr=localhost", "--master-port={}"),
        ("--rdzv-id=j", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{}"),
    ],
)
def test_scripts_of_several_nodes_meet_at_the_typed_address_too(words: tuple[str, ...], tmp_path: Path) -> None:
    port = free_port()
    train = (script(tmp_path, MEETS_AT_A_TYPED_ADDRESS), f"tcp://localhost:{port}")
    with ExitStack() as stack:
        typed = [[words[0].format(str(rank)), *(word.format(port) for word in words[1:])] for rank in range(2)]
        nodes = [
            stack.enter_context(start("run", "--", "torchrun", "--nnodes=2", "--max-restarts=2", *own, *train))
            for own in typed
        ]
        ends = ends_of(nodes)
    assert [code for code, _ in ends] == [0, 0], ends
    assert all("sum 2.0 after" in output for _, output in ends), ends


def test_a_script_that_takes_the_coordinator_for_torchs_store_is_told_at_once(tmp_path: Path) -> None:
    port = str(free_port())
    where = ("--nnodes=2", "--node-rank=0", "--master-addr=localhost", f"--master-port={port}")
    asks = f"from torch.distributed import TCPStore\nTCPStore('localhost', {port})\n"
    train = script(tmp_path, asks)
    with start("run", "--", "torchrun", *where, train) as node:
        node.read_until("waiting up to")
        with start("run", "--nproc-per-node", "1", "--", train):
            node.read_until(r"it looks for torch's store, which is where MASTER_ADDR and MASTER_PORT")


def test_where_rank_0_serves_the_store_and_workers_are_executed_nobody_else_imports_torch(tmp_path: Path) -> None:
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    train = script(tmp_path, SAYS_RANK.replace("of", "is one of"))
    words = ("run", "--start-method", "exec", "--nproc-per-node", "2", "--", train)
    with start(*words, env=env, cwd=tmp_path) as started:
        started.read_until(r"rank \d is", times=2)
        below = psutil.Process(started.pid).children(recursive=True)
        assert len(below) == 2
        (tmp_path / "go").touch()
        assert started.end()[0] == 0


SEES_FLAGS = "import sys\nprint(sys.flags.dev_mode, sys.warnoptions, sys.flags.inspect)\nassert {}\n"


@pytest.mark.parametrize("method", ["exec", "auto"])
def test_pythons_own_switches_are_the_workers_and_not_the_launchers(method: str, tmp_path: Path) -> None:
    env = {"PYTHONDEVMODE": "1", "PYTHONWARNINGS": "error::ResourceWarning"}
    words = ("--start-method", method, "--nproc-per-node", "1", "--", script(tmp_path, SEES_FLAGS.format(True)))
    ended = launched("run", *words, env=env)
    assert ended.stdout == "True ['default', 'error::ResourceWarning'] 0\n"
    assert "Warning" not in ended.stderr


@pytest.mark.parametrize(("fine", "code"), [(True, 0), (False, 1)])
def test_with_pythoninspect_the_launcher_ends_with_the_code_that_it_tells(
    fine: bool, code: int, tmp_path: Path
) -> None:
    train = script(tmp_path, SEES_FLAGS.format(fine))
    words = ("run", "--nproc-per-node", "1", "--max-restarts", "0", "--", train)
    ended = launch(*words, env={"PYTHONINSPECT": "1"})
    assert (ended.returncode, ended.stdout) == (code, "False ['ignore'] 1\n")
    assert "SystemExit" not in ended.stderr


def test_a_file_beside_the_script_that_shadows_a_module_is_imported_by_each_worker_alone(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("print('the json beside', flush=True)\n")
    train = script(tmp_path, "import json\nprint(json.__file__, flush=True)\n")
    ended = launched("run", "--nproc-per-node", "2", "--", train)
    assert ended.stdout.count("the json beside") == ended.stdout.count(f"{tmp_path}/json.py") == 2
    said = "workers start without the fork server: {} has the name of a module that the fork server has imported"
    assert ended.stderr.count(said.format(tmp_path / "json.py")) == 1
    assert "Traceback" not in ended.stderr


MEETS_OTHERS = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("rank", os.environ["RANK"], "of", dist.get_world_size(), flush=True)
os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here
"""


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "2", "--node-rank", "RANK", "--master-addr", "::1", "--master-port", "PORT", "--"),
        ("--", "torchrun", "--nnodes=2", "--node-rank=RANK", "--rdzv-endpoint=[::1]:PORT"),
        ("--", "torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:PORT"),
    ],
    ids=["a bare address", "an endpoint in brackets", "ranked by arrival"],
)
def test_nodes_meet_at_an_address_of_ipv6(words: tuple[str, ...], tmp_path: Path) -> None:
    require(has_ipv6(), "needs IPv6 on loopback")
    train, port = script(tmp_path, MEETS_OTHERS), str(free_port())
    places = [[word.replace("RANK", rank).replace("PORT", port) for word in words] for rank in "10"]
    nodes = [Started(("run", "--no-prefix", *place, train), env={}, cwd=tmp_path) for place in places]
    ends = ends_of(nodes)
    assert [code for code, _ in ends] == [0, 0], ends
    outputs = [output for _, output in ends]
    assert all(f"coordinator=[::1]:{port}" in output for output in outputs)
    if "--rdzv-backend=c10d" in words:
        assert all("node=ranked-by-arrival/2" in output for output in outputs)
    assert {rank for rank in "01" if any(f"rank {rank} of 2" in output for output in outputs)} == {"0", "1"}
