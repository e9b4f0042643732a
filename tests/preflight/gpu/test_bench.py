"""The tests of a GPU, their real code, on the CPU at tiny sizes; and what is read from what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.preflight import gpu_collect as collect
from trainer_launch.preflight.children import gpu_bench
from trainer_launch.preflight.gpu_collect import NO_NCCL, GpuFacts, GpuTest, LoadEnding, Peers, parse_test

LIMIT_S = 60.0
FLIP = """
import torch
product, count = torch.mm, [0]
def mm(*args, **more):
    made = product(*args, **more)
    count[0] += 1
    if count[0] % 5 == 0:
        made.view(torch.int16)[7, 7] ^= 1
    return made
torch.mm = mm
"""
WAIT_LESS = """
import datetime, torch.distributed as dist
wait = dist.FileStore.wait
dist.FileStore.wait = lambda self, keys, limit: wait(self, keys, datetime.timedelta(seconds=1))
"""


def bench(sabotage: str = "", *words: str) -> GpuTest:
    """Run the real child, after a sabotage of torch."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    argv = (sys.executable, collect.BENCH, "--device", "cpu", *words)
    if sabotage:
        run = f"sys.argv = {list(argv[1:])!r}\nrunpy.run_path({collect.BENCH!r}, run_name='__main__')"
        code = f"import runpy, sys\n{sabotage}\n{run}"
        argv = (sys.executable, "-c", code)
    ended = subprocess.run(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=100, check=False
    )
    return parse_test(0, "", Ended(status=ended.returncode, stdout=ended.stdout), LIMIT_S)


@pytest.mark.torch
def test_everything_is_measured_on_the_cpu_as_on_a_gpu() -> None:
    first, second = bench("", "--burn", "0.2"), bench()
    assert [(one.ending, one.why) for one in (first, second)] == [(LoadEnding.DONE, "")] * 2
    assert [name for name, _, _ in first.figures] == ["gemm", "gemm-burn", "hbm-copy", "h2d", "d2h"]
    assert first.repeats > second.repeats == 20  # the product is compared while the card gets hot, too
    assert [name for name, _, _ in second.figures] == ["gemm", "hbm-copy", "h2d", "d2h"]
    assert all(value > 0 for _, value, _ in first.figures)
    assert first.different == 0
    assert first.peers is not None
    assert first.peers.good
    assert first.facts["torch"]
    assert first.facts["model"] == "CPU"


@pytest.mark.torch
def test_a_product_that_comes_out_otherwise_now_and_then_is_seen() -> None:
    found = bench(FLIP)
    assert found.ending is LoadEnding.DONE
    assert found.different >= 3


@pytest.mark.torch
@pytest.mark.long("tests/preflight/gpu/test_bench.py")
def test_all_gpus_of_a_node_add_right_together() -> None:
    """Two, on the CPU with gloo; a third one that does not come is not waited for for ever."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    argv = (sys.executable, collect.BENCH, "--device", "cpu")
    load = collect.loaded(GpuFacts(trouble="no GPU"), ((0, "0"), (1, "1")), env, argv, 100.0)
    assert [(one.ending, one.why) for one in load.tests] == [(LoadEnding.DONE, "")] * 2
    assert [(one.peers.good, one.peers.why) for one in load.tests if one.peers] == [(True, "")] * 2
    assert all(one.peers is not None and one.peers.rate > 0 for one in load.tests)


@pytest.mark.torch
def test_who_waits_for_a_gpu_that_does_not_come_says_so(tmp_path: Path) -> None:
    found = bench(WAIT_LESS, "--peers", f"0:2:{tmp_path}")
    assert found.ending is LoadEnding.DONE
    assert found.peers is not None
    assert found.peers.why == "not all GPUs got that far"


@pytest.mark.torch
def test_a_torch_that_sees_no_gpu_says_so() -> None:
    argv = (sys.executable, collect.BENCH)
    said = subprocess.run(argv, capture_output=True, timeout=100, check=False).stdout
    found = parse_test(0, "", Ended(status=0, stdout=said), LIMIT_S)
    assert found.ending is LoadEnding.FAILED
    assert "sees no GPU" in found.why


def test_a_python_without_torch_says_so() -> None:
    argv = (sys.executable, "-I", "-S", collect.BENCH)
    said = subprocess.run(argv, capture_output=True, timeout=100, check=False).stdout
    assert parse_test(0, "", Ended(status=0, stdout=said), LIMIT_S).ending is LoadEnding.NO_TORCH


@pytest.mark.parametrize(
    ("lines", "network"),
    [
        (
            ["NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.7<0>", "NCCL INFO Using network IB"],
            "IB",
        ),
        (["NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>", "NCCL INFO Using network Socket"], "Socket"),
        (["NCCL INFO Assigned NET plugin Socket to comm"], "Socket"),
        (["NCCL INFO NET/OFI Selected provider is efa", "NCCL INFO Using network AWS Libfabric"], "AWS"),
        (["NCCL INFO NET/IB : No device found.", "NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>"], "Socket"),
        (["NCCL version 2.28.9+cuda13.0"], ""),
    ],
)
def test_the_network_is_read_from_nccls_log(lines: list[str], network: str) -> None:
    assert gpu_bench.network_in("\n".join(f"host:7:9 [0] {line}" for line in lines)) == network


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), ""),
        (("Enabled", "Enabled"), "all"),
        (("Disabled", "Disabled"), "none"),
        (("Disabled", "Enabled"), "some"),
    ],
)
def test_whether_adapters_reach_gpus_directly_is_read_from_nccls_log(words: tuple[str, ...], told: str) -> None:
    log = [
        f"h:7:9 [0] NCCL INFO NET/IB : GPU Direct RDMA {word} for HCA {at} 'mlx5_{at}'"
        for at, word in enumerate(words)
    ]
    assert gpu_bench.gpudirect_in("\n".join(log)) == told


def lines(*told: dict[str, Any]) -> bytes:
    return b"\n".join(json.dumps(one).encode() for one in told)


@pytest.mark.parametrize(
    ("seen", "ending", "text"),
    [
        (Ended(status=-9, timed_out=True), LoadEnding.DIED, "hung at 'gemm', and was killed after 60 s"),
        (Ended(status=None, timed_out=True), LoadEnding.STUCK, "not even SIGKILL ends it"),
        (Ended(status=-11, timed_out=False), LoadEnding.DIED, "died at 'gemm' (signal 11)"),
        (Ended(status=3, timed_out=False), LoadEnding.DIED, "died at 'gemm' (exit code 3)"),
    ],
)
def test_how_a_child_ended_is_told_with_the_stage_it_was_at(seen: Ended, ending: LoadEnding, text: str) -> None:
    found = parse_test(3, "GPU-3", replace(seen, stdout=lines({"stage": "device"}, {"stage": "gemm"})), LIMIT_S)
    assert found.ending is ending
    assert text in found.why


def test_a_line_that_was_cut_leaves_what_was_found_before() -> None:
    said = lines(
        {"stage": "device", "facts": {"torch": "2"}}, {"stage": "gemm", "figures": [["gemm", 1.5, "TFLOP/s"]]}
    )
    found = parse_test(0, "", Ended(status=-9, timed_out=True, stdout=said + b'\n{"stage": "mem'), LIMIT_S)
    assert (found.stage, found.figures) == ("gemm", (("gemm", 1.5, "TFLOP/s"),))


CUDA_ON_CPU = """
import os, sys, types
import torch, torch.distributed as dist
from trainer_launch.preflight.children import gpu_bench
class Device(str):  # torch takes it for the CPU, the bench for a GPU
    def __eq__(self, other): return str(other) in ("cuda", "cpu")
    __hash__ = str.__hash__
card = types.SimpleNamespace(name="NVIDIA H200", uuid="1234")
cuda = dict(is_available=lambda: True, get_device_properties=lambda index: card,
            get_device_capability=lambda index: (7, 0), synchronize=lambda: None,
            mem_get_info=lambda: (1 << 24, 1 << 24), empty_cache=lambda: None)
for name, value in cuda.items():
    setattr(torch.cuda, name, value)
dist.is_nccl_available = lambda: True
ones, init, randn = torch.ones, dist.init_process_group, torch.randn
def random(*size, dtype, **more):
    if dtype is torch.bfloat16:
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
    return randn(*size, dtype=dtype, **more)
torch.randn = random
torch.ones = lambda *size, pin_memory=False, **more: ones(*size, **more)
def meet(backend, **more):
    assert backend == "nccl"
    os.write(1, b"host:7:9 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.7<0>\\n")
    os.write(1, b"host:7:9 [0] NCCL INFO Using network IB\\nwhat nobody asked for\\n")
    init("gloo", **more)
dist.init_process_group = meet
out = os.dup(1)
aside = os.memfd_create("aside")
os.dup2(aside, 1)
gpu_bench.Bench(out, Device("cpu")).run(aside)
os._exit(0)
"""


def on_cuda(code: str) -> GpuTest:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = (sys.executable, "-c", code)
    ended = subprocess.run(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=100, check=False
    )
    return parse_test(0, "", Ended(status=0, stdout=ended.stdout), LIMIT_S)


@pytest.mark.torch
def test_a_torch_that_sees_no_gpu_says_what_cuda_says() -> None:
    """Such as that the machine's fabric manager does not run."""
    blind = """torch.cuda.is_available, torch.version.cuda = lambda: False, "13.0"
def init(): raise RuntimeError("Error 802: system not yet initialized")
torch.cuda.init = init
out = os.dup(1)"""
    found = on_cuda(CUDA_ON_CPU.replace("out = os.dup(1)", blind))
    assert found.why.endswith("built with CUDA 13.0, sees no GPU: Error 802: system not yet initialized")


@pytest.mark.torch
@pytest.mark.parametrize("peers", ["0:1:", "0:2:/no/such/folder"])
def test_a_torch_without_nccl_leaves_that_test_out(peers: str) -> None:
    code = CUDA_ON_CPU.replace("dist.is_nccl_available = lambda: True", "").replace(
        'Device("cpu"))', f'Device("cpu"), "{peers}")'
    )
    found = on_cuda(code)
    assert (found.ending, found.why) == (LoadEnding.DONE, "")
    assert found.peers == (None if peers == "0:1:" else Peers(good=True, rate=0.0, why=NO_NCCL))


@pytest.mark.torch
def test_what_is_only_done_with_cuda_runs_too() -> None:
    """The same code with CUDA's calls played: names and arguments fit, NCCL's log is found on the output.

    The card is a V100, which has no bfloat16.
    """
    found = on_cuda(CUDA_ON_CPU)
    assert (found.ending, found.why) == (LoadEnding.DONE, "")
    assert found.facts["model"] == "NVIDIA H200"
    assert found.uuid == "1234"
    assert found.network == "IB"
    assert found.stage == "end"
