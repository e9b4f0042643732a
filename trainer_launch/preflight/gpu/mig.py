"""A GPU that is cut into parts (MIG) serves one part to a process, and none together with other GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Gpu
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-mig"


def limit_s(subject: Subject) -> float:
    """As gpu-count's."""
    return findings_of_gpus.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """MIG is the job's own wish where it was given parts by name, and what somebody left behind elsewhere."""
    found, workers = findings_of_gpus.gpus(subject), subject.workers
    shown = " ".join(subject.env.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    wished = "MIG-" in shown

    def trouble(gpu: Gpu) -> Trouble | None:
        if not gpu.value("mig") or (wished and workers == 1):
            return None
        text = f"is in MIG mode, in which {workers} workers of one job cannot work together"
        action = "request whole GPUs" if wished else "turn MIG off on that machine (nvidia-smi -mig 0), or drain it"
        return Trouble(gpu=gpu.index, text=text, measured=True, expected=False, action=action)

    asked = [(gpu.index, gpu.fact("mig")) for gpu in found]
    judged = map(trouble, findings_of_gpus.knowing(found, "mig"))
    yield from findings_of_gpus.summed(NAME, asked, judged, "whole", Fault.JOB if wished else Fault.NODE)
