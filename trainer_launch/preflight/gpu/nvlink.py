"""The links between this node's GPUs are up, on each as many as on the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Gpu
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-nvlink"
NEEDS_LOAD = True
_CARDS_WITH_BRIDGES = ("PCIe", "NVL")  # in models' names: they have links, and not all of them need lead anywhere
_FABRIC_DONE = 3


def limit_s(subject: Subject) -> float:
    """Under load, errors are counted."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """Count the links that are up; what a card does not support is not broken."""
    found = findings_of_gpus.gpus(subject)
    knowing = findings_of_gpus.knowing(found, "nvlinks")
    most = max((sum(gpu.value("nvlinks")) for gpu in knowing), default=0)
    fastest = max((gpu.value("nvlink_mbps", 0) for gpu in knowing), default=0)
    errors = {one.index: one.growth("nvlink_errors") or 0 for one in findings_of_gpus.watched(subject)}
    good = f"{most} NVLinks up on each" + (f", at {fastest / 1000:g} GB/s" if fastest else "")
    judged = [_trouble(gpu, most, fastest, errors.get(gpu.index, 0)) for gpu in knowing]
    if knowing and not most and not any(map(_has_bridges, knowing)):
        judged = _all_down(knowing)
    asked = [(gpu.index, gpu.fact("nvlinks")) for gpu in found]
    yield from findings_of_gpus.summed(NAME, asked, judged, good)


def _has_bridges(gpu: Gpu) -> bool:
    return any(word in gpu.model for word in _CARDS_WITH_BRIDGES)


def _trouble(gpu: Gpu, most: int, fastest: int, errors: float) -> Trouble | None:
    links = gpu.value("nvlinks")
    up, speed = sum(links), gpu.value("nvlink_mbps", fastest)
    wanted = most if _has_bridges(gpu) else (len(links) if up else most)
    if up < wanted:
        down = ", ".join(str(number) for number, is_up in enumerate(links) if not is_up)
        return Trouble(
            gpu=gpu.index,
            text=f"has {up} of {wanted} NVLinks up (down: {down})",
            status=Status.WARN if _has_bridges(gpu) else Status.FAIL,
            measured=up,
            expected=wanted,
            unit="links",
        )
    if speed < fastest:
        text = f"has an NVLink at {speed / 1000:g} GB/s, others are at {fastest / 1000:g}"
        return Trouble(gpu=gpu.index, text=text, measured=speed, expected=fastest, unit="MB/s")
    state, error = gpu.value("fabric", (0, 0))
    if state == _FABRIC_DONE and error:
        return Trouble(gpu=gpu.index, text=f"could not join its NVLink fabric (error {error})", measured=error)
    if errors:
        text = f"had {errors:g} errors on its NVLinks during our tests"
        return Trouble(gpu=gpu.index, text=text, status=Status.WARN, measured=errors, expected=0, unit="errors")
    return None


def _all_down(gpus: Sequence[Gpu]) -> list[Trouble | None]:
    action = "see the fabric manager of that machine; without NVLink GPUs talk over PCIe, many times slower"
    text = "has NVLinks, and none is up"
    return [Trouble(gpu=gpu.index, text=text, status=Status.WARN, measured=0, action=action) for gpu in gpus]
