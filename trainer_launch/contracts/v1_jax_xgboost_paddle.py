"""Of the v1 operator: JAXJob, XGBoostJob (LightGBM runs in it, too) and PaddleJob."""

from __future__ import annotations

from trainer_launch.contracts import generic_env, names
from trainer_launch.contracts.source import Contract, Marks, Source
from trainer_launch.contracts.variables import Variables, jax_details
from trainer_launch.model import Endpoint, Job, Member, NodeRange
from trainer_launch.model.value_parsers import parse_host

JAX = Contract(
    "jaxjob-v1",
    Marks(all_of=("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"), shows=("COORDINATOR_PORT",)),
    Variables(
        nodes="NUM_PROCESSES",
        rank="PROCESS_ID",
        coordinator="COORDINATOR_ADDRESS",
        port="COORDINATOR_PORT",
        nproc_per_node=1,
        is_v1=True,
        engine="plain",
        details=jax_details,
    ).read,
    weaker_than=("trainer-v2-jax",),  # whose users set these names too, for their own scripts
)


# -- XGBoostJob: WORLD_SIZE counts pods, and each pod is one process ------------------------------


def _read_xgboost(source: Source) -> Job:
    """Read the general names, and the workers when there are any."""
    pods = source.count("WORLD_SIZE", "nodes")
    rank = source.index("RANK", "node_rank", below=pods)
    master = generic_env.master(source)
    workers = _workers(source, pods)
    own = names.split_v1(source.pod.hostname)
    return Job(
        role=own.role if own else ("master" if rank == 0 else "worker"),
        nodes=NodeRange(pods, pods),
        nproc_per_node=1,
        node_rank=rank,
        hostname_index=own.index if own else None,
        world_size=pods,
        coordinator=master,
        is_coordinator=rank == 0,
        # none rather than a wrong list
        members=tuple(map(Member, (master.host, *workers))) if len(workers) == pods - 1 else None,
        engine="plain",
        details={
            **generic_env.rank_details(pods, rank),
            "rank": rank,
            "worker_addrs": workers,
            "worker_port": source.port("WORKER_PORT", "worker_port", default=None),
        },
    )


def _workers(source: Source, pods: int) -> tuple[str, ...]:
    if source.blank("WORKER_ADDRS"):
        return ()
    workers = source.hosts("WORKER_ADDRS", "worker_addrs")
    if len(workers) >= pods:
        raise source.error("WORKER_ADDRS", ",".join(workers), f"fewer hosts than WORLD_SIZE, which is {pods}")
    return workers


XGBOOST = Contract(
    "xgboostjob-v1",
    Marks(when=generic_env.may_be_xgboost, shows=("WORKER_ADDRS", *generic_env.NAMES)),
    _read_xgboost,
)


# -- PaddleJob: collective, or with parameter servers; Paddle's own launcher gives the ranks ---------

_OWN_IP = "POD_IP_DUMMY"  # only the pod that hosts the master has it, and is told its own IP instead of a name


def _read_paddle(source: Source) -> Job:
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
        role=own.role if own else ("master" if servers is not None else "worker"),
        nodes=NodeRange(nodes, nodes),
        hostname_index=own.index if own else None,
        coordinator=master,
        is_coordinator=_is_master(source, master),
        members=_paddle_members(job_id, nodes) if collective else None,
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


def _paddle_members(job_id: str, nodes: int) -> tuple[Member, ...] | None:
    worker_0 = parse_host(f"{job_id}{names.V1_WORKER}0")
    return names.members_like(worker_0, names.V1_WORKER, nodes) if worker_0 else None


PADDLE = Contract(
    "paddlejob-v1",
    Marks(
        all_of=("PADDLE_MASTER", "PADDLE_JOB_ID"),
        shows=("PADDLE_NNODES", "PADDLE_SERVER_NUM", "PADDLE_TRAINER_NUM"),
    ),
    _read_paddle,
)
