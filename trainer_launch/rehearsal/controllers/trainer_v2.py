"""TrainJob of Kubeflow Trainer v2: its JobSet's pods, with what each runtime's policy injects into them. Pure.

The policies are in `trainer_policies`; here are pods, names and the JobSet's rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainer_launch.rehearsal.controllers import jobset, quantity, trainer_policies
from trainer_launch.rehearsal.controllers.pod_values import Container, Draft, File, Rules, Workload
from trainer_launch.rehearsal.controllers.pods import env_items, upserted
from trainer_launch.rehearsal.controllers.request import Request
from trainer_launch.rehearsal.controllers.runtime import (
    ANCESTOR,
    LAUNCHER,
    NODE,
    TRAINER,
    ReplicatedJob,
    TrainJob,
    on_containers,
    read_trainjob,
    resources_of,
)
from trainer_launch.rehearsal.controllers.v1 import MAX_REPLICAS

# -- MPI ---------------------------------------------------------------------------------------


_POLICY = ("numProcPerNode", "mpiImplementation", "sshAuthMountPath", "runLauncherAsNode")
_HOSTFILE = "/etc/mpi/hostfile"
_RESERVED = (
    "OMPI_MCA_orte_default_hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames",
    "OMPI_MCA_orte_set_default_slots",
    "OMPI_MCA_plm_rsh_args",
)


def mpi(job: TrainJob) -> TrainJob:
    """Keys for the launcher and the nodes; variables and hostfile for the launcher."""
    policy = job.policy_field
    policy.only(_POLICY)
    policy.get("mpiImplementation").choice(("OpenMPI",), "OpenMPI")
    for item in job.trainer.get("env").items():
        if item.get("name").value in _RESERVED:
            raise item.get("name").bad("a variable that the mpi runtime does not set itself")
    works = policy.get("runLauncherAsNode").flag()
    job = replace(job, jobs=tuple(_counted(one, job, works=works) for one in job.jobs))
    slots = _slots(job)
    hosts = [
        f"{job.name}-{one.name}-{number}-{index}.{job.subdomain}"
        for one in job.jobs
        if one.name == NODE or (one.name == LAUNCHER and works)
        for number in range(one.replicas)
        for index in range(one.count)
    ]
    ssh = policy.get("sshAuthMountPath").text("/root/.ssh").rstrip("/")
    keys = {
        f"{ssh}/id_rsa": File(mode=0o640, key="private"),
        f"{ssh}/id_rsa.pub": File(mode=0o644, key="public"),
        f"{ssh}/authorized_keys": File(mode=0o644, key="public"),
    }
    hostfile = {_HOSTFILE: File("".join(f"{host} slots={slots}\n" for host in hosts), 0o444)}
    env = env_items(
        {
            "OMPI_MCA_orte_default_hostfile": _HOSTFILE,
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": str(slots),
            "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        }
    )

    def launcher(one: Container) -> Container:
        return upserted(replace(one, files={**one.files, **keys, **hostfile}), env) if one.name == NODE else one

    def node(one: Container) -> Container:
        return replace(one, files={**one.files, **keys}) if one.name == NODE else one

    changes = {LAUNCHER: launcher, NODE: node}
    jobs = (on_containers(one, changes[one.name]) if one.name in changes else one for one in job.jobs)
    return replace(job, jobs=tuple(jobs))


def _counted(one: ReplicatedJob, job: TrainJob, *, works: bool) -> ReplicatedJob:
    """trainer.numNodes counts the nodes, the launcher too where it is one; the launcher keeps mlPolicy.numNodes."""
    wish = job.trainer.get("numNodes")
    if one.name != NODE or not wish.given:
        return one
    nodes = wish.number(least=1, most=MAX_REPLICAS)
    return replace(one, count=max(nodes - 1, 1) if works else nodes)


def _slots(job: TrainJob) -> int:
    given = job.trainer.get("numProcPerNode")
    if given.given:
        return given.number(least=1)
    slots = job.policy_field.get("numProcPerNode").number(1, least=1)
    devices = quantity.gpus(*resources_of(job))
    return devices if slots == 1 and devices > 1 else slots


# ----------------------------------------------------------------------------------------------


_POLICIES = {
    "torch": trainer_policies.torch,
    "jax": trainer_policies.jax,
    "xgboost": trainer_policies.xgboost,
    "flux": trainer_policies.flux,
    "mpi": mpi,
}
_PORTS = {"torch": ("PET_MASTER_PORT",), "xgboost": ("DMLC_TRACKER_PORT",)}
_MARKS = {"torch": "PET_NNODES", "xgboost": "DMLC_TRACKER_URI", "jax": "JAX_NUM_PROCESSES"}


def read(request: Request) -> Workload:
    """The pods of a TrainJob."""
    job = read_trainjob(request)
    if job.policy:
        job = _POLICIES[job.policy](job)
    drafts = tuple(draft for one in job.jobs for draft in _drafts(job, one))
    first = f"{job.name}-{NODE}-0-0"
    return Workload(
        kind="TrainJob",
        name=job.name,
        namespace=job.space,
        drafts=drafts,
        rules=_rules(job, drafts),
        ports=dict.fromkeys(_PORTS.get(job.policy, ()), first),
        ignored=tuple(
            dict.fromkeys((*_ignored_of_job(job), *(text for one in job.jobs for text in _ignored(job, one))))
        ),
        odd=tuple(_odd(job)),
    )


def _odd(job: TrainJob) -> Iterator[str]:
    """What the author of the job can hardly have meant."""
    launchers = next((one.count for one in job.jobs if one.name == LAUNCHER), 1)
    if job.policy == "mpi" and launchers > 1:
        yield (
            f"the controller makes {launchers} launchers, each of which runs the command, because "
            f"mlPolicy.numNodes is {launchers}; set that to 1, and trainer.numNodes to the number of nodes"
        )
    mark = _MARKS.get(job.policy)
    if mark is None:
        return
    if job.main is None:
        yield (
            f"no container gets {mark} and the like, because no replicatedJob has the label {ANCESTOR}: {TRAINER}; "
            f"add the label to the template of the replicatedJob that trains"
        )
    elif not any(item.name == mark for one in job.main.template.containers for item in one.items):
        yield (
            f"the container {NODE} gets no {mark} and the like, because the TrainJob has no spec.trainer; "
            f"add at least trainer: {{}}"
        )


def _ignored_of_job(job: TrainJob) -> Iterator[str]:
    """What the TrainJob and its runtime wish for beside their pods."""
    for key in ("suspend", "managedBy", "ttlSecondsAfterFinished"):
        if job.job.get("spec", key).given:
            yield (
                "suspend: the rehearsal runs anyway"
                if key == "suspend" and job.job.get("spec", key).flag()
                else key
            )
    if job.has_pod_group:
        yield "podGroupPolicy"
    yield from jobset.ignored(job.jobset, [one.field for one in job.jobs])


def _ignored(job: TrainJob, one: ReplicatedJob) -> list[str]:
    phrases = list(one.template.ignored)
    named = job.trainer.get("resourcesPerNode")
    if one.is_trainer and named.given:
        words = dict.fromkeys((*named.get("requests").mapping(), *named.get("limits").mapping()))
        phrases.append(f"resources ({', '.join(words)})")
    return phrases


def _drafts(job: TrainJob, one: ReplicatedJob) -> list[Draft]:
    """Every pod of a replicatedJob: `<job>-<replicatedJob>-<jobIndex>-<podIndex>`."""
    containers = one.template.containers
    main = next((each.name for each in containers if each.name == NODE), containers[0].name)
    pods = []
    for number in range(one.replicas):
        for index in range(one.count):
            host = f"{job.name}-{one.name}-{number}-{index}"
            full = f"{host}.{job.subdomain}"
            pods.append(
                Draft(
                    template=one.template,
                    hostname=host,
                    role=one.name,
                    index=index,
                    main=main,
                    restart=one.template.restart or "OnFailure",
                    names=(full, f"{full}.{job.space}", f"{full}.{job.space}.svc{job.domain}"),
                    labels=_labels(job, one, number, index),
                    completion_index=index,
                    child=f"{job.name}-{one.name}-{number}",
                    after=_after(job, one),
                )
            )
    return pods


def _labels(job: TrainJob, one: ReplicatedJob, number: int, index: int) -> Mapping[str, str]:
    return {
        "jobset.sigs.k8s.io/jobset-name": job.name,
        "jobset.sigs.k8s.io/replicatedjob-name": one.name,
        "jobset.sigs.k8s.io/job-index": str(number),
        "jobset.sigs.k8s.io/restart-attempt": "0",
        "batch.kubernetes.io/job-completion-index": str(index),
    }


def _after(job: TrainJob, one: ReplicatedJob) -> tuple[str, ...]:
    names = {each.name: each for each in job.jobs}
    waits = []
    if (
        job.jobset.get("startupPolicy", "startupPolicyOrder").choice(("AnyOrder", "InOrder"), "AnyOrder")
        == "InOrder"
    ):
        earlier = job.jobs[: [each.name for each in job.jobs].index(one.name)][-1:]
        waits += [f"{job.name}-{each.name}-{number}=Ready" for each in earlier for number in range(each.replicas)]
    for dependency in one.field.get("dependsOn").items():
        name = dependency.get("name").choice(tuple(names))
        status = dependency.get("status").choice(("Ready", "Complete"), "Complete")
        waits += [f"{job.name}-{name}-{number}={status}" for number in range(names[name].replicas)]
    return tuple(waits)


def _rules(job: TrainJob, drafts: tuple[Draft, ...]) -> Rules:
    children = {
        f"{job.name}-{one.name}-{number}": jobset.read_job(
            one.field.get("template", "spec"), one.name, one.template.restart or "OnFailure"
        )
        for one in job.jobs
        for number in range(one.replicas)
    }
    return jobset.read(job.jobset, drafts, children, job.job.get("spec", "activeDeadlineSeconds"))
