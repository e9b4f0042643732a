"""A GPU that is cut into parts (MIG) serves one part to a process, and none together with other GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.findings import Fault, Finding
from trainer_launch.gpus.values import Gpu
from trainer_launch.preflight import gpu_words
from trainer_launch.preflight.gpu_words import Trouble
from trainer_launch.preflight.subject import Subject

NAME = "gpu-mig"


def limit_s(subject: Subject) -> float:
    """As gpu-count's."""
    return gpu_words.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """MIG is the job's own wish where it was given parts by name, and what somebody left behind elsewhere."""
    found, workers = gpu_words.gpus(subject), subject.workers
    shown = " ".join(subject.env.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    wished = "MIG-" in shown

    def trouble(gpu: Gpu) -> Trouble | None:
        if not gpu.value("mig") or (wished and workers == 1):
            return None
        text = f"is in MIG mode, in which {workers} workers of one job cannot work together"
        action = "request whole GPUs" if wished else "turn MIG off on that machine (nvidia-smi -mig 0), or drain it"
        return Trouble(gpu=gpu.index, text=text, measured=True, expected=False, action=action)

    asked = [(gpu.index, gpu.fact("mig")) for gpu in found]
    judged = map(trouble, gpu_words.knowing(found, "mig"))
    yield from gpu_words.summed(NAME, asked, judged, "whole", Fault.JOB if wished else Fault.NODE)
