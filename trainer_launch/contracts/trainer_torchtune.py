"""Kubeflow Trainer v2, torchtune: PET_* without a master, whose address stands in the command."""

from __future__ import annotations

from trainer_launch.contracts import names, torchrun_env
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Endpoint, Job, Json, Origin, Rendezvous
from trainer_launch.model.value_parsers import parse_endpoint

NAME = "trainer-v2-torchtune"
MARKS = Marks(
    all_of=("PET_NNODES", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"),
    none_of=("PET_MASTER_ADDR",),
)

_FLAG = "--rdzv_endpoint"
_FLAGS = (_FLAG, "--rdzv-endpoint")  # torchrun takes both spellings


def read(source: Source) -> Job:
    """Read the three variables, and the endpoint from the command line."""
    nodes = torchrun_env.nodes(source)
    nproc = source.nproc("PET_NPROC_PER_NODE", "nproc_per_node")
    node_rank = source.index("PET_NODE_RANK", "node_rank", below=nodes.max)
    meeting, told_by = _rendezvous(source)
    endpoint = meeting.endpoint if meeting else None
    own = names.split_v2(source.pod.hostname)
    details: dict[str, Json] = {**torchrun_env.oddities(source), "rendezvous_from": told_by}
    return Job(
        contract=NAME,
        role="node",
        nodes=nodes,
        nproc_per_node=nproc,
        node_rank=node_rank,
        hostname_index=own.index if own else None,
        world_size=torchrun_env.world_size(nodes, nproc),
        coordinator=endpoint,
        is_coordinator=node_rank == 0,
        rendezvous=meeting,
        members=names.v2_members(endpoint.host, nodes.max) if endpoint else None,
        max_restarts=torchrun_env.max_restarts(source),
        # `tune run` starts torch elastic itself: a second agent around it would start it once per GPU.
        engine="plain" if source.pod.command[:2] == ("tune", "run") else "torchrun",
        details=details,
    )


def _rendezvous(source: Source) -> tuple[Rendezvous | None, str | None]:
    """The rendezvous and who told it: the command line wins over the environment, as torchrun has it."""
    found = _argument(source.pod.command)
    if found is None:
        told = torchrun_env.says_how_to_meet(source)
        return (torchrun_env.rendezvous(source, None), "env") if told else (None, None)
    endpoint = parse_endpoint(found, None)
    if endpoint is None:
        raise source.error(_FLAG, found, "HOST:PORT")
    source.note(_FLAG, found, Origin.COMMAND, "rdzv_endpoint")
    return _static(endpoint, found), "argv"


def _static(endpoint: Endpoint, written: str) -> Rendezvous:
    return Rendezvous(kind="static", backend="static", endpoint=endpoint, written=written)


def _argument(command: tuple[str, ...]) -> str | None:
    for position, word in enumerate(command):
        flag, equals, value = word.partition("=")
        if flag not in _FLAGS:
            continue
        if equals:
            return value
        return command[position + 1] if position + 1 < len(command) else ""
    return None
