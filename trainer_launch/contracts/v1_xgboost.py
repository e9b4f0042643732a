"""XGBoostJob of the v1 operator: WORLD_SIZE counts pods, and each pod is one process. LightGBM runs in it too."""

from __future__ import annotations

from trainer_launch.contracts import generic_env, names
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Member, NodeRange

NAME = "xgboostjob-v1"
MARKS = Marks(when=generic_env.may_be_xgboost, shows=("WORKER_ADDRS", *generic_env.NAMES))


def read(source: Source) -> Job:
    """Read the general names, and the workers when there are any."""
    pods = source.count("WORLD_SIZE", "nodes")
    rank = source.index("RANK", "node_rank", below=pods)
    master = Endpoint(source.host("MASTER_ADDR", "master_addr"), source.port("MASTER_PORT", "master_port"))
    workers = _workers(source, pods)
    own = names.split_v1(source.pod.hostname)
    return Job(
        contract=NAME,
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
            "env_world_size": pods,
            "env_rank": rank,
            "env_rank_means": "node",
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
