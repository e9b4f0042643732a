"""All GPUs are there, the same number by /dev, by the driver and by what the workers need."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.units import counted
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.devices import STUCK
from trainer_launch.preflight.gpu.facts import Facts

NAME = "gpu-count"


def limit_s(subject: Subject) -> float:
    """The library may hang, and its child is killed then."""
    return findings_of_gpus.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """Count them in each way; where there is none, this line stands for all checks of GPUs."""
    if subject.host.gpus.count == 0:
        yield _none(subject)
    elif subject.cards is None:
        text = f"{subject.host.gpus.reason}: only NVIDIA's GPUs are checked"
        yield Finding(check=NAME, status=Status.SKIPPED, text=text)
    else:
        are_parts = "MIG-" in (subject.cards.shown or "")  # of which one card may have several
        seen = subject.host.gpus.count if are_parts else len(subject.cards.gpus)
        yield _counted(subject, subject.cards.facts(), seen)


def _none(subject: Subject) -> Finding:
    if not subject.may_use_gpus:
        return Finding(check=NAME, status=Status.SKIPPED, text="no GPU here: GPU checks are skipped")
    return Finding(
        check=NAME,
        status=Status.SKIPPED,
        text="this container was given no GPU, though the job may have some: GPU checks are skipped",
        action="request the GPUs for the init container as well (resources.limits); the pod is given them once",
    )


def _counted(subject: Subject, facts: Facts, seen: int) -> Finding:
    host, workers = subject.host.gpus, subject.topology.local_world_size
    if facts.trouble.startswith(STUCK):
        return _failed(f"{host.reason}; {facts.trouble}", Fault.NODE, 0, host.count, findings_of_gpus.DRAIN)
    if facts.trouble:
        return Finding(
            check=NAME,
            status=Status.UNKNOWN,
            text=f"{counted(host.count, 'GPU')} ({host.reason}), but their state is unknown: {facts.trouble}",
            action="pip install nvidia-ml-py in the image" if "nvidia-ml-py" in facts.trouble else "",
        )
    if seen < host.count:
        missing = f"the driver shows {seen} of {counted(host.count, 'GPU')} ({host.reason})"
        return _failed(
            missing, Fault.NODE, seen, host.count, "report this node: a card may have fallen off its bus"
        )
    if workers is not None and workers > seen and subject.is_torch:
        text = f"{counted(workers, 'worker')} on this node, and {counted(seen, 'GPU')} ({host.reason})"
        return _failed(
            text, Fault.JOB, seen, workers, "request a GPU for each worker, or set nproc_per_node to them"
        )
    models = ", ".join(sorted({gpu.model for gpu in facts.gpus if gpu.model}))
    text = f"{counted(seen, 'GPU')}: {models or 'of unknown model'}, driver {facts.driver or 'of unknown version'}"
    if workers is not None and workers < seen and subject.is_torch:
        text += f"; {seen - workers} of them will be idle, with {counted(workers, 'worker')}"
        return Finding(check=NAME, status=Status.WARN, text=text, measured=workers, expected=seen, unit="GPUs")
    return Finding(check=NAME, status=Status.PASS, text=text, measured=seen, unit="GPUs")


def _failed(text: str, fault: Fault, measured: int, expected: int, action: str) -> Finding:
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=fault,
        text=text,
        measured=measured,
        expected=expected,
        unit="GPUs",
        action=action,
    )
