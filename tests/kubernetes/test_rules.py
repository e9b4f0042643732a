"""Published manifests are such as their operators' APIs take, and keep the rules of pods and jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes import job_rules, pod_rules, published, schema
from tests.kubernetes.published import Pod

RUNTIMES = tuple(sorted((published.KUBERNETES / "runtimes").glob("[!k]*.yaml")))
RULES = (pod_rules.restricted, pod_rules.hardened, pod_rules.grace, pod_rules.shared_memory)
each = pytest.mark.parametrize


def wrong_in(path: Path, rule: Callable[[Pod], Iterator[str]]) -> list[str]:
    return [f"{pod.where}: {text}" for pod in published.all_pods(path) for text in rule(pod)]


def test_every_manifest_for_production_is_looked_at() -> None:
    assert len(RUNTIMES) == 4
    assert len(published.JOBS) >= 9
    assert len({document["kind"] for path in published.JOBS for document in published.documents(path)}) == 4


@each("path", published.ALL, ids=published.name)
def test_its_api_takes_a_manifest_with_all_its_fields(path: Path) -> None:
    documents = published.documents(path)
    assert documents
    assert [text for document in documents for text in schema.wrong_in(document)] == []


@each("rule", RULES, ids=lambda rule: rule.__name__)
@each("path", published.FOR_PRODUCTION, ids=published.name)
def test_a_pod_for_production(path: Path, rule: Callable[[Pod], Iterator[str]]) -> None:
    assert wrong_in(path, rule) == []


@each("path", RUNTIMES, ids=published.name)
def test_a_runtimes_trainer_acts_on_exit_codes(path: Path) -> None:
    (runtime,) = published.documents(path)
    (trainer,) = [pod for pod in published.pods(runtime) if pod.where == _trainer(runtime)]
    assert list(job_rules.failure_policy(trainer)) == []


def _trainer(runtime: Mapping[str, Any]) -> str:
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return next(
        str(job["name"])
        for job in jobs
        if job_rules.ANCESTOR in job["template"].get("metadata", {}).get("labels", {})
    )


@each("path", published.JOBS, ids=published.name)
def test_an_operators_restart_policy_tells_wrong_settings_from_lost_nodes(path: Path) -> None:
    for document in published.documents(path):
        allowed = ("ExitCode",) if document["kind"] in ("PyTorchJob", "TFJob") else ("Never", "OnFailure")
        assert {pod.restart for pod in published.pods(document)} <= {*allowed}
        if document["kind"] != "TrainJob":
            assert document["spec"]["runPolicy"]["activeDeadlineSeconds"] > 0, "the only bound of ExitCode"
