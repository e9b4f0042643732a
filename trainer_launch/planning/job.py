"""The job as the platform describes it, with flags laid over it, and this node's place in it. Pure.

The explicit word wins, as in torchrun: flags of the launcher over the typed command, the command over the platform.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from trainer_launch.contracts.source import PodInput, Source
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import Endpoint, Fact, Host, Job, NodeRange, Origin, Rendezvous, Topology
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.settings import flag_of
from trainer_launch.model.units import counted

# The options of torchrun that describe the job; all others only concern the agent.
JOB_OPTIONS = (
    *("nnodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "max_restarts", "standalone"),
    *("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf"),
)
DEFAULT_PORT = 29500  # torchrun's own, and Kubeflow Trainer's
_C10D_PORT = 29400  # torch's default for an endpoint without a port
_NO_FILES = LiveFiles(0)
_NODES = "--nodes"  # what torchrun calls --nnodes
MEET_AT_NODE_0 = (None, "static", "c10d")  # other backends, such as etcd, meet at a server that is no node


def overlay(job: Job, options: Mapping[str, str], origin: Origin) -> Job:
    """The job with torchrun's job options laid over it; `options` is by option name, and others are ignored.

    Raises:
        UsageError: a value is out of its form.
    """
    given = {name: options[name] for name in JOB_OPTIONS if name in options}
    if not given:
        return job
    ours = {"nnodes": _NODES} if origin is Origin.FLAG else {}
    flags = {name: ours.get(name, flag_of(name)) for name in given}
    env = {flags[name]: value for name, value in given.items()}
    source = Source(PodInput(env=env, files=_NO_FILES, hostname=""))
    try:
        changed = _sizes(job, source)
        if given.get("standalone", "0") != "0":
            changed = _standalone(changed)
        elif any(name.startswith(("rdzv_", "master_")) for name in given):
            changed = _meeting(changed, given, source)
    except ContractError as problem:  # of the same sentence for a bad value, whoever wrote it
        raise UsageError(str(problem)) from None
    facts = tuple(Fact(name=flags[n], value=v, origin=origin, field=n) for n, v in given.items())
    return replace(changed, facts=job.facts + facts)


def with_minimum(job: Job, least: int | None) -> Job:
    """The job with another minimum of nodes.

    Raises:
        UsageError: it has fewer nodes than that, or nobody says how many.
    """
    if least is None:
        return job
    if job.nodes is None or least > job.nodes.max:
        size = None if job.nodes is None else counted(job.nodes.max, "node")
        has = f"the job has {size}" if size else "the number of nodes is unknown"
        raise UsageError(f"--min-nodes is {least}, but {has} (contract {job.contract}); see --nodes")
    fact = Fact(name="--min-nodes", value=str(least), origin=Origin.FLAG, field="min_nodes")
    changed = replace(job, nodes=NodeRange(least, job.nodes.max), facts=(*job.facts, fact))
    return replace(changed, world_size=job.world_size if least == job.nodes.max else None)


def with_spares(job: Job, asked: int | None, platforms: NodeRange | None) -> Job:
    """The job with its spares: beyond a typed number of nodes, otherwise some of the platform's nodes, `platforms`.

    Raises:
        UsageError: nobody says how many nodes there are, or too few are left to train.
    """
    nodes = job.nodes
    is_typed = typed(job, "nnodes", Origin.COMMAND) is not None
    if asked is None:
        extra = platforms.max - nodes.max if platforms is not None and nodes is not None and is_typed else 0
        if nodes is None or nodes.max == 1 or extra <= 0:
            return job
        fact = Fact(name="spares", value=str(extra), origin=Origin.DEFAULT, field="spares")
        return replace(job, spares=extra, facts=(*job.facts, fact))
    if nodes is None:
        raise UsageError(f"--spares is {asked}, but the number of nodes is unknown; set --nodes")
    fact = Fact(name="--spares", value=str(asked), origin=Origin.FLAG, field="spares")
    changed = replace(job, spares=asked, facts=(*job.facts, fact))
    if is_typed or not asked:
        return changed
    low = nodes.min - asked if nodes.fixed is not None else nodes.min
    if nodes.max - asked < max(1, low):
        raise UsageError(
            f"--spares is {asked}, but the platform has {counted(nodes.max, 'node')} (contract {job.contract}); "
            f"at least {max(1, low)} must train"
        )
    changed = replace(changed, nodes=NodeRange(low, nodes.max - asked), world_size=None)
    return replace(changed, world_size=_world_size(changed))


def _sizes(job: Job, given: Source) -> Job:
    nodes = given.node_range(_NODES if given.has(_NODES) else "--nnodes", default=None)
    nproc = given.nproc("--nproc-per-node", default=None)
    node_rank = given.index("--node-rank", default=None)
    restarts = given.index("--max-restarts", default=None)
    changed = replace(
        job,
        nodes=nodes or job.nodes,
        nproc_per_node=job.nproc_per_node if nproc is None else nproc,
        node_rank=job.node_rank if node_rank is None else node_rank,
        max_restarts=job.max_restarts if restarts is None else restarts,
    )
    if node_rank is not None:
        changed = replace(changed, is_coordinator=node_rank == 0)
    if nodes or nproc:
        changed = replace(changed, world_size=_world_size(changed))
    return changed


def _standalone(job: Job) -> Job:
    """The job as a single node that meets nobody."""
    alone = NodeRange(1, 1)
    changed = replace(job, nodes=alone, node_rank=0, is_coordinator=True, coordinator=None, rendezvous=None)
    return replace(changed, members=None, world_size=_world_size(changed))


def _meeting(job: Job, given: Mapping[str, str], source: Source) -> Job:
    """Where and how the nodes meet: a static address, or a rendezvous; a given address wins over the platform's."""
    before = job.rendezvous or Rendezvous(kind="static")
    backend = given.get("rdzv_backend", before.backend)
    dynamic = backend not in (None, "static")
    written, endpoint, coordinator = before.written, before.endpoint, _coordinator(job, source)
    if given.get("rdzv_endpoint", "").strip():  # empty is torchrun's own default
        written = given["rdzv_endpoint"]
        port = _C10D_PORT if dynamic else None
        endpoint = source.endpoint("--rdzv-endpoint", default_port=port, naked_ipv6=True)
        if backend in MEET_AT_NODE_0:
            coordinator = endpoint
    elif not dynamic and any(name.startswith("master_") for name in given):
        written, endpoint = None, coordinator
    elif not dynamic and coordinator is None:
        coordinator = endpoint
    rendezvous = Rendezvous(
        kind="dynamic" if dynamic else "static",
        backend=backend,
        endpoint=endpoint,
        written=written,
        run_id=given.get("rdzv_id", before.run_id),
        conf=source.conf("--rdzv-conf") or dict(before.conf),
    )
    return replace(job, coordinator=coordinator, rendezvous=rendezvous)


def _coordinator(job: Job, given: Source) -> Endpoint | None:
    host = given.host("--master-addr", default=None)
    is_alone = job.nodes is None or job.nodes.max == 1
    is_any = is_alone and given.peek("--master-port") == "0"  # a free one
    port = 0 if is_any else given.port("--master-port", default=None)
    if host is None and port is None:
        return job.coordinator
    # Without an address node 0 is the first member, as in `topology`; else torchrun's defaults hold.
    before = job.coordinator or Endpoint(job.members[0].host if job.members else "127.0.0.1", DEFAULT_PORT)
    return Endpoint(host or before.host, before.port if port is None else port)


def _world_size(job: Job) -> int | None:
    fixed = job.nodes.fixed if job.nodes else None
    return fixed * job.nproc_per_node if fixed and isinstance(job.nproc_per_node, int) else None


def place(job: Job, host: Host) -> Topology:
    """Complete the job for this node.

    Raises:
        ContractError: this node's rank is not below the number of nodes.
    """
    nodes = job.nodes or _alone(job)
    node_rank, rank_reason = _node_rank(job, nodes)
    local_world_size, size_reason = _local_world_size(job, host)
    coordinator, coordinator_reason = _coordinator_of(job, nodes)
    return Topology(
        node_rank=node_rank,
        nodes=nodes,
        local_world_size=local_world_size,
        coordinator=coordinator,
        is_coordinator=node_rank == 0 if job.is_coordinator is None else job.is_coordinator,
        rendezvous=job.rendezvous,
        max_restarts=job.max_restarts,
        spares=job.spares,
        because={"node_rank": rank_reason, "nproc_per_node": size_reason, "coordinator": coordinator_reason},
    )


def hosts_no_rank(job: Job) -> bool:
    """Whether this pod only runs mpirun: the platform's hostfile names other pods."""
    return bool(job.members) and job.mpi is not None and not job.mpi.launcher_in_hostfile


def typed(job: Job, field: str, *origins: Origin) -> str | None:
    """What the user said last of a field of torchrun's options, by our flag or variable, or from `origins`.

    What the platform says is no word of the user's.
    """
    facts = (fact for fact in reversed(job.facts) if fact.field == field)
    return next((fact.value for fact in facts if fact.origin in (Origin.FLAG, *origins)), None)


def _set_by(job: Job, *fields: str) -> str:
    return "as given" if any(typed(job, field, Origin.COMMAND) for field in fields) else "set by the platform"


def usable_threads(host: Host, local_world_size: int | None, given: str | None) -> tuple[str | None, str]:
    """OMP_NUM_THREADS for the workers as torchrun sets it, and why; None leaves it unset."""
    if given is not None:
        return given, f"{given} (it was set)"
    if local_world_size is None or local_world_size > 1:
        cpus = counted(host.cpus.usable, "CPU")
        why = f"{local_world_size or 'all'} workers share {cpus}; set it to use more threads each"
        return "1", f"1 ({why})"
    return None, "unset (one worker may use all CPUs)"


def _alone(job: Job) -> NodeRange | None:
    """A single node, unless the job shows others: an index above 0, several processes, or a list of hosts."""
    others = job.node_rank or job.hostname_index or job.members or job.sparse or job.several_nodes_shown_by
    others = others or job.role == "rank"
    return None if others or (job.world_size or 1) > 1 else NodeRange(1, 1)


def _node_rank(job: Job, nodes: NodeRange | None) -> tuple[int | None, str]:
    if job.foreign_replicated_job:
        why = "this pod belongs to another replicatedJob than the trainer's; PET_NODE_RANK is its index there"
        return None, f"none ({why})"
    if job.node_rank is not None:
        if nodes is not None and job.node_rank >= nodes.max + job.spares:
            has = counted(nodes.max, "node") + (f" and {counted(job.spares, 'spare')}" if job.spares else "")
            raise ContractError(
                f"this node's rank is {job.node_rank} but the job has at most {has}; "
                f"expected a rank from 0 to {nodes.max + job.spares - 1} (contract {job.contract})"
            )
        return job.node_rank, f"{job.node_rank} ({_set_by(job, 'node_rank', 'standalone')})"
    index = job.completion_index  # 0 tells nothing until something speaks of nodes
    if index is not None and nodes is not None and nodes.max + job.spares > 1:
        return index, f"{index} (the pod's completion index)"
    behind = job.rank_behind_workers
    if behind is not None:
        if nodes is not None and behind >= nodes.max + job.spares:
            return None, "none (the Workers already take all nodes of the job)"
        return behind, f"{behind} (the Master's rank follows the Workers' ranks)"
    # With parameter servers master 0 and worker 0 have the same index, and Paddle's own launcher gives the ranks.
    if job.hostname_index is not None and not job.has_servers:
        return job.hostname_index, f"{job.hostname_index} (from the host name)"
    if nodes is not None and nodes.max + job.spares == 1:
        return 0, "0 (the job has one node)"
    if job.rendezvous is not None and job.rendezvous.backend == "c10d":
        return None, "ranked by arrival (nothing sets a rank, and c10d needs none)"
    return None, "unknown (nothing sets it)"


def _local_world_size(job: Job, host: Host) -> tuple[int | None, str]:
    """Workers on this node; words are resolved from what the container really has."""
    given, gpus, cpus = job.nproc_per_node, host.gpus, host.cpus
    quota = "none" if cpus.quota is None else f"{cpus.quota:g} CPUs"
    cpu_reason = f"{cpus.affinity} CPUs in the affinity mask, cgroup quota {quota}"
    if isinstance(given, int):
        return given, f"{given} (as given)"
    if given is None and job.worker_for_each_gpu and gpus.count:
        return gpus.count, f"{gpus.count} (for each GPU: {gpus.reason})"
    if given is None:
        return 1, "1 (the default, as with torchrun)"
    if given == "cpu" or (given == "auto" and gpus.count == 0):
        why = cpu_reason if given == "cpu" else f"{gpus.reason}; {cpu_reason}"
        return cpus.usable, f"{cpus.usable} ({given}: {why})"
    if gpus.count and (given == "auto" or given == {"cuda": "gpu"}.get(gpus.device, gpus.device)):
        return gpus.count, f"{gpus.count} ({given}: {gpus.reason})"
    return None, f"unknown ({given}: {gpus.reason})"


def _coordinator_of(job: Job, nodes: NodeRange | None) -> tuple[Endpoint | None, str]:
    """Where all nodes meet: at the given address, else at the first member, else on this machine if it is alone."""
    if job.coordinator is not None:
        return job.coordinator, f"{job.coordinator} ({_set_by(job, 'master_addr', 'rdzv_endpoint')})"
    if job.rendezvous is not None and job.rendezvous.endpoint is not None:
        endpoint = job.rendezvous.endpoint
        return endpoint, f"{endpoint} (the rendezvous endpoint)"
    if nodes is not None and nodes.max + job.spares == 1:
        return None, "none (one node needs none)"
    if job.members:
        endpoint = Endpoint(job.members[0].host, DEFAULT_PORT)
        return endpoint, f"{endpoint} (the job's first node by name)"
    return None, "unknown (nothing sets it)"
