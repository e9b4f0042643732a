"""What a torch job is started again for, and what it is not, with real workers on two nodes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.cli.launching import script, start
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process]

# Each start leaves a mark. The error is told by torch's @record; rank 0 lives until it is stopped.
TRAIN = """
import os, sys, time
open(os.path.join({folder!r}, "start-" + os.environ["TORCHELASTIC_RESTART_COUNT"]), "a").close()
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        {ending}
    time.sleep(60)
main()
"""


def test_what_fails_the_same_way_each_time_is_not_started_ten_times(tmp_path: Path) -> None:
    said = "because the same ModuleNotFoundError has ended two starts in a row"
    program = TRAIN.format(folder=str(tmp_path), ending="import not_there")
    codes, (innocent, faulty) = ends_of(program, tmp_path, 2, 10)
    assert codes == [138, 1], innocent + faulty
    assert len(list(tmp_path.glob("start-*"))) == 2
    told_by_all = faulty.partition(" exit=")[0]  # the cause, its rank and its node
    assert innocent.startswith(f"{told_by_all} exit=138 ")
    assert "| rank 1 failed on node 1 (" in innocent
    assert ") with exit code 1" in innocent
    assert f"not restarted, {said}" in innocent
    assert "rank=1 node=1" in faulty
    assert f"not restarted, {said}" in faulty
    assert "it said: ModuleNotFoundError: No module named 'not_there'" in innocent
    assert faulty.startswith("reason=ProgramError")
    assert " retryable=false " in innocent, "it is not retried in vain"


def test_refused_arguments_are_told_by_every_node_and_nothing_is_started_again(tmp_path: Path) -> None:
    ending = "import argparse; argparse.ArgumentParser(prog='train.py').parse_args(['--lrr'])"
    codes, words = ends_of(TRAIN.format(folder=str(tmp_path), ending=ending), tmp_path, 2, 10)
    assert codes == [2, 2], words
    assert len(list(tmp_path.glob("start-*"))) == 1
    for message in words:
        assert message.startswith("reason=ProgramError ")
        assert "retryable=false" in message
        assert "| rank 1 ended with exit code 2, because it rejected its arguments: train.py: error: unr" in message


def ends_of(program: str, tmp_path: Path, nodes: int, restarts: int) -> tuple[list[int], list[str]]:
    """Exit codes and termination messages of a job of two ranks."""
    train = script(tmp_path, program)
    env = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(2 // nodes), "PET_MASTER_ADDR": "127.0.0.2"}
    env |= {"PET_MASTER_PORT": str(free_port()), "PET_MAX_RESTARTS": str(restarts)}
    words = [tmp_path / f"words-{node}" for node in range(nodes)]
    with contextlib.ExitStack() as pods:
        launchers = []
        for node in range(nodes):
            words[node].touch()
            options = ("--termination-log", str(words[node]), "--grace", "8")
            own = env | {"PET_NODE_RANK": str(node)}
            launchers.append(pods.enter_context(start("run", *options, "--", train, env=own)))
        codes = [launcher.end()[0] for launcher in launchers]
    return codes, [path.read_text() for path in words]


# Rank 0 loses its connection, nobody knows why; rank 1 takes the end of the generation for an error of its own.
CUT_OFF = """
import os, signal, time
def handler(number, frame):
    raise ValueError("asked to stop")
signal.signal(signal.SIGTERM, handler)
ready = os.path.join({folder!r}, "ready")
if os.environ["RANK"] == "1":
    open(ready, "w").close()
    while True: time.sleep(0.1)
while not os.path.exists(ready):
    time.sleep(0.05)
raise RuntimeError("[../gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
"""


def test_a_rank_that_fails_only_as_it_is_asked_to_end_is_not_accused(tmp_path: Path) -> None:
    codes, words = ends_of(CUT_OFF.format(folder=str(tmp_path)), tmp_path, 2, 0)
    assert codes == [138, 138], words
    assert words[0].startswith("reason=PeerLost node=0 ")
    assert words[1].startswith("reason=PeerLost node=1 ")
    assert "| rank 0 failed on node 0 (" in words[1]
    assert "asked to stop" not in "".join(words)


def test_a_node_on_preflights_list_is_not_admitted(tmp_path: Path) -> None:
    (tmp_path / "failing_nodes.txt").write_text(f"{os.uname().nodename}\n")
    (tmp_path / "words").touch()
    train = script(tmp_path, "print('trains', flush=True)\n")
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.2"}
    env |= {"PET_MASTER_PORT": str(free_port())}
    report = {"TRAINER_LAUNCH_REPORT": str(tmp_path / "report.json")}
    words = ("--termination-log", str(tmp_path / "words"), "--", train)
    with (
        start("run", "--", train, env=env | report | {"PET_NODE_RANK": "0"}) as first,
        start("run", *words, env=env | {"PET_NODE_RANK": "1"}) as second,
    ):
        code, output = second.end()
        assert code == 138, output
        first.signal(signal.SIGTERM)
        code, output = first.end()
    assert (code, "trains" in output) == (143, False), output
    text = (tmp_path / "words").read_text()
    assert text.startswith(f"reason=Quarantined node=1 host={os.uname().nodename} exit=138 ")
    assert "this node is quarantined: preflight found it faulty (failing_nodes.txt)" in text


# In its first life rank 1 leaves with 0 on the signal that the launcher hands on.
LEAVES = """
import os, signal, torch, torch.distributed as dist
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
signal.signal(signal.SIGUSR2, (lambda *_: os._exit(0)) if rank else signal.SIG_IGN)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
os.write(1, f"rank {rank} trains\\n".encode())  # in one piece
while life == 0:
    dist.all_reduce(torch.ones(1))
dist.barrier()
os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here
"""


def test_a_worker_that_leaves_with_0_on_a_signal_is_not_one_that_finished(tmp_path: Path) -> None:
    train = script(tmp_path, LEAVES)
    with start("run", "--nproc-per-node", "2", "--max-restarts", "1", "--", train) as launcher:
        launcher.read_until("rank . trains", times=2)
        launcher.signal(signal.SIGUSR2)
        output = launcher.ends_with(0)
    assert "still waited" not in output
