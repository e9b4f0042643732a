"""TrainJob of Kubeflow Trainer v2: its JobSet's pods, with what each runtime's policy injects into them. Pure.

kubeflow/trainer pkg/runtime/framework/plugins/{torch,jax,xgboost,flux,mpi}; PlainML injects nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from msgspec.structs import replace

from trainer_launch.rehearsal.controllers import documents, trainer_runtime
from trainer_launch.rehearsal.controllers.documents import Request
from trainer_launch.rehearsal.controllers.pod_values import (
    COMPLETION_INDEX,
    JOBSET_LABEL,
    SSH_ARGS,
    Container,
    Draft,
    EnvItem,
    File,
    Rules,
    Workload,
    env_items,
    key_files,
    open_mpi,
    upserted,
)
from trainer_launch.rehearsal.controllers.podspec import left_out
from trainer_launch.rehearsal.controllers.trainer_runtime import (
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

# -- policies of a runtime ---------------------------------------------------------------------


PORT = 29500
_TORCH = ("numProcPerNode", "envInjection")
_RESERVED = {
    "torch": ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "xgboost": ("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER"),
}
_FLUX_CONFIG = "/etc/flux-config"
_TUNE = ("tune", "run")


def torch(job: TrainJob) -> TrainJob:
    """PET_* for the trainer's container, and for the targets of envInjection."""
    job.policy_field.only(_TORCH)
    _refuse_reserved(job, _RESERVED["torch"])
    main = job.main
    nodes, nproc = (main.count if main else 1), _nproc(job)
    count = EnvItem(name="PET_NNODES", value=str(nodes))
    first_three = (count, EnvItem(name="PET_NPROC_PER_NODE", value=nproc), _index("PET_NODE_RANK"))
    items = (*first_three, *env_items({"PET_MASTER_ADDR": job.node_0, "PET_MASTER_PORT": str(PORT)}))
    if job.trainer.given:
        if job.trainer.get("command").texts() == _TUNE:
            job = _on_trainer(job, lambda one: tuned(upserted(one, first_three), job, nodes, nproc))
        else:
            job = _on_trainer(job, lambda one: upserted(one, items))
    return _injected(job, items)


def _injected(job: TrainJob, items: tuple[EnvItem, ...]) -> TrainJob:
    """All five variables for each target, in any replicatedJob, init containers too."""
    for target in job.policy_field.get("envInjection", "targets").items():
        target.only(("jobName", "containerNames"))
        name, chosen = target.get("jobName").text(), target.get("containerNames").texts()
        found = next((one for one in job.jobs if one.name == name), None)
        if found is None:
            raise target.get("jobName").bad(f"one of the replicatedJobs: {', '.join(one.name for one in job.jobs)}")
        there = [one.name for one in (*found.template.init, *found.template.containers)]
        missing = next((one for one in chosen if one not in there), None)
        if missing is not None:
            raise target.get("containerNames").bad(f"containers of {name}: {', '.join(there)}", found=missing)

        def given(one: Container, chosen: tuple[str, ...] = chosen) -> Container:
            return upserted(one, items) if one.name in chosen else one

        changed = on_containers(found, given, init=True)
        job = replace(job, jobs=tuple(changed if one is found else one for one in job.jobs))
    return job


def _nproc(job: TrainJob) -> str:
    """An integer as given; auto becomes the number of CPUs where no GPU is asked for."""
    limits, requests = resources_of(job)
    given = job.trainer.get("numProcPerNode")
    if not given.given:
        given = job.policy_field.get("numProcPerNode")
    if isinstance(given.value, str):  # until v2.1
        word = given.choice(("auto", "cpu", "gpu"))
    else:
        word = str(given.number(least=1)) if given.given else "auto"
    if word == "cpu":
        return str(documents.cpus(limits, requests))
    if word == "auto" and not documents.gpus(limits, requests):
        return str(documents.cpus(limits, requests))
    return word


def jax(job: TrainJob) -> TrainJob:
    """One process per node, whatever its devices are."""
    if not job.trainer.given:
        return job
    nodes = job.main.count if job.main else 1
    items = (
        EnvItem(name="JAX_NUM_PROCESSES", value=str(nodes)),
        _index("JAX_PROCESS_ID"),
        EnvItem(name="JAX_COORDINATOR_ADDRESS", value=f"{job.node_0}:{PORT}"),
    )
    return _on_trainer(job, lambda one: upserted(one, items))


def xgboost(job: TrainJob) -> TrainJob:
    """A tracker on node 0, and one worker per GPU."""
    _refuse_reserved(job, _RESERVED["xgboost"])
    if not job.trainer.given:
        return job
    nodes = job.main.count if job.main else 1
    workers = nodes * max(1, documents.gpus(*resources_of(job)))
    items = (
        *env_items({"DMLC_TRACKER_URI": job.node_0, "DMLC_TRACKER_PORT": str(PORT)}),
        _index("DMLC_TASK_ID"),
        EnvItem(name="DMLC_NUM_WORKER", value=str(workers)),
    )
    return _on_trainer(job, lambda one: upserted(one, items))


def flux(job: TrainJob) -> TrainJob:
    """The command is wrapped, and Flux's own files are there; no variable is."""
    job.policy_field.only(("numProcPerNode",))
    main = job.main
    if main is None or not job.trainer.get("numNodes").given:
        raise job.trainer.get("numNodes").bad("a number of nodes, which the Flux runtime needs")
    last = "0" if main.count == 1 else f"0-{main.count - 1}"
    files = {
        f"{_FLUX_CONFIG}/entrypoint.sh": File(mode=0o755),
        f"{_FLUX_CONFIG}/init.sh": File(mode=0o755),
        "/curve/curve.cert": File(mode=0o400),
        "/mnt/flux/config/etc/flux/system/hostlist": File(f"{job.name}-{NODE}-0-[{last}]\n"),
    }

    def wrapped(one: Container) -> Container:
        typed = " ".join((*one.command, *one.args))
        command = ("/bin/bash", f"{_FLUX_CONFIG}/entrypoint.sh", typed)
        return replace(one, command=command, args=(), files={**one.files, **files})

    installer = Container(name="flux-installer", command=("/bin/bash", f"{_FLUX_CONFIG}/init.sh"), platforms=True)
    made = _on_trainer(job, wrapped)
    changed = tuple(
        replace(one, template=replace(one.template, init=(installer, *one.template.init)))
        if one.is_trainer
        else one
        for one in made.jobs
    )
    return replace(made, jobs=changed)


def _index(name: str) -> EnvItem:
    return EnvItem(name=name, field=COMPLETION_INDEX)


def _on_trainer(job: TrainJob, change: Callable[[Container], Container]) -> TrainJob:
    """The trainer's container, which is called node, changed."""

    def chosen(one: Container) -> Container:
        return change(one) if one.name == NODE else one

    jobs: Iterable[ReplicatedJob] = (on_containers(one, chosen) if one.is_trainer else one for one in job.jobs)
    return replace(job, jobs=tuple(jobs))


def _refuse_reserved(job: TrainJob, names: Collection[str]) -> None:
    """The webhook lets nobody set what the controller does."""
    for item in job.trainer.get("env").items():
        if item.get("name").value in names:
            raise item.get("name").bad(f"a variable that the {job.policy} runtime does not set itself")


# -- torchtune ---------------------------------------------------------------------------------


_MODELS, _LARGE = ("llama3_2/1B", "llama3_2/3B", "qwen2_5/1.5B"), "llama3_3/70B"
_FIXED = ("output_dir", "tokenizer.path", "checkpointer.checkpoint_dir", "tokenizer.merges_file")  # the runtime's


def tuned(container: Container, job: TrainJob, nodes: int, nproc: str) -> Container:
    """The container with its command completed; its arguments stay the user's."""
    args = job.trainer.get("args").texts()
    for item in job.trainer.get("args").items():
        if item.text().partition("=")[0] in _FIXED:
            raise item.bad("a setting that the runtime does not fix")
    devices = documents.gpus(*resources_of(job))
    model = _model(job)
    recipe, suffix = _recipe(nodes, nproc, devices, args)
    several = nodes > 1 or (int(nproc) > 1 if nproc.isdigit() else devices > 1)
    endpoint = [f"--rdzv_endpoint={job.node_0}:{PORT}"] if several else []
    overrides = [word for word in _runtimes_command(job) if word.partition("=")[0] in _FIXED]
    return replace(container, command=(*_TUNE, *endpoint, recipe, "--config", f"{model}{suffix}", *overrides))


def _recipe(nodes: int, nproc: str, devices: int, args: tuple[str, ...]) -> tuple[str, str]:
    """Recipe, and the end of the configuration's name."""
    lora = any("model.lora_attn_modules" in word for word in args)
    quantized = _is_on("model.quantize_base", args) and not _is_on("model.use_dora", args)
    if nodes > 1:
        return "full_finetune_distributed", "_full_multinode"
    if nproc == "1" or devices == 1:
        if quantized or lora:
            return "lora_finetune_single_device", f"_{'qlora' if quantized else 'lora'}_single_device"
        return "full_finetune_single_device", "_full_single_device"
    if quantized or lora:
        return "lora_finetune_distributed", "_qlora" if quantized else "_lora"
    return "full_finetune_distributed", "_full"


def _is_on(name: str, args: tuple[str, ...]) -> bool:
    pairs = (word.partition("=") for word in args)
    return any(name in key and value.strip().lower() == "true" for key, _, value in pairs)


def _runtimes_command(job: TrainJob) -> tuple[str, ...]:
    """The command of the runtime's own container, before the TrainJob's replaced it."""
    if job.main is None:
        return ()
    containers = job.main.field.get("template", "spec", "template", "spec", "containers").items()
    return next((one.get("command").texts() for one in containers if one.get("name").value == NODE), ())


def _model(job: TrainJob) -> str:
    """`torchtune-llama3.3-70b` tunes llama3_3/70B, the only one that several nodes can."""
    parts = job.runtime.split("-")
    model = f"{parts[1].replace('.', '_')}/{parts[2].upper()}" if len(parts) == 3 else ""
    if model not in (*_MODELS, _LARGE):
        raise job.job.get("spec", "runtimeRef", "name").bad(
            f"torchtune-NAME-SIZE for one of {', '.join((*_MODELS, _LARGE))}"
        )
    if model != _LARGE and job.trainer.get("numNodes").number(1) > 1:
        raise job.trainer.get("numNodes").bad(f"1 node for {model}")
    return model


# -- MPI ---------------------------------------------------------------------------------------


_POLICY = ("numProcPerNode", "mpiImplementation", "sshAuthMountPath", "runLauncherAsNode")
_HOSTFILE = "/etc/mpi/hostfile"
# Variables with the host file and with arguments for ssh: kubeflow/trainer pull request 3717, commit 9e87e772.
_HYDRA = {
    "Intel": ("I_MPI_HYDRA_HOST_FILE", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"),
    "MPICH": ("HYDRA_HOST_FILE", "HYDRA_LAUNCHER_EXTRA_ARGS"),
}


def mpi(job: TrainJob) -> TrainJob:
    """Keys for the launcher and the nodes; variables and hostfile for the launcher."""
    policy = job.policy_field
    policy.only(_POLICY)
    hydra = _hydra(job)
    works = policy.get("runLauncherAsNode").flag()
    wish = job.trainer.get("numNodes")
    if works and wish.number(1) > 1 and not {LAUNCHER, NODE} <= {one.name for one in job.jobs}:
        raise wish.bad(f"1, or a runtime with the replicatedJobs {LAUNCHER} and {NODE}")
    job = replace(job, jobs=tuple(_counted(one, job, works=works) for one in job.jobs))
    slots = _slots(job)
    env = env_items({hydra[0]: _HOSTFILE, hydra[1]: SSH_ARGS}) if hydra else open_mpi(_HOSTFILE, slots)
    _refuse_reserved(job, [item.name for item in env])
    hosts = [
        f"{job.name}-{one.name}-{number}-{index}.{job.subdomain}"
        for one in job.jobs
        if one.name == NODE or (one.name == LAUNCHER and works)
        for number in range(one.replicas)
        for index in range(one.count)
    ]
    ssh = policy.get("sshAuthMountPath").text("/root/.ssh").rstrip("/")
    keys = key_files(ssh, 0o640, 0o644)
    before = ":" if hydra else " slots="
    hostfile = {_HOSTFILE: File("".join(f"{host}{before}{slots}\n" for host in hosts), 0o444)}

    def launcher(one: Container) -> Container:
        return upserted(replace(one, files={**one.files, **keys, **hostfile}), env) if one.name == NODE else one

    def node(one: Container) -> Container:
        return replace(one, files={**one.files, **keys}) if one.name == NODE else one

    changes = {LAUNCHER: launcher, NODE: node}
    jobs = (on_containers(one, changes[one.name]) if one.name in changes else one for one in job.jobs)
    return replace(job, jobs=tuple(jobs))


def _hydra(job: TrainJob) -> tuple[str, str] | None:
    """Variables of an implementation whose mpirun is a Hydra; None: Open MPI."""
    chosen = job.policy_field.get("mpiImplementation").choice(("OpenMPI", *_HYDRA), "OpenMPI")
    return _HYDRA.get(chosen)


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
    devices = documents.gpus(*resources_of(job))
    return devices if slots == 1 and devices > 1 else slots


# -- a TrainJob's pods --------------------------------------------------------------------------


_POLICIES = {"torch": torch, "jax": jax, "xgboost": xgboost, "flux": flux, "mpi": mpi}
_PORTS = {"torch": ("PET_MASTER_PORT",), "xgboost": ("DMLC_TRACKER_PORT",)}
INDEX = "batch.kubernetes.io/job-completion-index"
_MARKS = {"torch": "PET_NNODES", "xgboost": "DMLC_TRACKER_URI", "jax": "JAX_NUM_PROCESSES"}


def read(request: Request) -> Workload:
    """The pods of a TrainJob."""
    job = read_trainjob(request)
    return made(_POLICIES[job.policy](job) if job.policy else job)


def made(job: TrainJob, kind: str = "TrainJob") -> Workload:
    """The pods of its JobSet."""
    drafts = tuple(draft for one in job.jobs for draft in _drafts(job, one))
    first = f"{job.name}-{NODE}-0-0"
    return Workload(
        kind=kind,
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
    if job.policy == "mpi" and _hydra(job):
        yield (
            f"Trainer up to v2.3 refuses mpiImplementation {job.policy_field.get('mpiImplementation').value}; "
            "the pods are those of its pull request 3717"
        )
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
    yield from left_out(job.job.get("spec"), ("suspend", "managedBy", "ttlSecondsAfterFinished"))
    if job.has_pod_group:
        yield "podGroupPolicy"
    yield from trainer_runtime.ignored(job.jobset, job.jobs)


def _ignored(job: TrainJob, one: ReplicatedJob) -> list[str]:
    phrases = list(one.template.ignored)
    if any(container.platforms for container in one.template.containers):
        phrases.append(f"{one.name}: its program is in its image")
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
                    names=(full, f"{full}.{job.space}", f"{full}.{job.space}.svc"),
                    labels=_labels(job, one, number, index),
                    completion_index=index,
                    child=f"{job.name}-{one.name}-{number}",
                    after=_after(job, one),
                )
            )
    return pods


def _labels(job: TrainJob, one: ReplicatedJob, number: int, index: int) -> Mapping[str, str]:
    before = job.jobs[: [each.name for each in job.jobs].index(one.name)]
    labels = {
        "jobset-name": job.name,
        "replicatedjob-name": one.name,
        "replicatedjob-replicas": str(one.replicas),
        "global-replicas": str(sum(each.replicas for each in job.jobs)),
        "job-index": str(number),
        "job-global-index": str(sum(each.replicas for each in before) + number),
        "restart-attempt": "0",
        **_coordinator(job),
    }
    return {**{f"{JOBSET_LABEL}{name}": value for name, value in labels.items()}, INDEX: str(index)}


def _coordinator(job: TrainJob) -> Mapping[str, str]:
    """The label with the name of the pod that the JobSet has as its coordinator."""
    found = job.jobset.get("coordinator")
    if not found.given:
        return {}
    found.only(("replicatedJob", "jobIndex", "podIndex"))
    chosen = found.get("replicatedJob").choice(tuple(one.name for one in job.jobs))
    place = f"{found.get('jobIndex').number(0)}-{found.get('podIndex').number(0)}"
    return {"coordinator": f"{job.name}-{chosen}-{place}.{job.subdomain}"}


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
        f"{job.name}-{one.name}-{number}": trainer_runtime.read_job(
            one.field.get("template", "spec"), one.name, one.template.restart or "OnFailure"
        )
        for one in job.jobs
        for number in range(one.replicas)
    }
    return trainer_runtime.read(job.jobset, drafts, children, job.job.get("spec", "activeDeadlineSeconds"))
