"""How Trainer v2 completes `tune run`: recipe, configuration and rendezvous by nodes and arguments. Pure.

kubeflow/trainer pkg/runtime/framework/plugins/torch/torchtune.go.
"""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.rehearsal.controllers import quantity
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Container
from trainer_launch.rehearsal.controllers.runtime import NODE, TrainJob, resources_of

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
