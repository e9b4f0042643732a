"""A manifest as values: pods with their containers, and the rules by which they live and die.

Frozen values. A `Draft` is a pod before it has an address; `pods` gives them theirs.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.contracts.source import MAX_VALUE_BYTES
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import shown


class PodFile(Struct, frozen=True):
    """A file that the platform puts into a container; `key` names what is made when the job is (see `keys`)."""

    text: str = ""
    mode: int = 0o644
    key: str | None = None  # "private" or "public": of the job's own pair of keys
    is_mounted: bool = False  # it lies in a volume, where the container has that


HOSTFILE = "/etc/mpi/hostfile"


def key_files(folder: str, private: int, public: int) -> dict[str, PodFile]:
    """The job's own pair of keys, as ssh wants it, with these modes."""
    return {
        f"{folder}/id_rsa": PodFile(mode=private, key="private"),
        **{f"{folder}/{name}": PodFile(mode=public, key="public") for name in ("id_rsa.pub", "authorized_keys")},
    }


class Mount(Struct, frozen=True):
    """A volume at a path of a container."""

    path: str
    volume: str
    part: str = ""  # subPath, or subPathExpr with $(NAME) for a variable


class EnvItem(Struct, frozen=True, kw_only=True):
    """A variable: a value, in which $(NAME) stands for another, or a field of the pod."""

    name: str
    value: str = ""
    field: str | None = None  # such as metadata.name


class ExitRule(Struct, frozen=True, kw_only=True):
    """A rule by exit codes, of a Job's podFailurePolicy or a container."""

    action: str  # FailJob, Ignore, Count; of a container Restart
    container: str | None = None
    among: bool  # In, else NotIn
    codes: tuple[int, ...]

    def means(self, code: int) -> bool:
        """Whether an exit code is one that the rule means."""
        return (code in self.codes) is self.among


class Container(Struct, frozen=True, kw_only=True):
    """A container as the pod's specification has it; in a `Pod` its variables are resolved as well."""

    name: str
    command: tuple[str, ...] = ()  # in place of the image's ENTRYPOINT
    args: tuple[str, ...] = ()
    typed: Mapping[str, str] = field(default_factory=dict)  # a word of both that had $(NAME) in it -> with it
    items: tuple[EnvItem, ...] = ()  # in order; of the same name the last counts
    sources: tuple[EnvItem, ...] = ()  # of envFrom; `items` are stronger, and never replace them in their place
    env: Mapping[str, str] = field(default_factory=dict)  # all variables, resolved
    files: Mapping[str, PodFile] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    workdir: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)  # by name
    limits: Mapping[str, str] = field(default_factory=dict)  # as Kubernetes writes quantities
    requests: Mapping[str, str] = field(default_factory=dict)
    restart: str | None = None  # its own restartPolicy, in place of the pod's
    restart_rules: tuple[ExitRule, ...] = ()  # restartPolicyRules
    sidecar: bool = False  # an init container with restartPolicy Always: goes on beside the others
    stop_signal: str | None = None  # lifecycle.stopSignal, in place of SIGTERM
    platforms: bool = False  # its program is in an image that is not here; a rehearsal has nothing for it to do

    @property
    def uses_ssh(self) -> bool:
        """Whether the job's private key is mounted here."""
        return any(file.key == "private" for file in self.files.values())

    @property
    def serves_ssh(self) -> bool:
        """Whether the container is for sshd: it has the key, and no hosts to reach with it."""
        return self.uses_ssh and HOSTFILE not in self.files


class Template(Struct, frozen=True, kw_only=True):
    """The template of all pods of a role."""

    containers: tuple[Container, ...]
    init: tuple[Container, ...] = ()
    restart: str | None = None  # None: as the kind has it
    grace_s: float = 30.0
    volumes: Mapping[str, str] = field(default_factory=dict)  # name -> "pod", or "claim:NAME" for all pods
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    service_account: str = "default"

    def container(self, name: str) -> Container | None:
        """The main container of this name."""
        return next((each for each in self.containers if each.name == name), None)


class Draft(Struct, frozen=True, kw_only=True):
    """A pod of the job, all but its address."""

    template: Template
    hostname: str
    role: str  # the platform's word, lower case
    index: int
    main: str  # the container that counts
    restart: str  # Always, OnFailure, Never, or ExitCode: what its controller goes by
    names: tuple[str, ...]  # under which others find it: the short name, and longer ones
    labels: Mapping[str, str] = field(default_factory=dict)
    completion_index: int | None = None  # of an Indexed Job
    child: str = ""  # the Job that it belongs to, where there is one between the job and its pods
    after: tuple[str, ...] = ()  # Jobs that come first, as JOB=Ready or JOB=Complete


class Pod(Struct, frozen=True, kw_only=True):
    """A pod, as its kubelet gets it: every variable resolved."""

    draft: Draft
    namespace: str
    address: str
    init: tuple[Container, ...]
    containers: tuple[Container, ...]

    @property
    def name(self) -> str:
        """The host name, which is different for each pod of a job."""
        return self.draft.hostname

    @property
    def main(self) -> Container:
        """The container that counts."""
        return self.container(self.draft.main)

    def container(self, name: str) -> Container:
        """The container of this name, main or init."""
        return next(each for each in (*self.init, *self.containers) if each.name == name)


class Success(Struct, frozen=True, kw_only=True):
    """The job has succeeded when all, or any, of these groups have; a group has when each of its pods has."""

    groups: tuple[tuple[str, ...], ...]
    any_of: bool = False
    spares: int = 0  # pods that may be lost, or fail, once nothing of them runs


class SetRule(Struct, frozen=True, kw_only=True):
    """A rule of a JobSet's failurePolicy; an empty tuple fits all."""

    action: str  # FailJobSet, RestartJobSet, RestartJobSetAndIgnoreMaxRestarts
    reasons: tuple[str, ...] = ()


class ChildRules(Struct, frozen=True, kw_only=True):
    """How a batch Job between the job and its pods lives."""

    backoff_limit: int = 6
    exit_rules: tuple[ExitRule, ...] = ()


class JobRules(Struct, frozen=True, kw_only=True):
    """How the controller lets the pods of a job live and die."""

    family: str  # "v1": bare pods; "jobset": Jobs of a JobSet; "mpi": bare workers, and a Job for the launcher
    success: Success
    backoff_limit: int | None = None  # v1: of restarts in all pods together
    clean: str = "None"  # cleanPodPolicy: None, Running, All
    children: Mapping[str, ChildRules] = field(default_factory=dict)
    max_restarts: int = 0  # of the whole JobSet
    set_rules: tuple[SetRule, ...] = ()


class Workload(Struct, frozen=True, kw_only=True):
    """A whole job: its pods, its rules, what a laptop leaves out of it, and what is odd about it anywhere."""

    kind: str
    name: str
    namespace: str
    drafts: tuple[Draft, ...]
    rules: JobRules
    ports: Mapping[str, str] = field(default_factory=dict)  # variable -> host name of the pod that listens there
    ignored: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()  # sentences: unlikely settings, and fields that are not read


JOBSET_LABEL = "jobset.sigs.k8s.io/"  # what these begin with, JobSet writes as annotations, too
COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_REFERENCE = re.compile(r"\$(?:\$|\(([^()$]+)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['?([^']*)'?\]")


def address_of(number: int, network: str = "10.244") -> str:
    """The address of a pod by its number in the job: without another network one such as pods of a cluster have."""
    return f"{network}.{number // 250}.{number % 250 + 2}"


def pods(workload: Workload, address_of: Callable[[int], str] = address_of) -> tuple[Pod, ...]:
    """The pods of a job, each with its address, and on a node of its own."""
    return tuple(
        _pod(draft, workload.namespace, address_of(number), f"node-{number}")
        for number, draft in enumerate(workload.drafts)
    )


def _pod(draft: Draft, namespace: str, address: str, node: str) -> Pod:
    fields = _fields(draft, namespace, address) | {"spec.nodeName": node}
    init, containers = draft.template.init, draft.template.containers
    if draft.completion_index is not None:  # of an Indexed Job every container gets it, unless it has the variable
        init, containers = tuple(map(_indexed, init)), tuple(map(_indexed, containers))
    return Pod(
        draft=draft,
        namespace=namespace,
        address=address,
        init=tuple(_resolved(each, fields) for each in init),
        containers=tuple(_resolved(each, fields) for each in containers),
    )


def _indexed(container: Container) -> Container:
    if any(item.name == "JOB_COMPLETION_INDEX" for item in (*container.sources, *container.items)):
        return container
    index = EnvItem(name="JOB_COMPLETION_INDEX", field=COMPLETION_INDEX)
    return replace(container, items=(*container.items, index))


# Fields of a pod that a variable may have, beside labels and annotations; no server listens at the host's address.
FIELDS = (
    *("metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName"),
    *("status.podIP", "status.podIPs", "status.hostIP", "status.hostIPs"),
)
_HOST = "127.0.0.1"


def _fields(draft: Draft, namespace: str, address: str) -> dict[str, str]:
    index = "" if draft.completion_index is None else str(draft.completion_index)
    labels = {**draft.template.labels, **draft.labels}
    written = {name: value for name, value in draft.labels.items() if name.startswith(JOBSET_LABEL)}
    annotations = {**draft.template.annotations, **written}
    return {
        "metadata.name": draft.hostname,
        "metadata.namespace": namespace,
        "metadata.uid": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{namespace}/{draft.hostname}")),
        "spec.serviceAccountName": draft.template.service_account,
        **dict.fromkeys(("status.podIP", "status.podIPs"), address),
        **dict.fromkeys(("status.hostIP", "status.hostIPs"), _HOST),
        COMPLETION_INDEX: index,
        **{f"metadata.labels['{name}']": value for name, value in labels.items()},
        **{f"metadata.annotations['{name}']": value for name, value in annotations.items()},
    }


def _resolved(container: Container, fields: Mapping[str, str]) -> Container:
    env: dict[str, str] = {}
    for item in (*container.sources, *container.items):
        is_field = item.field is not None
        env[item.name] = fields.get(_plain(item.field or ""), "") if is_field else expanded(item.value, env)
    words = {word: expanded(word, env) for word in (*container.command, *container.args)}
    return replace(
        container,
        env=env,
        command=tuple(words[word] for word in container.command),
        args=tuple(words[word] for word in container.args),
        typed={text: word for word, text in words.items() if text not in words},
        mounts=tuple(replace(mount, part=_part(mount, env)) for mount in container.mounts),
    )


def _part(mount: Mount, env: Mapping[str, str]) -> str:
    part = expanded(mount.part, env)
    if ".." in part.split("/"):
        raise UsageError(f"the subPath of {mount.path} is {shown(part)}; expected a path inside its volume")
    return part


def _plain(path: str) -> str:
    match = _SUBSCRIPT.fullmatch(path)
    return f"metadata.{match[1]}['{match[2]}']" if match else path


def escaped(text: str) -> str:
    """A text in which $(NAME) stands for itself, as `expanded` gives it back."""
    return text.replace("$", "$$")


def expanded(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) replaced by what came before it, $$ by $; a name that nothing has stays as it is written.

    Raises:
        UsageError: it is longer than Linux lets a variable or an argument be.
    """

    def value(match: re.Match[str]) -> str:
        return "$" if match[1] is None else env.get(match[1], match[0])

    size = len(text) + sum(len(value(match)) for match in _REFERENCE.finditer(text))
    if size > MAX_VALUE_BYTES:  # looked at before it is made: references to references grow without end
        start = shown(text[:40])
        raise UsageError(
            f"the value that begins with {start} is longer than {MAX_VALUE_BYTES} bytes, which is Linux's limit"
        )
    return _REFERENCE.sub(value, text)


SSH_ARGS = "-o ConnectionAttempts=10"


def open_mpi(hostfile: str, slots: int) -> tuple[EnvItem, ...]:
    """Open MPI's variables for a launcher, as Trainer v2 and mpi-operator have them.

    kubeflow/trainer pkg/runtime/framework/plugins/mpi/mpi.go.
    """
    return env_items(
        {
            "OMPI_MCA_orte_default_hostfile": hostfile,
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": str(slots),
            "OMPI_MCA_plm_rsh_args": SSH_ARGS,
        }
    )


def env_items(pairs: Mapping[str, str]) -> tuple[EnvItem, ...]:
    """Plain variables."""
    return tuple(EnvItem(name=name, value=value) for name, value in pairs.items())


def upserted(container: Container, items: Iterable[EnvItem]) -> Container:
    """Variables put in the place of those of the same name, else behind, as Trainer v2 does."""
    merged = list(container.items)
    for item in items:
        at = next((number for number, old in enumerate(merged) if old.name == item.name), None)
        if at is None:
            merged.append(item)
        else:
            merged[at] = item
    return replace(container, items=tuple(merged))
