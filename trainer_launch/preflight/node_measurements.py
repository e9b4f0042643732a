"""This node's GPUs and measurements, for its record; judged here where there is no cluster preflight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from trainer_launch import preflight
from trainer_launch.host.network import AdapterPort
from trainer_launch.model.findings import Finding
from trainer_launch.model.settings import Settings
from trainer_launch.preflight import gpu_judgement, reference_values, thresholds
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.cluster.comparison import NCCL
from trainer_launch.preflight.container import storage
from trainer_launch.preflight.gpu import checksums, load
from trainer_launch.preflight.gpu.devices import Cards
from trainer_launch.preflight.measurements import Checksum, Measure, fitted, fitted_checksums

_RECORD_S = 60.0  # for all nodes to say what they have found
_NEED_LOAD = frozenset({*(check.NAME for check in preflight.NEEDING_LOAD), checksums.NAME, *gpu_judgement.CHECKS})


def record_s(subject: Subject) -> float:
    """What node 0 waits for all nodes' records: a GPU or a folder that hangs takes its time to tell."""
    load_s = subject.cards.load_limit_s if subject.cards is not None and subject.cards.has_load else 0.0
    return _RECORD_S + max(load_s, storage.limit_s(subject) if subject.storage else 0.0)


def level(settings: Settings, chosen: Collection[str], skipped: Collection[str]) -> str:
    """How far to look at GPUs: no load for checks that do not need it, or where gpu-load is not to be run."""
    if load.NAME in skipped or (chosen and not _NEED_LOAD & set(chosen)):
        return "quick"
    return settings.level


def facts(cards: Cards | None) -> dict[str, str]:
    """What all nodes should have alike, better known than by files: models, driver, and the NCCL that is loaded."""
    if cards is None or cards.facts().trouble:
        return {}
    models = Counter(gpu.model for gpu in cards.gpus if gpu.model)
    told = {"gpus": f"{len(cards.gpus)} of {', '.join(sorted(models)) or 'unknown model'}"}
    if cards.facts().driver:
        told["driver"] = cards.facts().driver
    found = cards.load() if cards.has_load else None
    loaded = {one.facts["nccl"] for one in found.tested if "nccl" in one.facts} if found is not None else set()
    return told | ({NCCL: ", ".join(sorted(loaded))} if loaded else {})


def adapters(ports: Sequence[AdapterPort]) -> dict[str, str]:
    """The RDMA adapters that are up, by their rates: a node with others slows all down, or hangs them."""
    rates = Counter(port.rate or "of unknown rate" for port in ports if port.is_active)
    told = ", ".join(f"{count} x {rate}" for rate, count in sorted(rates.items()))
    return {"adapters": told or "none of them"} if ports else {}


def measured(cards: Cards | None) -> tuple[tuple[Measure, ...], tuple[Checksum, ...]]:
    """For node 0."""
    found = cards.load() if cards is not None and cards.has_load else None
    return ((), ()) if found is None else (fitted(found.measures), fitted_checksums(found.checksums))


def alone(cards: Cards | None, settings: Settings, name: str) -> tuple[list[Finding], Sequence[Measure]]:
    """The judgement where no other node takes part in it; `name` is this node's."""
    figures, sums = measured(cards)
    if not figures and not sums:
        return [], ()
    _, shares = thresholds.parse(settings.threshold)
    found = [
        *checksums.differing({"": sums}),
        *gpu_judgement.findings([name], [figures], reference_values.load(settings.reference), shares),
    ]
    return found, figures
