"""Who this node is among whom: the job as it was told, completed with what this machine has. Pure."""

from __future__ import annotations

from trainer_launch.model import Endpoint, Fact, Host, Job, NodeRange, Origin, Topology
from trainer_launch.model.errors import ContractError
from trainer_launch.model.units import counted

DEFAULT_PORT = 29500  # torchrun's own, and Kubeflow Trainer's


def place(job: Job, host: Host) -> Topology:
    """Complete the job for this node.

    Raises:
        ContractError: this node's rank is not below the number of nodes.
    """
    nodes = job.nodes or _alone(job)
    node_rank, rank_fact = _node_rank(job, nodes)
    local_world_size, size_fact = _local_world_size(job, host)
    coordinator, coordinator_fact = _coordinator(job, nodes)
    return Topology(
        node_rank=node_rank,
        nodes=nodes,
        local_world_size=local_world_size,
        coordinator=coordinator,
        is_coordinator=node_rank == 0 if job.is_coordinator is None else job.is_coordinator,
        rendezvous=job.rendezvous,
        max_restarts=job.max_restarts,
        spares=job.spares,
        facts=(rank_fact, size_fact, coordinator_fact),
    )


def hosts_no_rank(job: Job) -> bool:
    """Whether this pod only runs mpirun: the platform's hostfile names other pods."""
    return bool(job.members) and job.details.get("launcher_in_hostfile") is False


def workers_asked_for(job: Job) -> str | None:
    """The value of --nproc-per-node, or of its variable; what the platform says is no word of the user's."""
    given = (fact for fact in reversed(job.facts) if fact.field == "nproc_per_node")
    return next((fact.value for fact in given if fact.origin is Origin.FLAG), None)


def usable_threads(host: Host, local_world_size: int | None, given: str | None) -> tuple[str | None, Fact]:
    """OMP_NUM_THREADS for the workers as torchrun sets it, and why; None leaves it unset."""
    if given is not None:
        return given, _fact("OMP_NUM_THREADS", given, Origin.ENV, "it was set")
    if local_world_size is None or local_world_size > 1:
        cpus = counted(host.cpus.usable, "CPU")
        why = f"{local_world_size or 'all'} workers share {cpus}; set it to use more threads each"
        return "1", _fact("OMP_NUM_THREADS", "1", Origin.DEFAULT, why)
    return None, _fact("OMP_NUM_THREADS", "unset", Origin.DEFAULT, "one worker may use all CPUs")


def _alone(job: Job) -> NodeRange | None:
    """One node, when nothing speaks of others: an index above 0, several processes, a list that leaves them out."""
    others = job.node_rank or job.hostname_index or job.members or job.details.get("sparse")
    others = others or job.details.get("several_nodes_shown_by")
    return None if others or (job.world_size or 1) > 1 else NodeRange(1, 1)


def _node_rank(job: Job, nodes: NodeRange | None) -> tuple[int | None, Fact]:
    if job.details.get("foreign_replicated_job"):
        why = "this pod belongs to another replicatedJob than the trainer's; PET_NODE_RANK is its index there"
        return None, _fact("node_rank", "none", Origin.HOSTNAME, why)
    if job.node_rank is not None:
        if nodes is not None and job.node_rank >= nodes.max + job.spares:
            has = counted(nodes.max, "node") + (f" and {counted(job.spares, 'spare')}" if job.spares else "")
            raise ContractError(
                f"this node's rank is {job.node_rank} but the job has at most {has}; "
                f"expected a rank from 0 to {nodes.max + job.spares - 1} (contract {job.contract})"
            )
        return job.node_rank, _fact("node_rank", str(job.node_rank), Origin.ENV, "set by the platform")
    index = job.details.get("completion_index")  # 0 tells nothing until something speaks of nodes
    if isinstance(index, int) and nodes is not None and nodes.max + job.spares > 1:
        return index, _fact("node_rank", str(index), Origin.ENV, "the pod's completion index")
    behind = job.details.get("rank_behind_workers")
    if isinstance(behind, int):
        if nodes is not None and behind >= nodes.max + job.spares:
            return None, _fact("node_rank", "none", Origin.ENV, "the Workers already take all nodes of the job")
        return behind, _fact("node_rank", str(behind), Origin.ENV, "the Master's rank follows the Workers' ranks")
    # With parameter servers master 0 and worker 0 have the same index, and Paddle's own launcher gives the ranks.
    if job.hostname_index is not None and job.details.get("mode") != "ps":
        rank = job.hostname_index
        return rank, _fact("node_rank", str(rank), Origin.HOSTNAME, "from the host name")
    if nodes is not None and nodes.max + job.spares == 1:
        return 0, _fact("node_rank", "0", Origin.DEFAULT, "the job has one node")
    return None, _fact("node_rank", "unknown", Origin.DEFAULT, "nothing sets it")


def _local_world_size(job: Job, host: Host) -> tuple[int | None, Fact]:
    """Workers on this node; words are resolved from what the container really has."""
    given, gpus, cpus = job.nproc_per_node, host.gpus, host.cpus
    cpu_reason = f"{cpus.affinity} CPUs in the affinity mask, cgroup quota {_quota(cpus.quota)}"
    if isinstance(given, int):
        return given, _fact("nproc_per_node", str(given), Origin.ENV, "as given")
    if given is None and job.details.get("worker_for_each_gpu") and gpus.count:
        return gpus.count, _fact("nproc_per_node", str(gpus.count), Origin.MACHINE, f"for each GPU: {gpus.reason}")
    if given is None:
        return 1, _fact("nproc_per_node", "1", Origin.DEFAULT, "the default, as with torchrun")
    if given == "cpu" or (given == "auto" and gpus.count == 0):
        why = cpu_reason if given == "cpu" else f"{gpus.reason}; {cpu_reason}"
        return cpus.usable, _fact("nproc_per_node", str(cpus.usable), Origin.MACHINE, f"{given}: {why}")
    if gpus.count and (given == "auto" or given == {"cuda": "gpu"}.get(gpus.device, gpus.device)):
        return gpus.count, _fact("nproc_per_node", str(gpus.count), Origin.MACHINE, f"{given}: {gpus.reason}")
    return None, _fact("nproc_per_node", "unknown", Origin.MACHINE, f"{given}: {gpus.reason}")


def _coordinator(job: Job, nodes: NodeRange | None) -> tuple[Endpoint | None, Fact]:
    """Where all nodes meet: as told, else the first member, else this machine when it is alone."""
    if job.coordinator is not None:
        return job.coordinator, _fact("coordinator", str(job.coordinator), Origin.ENV, "set by the platform")
    if job.rendezvous is not None and job.rendezvous.endpoint is not None:
        endpoint = job.rendezvous.endpoint
        return endpoint, _fact("coordinator", str(endpoint), Origin.ENV, "the rendezvous endpoint")
    if nodes is not None and nodes.max + job.spares == 1:
        return None, _fact("coordinator", "none", Origin.DEFAULT, "one node needs none")
    if job.members:
        endpoint = Endpoint(job.members[0].host, DEFAULT_PORT)
        return endpoint, _fact("coordinator", str(endpoint), Origin.HOSTNAME, "the job's first node by name")
    return None, _fact("coordinator", "unknown", Origin.DEFAULT, "nothing sets it")


def _quota(quota: float | None) -> str:
    return "none" if quota is None else f"{quota:g} CPUs"


def _fact(name: str, value: str, origin: Origin, why: str) -> Fact:
    return Fact(name=name, value=f"{value} ({why})", origin=origin, field=name)
