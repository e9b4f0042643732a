"""A job from flags: the pods that Kubeflow Trainer v2 would make of it, and when it ends. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import v1, v1_pytorch
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import (
    Container,
    Draft,
    File,
    Rules,
    Success,
    Template,
    Workload,
)
from trainer_launch.rehearsal.controllers.pods import env_items
from trainer_launch.rehearsal.controllers.request import Request

KIND, JOB, NODE, LAUNCHER = "TrainJob", "local", "node", "launcher"
# Our own command line. Not -m: it would look for our modules, and for Python's own, in the user's folder first.
RUN = "import sys; '' in sys.path and sys.path.remove(''); from trainer_launch.cli import main; main()"
_PORT = 29500
MAX_NODES = 200
_OURS = "trainer-launch"
_HOSTFILE, _KEYS = "/etc/mpi/hostfile", "/etc/mpi/ssh"
# What a pod must not inherit from the shell it is rehearsed in: other platforms' words, and our own job settings.
_FOREIGN_PREFIXES = ("PET_", "TORCHELASTIC_", "OMPI_", "PMI_", "DMLC_", "JAX_", "K_MPI_", "PADDLE_", "FLYTE_")
_FOREIGN_NAMES = frozenset(
    {
        "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
        "JOB_COMPLETION_INDEX", "TF_CONFIG", "MX_CONFIG", "HOSTNAME", "TRAINER_LAUNCH_CONTRACT",
        "TRAINER_LAUNCH_NODES", "TRAINER_LAUNCH_NPROC_PER_NODE", "TRAINER_LAUNCH_NODE_RANK",
        "TRAINER_LAUNCH_MASTER_ADDR", "TRAINER_LAUNCH_MASTER_PORT",
    }
)  # fmt: skip

# More ranks than CPUs are fine here, which let each other run, none is bound to one, and the network may be down.
ON_A_LAPTOP = {
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_oob_tcp_if_include": "lo",
    "OMPI_MCA_btl_tcp_if_include": "lo",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_prte_if_include": "lo",
}


def torch_job(
    nodes: int, nproc_per_node: str, command: Sequence[str], grace_s: float, *, asked: bool = False
) -> Workload:
    """A torch job, or one of any program on every node: all have to succeed, the first failure ends it.

    With `asked` the user has given the number of workers, which then starts workers of any program.
    The five PET_* values are those of kubeflow/trainer pkg/runtime/framework/plugins/torch/torch.go.

    Raises:
        UsageError: more nodes than a laptop has room for.
    """
    told = {
        "PET_NNODES": str(_checked(nodes)),
        "PET_NPROC_PER_NODE": nproc_per_node,
        "PET_MASTER_ADDR": _full(_name(NODE, 0)),
        "PET_MASTER_PORT": str(_PORT),
    }
    words = _run(command, nproc_per_node if asked else None)

    def draft(node: int) -> Draft:
        container = Container(name=NODE, command=words, items=env_items({**told, "PET_NODE_RANK": str(node)}))
        return _draft(NODE, node, container, grace_s, label=str(node))

    drafts = tuple(map(draft, range(nodes)))
    return _job(drafts, tuple(one.hostname for one in drafts), {"PET_MASTER_PORT": drafts[0].hostname})


def elastic_job(
    nodes: NodeRange,
    started: int,
    nproc_per_node: str,
    command: Sequence[str],
    grace_s: float,
    *,
    asked: bool = False,
) -> Workload:
    """A torch job with a range of nodes: an elastic PyTorchJob that begins with `started` pods.

    Raises:
        UsageError: more nodes than a laptop has room for.
    """
    container = {"name": "pytorch", "command": list(_run(command, nproc_per_node if asked else None))}
    workers = {"replicas": started, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    spec = {
        "nprocPerNode": nproc_per_node,
        "elasticPolicy": {"minReplicas": nodes.min, "maxReplicas": _checked(nodes.max), "rdzvBackend": "c10d"},
        "pytorchReplicaSpecs": {"Worker": workers},
    }
    document = Field({"metadata": {"name": JOB}, "spec": spec}, "", "the options")
    made = v1_pytorch.read(Request(job=document))
    drafts = tuple(_labelled(replace(one, template=replace(one.template, grace_s=grace_s))) for one in made.drafts)
    return replace(made, drafts=drafts)


def _run(command: Sequence[str], nproc_per_node: str | None = None) -> tuple[str, ...]:
    flags = () if nproc_per_node is None else ("--nproc-per-node", nproc_per_node)
    return (_OURS, "run", *flags, "--", *map(_as_typed, command))


def _labelled(draft: Draft) -> Draft:
    """Its workers' lines begin with its index."""
    label = env_items({"TRAINER_LAUNCH_NODE_LABEL": str(draft.index)})
    return replace(draft, template=v1.with_env(draft.template, label))


def mpi_job(nodes: int, nproc_per_node: int, command: Sequence[str], grace_s: float) -> Workload:
    """A job of MPI: every node runs sshd, and the launcher, which comes last, decides how it ends.

    The launcher's variables are those of kubeflow/trainer pkg/runtime/framework/plugins/mpi/mpi.go.

    Raises:
        UsageError: more nodes than a laptop has room for.
    """
    keys = {f"{_KEYS}/id_rsa": File(mode=0o600, key="private")}
    keys |= {f"{_KEYS}/{name}": File(key="public") for name in ("id_rsa.pub", "authorized_keys")}
    served = Container(name=NODE, command=(_OURS, "sshd"), files=keys)
    workers = tuple(_draft(NODE, node, served, grace_s, label=str(node)) for node in range(_checked(nodes)))
    hosts = "".join(f"{_full(one.hostname)} slots={nproc_per_node}\n" for one in workers)
    told = {
        "OMPI_MCA_orte_default_hostfile": _HOSTFILE,
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": str(nproc_per_node),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    runs = Container(
        name=NODE,
        command=_run(command),
        items=env_items(told),
        files={**keys, _HOSTFILE: File(hosts, 0o444)},
    )
    launcher = _draft(LAUNCHER, 0, runs, grace_s, label=LAUNCHER)
    return _job((*workers, launcher), (launcher.hostname,), {})


def _job(drafts: tuple[Draft, ...], deciders: tuple[str, ...], ports: Mapping[str, str]) -> Workload:
    rules = Rules(family="v1", success=Success(groups=(deciders,)), clean="Running")
    return Workload(kind=KIND, name=JOB, namespace="default", drafts=drafts, rules=rules, ports=ports)


def _draft(role: str, index: int, container: Container, grace_s: float, label: str) -> Draft:
    container = replace(container, items=(*container.items, *env_items({"TRAINER_LAUNCH_NODE_LABEL": label})))
    name = _name(role, index)
    return Draft(
        template=Template(containers=(container,), grace_s=grace_s),
        hostname=name,
        role=role,
        index=index,
        main=NODE,
        restart="Never",
        names=(_full(name),),
        completion_index=index,
    )


def _name(role: str, index: int) -> str:
    return f"{JOB}-{role}-0-{index}"


def _full(name: str) -> str:
    """As it stands in what the controller writes: <pod>.<subdomain>."""
    return f"{name}.{JOB}"


def _as_typed(word: str) -> str:
    """A word of the user's, in which $(NAME) is the shell's business and no reference of Kubernetes."""
    return word.replace("$", "$$")


def _checked(nodes: int) -> int:
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"invalid value {nodes} for --nodes: a rehearsal runs 1 to {MAX_NODES} nodes")
    return nodes


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The shell's variables without those of another platform."""
    return {name: value for name, value in env.items() if not _foreign(name)}


def _foreign(name: str) -> bool:
    return name in _FOREIGN_NAMES or name.startswith(_FOREIGN_PREFIXES)
