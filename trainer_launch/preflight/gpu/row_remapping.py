"""Bad rows of GPU memory are replaced by spare ones, which takes a reset, until no spare is left."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Gpu, State
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-remap"
_RESET = "have the GPU reset before it is used: a bad row of its memory is still in use"


def limit_s(subject: Subject) -> float:
    """As gpu-count's."""
    return findings_of_gpus.FACTS_LIMIT_S


def check(subject: Subject) -> Iterator[Finding]:
    """Remapped rows from A100 on, retired pages on older cards."""
    found = findings_of_gpus.gpus(subject)
    rows = [gpu for gpu in found if gpu.fact("remapped").state is not State.UNSUPPORTED]
    pages = [gpu for gpu in found if gpu not in rows]
    good = f"no row of memory waits for a spare one ({sum(map(_uncorrectable, rows))} were replaced for errors)"
    yield from findings_of_gpus.told(NAME, rows, "remapped", _rows, good)
    yield from findings_of_gpus.told(
        NAME, pages, "retired_pending", _pages, "no page of memory waits for its retirement"
    )


def _uncorrectable(gpu: Gpu) -> int:
    return int(gpu.value("remapped", (0, 0))[1])


def _rows(gpu: Gpu) -> Trouble | None:
    _, uncorrectable, pending, failed = gpu.value("remapped")
    if failed:
        text = f"has a bad row of memory and no spare one for it: remapping failed ({gpu.uuid})"
        return Trouble(
            gpu=gpu.index, text=text, measured="failed", action="drain this node for good: replace the card"
        )
    if pending:
        text = f"has a bad row of memory whose remapping waits for a reset ({uncorrectable} so far, {gpu.uuid})"
        return Trouble(gpu=gpu.index, text=text, measured="pending", action=_RESET)
    return None


def _pages(gpu: Gpu) -> Trouble | None:
    if not gpu.value("retired_pending"):
        return None
    text = f"has a bad page of memory whose retirement waits for a reset ({gpu.uuid})"
    return Trouble(gpu=gpu.index, text=text, measured="pending", action=_RESET)
