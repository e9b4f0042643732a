"""What the policies of a TrainingRuntime inject: torch and torchtune, JAX, XGBoost, Flux. PlainML injects nothing.

kubeflow/trainer pkg/runtime/framework/plugins/{torch,jax,xgboost,flux}. Each takes a TrainJob and gives it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from trainer_launch.rehearsal.controllers import quantity
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Container, EnvItem, File
from trainer_launch.rehearsal.controllers.pods import COMPLETION_INDEX, env_items, upserted
from trainer_launch.rehearsal.controllers.runtime import NODE, ReplicatedJob, TrainJob, on_containers, resources_of

PORT = 29500
_TORCH = ("numProcPerNode", "envInjection")
_RESERVED = {
    "torch": ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    "xgboost": ("DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER"),
}
_FLUX_CONFIG = "/etc/flux-config"


def torch(job: TrainJob) -> TrainJob:
    """PET_* for the trainer's container, and for the targets of envInjection."""
    job.policy_field.only(_TORCH)
    _refuse_reserved(job)
    main = job.main
    nodes, nproc = (main.count if main else 1), _nproc(job)
    count = EnvItem(name="PET_NNODES", value=str(nodes))
    first_three = (count, EnvItem(name="PET_NPROC_PER_NODE", value=nproc), _index("PET_NODE_RANK"))
    items = (*first_three, *env_items({"PET_MASTER_ADDR": job.node_0, "PET_MASTER_PORT": str(PORT)}))
    if job.trainer.given:
        if job.trainer.get("command").texts() == ("tune", "run"):
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
        return str(quantity.cpus(limits, requests))
    if word == "auto" and not quantity.gpus(limits, requests):
        return str(quantity.cpus(limits, requests))
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
    _refuse_reserved(job)
    if not job.trainer.given:
        return job
    nodes = job.main.count if job.main else 1
    workers = nodes * max(1, quantity.gpus(*resources_of(job)))
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


# -- common -----------------------------------------------------------------------------------


def _index(name: str) -> EnvItem:
    return EnvItem(name=name, field=COMPLETION_INDEX)


def _on_trainer(job: TrainJob, change: Callable[[Container], Container]) -> TrainJob:
    """The trainer's container, which is called node, changed."""

    def chosen(one: Container) -> Container:
        return change(one) if one.name == NODE else one

    jobs: Iterable[ReplicatedJob] = (on_containers(one, chosen) if one.is_trainer else one for one in job.jobs)
    return replace(job, jobs=tuple(jobs))


def _refuse_reserved(job: TrainJob) -> None:
    """The webhook lets nobody set what the controller does."""
    if job.trainer.get("command").texts() == ("tune", "run"):
        return
    for item in job.trainer.get("env").items():
        if item.get("name").value in _RESERVED[job.policy]:
            raise item.get("name").bad(f"a variable that the {job.policy} runtime does not set itself")


# -- torchtune ---------------------------------------------------------------------------------


_PORT = 29500
_FIXED = ("output_dir", "tokenizer.path", "checkpointer.checkpoint_dir", "tokenizer.merges_file")  # the runtime's


def tuned(container: Container, job: TrainJob, nodes: int, nproc: str) -> Container:
    """The container with its command completed; its arguments stay the user's."""
    args = job.trainer.get("args").texts()
    for item in job.trainer.get("args").items():
        if item.text().partition("=")[0] in _FIXED:
            raise item.bad("a setting that the runtime does not fix")
    devices = quantity.gpus(*resources_of(job))
    recipe, suffix = _recipe(nodes, nproc, devices, args)
    several = nodes > 1 or (int(nproc) > 1 if nproc.isdigit() else devices > 1)
    endpoint = [f"--rdzv_endpoint={job.node_0}:{_PORT}"] if several else []
    overrides = [word for word in _runtimes_command(job) if word.partition("=")[0] in _FIXED]
    config = f"{_model(job.job)}{suffix}"
    return replace(container, command=("tune", "run", *endpoint, recipe, "--config", config, *overrides))


def _recipe(nodes: int, nproc: str, devices: int, args: tuple[str, ...]) -> tuple[str, str]:
    """Recipe, and the end of the configuration's name."""
    lora = any("model.lora_attn_modules" in word for word in args)
    quantized = any("model.quantize_base=True" in word for word in args)
    quantized = quantized and not any("model.use_dora=True" in word for word in args)
    if nodes > 1:
        return "full_finetune_distributed", "_full_multinode"
    if nproc == "1" or devices == 1:
        if quantized or lora:
            return "lora_finetune_single_device", f"_{'qlora' if quantized else 'lora'}_single_device"
        return "full_finetune_single_device", "_full_single_device"
    if quantized or lora:
        return "lora_finetune_distributed", "_qlora" if quantized else "_lora"
    return "full_finetune_distributed", "_full"


def _runtimes_command(job: TrainJob) -> tuple[str, ...]:
    """The command of the runtime's own container, before the TrainJob's replaced it."""
    if job.main is None:
        return ()
    containers = job.main.field.get("template", "spec", "template", "spec", "containers").items()
    return next((one.get("command").texts() for one in containers if one.get("name").value == NODE), ())


def _model(job: Field) -> str:
    """`torchtune-llama3.3-70b` tunes llama3_3/70B."""
    parts = job.get("spec", "runtimeRef", "name").text().split("-")
    return f"{parts[1].replace('.', '_')}/{parts[2].upper()}" if len(parts) == 3 else ""
