"""`stopping()`: what a script that polls hears of a request to stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import Started, clean_env, script, start
from tests.ports import free_port

ALONE = """
import os, signal, sys
{before}
from trainer_launch import stopping
said = [stopping()]
os.kill(os.getpid(), signal.SIGTERM)
said += [stopping(), stopping()]
print(*said, "torch" in sys.modules)
"""
HANDLER = "signal.signal(signal.SIGTERM, lambda *_: print('the handler that was there'))"
IN_A_THREAD = """
import threading
from trainer_launch import stopping
def poll():
    try:
        stopping()
    except ValueError as problem:
        print(problem)
thread = threading.Thread(target=poll)
thread.start(), thread.join()
"""
TRAINS = """
import os, time
import torch, torch.distributed as dist
from trainer_launch import stopping

dist.init_process_group("gloo")
rank = dist.get_rank()
step = int(open("saved").read()) if os.path.exists("saved") else 0
while step < 100:
    time.sleep(0.02 * (1 + rank))  # ranks are at different places when they hear
    dist.all_reduce(torch.ones(1))
    step += 1
    print(f"rank {rank} step {step}", flush=True)
    if stopping():
        dist.barrier()
        if rank == 0:
            open("saved", "w").write(str(step))
        dist.barrier()
        break
"""


def ran(code: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", code], env=clean_env(), capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout


@pytest.mark.parametrize(("before", "more"), [("", ""), (HANDLER, "the handler that was there\n")])
def test_a_process_hears_of_its_own_request_and_is_not_ended_by_it(before: str, more: str) -> None:
    assert ran(ALONE.format(before=before)) == f"{more}False True True False\n"


def test_the_first_call_has_to_be_the_main_threads() -> None:
    assert ran(IN_A_THREAD).startswith("the first call of stopping() is another thread's")


@pytest.mark.process
@pytest.mark.torch
def test_one_evicted_pod_makes_one_common_checkpoint_and_no_step_is_repeated(tmp_path: Path) -> None:
    job = ("--nodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    train = script(tmp_path, TRAINS)

    def node(rank: int) -> tuple[str, ...]:
        return ("run", *job, "--node-rank", str(rank), "--", train)

    def steps(started: Started, rank: int, output: str) -> list[int]:
        return [int(line.split()[-1]) for line in output.splitlines() if line.startswith(f"rank {rank} step")]

    with start(*node(0), cwd=tmp_path) as zero:
        with start(*node(1), cwd=tmp_path) as one:
            one.read_until("rank 1 step 5")
            one.signal(15)
            code, output = one.end()
            assert code == 143, output
            before = steps(one, 1, output)
        zero.read_until("generation 1 is over")
        with start(*node(1), cwd=tmp_path) as again:
            assert again.end()[0] == 0
        output = zero.ends_with(0)
    done = steps(zero, 0, output)
    assert done == list(range(1, 101)), "each step once"
    assert (tmp_path / "saved").read_text() == str(before[-1])
