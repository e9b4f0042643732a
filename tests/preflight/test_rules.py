"""Rules accuse only what is faulty: beside each rule that names a culprit stands one that only looks guilty."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.preflight.gpus import FACTS
from tests.preflight.world import GIB, HEALTHY, MIB, STORED, Names, subject
from trainer_launch.host import network
from trainer_launch.host.deadline_subprocess import Ended, Tried
from trainer_launch.host.network import AdapterPort
from trainer_launch.model import Gpus, NodeRange
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight import container_checks, registry
from trainer_launch.preflight.check import Subject, Where
from trainer_launch.preflight.cluster import node_facts
from trainer_launch.preflight.gpu_collect import (
    LOAD,
    NO_NCCL,
    Cards,
    Gpu,
    GpuTest,
    LoadEnding,
    Peers,
    parse_test,
)
from trainer_launch.preflight.rules import CLOCKS, LANES, RULES
from trainer_launch.preflight.thresholds import load_table

NDR, EDR, HDR = "400 Gb/sec (4X NDR)", "100 Gb/sec (4X EDR)", "200 Gb/sec (4X HDR)"


def of_gpu(env: Any = None, topology: Any = None, **facts: Any) -> Subject:
    """A node whose second card tells this."""
    second = replace(FACTS.gpus[1], facts={**FACTS.gpus[1].facts, **facts})
    return with_gpus((FACTS.gpus[0], second), env=env or {}, topology=topology)


def all_cards(env: Any = None, workers: Any = 2, **facts: Any) -> Subject:
    """A node each of whose cards tells this."""
    cards = (replace(gpu, facts={**gpu.facts, **facts}) for gpu in FACTS.gpus)
    return with_gpus(tuple(cards), env=env or {}, topology={"local_world_size": workers})


def with_gpus(gpus: tuple[Gpu, ...], **changes: Any) -> Subject:
    return subject(cards=Cards(lambda: replace(FACTS, gpus=gpus)), **changes)


def with_tests(env: Any = None, adapters: tuple[AdapterPort, ...] = HEALTHY.adapters, **changes: Any) -> Subject:
    """A node the test of whose second card ended so."""
    first, second = FACTS.tests
    cards = Cards(lambda: replace(FACTS, tests=(first, replace(second, **changes))))
    return subject(cards=cards, adapters=adapters, env=env or {})


def with_ports(*rates: str, gpus: int = 2, **changes: Any) -> Subject:
    """Ports of these rates; one of none is down."""
    ports = tuple(AdapterPort(f"mlx5_{number}", 1, bool(rate), rate) for number, rate in enumerate(rates))
    return subject(adapters=ports, host={"gpus": replace(HEALTHY.host.gpus, count=gpus)}, **changes)


def shared_card(**facts: Any) -> Subject:
    """A pod of several that has one GPU, which other pods may use as well."""
    one = {"gpus": replace(HEALTHY.host.gpus, count=1)}
    gpus = (replace(FACTS.gpus[0], facts={**FACTS.gpus[0].facts, **facts}),)
    return with_gpus(gpus, host=one, topology={"local_world_size": 1})


def lost_a_card(uuid: str, **changes: Any) -> Subject:
    """A node that does not have the card of this UUID, which the job names."""
    facts = replace(FACTS, gpus=FACTS.gpus[:1], absent=(uuid,), **changes)
    return subject(cards=Cards(lambda: facts), env={"CUDA_VISIBLE_DEVICES": f"GPU-0,{uuid}"})


def storing(tried: Tried) -> Subject:
    locked = Tried(values={"bytes": 1.0})
    return subject(try_out=lambda what, argument, limit_s: tried if what == "storage" else locked)


def findings(node: Subject, name: str) -> list[Finding]:
    check = next(one for one in registry.CHECKS if one.id == name)
    return list(check.run(node))


def fails(node: Subject, name: str) -> list[str]:
    return [finding.text for finding in findings(node, name) if finding.status is Status.FAIL]


IMPORTING = GpuTest(ending=LoadEnding.NOT_RUN, stage="import torch", why="its test hung at 'import torch'")
APART: dict[str, Any] = {"ending": LoadEnding.FAILED, "stage": "peers", "peers": None}
FABRIC = {"state": 3, "status": 0, "health": 0xAA, "cluster": "ab" * 16, "clique": 1}
A6000 = {"name": "NVIDIA RTX A6000", "nvlinks": [1] * 4}
# By check and fact of a rule that fails a node or a job: somebody who only looks guilty.
INNOCENT: dict[tuple[str, str], Subject] = {
    # Eight forked workers share what torch takes.
    ("pids", "one"): subject(topology={"local_world_size": 8}, pids=(100, 20)),
    ("nofile", "certain"): subject(
        limits=replace(HEALTHY.limits, nofile_soft=300), topology={"nodes": NodeRange(1000, 1000)}
    ),
    ("memlock", "refused"): subject(try_out=lambda what, argument, limit_s: Tried(timed_out=True)),
    ("shm", "broken"): subject(host={"shm_bytes": 64 * MIB, "shm_free_bytes": MIB}),
    ("storage", "hangs"): storing(replace(STORED, values={**STORED.values, "seconds": 19.0})),
    ("storage", "refused"): storing(Tried(problem="no child could be started")),
    ("storage", "fails"): storing(replace(STORED, values={**STORED.values, "free_bytes": 1e6})),
    ("own-name", "wrong"): subject(lookup=lambda name: frozenset({"127.0.1.1"})),  # GLOO_SOCKET_IFNAME is set
    ("dns", "never there"): subject(job=replace(HEALTHY.job, contract="mpijob-v1"), lookup=lambda name: _refuse()),
    ("dns", "absent"): subject(job=replace(HEALTHY.job, contract="tfjob-v1"), lookup=lambda name: _refuse()),
    ("gloo-socket-ifname", "wrong"): subject(env={"GLOO_SOCKET_IFNAME": "eth9"}),  # NCCL does the work
    ("nccl-socket-ifname", "wrong"): subject(
        host={"gpus": replace(HEALTHY.host.gpus, count=0)}, env={"NCCL_SOCKET_IFNAME": "ib"}
    ),
    ("nccl-ib-hca", "all down"): with_ports("", "", env={"NCCL_IB_HCA": ""}),  # so by design, as nobody wants one
    ("nccl-ib-hca", "left out"): with_ports(NDR, NDR, env={"NCCL_IB_HCA": "=mlx5_1,mlx5_7"}),
    ("gpu-count", "hangs"): subject(cards=Cards(lambda: replace(FACTS, trouble="no library", gpus=()))),
    ("gpu-count", "shown"): subject(
        env={"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2,MIG-3"}, host={"gpus": replace(HEALTHY.host.gpus, count=3)}
    ),
    ("gpu-count", "elsewhere"): subject(env={"CUDA_VISIBLE_DEVICES": "GPU-0,GPU-1"}),
    ("gpu-count", "for workers"): subject(is_torch=False, topology={"local_world_size": 16}),
    ("gpu-recovery", "lost"): with_gpus((FACTS.gpus[0], Gpu(index=1, unknown={"recovery": "no answer"}))),
    ("gpu-recovery", "recovery"): of_gpu(recovery=0),
    ("gpu-ecc", "sram_threshold"): of_gpu(sram_threshold=False),
    ("gpu-ecc", "ecc_uncorrected"): of_gpu(ecc_corrected=10**6),
    ("gpu-remap", "remapped"): of_gpu(remapped=[5, 9, 0, 0]),  # they have their spare rows
    ("gpu-remap", "retired_pending"): of_gpu(retired_pending=0),
    ("gpu-mig", "mig asked for"): with_gpus(
        tuple(replace(gpu, facts={**gpu.facts, "mig": 1}) for gpu in FACTS.gpus),
        env={"CUDA_VISIBLE_DEVICES": "MIG-1"}, topology={"local_world_size": 1},
    ),
    ("gpu-mig", "mig left on"): with_gpus(
        tuple(replace(gpu, facts={**gpu.facts, "mig": 1}) for gpu in FACTS.gpus),
        env={"CUDA_VISIBLE_DEVICES": "MIG-1"}, topology={"local_world_size": 1},
    ),
    ("gpu-memory", "memory held"): of_gpu(memory_used=900 << 20, memory_total=141 * GIB),
    ("gpu-load", "not built"): with_tests(ending=LoadEnding.NO_TORCH, why="No module named 'torch'"),
    ("gpu-load", "not ready"): of_gpu(fabric={**FABRIC, "state": 2}),  # and it computes
    ("gpu-load", "unseen"): with_tests(ending=LoadEnding.NOT_RUN, stage="device", why="CUDA out of memory"),
    ("gpu-load", "crashed"): with_tests(ending=LoadEnding.NOT_RUN, stage="gemm", why="its test died (signal 9)"),
    ("gpu-load", "stuck"): with_tests(ending=LoadEnding.NOT_RUN, stage="import torch", why=IMPORTING.why),
    ("gpu-load", "wrong"): with_tests(ending=LoadEnding.NOT_RUN, stage="import torch", why=IMPORTING.why),
    ("gpu-peers", "wrong sums"): with_tests(peers=Peers(good=True, rate=0.0, why="not all GPUs got that far")),
    ("gpu-peers", "misled"): with_tests(**APART, why="NCCL error: No space left on device"),
    ("gpu-peers", "not built"): replace(with_tests(**APART, why="named symbol not found"), is_torch=False),
    ("gpu-peers", "held apart"): with_tests(**APART, why="unhandled system error: No space left on device"),
    ("gpu-peers", "apart"): with_tests(**APART, why="Error while creating shared memory segment /dev/shm/nccl-1"),
    ("gpu-network", "fallback"): subject(
        env={"NCCL_IB_DISABLE": "1"},
        cards=Cards(lambda: replace(FACTS, tests=(replace(FACTS.tests[0], network="Socket"),))),
    ),
    # At its power limit all the time, and hot in a single look.
    ("gpu-clocks", CLOCKS): of_gpu(**{CLOCKS: {"looks": 400, "times": {"4": 400, "64": 1}}}),
    ("gpu-pcie", "fewer lanes"): of_gpu(**{LANES: [0, 16]}),  # a virtual machine tells none
    ("gpu-nvlink", "fabric"): of_gpu(fabric={**FABRIC, "state": 0, "status": 999, "health": 0x11}),  # has none
    ("gpu-nvlink", "links"): with_gpus(  # bridged in pairs, and one without a bridge
        tuple(replace(gpu, facts={**gpu.facts, **A6000, "nvlinks": [1 - gpu.index] * 4}) for gpu in FACTS.gpus)
    ),
    ("gpu-xid", f"{LOAD}xids"): of_gpu(**{f"{LOAD}xids": [13, 31]}),  # programs cause these
}  # fmt: skip
NO_LOCK = lambda what, argument, limit_s: STORED if what == "storage" else Tried(errno=12)  # noqa: E731
NO_GPUS = {"gpus": replace(HEALTHY.host.gpus, count=0)}
ON_CPUS = replace(HEALTHY.job, nproc_per_node=2)
ONE_RANK = {"local_world_size": 1, "nodes": NodeRange(1, 1)}
FEW_FILES = replace(HEALTHY.limits, nofile_soft=1024)
GAUDI = {"gpus": Gpus(count=8, reason="8 Gaudi devices", is_nvidia=False, device="hpu")}
ELASTIC = {"nodes": NodeRange(2, 4096)}  # 4096 as a large number
ONE_OF_TWO = {"local_world_size": 1, "nodes": NodeRange(2, 2)}
OTHER_RAIL = (AdapterPort("mlx5_0", 1, False, NDR), AdapterPort("mlx5_9", 1, True, NDR))
EFA = (AdapterPort("rdmap0s6", 1, True, EDR, is_foreign=True),)
ETHERNET = (AdapterPort("mlx5_0", 1, True, EDR, is_ethernet=True),)
NO_HCA = {"NCCL_IB_HCA": ""}
NOT_READY = "torch 2.11, built with CUDA 13.0, sees no GPU: Error 802: system not yet initialized"
NO_CUDA = "torch 2.11, built with CUDA 13.0, sees no GPU: CUDA unknown error"
CPU_TORCH = "RuntimeError: torch 2.13.0+cpu, built without CUDA, sees no GPU"
GH200: dict[str, Any] = {"name": "NVIDIA GH200 480GB", "nvlinks": [0] * 18, "memory_used": 3 * GIB}
# By check: more of them, of other fleets.
ALSO: list[tuple[str, Subject]] = [
    ("memory", subject(host={"memory_limit_bytes": 128 * MIB})),  # of an init container alone
    ("gpu-pcie", all_cards(**{LANES: [8, 16]})),  # slots of 8 lanes
    ("gpu-mig", all_cards(mig=1, mig_parts=1, env={"NVIDIA_VISIBLE_DEVICES": "void"}, workers=1)),  # by CDI
    ("gpu-mig", all_cards(mig=1, mig_parts=1, env={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia"}, workers=1)),
    ("gpu-memory", of_gpu(memory_used=40 * GIB, memory_total=80 * GIB, topology=ONE_RANK)),  # time slicing
    ("gpu-memory", of_gpu(memory_used=40 * GIB, env={"CUDA_MPS_PIPE_DIRECTORY": "/mps"})),
    ("gpu-memory", shared_card(memory_used=40 * GIB)),  # each pod of the job has such a part
    ("gpu-memory", all_cards(**GH200)),  # the kernel has files there
    ("gpu-load", with_tests(ending=LoadEnding.FAILED, stage="nccl", peers=None, why="no NCCL")),
    *(
        ("gpu-load", replace(with_tests(ending=LoadEnding.FAILED, stage="device", why=why), is_torch=False))
        for why in (CPU_TORCH, NO_CUDA)
    ),
    ("gpu-peers", with_tests(ending=LoadEnding.NOT_RUN, stage="peers", peers=None, why="CUDA out of memory")),
    ("gpu-peers", with_tests(peers=Peers(good=True, rate=0.0, why=NO_NCCL))),
    ("gpu-network", with_tests(network="Socket", adapters=OTHER_RAIL, env={"NCCL_IB_HCA": "=mlx5_0"})),
    ("gpu-network", with_tests(network="Socket", adapters=ETHERNET, env=NO_HCA)),
    ("gpu-network", with_tests(network="Socket", env={"NCCL_NET": "socket"})),
    ("nccl-ib-hca", with_ports("", "", env={"NCCL_NET": "Socket"})),
    ("nccl-ib-hca", subject(env={"NCCL_IB_HCA": "^mlx5"})),  # the others are not for this job
    ("nccl-ib-hca", subject(adapters=EFA)),  # which a plug-in uses, whatever a common manifest has for others
    ("nofile", subject(limits=FEW_FILES, host=NO_GPUS, job=ON_CPUS, topology=ELASTIC)),
    ("nofile", subject(limits=FEW_FILES, host=GAUDI, job=ON_CPUS, topology={"nodes": NodeRange(1000, 1000)})),
    ("own-name", subject(host=GAUDI, job=ON_CPUS, env={"GLOO_SOCKET_IFNAME": ""}, interfaces=(), lookup=Names({}))),
    ("gloo-socket-ifname", subject(host=GAUDI, job=ON_CPUS, env={"GLOO_SOCKET_IFNAME": "eth9"})),
    ("shm", subject(topology=ONE_RANK, write_problem=lambda size: 28)),  # it needs none
    ("memlock", subject(env={"NCCL_IB_DISABLE": "1"}, try_out=NO_LOCK)),
    ("memlock", with_ports("", "", try_out=NO_LOCK)),
    ("memlock", subject(host=NO_GPUS, job=ON_CPUS, try_out=NO_LOCK)),
    ("nccl-ib-hca", subject(host=NO_GPUS, job=ON_CPUS, env={"NCCL_IB_HCA": "^mlx5"})),
    ("nccl-ib-hca", with_ports("", "", gpus=0, job=ON_CPUS)),
    ("storage", storing(replace(STORED, values={**STORED.values, "lacks": 3.0, "free_bytes": -1.0}))),  # a bucket
]


def _refuse() -> frozenset[str]:
    raise OSError(-2, "Name or service not known")


def test_each_rule_that_names_a_culprit_has_an_innocent() -> None:
    here = registry.ids(Where.CONTAINER, Where.GPU)
    assert {(rule.check, rule.fact) for rule in RULES if rule.fault and rule.check in here} == set(INNOCENT)


@pytest.mark.parametrize(("check", "node"), [*((check, node) for (check, _), node in INNOCENT.items()), *ALSO])
def test_who_only_looks_guilty_is_not_accused(check: str, node: Subject) -> None:
    assert fails(node, check) == []


def test_nvlinks_of_a_card_that_has_no_other_to_link_to_may_be_down() -> None:
    alone = (with_gpus((replace(gpu, facts={**gpu.facts, **facts}),)) for gpu, facts in _LONELY)
    assert [one.status for node in alone for one in findings(node, "gpu-nvlink")] == [Status.PASS] * 2


_LONELY = [(FACTS.gpus[0], GH200), (FACTS.gpus[0], {"nvlinks": [0] * 18})]


def test_every_remedy_is_a_word_of_the_schema_and_a_node_is_drained_only_for_what_is_its_own() -> None:
    words = {rule.remedy for rule in RULES} - {"", "{value[1]}"}
    assert words <= {"RESET", "REBOOT", "DRAIN", "RMA", "FIX_JOB", "FIX_IMAGE"}
    blameless = {rule.check for rule in RULES if rule.fault is Fault.NODE and not rule.remedy}
    # A server, a missing pod, what a container lacks, another pod, adapters slower than those of others.
    of_gpus = {"gpu-load", "gpu-memory", "gpu-peers"}
    assert blameless == {"storage", "dns", "roll-call", "mpi-hosts", "facts", *of_gpus}
    assert all(rule.remedy in ("FIX_JOB", "FIX_IMAGE") for rule in RULES if rule.fault is Fault.JOB)


@pytest.mark.parametrize(
    ("facts", "remedy"),
    [
        ({"recovery": 1}, "RESET"),
        ({"recovery": 2}, "REBOOT"),
        ({"recovery": 99}, "DRAIN"),
        ({f"{LOAD}xids": [79]}, "REBOOT"),
        ({f"{LOAD}xids": [48, 13]}, "RESET"),
        ({f"{LOAD}xids": [62]}, "DRAIN"),
        ({"remapped": [0, 9, 1, 1]}, "RMA"),
        ({"sram_threshold": True}, "RMA"),
    ],
)
def test_a_device_says_itself_what_helps(facts: dict[str, Any], remedy: str) -> None:
    node = of_gpu(**facts)
    every = [finding for check in registry.at(Where.GPU) for finding in check.run(node)]
    assert [finding.remedy for finding in every if finding.status is Status.FAIL] == [remedy]


def in_cliques(*cliques: int) -> Subject:
    """A node whose cards are in these cliques of an NVLink fabric."""
    fabrics = [{"fabric": {**FABRIC, "clique": clique}} for clique in cliques]
    cards = (replace(gpu, facts={**gpu.facts, **fabric}) for gpu, fabric in zip(FACTS.gpus, fabrics, strict=True))
    return with_gpus(tuple(cards))


NO_GPUDIRECT = replace(FACTS.tests[0], gpudirect="none")
NO_ROOM = "NCCL error: Error while creating shared memory segment /dev/shm/nccl-1: No space left on device"
HARD: list[tuple[Subject, str, str]] = [
    *((of_gpu(fabric={**FABRIC, "health": health}), "gpu-nvlink", "fail") for health in (0xA9, 0x9A)),
    (of_gpu(fabric={**FABRIC, "health": 0xA6}), "gpu-nvlink", "warn"),
    (of_gpu(fabric={**FABRIC, "state": 2}), "gpu-nvlink", "warn"),
    (of_gpu(fabric={**FABRIC, "status": 999}), "gpu-nvlink", "fail"),
    (of_gpu(nvlinks=[0] * 18), "gpu-nvlink", "fail"),
    (of_gpu(spent_banks=2), "gpu-remap", "warn"),
    (of_gpu(**{f"{LOAD}pcie_generation": [4, 5]}), "gpu-pcie", "warn"),
    (of_gpu(**{f"{LOAD}xids": [94, 63]}), "gpu-xid", "warn"),
    (in_cliques(1, 8), "gpu-nvlink", "warn"),
    (with_tests(ending=LoadEnding.DIED, stage="peers", peers=None, why="its test died"), "gpu-peers", "fail"),
    (subject(cards=Cards(lambda: replace(FACTS, tests=(NO_GPUDIRECT,)))), "gpu-network", "warn"),
    *((of_gpu(**{CLOCKS: {"looks": 9, "times": {bit: 9}}}), "gpu-clocks", "fail") for bit in ("8", "32")),
    (with_tests(ending=LoadEnding.FAILED, stage="device", why="CUDA error: unknown"), "gpu-load", "fail"),
    (with_tests(**APART, why="NCCL error: Bootstrap : no socket interface found"), "gpu-peers", "fail"),
    (with_tests(**APART, why="NCCL error: remote process exited"), "gpu-peers", "fail"),
    (with_tests(**APART, why=NO_ROOM), "gpu-peers", "warn"),
    (with_tests(ending=LoadEnding.FAILED, stage="device", why=NOT_READY), "gpu-load", "fail"),
    (with_tests(ending=LoadEnding.FAILED, stage="device", why=NO_CUDA), "gpu-load", "fail"),
    (with_tests(network="Socket", adapters=ETHERNET, env=NO_HCA), "gpu-network", "warn"),
    (all_cards(**{LANES: [8, 16]}), "gpu-pcie", "warn"),
    (of_gpu(**{LANES: [8, 16]}), "gpu-pcie", "fail"),
    (of_gpu(name="NVIDIA A100 80GB PCIe", **{LANES: [8, 16]}), "gpu-pcie", "warn"),  # so may its slot be made
    (of_gpu(memory_used=40 * GIB, memory_total=80 * GIB), "gpu-memory", "fail"),
    (of_gpu(memory_used=40 * GIB, memory_total=80 * GIB, topology=ONE_RANK), "gpu-memory", "warn"),
    (of_gpu(mig=1, mig_parts=1), "gpu-mig", "fail"),  # beside a whole one
    (all_cards(mig=1, mig_parts=0), "gpu-mig", "fail"),
    (with_tests(ending=LoadEnding.FAILED, stage="nccl", peers=None, why="NCCL error"), "gpu-peers", "fail"),
    (subject(adapters=OTHER_RAIL, env={"NCCL_IB_HCA": "=mlx5_0"}), "nccl-ib-hca", "fail"),
    (with_ports("", "", env={"NCCL_IB_HCA": ""}), "nccl-ib-hca", "warn"),
    (subject(topology=ONE_OF_TWO, write_problem=lambda size: 28), "shm", "fail"),  # NCCL makes a segment there
]


@pytest.mark.parametrize(("node", "check", "status"), HARD)
def test_what_a_card_tells_is_as_bad_as_it_is(node: Subject, check: str, status: str) -> None:
    (finding,) = [one for one in findings(node, check) if one.status is not Status.PASS]
    assert finding.status.value == status
    misled = "no socket interface" in finding.text or check == "shm"
    assert finding.fault is (None if status == "warn" else Fault.JOB if misled else Fault.NODE)


def of_failed_test(ending: LoadEnding, stage: str, why: str) -> Finding:
    """The one finding about a GPU whose test ended so in this stage."""
    node = with_tests(ending=ending, stage=stage, peers=None, why=why)
    (finding,) = findings(node, "gpu-peers" if stage == "peers" else "gpu-load")
    return finding


@pytest.mark.parametrize(
    ("stage", "why", "remedy"),
    [
        (
            "gemm",
            "OSError: libcublas.so.12: cannot open shared object file: No such file",
            "FIX_IMAGE",
        ),
        ("gemm", "RuntimeError: \"addmm_cuda\" not implemented for 'BFloat16'", "FIX_IMAGE"),
        ("peers", "NCCL error: unhandled cuda error: no kernel image is available", "FIX_IMAGE"),
        ("device", "sees no GPU: The NVIDIA driver on your system is too old (found version 12020)", "FIX_IMAGE"),
        ("device", "torch 2.11, built with CUDA 13.0, sees no GPU: Found no NVIDIA driver on your system", ""),
        ("gemm", "OSError: libcuda.so.1: cannot open shared object file", ""),  # the container runtime mounts it
        ("peers", "ImportError: libcuda.so.1: cannot open shared object file", ""),
        ("device", "CUDA error: all CUDA-capable devices are busy or unavailable", ""),
        ("device", "CUDA error: MPS client failed to connect to the MPS control daemon", ""),
        ("memory", "CUDA error: OS call failed or operation not supported on this OS", ""),
        ("peers", "NCCL error: unhandled system error: Call to socket failed: Permission denied", ""),
        ("gemm", "CUDA error: an illegal memory access was encountered", "DRAIN"),
        ("peers", "NCCL error: unhandled cuda error: uncorrectable NVLink error", "DRAIN"),
    ],
)
def test_a_card_is_not_drained_for_what_its_image_lacks_or_its_container(stage: str, why: str, remedy: str) -> None:
    finding = of_failed_test(LoadEnding.FAILED, stage, why)
    assert (finding.status, finding.remedy) == (Status.FAIL, remedy)


@pytest.mark.parametrize(
    ("stage", "why", "remedy"),
    [
        ("gemm", "its test died at 'gemm' (signal 11)", ""),  # in a library of the image, or for the card
        ("peers", "its test died at 'peers' (signal 6)", ""),
        ("gemm", "its test hung at 'gemm', and was killed after 60 s", "DRAIN"),
        ("peers", "its test hung at 'peers', and was killed after 60 s", "DRAIN"),
    ],
)
def test_a_crash_is_told_and_drains_no_machine(stage: str, why: str, remedy: str) -> None:
    finding = of_failed_test(LoadEnding.DIED, stage, why)
    assert (finding.status, finding.fault, finding.remedy) == (Status.FAIL, Fault.NODE, remedy)


def test_cards_whose_fabric_manager_has_not_begun_need_no_card_to_be_replaced() -> None:
    (finding,) = findings(with_tests(ending=LoadEnding.FAILED, stage="device", why=NOT_READY), "gpu-load")
    assert (finding.fault, finding.remedy) == (Fault.NODE, "DRAIN")
    assert "fabric manager" in finding.action
    assert "replaced" not in finding.action


def test_a_lost_card_that_the_job_names_is_of_its_machine_and_a_name_that_nobody_has_of_the_job() -> None:
    (lost,), (misnamed,) = (findings(lost_a_card("GPU-1", n_unseen=n), "gpu-count") for n in (1, 0))
    assert (lost.fault, lost.remedy, misnamed.fault, misnamed.remedy) == (Fault.NODE, "DRAIN", Fault.JOB, "FIX_JOB")
    assert "missing: GPU-1" in lost.text


def test_cards_that_need_different_remedies_have_findings_of_their_own() -> None:
    gone, erring = ({**gpu.facts, f"{LOAD}xids": [xid]} for gpu, xid in zip(FACTS.gpus, (79, 48), strict=True))
    node = with_gpus((replace(FACTS.gpus[0], facts=gone), replace(FACTS.gpus[1], facts=erring)))
    assert [(one.subject, one.remedy) for one in findings(node, "gpu-xid")] == [
        ("GPU 0", "REBOOT"),
        ("GPU 1", "RESET"),
    ]


@pytest.mark.parametrize("spec", ["mlx5", ""])
def test_one_of_eight_adapters_that_is_down_is_named(spec: str) -> None:
    node = with_ports(*[NDR] * 3, "", *[NDR] * 4, gpus=8, env={"NCCL_IB_HCA": spec})
    (finding,) = findings(node, "nccl-ib-hca")
    assert finding.status is Status.WARN
    assert finding.text.startswith("7 of 8 RDMA ports are up for 8 GPUs; mlx5_3:1 (down)")
    beside = AdapterPort("mlx5_an0", 1, True, EDR, is_ethernet=True)  # as Azure has it, for all but the GPUs
    (finding,) = findings(replace(node, adapters=(*node.adapters, beside)), "nccl-ib-hca")
    assert (finding.status, finding.text[:10]) == (Status.WARN, "8 of 9 RDM")
    unused = tuple(AdapterPort(f"mlx5_an{n}", 1, False, "", is_ethernet=True) for n in range(8))
    node = with_ports(*[NDR] * 8, gpus=8, env={"NCCL_IB_HCA": spec})
    (finding,) = findings(replace(node, adapters=(*node.adapters, *unused)), "nccl-ib-hca")
    assert finding.status is Status.PASS


@pytest.mark.parametrize(
    ("rates", "gpus", "spec"),
    [
        ([*[NDR] * 8, "", ""], 8, ""),  # ports without a cable, beside one for each GPU
        ([NDR, ""], 8, ""),  # a machine with few adapters
        ([NDR, "", NDR], 2, "^mlx5_1"),  # NCCL does not take it
    ],
)
def test_ports_that_nobody_needs_may_be_down(rates: list[str], gpus: int, spec: str) -> None:
    node = with_ports(*rates, gpus=gpus, env={"NCCL_IB_HCA": spec})
    assert [one.status for one in findings(node, "nccl-ib-hca")] == [Status.PASS]


def among(*nodes: Subject) -> list[tuple[str, Fault | None]]:
    """What the comparison of these nodes says, of whom."""
    ports = [container_checks.used_adapters(node) for node in nodes]
    told = [{"python": "3.12", **node_facts.of_adapters(its)} for its in ports]
    found = node_facts.differences([f"node {number}" for number in range(len(nodes))], told)
    return [(one.subject, one.fault) for one in found if one.status is not Status.PASS]


def test_the_node_with_fewer_or_slower_adapters_than_most_is_faulty() -> None:
    whole = with_ports(*[NDR] * 8)
    assert among(whole, whole, with_ports(*[NDR] * 7, "")) == [("node 2", Fault.NODE)]
    free = [with_ports(*rates, env={"NCCL_IB_HCA": ""}) for rates in ([NDR] * 8, [NDR] * 8, [*[NDR] * 7, ""])]
    assert among(*free) == [("node 2", Fault.NODE)]  # NCCL takes all
    assert among(whole, whole, with_ports(*[NDR] * 7, EDR)) == [("node 2", Fault.NODE)]  # a rail at a quarter
    one, lane = with_ports(NDR), with_ports("100 Gb/sec (1X NDR)")  # one of the cable's four, not an older machine
    assert among(one, one, lane) == [("node 2", Fault.NODE)]
    assert among(whole, whole, with_ports(*[""] * 8)) == [("node 2", Fault.NODE)]


def test_a_node_with_more_or_faster_adapters_is_not_faulty_for_that() -> None:
    whole, more = with_ports(*[HDR] * 4), with_ports(*[NDR] * 8)
    assert among(whole, whole, more) == [("node 2", None)]
    assert among(whole, whole, whole, more, with_ports(*[HDR] * 3)) == [("node 4", Fault.NODE)]
    assert among(whole, more) == [("", None)]  # no majority
    assert among(more, more, with_ports(*[HDR] * 8)) == [("node 2", None)]  # another kind of machine
    assert among(more, more, with_ports(*[HDR] * 7, "")) == [("node 2", None)]  # whose own check tells of its port
    quiet = [with_ports(*rates, env={"NCCL_IB_DISABLE": "1"}) for rates in ([NDR], [NDR], [EDR])]
    assert among(*quiet) == []  # nobody uses them
    spare = with_ports(*[NDR] * 8, EDR)
    assert among(spare, spare, with_ports(*[NDR] * 8, "")) == [("node 2", None)]  # not one of those for the GPUs
    unknown = with_ports("of unknown rate", *[NDR] * 7)
    assert among(with_ports(*[NDR] * 8), with_ports(*[NDR] * 8), unknown) == [("node 2", None)]


def test_a_pod_that_was_given_fewer_adapters_of_its_machine_than_others_is_not_faulty_and_told() -> None:
    whole, fewer, ill = (with_ports(*rates) for rates in ([NDR] * 8, [NDR] * 4, [*[NDR] * 7, ""]))
    assert among(whole, whole, given(fewer)) == [("node 2", None)]
    assert among(given(whole), given(whole), given(fewer)) == [("node 2", None)]
    assert among(given(whole), given(whole), given(ill)) == [("node 2", Fault.NODE)]
    assert among(whole, whole, fewer) == [("node 2", Fault.NODE)]  # its machine has no more


def given(node: Subject) -> Subject:
    """Its machine has others, too."""
    return replace(node, adapters=tuple(replace(port, has_others=True) for port in node.adapters))


def test_the_speed_of_all_gpus_together_is_a_measure_of_the_node() -> None:
    tests = [replace(test, facts={"model": "NVIDIA H200"}) for test in FACTS.tests]
    whole = replace(FACTS, tests=tuple(tests))
    assert [(one.name, one.value, one.gpu) for one in whole.measures] == [("allreduce-2", 460.0, None)]
    alone = replace(FACTS, tests=tuple(tests[:1]))
    assert alone.measures == ()
    assert load_table(None).rows["nvidia h200", "allreduce-8"].value > 400


@pytest.mark.parametrize(
    ("told", "ended", "why"),
    [
        (b'{"stage": "device", "import_s": 57.0}', Ended(status=-9, timed_out=True), "`import torch` took 57 s"),
        (b'{"stage": "pcie"}', Ended(status=-9), "the kernel kills so where a container's memory runs out"),
        (b'{"stage": "memory", "ending": "failed", "why": "CUDA out of memory"}', Ended(status=0), "out of memory"),
        (b'{"stage": "peers"}', Ended(status=-7), "so dies who finds no room in /dev/shm"),
        (b'{"stage": "peers", "ending": "failed", "why": "Too many open files"}', Ended(status=0), "open files"),
    ],
)
def test_a_card_is_not_blamed_for_time_or_memory_that_others_took(told: bytes, ended: Ended, why: str) -> None:
    test = parse_test(3, "GPU-3", replace(ended, stdout=told), 60.0)
    assert test.ending is LoadEnding.NOT_RUN
    assert why in test.why
    node = with_tests(ending=test.ending, stage=test.stage, why=test.why, peers=None)
    assert fails(node, "gpu-load") == fails(node, "gpu-peers") == []


def test_errors_that_a_port_counts_during_pair_tests_warn_and_earlier_ones_do_not(tmp_path: Path) -> None:
    counters = tmp_path / "sys/class/infiniband/mlx5_1/ports/1/counters"
    counters.mkdir(parents=True)
    for name, text in (
        ("symbol_error", "40\n"),
        ("link_downed", "2\n"),
        ("port_xmit_wait", "9\n"),
        ("VL15_dropped", "N/A"),
    ):
        (counters / name).write_text(text)
    before = network.port_errors(tmp_path)
    assert before == {("mlx5_1", 1, "symbol_error"): 40, ("mlx5_1", 1, "link_downed"): 2}
    node = subject(port_errors=before, count_errors=lambda: network.port_errors(tmp_path))
    assert [one.status for one in findings(node, "rdma-errors")] == [Status.PASS]
    (counters / "symbol_error").write_text("47\n")
    (finding,) = findings(node, "rdma-errors")
    assert (finding.status, finding.text) == (
        Status.WARN,
        "mlx5_1:1 symbol_error +7, while pairs of nodes were tested",
    )


@pytest.mark.parametrize("env", [{"NCCL_IB_HCA": "^mlx5_1"}, {"NCCL_IB_DISABLE": "1"}])
def test_ports_that_nccl_does_not_take_may_count_what_they_like(env: dict[str, str]) -> None:
    node = subject(env=env, count_errors=lambda: {("mlx5_1", 1, "symbol_error"): 7})
    assert {one.status for one in findings(node, "rdma-errors")} <= {Status.PASS, Status.SKIPPED}
    assert [one.status for one in findings(replace(node, port_errors=None), "rdma-errors")] == [Status.SKIPPED]
