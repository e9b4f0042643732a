"""Kubeflow Trainer v2: its runtimes for torch, torchtune, JAX, XGBoost, Flux and PlainML (MPI: `mpi_operator`).

And where any v2 pod may report its progress. The variable called TOKEN holds a path: the token itself is never read
here, it rotates and belongs in no Job.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from msgspec.structs import replace

from trainer_launch.contracts import names, torchrun_env
from trainer_launch.contracts.rows import Row
from trainer_launch.contracts.source import Contract, Marks, Source
from trainer_launch.model import Job, Member, NodeRange, Origin, Rendezvous, StatusEndpoint, hostfile
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import parse_endpoint, parse_host

_INDEX = "JOB_COMPLETION_INDEX"


# Torch: five variables, in the trainer container or injected elsewhere.

_FIVE = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


def _fits_torch(source: Source) -> bool:
    if source.has(_INDEX):  # the v1 operator makes bare pods, which never have it
        return True
    # The Kubeflow SDK's local container backend sets the five and no index. MASTER_ADDR may be set by hand.
    return all(map(source.has, _FIVE)) and not source.has_any("RANK", "WORLD_SIZE", "PET_RDZV_ENDPOINT")


def _read_torch(source: Source) -> Job:
    """Read the five variables, and tell a foreign rank by the host name."""
    nodes = source.node_range("PET_NNODES", "nodes")
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node")
    node_rank = source.index("PET_NODE_RANK", "node_rank")
    master = torchrun_env.master(source)
    index = source.index(_INDEX, default=None)
    if index is not None and index != node_rank:
        raise source.error("PET_NODE_RANK", str(node_rank), f"{_INDEX}, which is {index}")
    foreign = names.is_foreign(source.pod.hostname, master.host, node_rank)
    if not foreign and node_rank >= nodes.max:
        raise source.error("PET_NODE_RANK", str(node_rank), f"a whole number from 0 to {nodes.max - 1}")
    if foreign:
        source.warn("PET_NODE_RANK is the index in another replicatedJob than the trainer's: this pod has no rank")
    rendezvous = torchrun_env.rendezvous(source, master)
    job = torchrun_env.job(source, nodes, nproc, rendezvous)
    return replace(
        job,
        role="node",
        node_rank=node_rank,
        hostname_index=names.v2_index(source.pod.hostname),
        coordinator=rendezvous.endpoint if rendezvous.written and rendezvous.endpoint else master,
        is_coordinator=node_rank == 0 and not foreign,
        members=names.members(master.host, names.V2_NODE, nodes.max),
        foreign_replicated_job=foreign,
    )


TORCH = Contract(
    "trainer-v2-torch",
    Marks(all_of=("PET_MASTER_ADDR",), when=_fits_torch),
    _read_torch,
    kind="TrainJob with torch",
)


# Torchtune: no master, whose address is in the command.

_FLAG = "--rdzv_endpoint"
_FLAGS = (_FLAG, "--rdzv-endpoint")  # torchrun takes both spellings


def _read_torchtune(source: Source) -> Job:
    """Read the three variables, and the endpoint from the command line."""
    nodes = source.node_range("PET_NNODES", "nodes")
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node")
    node_rank = source.index("PET_NODE_RANK", "node_rank", below=nodes.max)
    rendezvous, read_from = _rendezvous(source)
    source.derive(rendezvous_from=read_from)
    endpoint = rendezvous.endpoint if rendezvous else None
    job = torchrun_env.job(source, nodes, nproc, rendezvous)
    return replace(
        job,
        role="node",
        node_rank=node_rank,
        hostname_index=names.v2_index(source.pod.hostname),
        is_coordinator=node_rank == 0,
        members=names.members(endpoint.host, names.V2_NODE, nodes.max) if endpoint else None,
        # `tune run` starts torch elastic itself: a second agent around it would start it once per GPU.
        engine="plain" if source.pod.command[:2] == ("tune", "run") else "torchrun",
    )


def _rendezvous(source: Source) -> tuple[Rendezvous | None, str | None]:
    """The rendezvous and where it was read: the command line wins over the environment, as torchrun has it."""
    written = _argument(source.pod.command)
    if written is None:
        given = torchrun_env.given_rendezvous(source)
        return given, None if given is None else "env"
    endpoint = parse_endpoint(written, None)
    if endpoint is None:
        raise source.error(_FLAG, written, "HOST:PORT")
    source.note(_FLAG, written, Origin.COMMAND, "rdzv_endpoint")
    return Rendezvous(kind="static", backend="static", endpoint=endpoint, written=written), "argv"


def _argument(command: tuple[str, ...]) -> str | None:
    for position, word in enumerate(command):
        flag, equals, value = word.partition("=")
        if flag not in _FLAGS:
            continue
        if equals:
            return value
        return command[position + 1] if position + 1 < len(command) else ""
    return None


TORCHTUNE = Contract(
    "trainer-v2-torchtune",
    Marks(all_of=("PET_NNODES", "PET_NODE_RANK", _INDEX), none_of=("PET_MASTER_ADDR",)),
    _read_torchtune,
    kind="TrainJob with torchtune",
)


# JAX: one process per node, whatever the number of GPUs.

JAX = Contract(
    "trainer-v2-jax",
    Marks(all_of=("JAX_COORDINATOR_ADDRESS",)),
    Row(
        nodes="JAX_NUM_PROCESSES",
        rank="JAX_PROCESS_ID",
        coordinator="JAX_COORDINATOR_ADDRESS",
        nproc_per_node=1,
        engine="plain",
        words=(("rank", "node_rank"),),
    ).read,
    kind="TrainJob with JAX",
)


# XGBoost: DMLC_TASK_ID counts pods while DMLC_NUM_WORKER counts workers.

XGBOOST = Contract(
    "trainer-v2-xgboost",
    Marks(all_of=("DMLC_TRACKER_URI",)),
    Row(
        nodes="DMLC_NUM_WORKER",
        counts_workers=True,
        rank="DMLC_TASK_ID",
        coordinator="DMLC_TRACKER_URI",
        port="DMLC_TRACKER_PORT",
        fields=("tracker_host", "tracker_port"),
        engine="plain",
        words=(("num_worker", "world_size"), ("task_id", "node_rank"), ("runs_tracker", "is_coordinator")),
    ).read,
    kind="TrainJob with XGBoost",
)


# Flux: no variable at all, only files and a replaced command.

_ENTRYPOINT = "/etc/flux-config/entrypoint.sh"
_HOSTLIST = "/mnt/flux/config/etc/flux/system/hostlist"


def _read_flux(source: Source) -> Job:
    """Read the broker's host list, which the init container wrote, and the command that Flux wraps."""
    hosts = _flux_hosts(source)
    hostname = source.pod.hostname
    own = names.split_v2(hostname)
    lead = hosts[0] if hosts else (f"{own.group}-{own.job_index}-0" if own else None)
    index = source.index(_INDEX, "node_rank", below=len(hosts) if hosts else None, default=None)
    if hostname:
        source.note("hostname", hostname, Origin.HOSTNAME, "is_coordinator")
    source.derive(lead_broker=lead, user_command=_user_command(source.pod.command))
    return Job(
        role="node",
        nodes=NodeRange(len(hosts), len(hosts)) if hosts else None,
        node_rank=index,
        hostname_index=own.index if own else None,
        is_coordinator=names.first_label(hostname) == lead if lead and hostname else None,
        members=tuple(map(Member, hosts)) if hosts else None,
        engine="plain",
    )


def _flux_hosts(source: Source) -> tuple[str, ...] | None:
    text = source.file(_HOSTLIST, "hosts")
    if text is None or not text.strip():
        return None
    return hostfile.expand_hostlist(text, _HOSTLIST, source.contract)


def _user_command(command: tuple[str, ...]) -> str | None:
    # The controller runs `bash entrypoint.sh '<command and args joined by blanks>'`.
    if _ENTRYPOINT not in command:
        return None
    return " ".join(command[command.index(_ENTRYPOINT) + 1 :]) or None


FLUX = Contract("trainer-v2-flux", Marks(files=(_ENTRYPOINT,)), _read_flux)


def _read_plainml(source: Source) -> Job:
    """Read the completion index, and torchrun's variables where the user set some by hand.

    So also a TrainJob without `spec.trainer`, and init containers and sidecars that nothing is injected into.
    """
    index = source.index(_INDEX, "node_rank")
    by_hand = torchrun_env.by_hand(source)
    # A container into which nothing is injected sees index 0 too: only a higher one proves that there are ranks.
    rank = index or None
    return replace(
        by_hand,
        role="node",
        node_rank=rank if by_hand.node_rank is None else by_hand.node_rank,
        hostname_index=names.v2_index(source.pod.hostname),
        engine=None,
        completion_index=index,
    )


PLAINML = Contract("trainer-v2-plainml", Marks(all_of=(_INDEX,)), _read_plainml)


METHOD = "POST"

_URL = "KUBEFLOW_TRAINER_SERVER_URL"
_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
_PORTS = {"https": 443, "http": 80}
_NAME = "[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?"
_PATH = re.compile(rf"/apis/trainer\.kubeflow\.org/[a-z0-9]{{1,32}}/namespaces/{_NAME}/trainjobs/{_NAME}/status")
_BEARER = re.compile(r"[A-Za-z0-9._~+/=-]+")


def read_status(source: Source) -> StatusEndpoint | None:
    """The endpoint, None when the feature is off."""
    if not source.has(_URL):
        return None
    url = source.text(_URL, "status_enabled")
    parsed = _parse_url(url)
    if parsed is None:
        expected = "http(s)://HOST[:PORT]/apis/trainer.kubeflow.org/VERSION/namespaces/NAME/trainjobs/NAME/status"
        raise source.error(_URL, url, expected)
    scheme, host, port, path = parsed
    return StatusEndpoint(
        scheme=scheme,
        server_host=host,
        server_port=port,
        path=path,
        ca_file=source.path(_CA_CERT, "ca_file"),
        token_file=source.path(_TOKEN, "token_file"),
    )


def with_status(source: Source, job: Job) -> Job:
    """The job with the endpoint; only rank 0 of the trainer's own nodes reports to it."""
    endpoint = read_status(source)
    if endpoint is None:
        return job
    index = source.index("JOB_COMPLETION_INDEX", default=None)
    rank = index if job.node_rank is None else job.node_rank
    return replace(job, status=endpoint, should_report_progress=rank == 0 and not job.foreign_replicated_job)


def authorization_header(token: str) -> str:
    """The header's value for the text of the token file; what could break the header is refused, unshown."""
    bare = token.strip()
    if not _BEARER.fullmatch(bare):
        raise ContractError(
            f"the file that {_TOKEN} names has no valid token ({len(token)} characters); "
            f"expected one word of letters, digits and ._~+/=-"
        )
    return f"Bearer {bare}"


def _parse_url(url: str) -> tuple[str, str, int, str] | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    host = parse_host(parts.hostname or "")
    plain = not (parts.query or parts.fragment or parts.username or parts.password)
    if parts.scheme not in _PORTS or host is None or not _PATH.fullmatch(parts.path) or port == 0 or not plain:
        return None
    return parts.scheme, host, port or _PORTS[parts.scheme], parts.path
