"""Where and how the nodes of a torch job meet, as torchrun's options: at our coordinator, or by torch's means."""

from __future__ import annotations

import re

from trainer_launch.model import (
    Endpoint,
    Hosting,
    Membership,
    NodeRange,
    Rendezvous,
    Seats,
    Topology,
    value_parsers,
)
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.flag_overrides import MEET_AT_NODE_0

DEFAULT_MAX_RESTARTS = 3  # torchrun's is 0, with which no failure is survived
_FIRST = re.compile(r"(?P<stem>[^.]*-)0")  # the first of some hosts with an index each
_UNLIMITED = "1000000"  # for torch's own count: the budget is the job's, and the coordinator keeps it


def nodes_of(request: Request) -> NodeRange:
    """How many nodes the job has; nobody having said so is an error."""
    if request.topology.nodes is None:
        raise ContractError(f"the number of nodes is unknown {_to_set(request)}")
    return request.topology.nodes


def _to_set(request: Request) -> str:
    """What shows that there are several nodes, and the options that say what is unknown, with their variables."""
    topology, shown = request.topology, request.job.details.get("several_nodes_shown_by")
    said = {"nodes": topology.nodes, "node-rank": topology.node_rank, "master-addr": topology.coordinator}
    names = [name for name, value in said.items() if value is None]
    flags = ", ".join(f"--{name} (TRAINER_LAUNCH_{name.replace('-', '_').upper()})" for name in names)
    why = f", and {shown} shows that there are several" if shown else ""
    alone = ", or --nodes 1 to train on this node alone" if shown and topology.nodes is None else ""
    return f"(contract {request.job.contract}){why}; set {flags}{alone}"


def options(request: Request, nodes: NodeRange) -> dict[str, str]:
    """Where and how the agents meet."""
    if is_ours(request):
        return _our_meeting(request, nodes)
    if request.topology.pods == 1:
        # One node meets nobody: any free port will do, whatever port the platform names.
        return {"nnodes": "1", "standalone": "1"}
    rendezvous = request.topology.rendezvous
    if rendezvous is not None and rendezvous.kind == "dynamic" and rendezvous.endpoint is not None:
        return _dynamic(request.topology, nodes, rendezvous, rendezvous.endpoint)
    return _static(request, nodes)


def hosting(request: Request) -> Hosting | None:
    """The coordinator that this node hosts, if it is the one to do so."""
    if not is_ours(request):
        return None
    nodes = nodes_of(request)
    node_rank, coordinator = _own_place(request, nodes)
    seats = _seats(request, nodes)
    is_alone = request.topology.pods == 1
    if not request.topology.is_coordinator and not is_alone and seats is None:
        return None
    return Hosting(
        job=_job_id(request, coordinator),
        host=coordinator.host if is_alone else "",
        port=coordinator.port,
        nodes=nodes,
        spares=request.topology.spares,
        max_restarts=_budget(request),
        rejoin_timeout_s=request.settings.wait_timeout,
        shrink_after_s=request.shrink_after_s,
        secret_file=request.secret_file,
        seats=seats,
        seat=node_rank,
        finds_stragglers=request.settings.hang_report_after != "off",
    )


def meeting(request: Request) -> tuple[str, Endpoint] | None:
    """The job's name, and where to ask how it stands: node 0 asks itself, whatever its name."""
    if not is_ours(request):
        return None
    nodes = nodes_of(request)
    _, coordinator = _own_place(request, nodes)
    hosts_it = hosting(request) is not None and (request.topology.is_coordinator or request.topology.pods == 1)
    place = Endpoint("localhost", coordinator.port) if hosts_it else coordinator
    return _job_id(request, coordinator), place


def membership(request: Request, local_addr: str | None) -> Membership:
    """This node as a member of the job that meets at our coordinator."""
    nodes = nodes_of(request)
    node_rank, coordinator = _own_place(request, nodes)
    return Membership(
        job=_job_id(request, coordinator),
        coordinator=coordinator,
        node_rank=node_rank,
        host=request.host.hostname,
        address=local_addr,
        patience_s=request.settings.wait_timeout,
        max_restarts=_budget(request),
        ports=request.port_range,
        seats=_seats(request, nodes),
        secret_file=request.secret_file,
        label=request.label or "",
    )


def wait_for(request: Request) -> tuple[str, ...]:
    """Node 0's name, on every other node: a name that does not resolve yet is fatal inside torch."""
    topology = request.topology
    nodes = nodes_of(request)
    if topology.pods == 1 or topology.coordinator is None or topology.is_coordinator:
        return ()
    if value_parsers.is_address(topology.coordinator.host):
        return ()
    if is_ours(request) and _seats(request, nodes) is not None:
        return ()  # node 0 may be gone for good; there are others to ask
    return (topology.coordinator.host,)


def is_ours(request: Request) -> bool:
    """Whether the nodes meet at our coordinator; a store of its own, such as etcd, is left to torch."""
    rendezvous = request.topology.rendezvous
    nodes = request.topology.nodes
    backend = rendezvous.backend if rendezvous is not None else None
    if not request.our_rendezvous or nodes is None:
        return False
    return request.topology.pods == 1 or backend in MEET_AT_NODE_0


def _our_meeting(request: Request, nodes: NodeRange) -> dict[str, str]:
    node_rank, coordinator = _own_place(request, nodes)
    conf = {
        "node_rank": str(node_rank),
        "host": request.host.hostname,
        "is_host": "false",  # the launcher of node 0 hosts the coordinator
        "patience": f"{request.settings.wait_timeout:g}",
        "max_restarts": str(_budget(request)),
    }
    if request.port_range is not None:
        conf["ports"] = str(request.port_range)
    if request.secret_file is not None:
        conf["secret_file"] = request.secret_file
    if request.topology.spares:
        conf["spares"] = str(request.topology.spares)
    seats = _seats(request, nodes)
    if seats is not None:
        conf["seats"] = f"{seats.pattern}/{seats.offset}/{seats.count}"
    return {
        "nnodes": str(nodes),
        "node_rank": "0",  # torch warns of a PET_NODE_RANK that it ignores; ours is in the configuration
        "max_restarts": _UNLIMITED,
        "rdzv_backend": "trainer-launch",
        "rdzv_endpoint": str(coordinator),
        "rdzv_id": _job_id(request, coordinator),
        "rdzv_conf": ",".join(f"{name}={value}" for name, value in conf.items()),
    }


def _seats(request: Request, nodes: NodeRange) -> Seats | None:
    """Where each node's coordinator is, where the job may do without one and the names tell the nodes' index."""
    node_rank, coordinator = _own_place(request, nodes)
    label, dot, domain = coordinator.host.partition(".")
    first = _FIRST.fullmatch(label)
    if (nodes.fixed is not None and not request.topology.spares) or first is None:
        return None
    stem, offset = first["stem"], 0
    if stem.endswith("-master-"):
        stem, offset = f"{stem.removesuffix('-master-')}-worker-", -1
    seats = Seats(coordinator, f"{stem}#{dot}{domain}", offset, nodes.max + request.topology.spares)
    own = seats.endpoint(node_rank).host.partition(".")[0]
    return seats if own == request.host.hostname.partition(".")[0] else None


def _budget(request: Request) -> int:
    restarts = request.topology.max_restarts
    return DEFAULT_MAX_RESTARTS if restarts is None else restarts


def _job_id(request: Request, coordinator: Endpoint) -> str:
    return job_name(request.topology, request.host.hostname, coordinator)


def job_name(topology: Topology, hostname: str, coordinator: Endpoint) -> str:
    """What tells this job from another at the same address: the user's run id, else host and port of node 0."""
    rendezvous = topology.rendezvous
    if rendezvous is not None and rendezvous.run_id:
        return rendezvous.run_id
    if coordinator.is_loopback and topology.pods not in (None, 1):
        # Operators up to 1.3 tell node 0 that it is localhost, and the others its name; who else is told localhost
        # is on the same machine.
        return _as_name(Endpoint(hostname, coordinator.port))
    return _as_name(coordinator)


def _as_name(endpoint: Endpoint) -> str:
    """Without colons and brackets: workers see it as TORCHELASTIC_RUN_ID, and torch names folders after it."""
    return re.sub(r"[^\w.-]+", "-", str(endpoint)).strip("-")


def _own_place(request: Request, nodes: NodeRange) -> tuple[int, Endpoint]:
    """This node's rank, and where the nodes meet."""
    topology = request.topology
    if topology.pods == 1 and request.our_rendezvous:
        # One node meets nobody else: its own loopback will do, whatever address the platform names.
        return 0, Endpoint("127.0.0.1", request.loopback_port)
    if topology.node_rank is None:
        raise ContractError(f"this job has {nodes} nodes, but the rank of this node is unknown {_to_set(request)}")
    if topology.coordinator is None:
        raise ContractError(f"this job has {nodes} nodes, but the address of node 0 is unknown {_to_set(request)}")
    return topology.node_rank, topology.coordinator


def _dynamic(topology: Topology, nodes: NodeRange, rendezvous: Rendezvous, endpoint: Endpoint) -> dict[str, str]:
    conf = dict(rendezvous.conf)
    if rendezvous.backend == "c10d" and not endpoint.is_loopback and topology.node_rank is not None:
        # torch guesses from name lookups who hosts the store, and guesses wrong behind a Service.
        conf.setdefault("is_host", str(topology.is_coordinator).lower())
    made = {
        "nnodes": str(nodes),
        "rdzv_backend": rendezvous.backend or "c10d",
        "rdzv_endpoint": str(endpoint),
        "rdzv_conf": ",".join(f"{name}={value}" for name, value in conf.items()),
        "rdzv_id": rendezvous.run_id or "",
    }
    return {name: value for name, value in made.items() if value}


def _static(request: Request, nodes: NodeRange) -> dict[str, str]:
    node_rank, coordinator = _own_place(request, nodes)
    if nodes.fixed is None:
        raise UsageError(
            f"{nodes} nodes need an elastic rendezvous; "
            f"set --rdzv-backend c10d and --rdzv-endpoint in the torchrun command, or set a fixed number of nodes"
        )
    rendezvous = request.topology.rendezvous
    run_id = rendezvous.run_id if rendezvous else None
    options = {
        "nnodes": str(nodes),
        "node_rank": str(node_rank),
        "master_addr": coordinator.host,
        "master_port": str(coordinator.port),
        "rdzv_backend": "static",
    }
    return options if run_id is None else {**options, "rdzv_id": run_id}
