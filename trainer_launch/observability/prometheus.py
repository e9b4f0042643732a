"""Format this node's metrics for Prometheus (text format 0.0.4). Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from trainer_launch.observability.node_view import View
from trainer_launch.observability.progress import Progress
from trainer_launch.observability.runtime_events import Standing
from trainer_launch.supervisor.state import Phase

_PREFIX = "trainer_launch_"
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
Sample = tuple[Mapping[str, str], float]


def text(view: View, standing: Standing, reports: Sequence[Progress], *, now_s: float, at_s: float) -> str:
    """All metrics; `now_s` is the time since the epoch, `at_s` the monotonic clock's."""
    return "".join((*_of_node(view, now_s), *_of_job(standing, view), *_of_reports(reports, at_s)))


def _of_node(view: View, now_s: float) -> Iterable[str]:
    about = {
        "version": view.version,
        "contract": view.contract,
        "engine": view.engine,
        "host": view.host,
        "node": "" if view.node_rank is None else str(view.node_rank),
    }
    yield _gauge("info", "What this launcher runs; always 1.", [(about, 1)])
    phases = [({"phase": phase.value}, float(view.phase == phase.value)) for phase in Phase]
    yield _gauge("phase", "1 for the current phase of this node's launcher.", phases)
    yield _gauge("start_time_seconds", "When the launcher started, since the epoch.", [({}, view.started_s)])
    yield _gauge("uptime_seconds", "Seconds since the launcher started.", [({}, max(0.0, now_s - view.started_s))])
    yield _counter("attempts", "Starts of this node's processes by the launcher.", view.attempt)
    yield _gauge("processes", "Running processes of the launcher.", [({}, len(view.processes))])
    yield _counter("exits", "Processes of the launcher that have ended.", view.ended)
    last = view.exits[-1:]
    yield _gauge("exit_code", "Exit code of the last process that ended.", [({"process": n}, c) for n, c in last])


def _of_job(standing: Standing, view: View) -> Iterable[str]:
    workers = standing.workers if standing.workers is not None else len(view.processes)
    yield _gauge("workers", "Workers of this node in the current generation.", [({}, workers)])
    yield _gauge("generation", "The job's generation: how many times it was formed.", _one(standing.generation))
    yield _gauge("nodes", "Nodes in the job's generation.", _one(standing.nodes))
    yield _counter("restarts", "Worker failures after which the job restarted.", standing.restarts)


def _of_reports(reports: Sequence[Progress], at_s: float) -> Iterable[str]:
    each = [(one, {"rank": str(one.local_rank if one.rank is None else one.rank)}) for one in reports]
    steps = [(labels, float(one.step)) for one, labels in each if one.step is not None]
    yield _gauge("step", "Finished training steps, as reported.", steps)
    parts = [(labels, one.progress) for one, labels in each if one.progress is not None]
    yield _gauge("progress_ratio", "Finished share of the training, 0 to 1, as reported.", parts)
    ages = [(labels, max(0.0, at_s - one.at_s)) for one, labels in each]
    yield _gauge("progress_age_seconds", "Seconds since the last report.", ages)
    etas = [(labels, one.eta_s) for one, labels in each if one.eta_s is not None]
    yield _gauge("eta_seconds", "Seconds left, as reported.", etas)
    values = [({**labels, "name": name}, value) for one, labels in each for name, value in one.metrics.items()]
    yield _gauge("metric", "A metric of the training, as reported.", values)


def _one(value: int | None) -> list[Sample]:
    return [] if value is None else [({}, value)]


def _gauge(name: str, words: str, samples: Sequence[Sample]) -> str:
    return _family(_PREFIX + name, words, "gauge", samples)


def _counter(name: str, words: str, value: int | None) -> str:
    return _family(f"{_PREFIX}{name}_total", words, "counter", _one(value))


def _family(name: str, words: str, kind: str, samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    lines = [f"{name}{_labels(labels)} {_value(value)}\n" for labels, value in samples]
    return f"# HELP {name} {words}\n# TYPE {name} {kind}\n{''.join(lines)}"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{"".join(_ESCAPES.get(c, c) for c in value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _value(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
