"""What the v1 operator's kinds have in common: replica specs, names, run policy.

kubeflow/trainer release-1.9: pkg/controller.v1/common, pkg/core, pkg/apis/kubeflow.org/v1/common_types.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Container, Draft, EnvItem, Rules, Success, Template
from trainer_launch.rehearsal.controllers.pods import appended
from trainer_launch.rehearsal.controllers.podspec import read_template

RESTARTS = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN = ("None", "Running", "All")
MAX_REPLICAS = 4096
_RUN_POLICY = ("cleanPodPolicy", "activeDeadlineSeconds", "backoffLimit")
_RUN_POLICY_IGNORED = ("suspend", "schedulingPolicy", "managedBy", "ttlSecondsAfterFinished")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What differs between the kinds."""

    specs: str  # the field with the replica specs
    roles: tuple[str, ...]  # as the manifest writes them
    container: str  # that counts; "": each pod's first
    port_name: str
    port: int
    restart: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """One replica spec."""

    role: str  # lower case
    count: int
    restart: str
    template: Template
    main: str  # the container that counts
    port: int
    where: Field


def job_name(found: Field) -> str:
    """The job's name; without one, as with generateName, what comes before the random part."""
    metadata = found.get("metadata")
    if metadata.get("name").given:
        return metadata.get("name").name()
    prefix = metadata.get("generateName")
    return Field(prefix.text().rstrip("-"), prefix.path, prefix.where).name()


def namespace(found: Field) -> str:
    """The job's namespace."""
    return found.get("metadata", "namespace").name("") or "default"


def replicas(found: Field, kind: Kind) -> dict[str, Replicas]:
    """The replica specs by role, in the order of `kind.roles`."""
    specs = found.get("spec", kind.specs)
    by_role = {role.lower(): role for role in kind.roles}
    for key, spec in specs.fields():
        if key.lower() not in by_role:
            raise spec.bad(f"only the replica types {', '.join(kind.roles)}")
    given = {key.lower(): spec for key, spec in specs.fields() if spec.given}
    if not given:
        raise specs.bad(f"replica specs: {', '.join(kind.roles)}")
    return {role: _replicas(role, given[role], kind) for role in by_role if role in given}


def _replicas(role: str, spec: Field, kind: Kind) -> Replicas:
    spec.only(("replicas", "template", "restartPolicy"))
    template = read_template(spec.get("template"))
    main = template.container(kind.container) if kind.container else template.containers[0]
    if main is None:
        names = ", ".join(one.name for one in template.containers)
        raise spec.get("template", "spec", "containers").bad(
            f"a container named {kind.container}, which gets the controller's variables (found: {names})"
        )
    return Replicas(
        role=role,
        count=spec.get("replicas").number(1, most=MAX_REPLICAS),
        restart=spec.get("restartPolicy").choice(RESTARTS, kind.restart) or kind.restart,
        template=template,
        main=main.name,
        port=main.ports.get(kind.port_name, kind.port),
        where=spec,
    )


def with_env(template: Template, items: Iterable[EnvItem], only: str | None = None) -> Template:
    """Variables for all main containers, or for the one that is named."""
    fresh = tuple(items)

    def given(container: Container) -> Container:
        return container if only not in (None, container.name) else appended(container, fresh)

    return replace(template, containers=tuple(map(given, template.containers)))


def drafts(
    job: str,
    space: str,
    specs: Mapping[str, Replicas],
    made: Callable[[Replicas, int], Template],
    domain: str = "",
) -> tuple[Draft, ...]:
    """The pods of all replica specs; `made` gives each its template."""
    pods = []
    for one, index in [(each, index) for each in specs.values() for index in range(each.count)]:
        name = f"{job}-{one.role}-{index}"
        pods.append(
            Draft(
                template=made(one, index),
                hostname=name,
                role=one.role,
                index=index,
                main=one.main,
                restart=one.restart,
                names=(name, f"{name}.{space}", f"{name}.{space}.svc{domain}"),
                labels=_labels(job, one.role, index),
            )
        )
    return tuple(pods)


def _labels(job: str, role: str, index: int) -> Mapping[str, str]:
    start = "training.kubeflow.org"
    return {f"{start}/job-name": job, f"{start}/replica-type": role, f"{start}/replica-index": str(index)}


def rules(found: Field, success: Success, policy: Field | None = None) -> Rules:
    """The run policy."""
    run = found.get("spec", "runPolicy") if policy is None else policy
    run.only((*_RUN_POLICY, *_RUN_POLICY_IGNORED))
    deadline = run.get("activeDeadlineSeconds")
    backoff = run.get("backoffLimit")
    return Rules(
        family="v1",
        success=success,
        backoff_limit=backoff.number() if backoff.given else None,
        clean=run.get("cleanPodPolicy").choice(CLEAN, "None") or "None",
        deadline_s=float(deadline.number()) if deadline.given else None,
    )


def ignored(found: Field, templates: Iterable[Replicas]) -> tuple[str, ...]:
    """What this machine leaves out, each once."""
    of_pods = (phrase for one in templates for phrase in one.template.ignored)
    return tuple(dict.fromkeys((*of_run_policy(found), *of_pods)))


def of_run_policy(found: Field) -> Iterator[str]:
    """What of the run policy means nothing here."""
    run = found.get("spec", "runPolicy")
    for key in _RUN_POLICY_IGNORED:
        if run.get(key).given:
            yield "suspend: the rehearsal runs anyway" if key == "suspend" and run.get(key).flag() else key


def everyone(pods: Sequence[Draft], role: str) -> tuple[str, ...]:
    """The pods of a role by name."""
    return tuple(pod.hostname for pod in pods if pod.role == role)
