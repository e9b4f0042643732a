"""A container in which all is well, to be broken by one test at a time."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from tests.preflight.gpus import HEALTHY_CARDS
from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.host.machine import Limits
from trainer_launch.host.network import AdapterPort, Interface
from trainer_launch.model import Cpus, Endpoint, Gpus, Host, Job, Member, NodeRange, Topology
from trainer_launch.model.findings import Report
from trainer_launch.planning.command import parse_command
from trainer_launch.preflight import check, registry
from trainer_launch.preflight.check import Subject, Where

MIB = 1 << 20
GIB = 1 << 30
ETH0 = Interface(name="eth0", addresses=("10.0.0.7", "fd00::7"))
LO = Interface(name="lo", addresses=("127.0.0.1", "::1"))
ADDRESSES = {
    "job-node-0-0.job": frozenset({"10.0.0.6"}),
    "job-node-0-1.job": frozenset({"10.0.0.7"}),
    "job-node-0-1": frozenset({"10.0.0.7"}),
}
STORED = Tried(stage="unlink", values={"seconds": 0.01, "same": 1.0, "free_bytes": 50.0 * GIB, "free_inodes": 1e6})

HOST = Host(
    hostname="job-node-0-1",
    cpus=Cpus(affinity=16, quota=8.0),
    gpus=Gpus(count=2, reason="2 in /dev"),
    memory_limit_bytes=64 * GIB,
    memory_used_bytes=GIB,
    shm_bytes=16 * GIB,
    shm_free_bytes=16 * GIB,
)
JOB = Job(
    contract="trainer-v2-torch",
    nodes=NodeRange(2, 2),
    nproc_per_node=2,
    node_rank=1,
    members=(Member("job-node-0-0.job"), Member("job-node-0-1.job")),
    engine="torchrun",
)
TOPOLOGY = Topology(
    node_rank=1,
    nodes=NodeRange(2, 2),
    local_world_size=2,
    coordinator=Endpoint("job-node-0-0.job", 29500),
    is_coordinator=False,
    rendezvous=None,
    max_restarts=None,
)


class Names:
    """A resolver that knows these names; a list of answers is given out in turn, the last one for ever."""

    def __init__(self, known: Mapping[str, Any], problem: int = socket.EAI_NONAME) -> None:
        self._problem = problem  # of names that it does not know
        self._known = {name: list(told) if isinstance(told, list) else [told] for name, told in known.items()}

    def __call__(self, name: str) -> frozenset[str]:
        answers = self._known.get(name)
        if not answers or answers[0] is None:
            if answers and len(answers) > 1:
                answers.pop(0)
            raise socket.gaierror(self._problem, "Name or service not known")
        answer: frozenset[str] = answers.pop(0) if len(answers) > 1 else answers[0]
        return answer


def try_out(what: str, argument: str, limit_s: float) -> Tried:
    return STORED if what == "storage" else Tried(stage="mlock", values={"bytes": float(argument)})


HEALTHY = Subject(
    job=JOB,
    host=HOST,
    topology=TOPOLOGY,
    command=parse_command(["true"]),
    env={
        "PATH": "/usr/bin:/bin",
        "NCCL_SOCKET_IFNAME": "eth",
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_IB_HCA": "mlx5",
    },
    storage=("/checkpoints",),
    limits=Limits(nofile_soft=65536, nofile_hard=65536, memlock_bytes=None),
    pids=(10_000, 9_000),
    interfaces=(LO, ETH0),
    adapters=(AdapterPort("mlx5_0", 1, True), AdapterPort("mlx5_1", 1, True)),
    has_rdma=True,
    port_errors={},
    count_errors=dict,
    cards=HEALTHY_CARDS,
    lookup=Names(ADDRESSES),
    write_problem=lambda size: None,
    try_out=try_out,
)


def subject(
    *, host: Mapping[str, Any] | None = None, topology: Mapping[str, Any] | None = None, **changes: Any
) -> Subject:
    """The healthy subject, broken."""
    made = replace(HEALTHY, **changes)
    made = replace(made, env={**HEALTHY.env, **changes.get("env", {})})
    return replace(made, host=replace(HOST, **(host or {})), topology=replace(TOPOLOGY, **(topology or {})))


def run_all(made: Subject) -> Report:
    """All checks of a container and of its GPUs."""
    return check.run(made, registry.at(Where.CONTAINER, Where.GPU))
