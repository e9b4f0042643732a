"""`trainer_launch.launch` with real workers: results, failures, restarts, requests to stop, two nodes."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import require
from tests.pods import hosts
from tests.pytorch.launch.script import ROOT, end, program, start

pytestmark = [pytest.mark.torch, pytest.mark.process]


def test_the_ranks_results_come_back_by_every_method_and_nothing_stays_in_the_process(tmp_path: Path) -> None:
    main = """for method in ("spawn", "forkserver"):
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    say(trainer_launch.launch(add, quick(start_method=method), 3, y=4))
    until = time.monotonic() + 30  # torch's own threads may take a moment to end
    while threading.active_count() > 1 and time.monotonic() < until: time.sleep(0.01)
    say([before == (dict(os.environ), signal.getsignal(signal.SIGTERM)), threading.active_count()])"""
    code, said, output = end(start(tmp_path, main))
    assert code == 0, output
    assert said == [{"0": [0, 2, 7], "1": [1, 2, 7]}, [True, 1]] * 2


@pytest.mark.long("tests/pytorch/launch/test_launch.py")
def test_failures_are_told_and_a_crash_is_repaired_when_asked(tmp_path: Path) -> None:
    main = f"""say(failure(unlucky))
say(failure(give_back_a_function))
sys.modules["cloudpickle"] = None  # not installed
say(failure(lambda: 1))
say(trainer_launch.launch(crash_once, quick(max_restarts=1), {str(tmp_path / "mark")!r}))
say(failure(time.sleep, 60, run_policy=RunPolicy(active_deadline_seconds=1)))"""
    code, (unlucky, function, unsendable, repaired, late), output = end(start(tmp_path, main))
    assert code == 0, output
    assert unlucky[0::2] == ["WorkerFailedError", 1]
    assert "rank 1 failed on node 0" in unlucky[1].splitlines()[0]
    assert unlucky[1].splitlines()[-1] == "ValueError: no luck"
    assert "in unlucky" in unlucky[1]
    assert function[0] == "WorkerFailedError"
    assert "returned a function that cannot be pickled" in function[1]
    assert unsendable[0] == "UsageError"
    assert "pass plain values, or install cloudpickle" in unsendable[1]
    assert repaired == {"0": "1", "1": "1"}
    assert late[:2] == ["NodeError", "the job took longer than active_deadline_seconds, 1 s"]


def test_a_closure_travels_by_cloudpickle(tmp_path: Path) -> None:
    require(importlib.util.find_spec("cloudpickle") is not None, "cloudpickle is not installed")
    main = """def closure(base):
    return lambda x: [int(os.environ["RANK"]), base + x]
say(trainer_launch.launch(closure(40), quick(start_method="spawn"), 2))
say(failure(lambda: 1, open(1, closefd=False)))"""
    code, (found, unsent), output = end(start(tmp_path, main))
    assert code == 0, output
    assert found == {"0": [0, 42], "1": [1, 42]}
    assert "nor by cloudpickle (" in unsent[1]


@pytest.mark.long("tests/pytorch/launch/test_launch.py")
def test_flytes_elastic_starts_the_workers_and_its_recoverable_exception_stays_recoverable(tmp_path: Path) -> None:
    (tmp_path / "flytekit" / "exceptions").mkdir(parents=True)
    (tmp_path / "flytekit" / "exceptions" / "user.py").write_text(
        "class FlyteRecoverableException(Exception): pass\n"
    )
    top = """
from flytekit.exceptions.user import FlyteRecoverableException
from types import SimpleNamespace

class SpotGone(FlyteRecoverableException): pass

def fail(kind):
    if os.environ["RANK"] == "1": raise kind("lost the disk")
    time.sleep(60)

def limits():
    from torch.distributed import distributed_c10d
    timeout = distributed_c10d.default_pg_nccl_timeout.total_seconds()
    return [os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"], timeout]

flytes = dict(nnodes=1, nproc_per_node=2, rdzv_backend="c10d", monitor_interval=0.1, start_method="fork",
    max_restarts=0, rdzv_configs={}, nccl_heartbeat_timeout_sec=300, nccl_collective_timeout_sec=120)
"""
    main = """say(trainer_launch.launch(limits, SimpleNamespace(**flytes)))
for kind in (FlyteRecoverableException, SpotGone, ValueError):
    try:
        trainer_launch.launch(fail, SimpleNamespace(**flytes), kind)
    except Exception as problem:
        say([type(problem).__name__, str(problem).splitlines()[0]])"""
    code, (values, plain, derived, other), output = end(start(tmp_path, main, top=top))
    assert code == 0, output
    assert values == {"0": ["300", 120], "1": ["300", 120]}
    assert [plain[0], derived[0], other[0]] == [
        "FlyteRecoverableException",
        "FlyteRecoverableException",
        "WorkerFailedError",
    ]
    assert derived[1].endswith(": SpotGone: lost the disk")
    assert "RecoverableError" not in derived[1]


@pytest.mark.parametrize("thread", [0, 1], ids=["the main thread", "another thread"])
def test_asked_to_stop_the_workers_have_their_grace_and_the_script_ends_with_143(
    tmp_path: Path, thread: int
) -> None:
    """The kernel may give a signal to any thread, or a moment before the main one begins to wait."""
    main = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    main += "try:\n    trainer_launch.launch(wait, quick())\nfinally:\n    say('finally')"
    process = start(tmp_path, main)
    assert process.stdout is not None
    ready = 0
    while ready < 2:
        line = process.stdout.readline()
        assert line, "it ended before its workers were ready"
        ready += "ready" in line
    threads = sorted(int(name) for name in os.listdir(f"/proc/{process.pid}/task"))
    assert ctypes.CDLL(None).tgkill(process.pid, threads[thread], signal.SIGTERM) == 0
    code, said, output = end(process)
    assert code == 143, output
    assert output.count("saved") == 2
    assert said == ["finally"]


@pytest.mark.long("tests/pytorch/launch/test_launch.py")
def test_the_nodes_of_a_flyte_task_meet_and_each_has_its_own_ranks_results(tmp_path: Path) -> None:
    env = {
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": "0",
        "FLYTE_INTERNAL_EXECUTION_ID": "x",
        "PYTHONPATH": str(ROOT),
    }
    main = "say(trainer_launch.launch(add, Elastic(nnodes=2, nproc_per_node=1, monitor_interval=0.1), 3))"
    argv = program(tmp_path, main)
    with hosts("job-worker-0", "job-worker-1") as pods:
        ends = [end(process) for process in [pod.start(argv, env) for pod in pods]]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [said for _, said, _ in ends] == [[{"0": [0, 2, 4]}], [{"1": [1, 2, 4]}]]
