"""Manifests of all kinds, and faults."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.oracle import Refused, attempt
from tests.fuzz.registry import target
from trainer_launch.contracts.snapshot import pod_from_snapshot
from trainer_launch.model import value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import parse_host
from trainer_launch.rehearsal import controllers
from trainer_launch.rehearsal.controllers import documents, job_lifecycle, local_jobs, pod_values, workload_of
from trainer_launch.rehearsal.controllers.pod_values import Workload
from trainer_launch.rehearsal.faults import grammar


@target(8000)
def manifest(data: bytes) -> None:
    """A job, its pods with addresses, their snapshots, and what of them would lie where on this machine."""
    text = data.decode("utf-8", "replace")
    found = attempt(documents.read_documents, text, "job.yaml", kinds=(UsageError,), names="job.yaml")
    if isinstance(found, Refused):
        return
    job = attempt(workload_of, found, kinds=(UsageError,))
    if not isinstance(job, Refused) and len(job.drafts) <= 8:
        _check(job)


def _check(job: Workload) -> None:
    made = attempt(pod_values.pods, job, kinds=(UsageError,))
    if isinstance(made, Refused):
        return
    for pod in made:
        assert parse_host(pod.name) == pod.name, f"a pod is called {pod.name!r}"
    for name, told in controllers.rendered(made).items():
        assert "/" not in name
        assert name not in (".", "..")
        attempt(pod_from_snapshot, json.loads(json.dumps(told)), kinds=(UsageError,))
    job_lifecycle.begin(job, made, 0.0)
    local = local_jobs.local_network_of(job, made)
    local_jobs.endpoints(local, made)
    for pod in made:
        for container in (*pod.init, *pod.containers):
            here = local_jobs.localised(container, local, lambda volume: f"/scratch/{volume}")
            for path in here.files:
                assert path.startswith("/scratch/"), f"a file would be written to {path}"
                assert ".." not in path.split("/"), f"a file would be written to {path}"
            for mount in container.mounts:
                assert ".." not in f"/scratch/{mount.volume}/{mount.part}".split("/"), mount


@target(2100)
def fault(data: bytes) -> None:
    """A fault in words: what people are shown of it means the same."""
    text = data.decode("utf-8", "replace")
    found = attempt(grammar.parse, text, kinds=(UsageError,), names="--fault")
    if not isinstance(found, Refused):
        assert grammar.parse(found.text) == found


@target(200)
def line_pattern(data: bytes) -> None:
    """A regular expression of --fault: what is not refused is looked for in any line within seconds."""
    text = data.decode("utf-8", "replace")
    made = value_parsers.compiled_pattern(text)
    if made is None or _open_ends(value_parsers._parser.parse(text)) > 2:
        return  # each more multiplies by the length of a line, as .*a.*b.*c.*d would
    signs = "".join(dict.fromkeys(text)) or "a"
    for line in ("a" * 999, text * 99, signs * 99, " ".join(signs * 50), *(sign * 999 for sign in signs[:8])):
        made.search(line[: value_parsers.MAX_LINE])


def _open_ends(tree: Any, times: int = 1) -> int:
    """How many repeats without a small end one after the other it has."""
    found = 0
    for kind, value in tree:
        is_repeat = str(kind).endswith("REPEAT")
        many = is_repeat and value[1] - value[0] > 4
        inner = times * (min(value[1], 99) if is_repeat else 1)
        found += (times if many else 0) + sum(_open_ends(part, inner) for part in value_parsers._parts(value))
    return found
