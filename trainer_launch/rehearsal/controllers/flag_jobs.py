"""Jobs of flags: `rehearse --nodes N -- train.py` as the manifest that would ask for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.host import runtime_directory
from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import trainer_v2, v1
from trainer_launch.rehearsal.controllers.documents import RUNTIMES, Configs, Field
from trainer_launch.rehearsal.controllers.jobset import NODE
from trainer_launch.rehearsal.controllers.local_jobs import MAX_PODS, OURS
from trainer_launch.rehearsal.controllers.pod_values import (
    COMPLETION_INDEX,
    Draft,
    JobRules,
    Success,
    Workload,
    escaped,
)
from trainer_launch.rehearsal.controllers.trainer_v2 import ANCESTOR, LAUNCHER, TRAINER

JOB = "local"
_OPTIONS = "the options"  # what messages call the manifest that flags become
_KEYS = "/etc/mpi/ssh"
_MEETING = ("--rdzv-endpoint", "--master-addr")  # options of a command that name node 0 of another place


def torch_job(
    nodes: int, nproc_per_node: str, command: Sequence[str], grace_s: float, *, asked: bool = False, spares: int = 0
) -> Workload:
    """A torch job, or one of any program on every node: all but spares have to succeed, the first failure ends it.

    With `asked` the user has given the number of workers, which then starts workers of any program.

    Raises:
        UsageError: more nodes than a laptop has room for.
    """
    words = _run(command, nproc_per_node if asked else None, f"{JOB}-{NODE}-0-0.{JOB}")
    trainer = {"numNodes": _checked(nodes + spares), "numProcPerNode": _number(nproc_per_node), "command": words}
    return _trainjob({"torch": {}}, [_replicated_job(NODE, TRAINER)], trainer, grace_s, spares)


def mpi_job(nodes: int, nproc_per_node: int, command: Sequence[str], grace_s: float) -> Workload:
    """A job of MPI: every node runs sshd, and the launcher, which comes last, decides how it ends.

    Raises:
        UsageError: more nodes than a laptop has room for.
    """
    trainer = {"numNodes": _checked(nodes), "numProcPerNode": nproc_per_node, "command": _run(command)}
    jobs = [_replicated_job(NODE, command=[OURS, "sshd"]), _replicated_job(LAUNCHER, TRAINER)]
    return _trainjob({"mpi": {"sshAuthMountPath": _KEYS}}, jobs, trainer, grace_s)


def elastic_job(
    nodes: NodeRange, nproc_per_node: str, command: Sequence[str], grace_s: float, *, asked: bool = False
) -> Workload:
    """A torch job with a range of nodes: an elastic PyTorchJob that begins with as many pods as it may have.

    Raises:
        UsageError: more nodes than a laptop has room for.
    """
    words = _run(command, nproc_per_node if asked else None, f"{JOB}-worker-0")
    index = "training.kubeflow.org/replica-index"
    container = {"name": "pytorch", "command": words, "env": [_label(f"metadata.labels['{index}']")]}
    workers = {
        "replicas": _checked(nodes.max),
        "restartPolicy": "Never",
        "template": {"spec": {"containers": [container]}},
    }
    spec = {
        "nprocPerNode": nproc_per_node,
        "elasticPolicy": {"minReplicas": nodes.min, "maxReplicas": nodes.max, "rdzvBackend": "c10d"},
        "pytorchReplicaSpecs": {"Worker": workers},
    }
    made = v1.read(Field({"kind": "PyTorchJob", "metadata": {"name": JOB}, "spec": spec}, "", _OPTIONS))
    return replace(made, drafts=_with_grace(made, grace_s))


def _trainjob(
    policy: Mapping[str, object],
    jobs: list[dict[str, object]],
    trainer: Mapping[str, object],
    grace_s: float,
    spares: int = 0,
) -> Workload:
    """A TrainJob whose last replicatedJob decides how it ends, and whose controller restarts nothing."""
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": RUNTIMES[0],
        "metadata": {"name": JOB},
        "spec": {"mlPolicy": policy, "template": {"spec": {"replicatedJobs": jobs}}},
    }
    spec = {"runtimeRef": {"name": JOB}, "trainer": trainer}
    configs = Configs(runtimes=(Field(runtime, "", _OPTIONS),))
    made = trainer_v2.read(Field({"metadata": {"name": JOB}, "spec": spec}, "", _OPTIONS, configs))
    deciders = tuple(draft.hostname for draft in made.drafts if draft.role == made.drafts[-1].role)
    rules = JobRules(family="v1", success=Success(groups=(deciders,), spares=spares), clean="Running")
    return replace(made, drafts=_with_grace(made, grace_s), rules=rules)


def _replicated_job(name: str, step: str = "", command: Sequence[str] = ()) -> dict[str, object]:
    label = _label(COMPLETION_INDEX) if name == NODE else {"name": runtime_directory.NODE_LABEL, "value": name}
    container = {"name": NODE, "command": [*command], "env": [label]}
    pod = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {"name": name, "template": {"metadata": {"labels": {ANCESTOR: step}}, "spec": {"template": pod}}}


def _label(path: str) -> dict[str, object]:
    """The beginning of the lines of a pod's workers: a field of the pod."""
    return {"name": runtime_directory.NODE_LABEL, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _with_grace(made: Workload, grace_s: float) -> tuple[Draft, ...]:
    """Kubernetes has whole seconds in a manifest, --grace has not."""
    return tuple(replace(draft, template=replace(draft.template, grace_s=grace_s)) for draft in made.drafts)


def _run(command: Sequence[str], nproc_per_node: str | None = None, first: str | None = None) -> list[str]:
    """The launcher's command line. Pods meet at the pod `first`, even if the command names a cluster's host.

    In the user's words $(NAME) is the shell's business and no reference of Kubernetes.
    """
    flags = [] if nproc_per_node is None else ["--nproc-per-node", nproc_per_node]
    if first is not None and any(word.partition("=")[0].replace("_", "-") in _MEETING for word in command):
        flags += ["--master-addr", first]
    return [OURS, "run", *flags, "--", *map(escaped, command)]


def _number(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def _checked(nodes: int) -> int:
    if not 1 <= nodes <= MAX_PODS:
        raise UsageError(f"invalid value {nodes} for --nodes: a rehearsal runs 1 to {MAX_PODS} nodes")
    return nodes
