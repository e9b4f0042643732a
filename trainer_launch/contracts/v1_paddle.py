"""PaddleJob of the v1 operator: collective, or with parameter servers. Paddle's own launcher gives the ranks."""

from __future__ import annotations

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Member, NodeRange
from trainer_launch.model.value_parsers import parse_host

NAME = "paddlejob-v1"
MARKS = Marks(
    all_of=("PADDLE_MASTER", "PADDLE_JOB_ID"),
    shows=("PADDLE_NNODES", "PADDLE_SERVER_NUM", "PADDLE_TRAINER_NUM"),
)

_OWN_IP = "POD_IP_DUMMY"  # only the pod that hosts the master has it, and is told its own IP instead of a name


def read(source: Source) -> Job:
    """Read the PADDLE_* variables; the master is an IP on its own pod and a name on the others."""
    nodes = source.count("PADDLE_NNODES", "nodes")
    master = source.pod_endpoint("PADDLE_MASTER", "master_addr")
    job_id = source.text("PADDLE_JOB_ID", "job_id")
    servers = source.count("PADDLE_SERVER_NUM", "server_num", default=None)
    trainers = source.count("PADDLE_TRAINER_NUM", "trainer_num", default=None)
    if servers is not None and trainers is not None:
        raise source.error("PADDLE_SERVER_NUM", str(servers), "either this or PADDLE_TRAINER_NUM, not both")
    collective = servers is None and trainers is None
    own = names.split_v1(source.pod.hostname)
    return Job(
        contract=NAME,
        role=own.role if own else ("master" if servers is not None else "worker"),
        nodes=NodeRange(nodes, nodes),
        hostname_index=own.index if own else None,
        coordinator=master,
        is_coordinator=_is_master(source, master),
        members=_members(job_id, nodes) if collective else None,
        engine="plain",
        details={
            "job_id": job_id,
            "mode": "collective" if collective else "ps",
            "server_num": servers,
            "trainer_num": trainers,
        },
    )


def _is_master(source: Source, master: Endpoint) -> bool:
    return source.has(_OWN_IP) or names.first_label(master.host) == source.pod.hostname


def _members(job_id: str, nodes: int) -> tuple[Member, ...] | None:
    worker_0 = parse_host(f"{job_id}-worker-0")
    return names.members_like(worker_0, "-worker-", nodes) if worker_0 else None
