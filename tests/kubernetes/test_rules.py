"""Published manifests keep the rules of pods and jobs; a manifest that breaks one is seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kubernetes import job_rules, pod_rules, programs, published
from tests.kubernetes.published import GONE, Pod, changed

RUNTIMES = tuple(sorted((published.KUBERNETES / "runtimes").glob("[!k]*.yaml")))
RULES = (
    *(pod_rules.restricted, pod_rules.hardened, pod_rules.references, pod_rules.grace, pod_rules.shared_memory),
)
each = pytest.mark.parametrize


def wrong_in(path: Path, rule: Callable[[Pod], Iterator[str]]) -> list[str]:
    return [f"{pod.where}: {text}" for pod in published.all_pods(path) for text in rule(pod)]


def test_every_manifest_for_production_is_looked_at() -> None:
    assert len(RUNTIMES) == 4
    assert len(published.JOBS) >= 9
    assert len({document["kind"] for path in published.JOBS for document in published.documents(path)}) == 4


@each("rule", RULES, ids=lambda rule: rule.__name__)
@each("path", published.FOR_PRODUCTION, ids=published.name)
def test_a_pod_for_production(path: Path, rule: Callable[[Pod], Iterator[str]]) -> None:
    assert wrong_in(path, rule) == []


@each("path", published.ALL, ids=published.name)
def test_what_a_pod_refers_to_is_there(path: Path) -> None:
    assert wrong_in(path, pod_rules.references) == []


@each("path", published.ALL, ids=published.name)
def test_each_program_that_a_manifest_starts_is_in_its_image(path: Path) -> None:
    assert [text for document in published.documents(path) for text in programs.missing(document)] == []


@each("path", RUNTIMES, ids=published.name)
def test_a_runtimes_targets_are_there_and_its_trainer_acts_on_exit_codes(path: Path) -> None:
    (runtime,) = published.documents(path)
    assert list(job_rules.targets(runtime)) == []
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
        found = [
            text for pod in published.pods(document) for text in job_rules.restart_policy(document["kind"], pod)
        ]
        assert found == []
        if document["kind"] != "TrainJob":
            assert document["spec"]["runPolicy"]["activeDeadlineSeconds"] > 0, "the only bound of ExitCode"


GOOD = yaml.safe_load("""
terminationGracePeriodSeconds: 60
restartPolicy: Never
securityContext: {runAsNonRoot: true, runAsUser: 1000, seccompProfile: {type: RuntimeDefault}}
initContainers:
  - name: preflight-check
    securityContext: &context
      {allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
    volumeMounts: [{name: tmp, mountPath: /tmp}]
containers:
  - name: node
    env: [{name: TRAINER_LAUNCH_GRACE, value: "50"}]
    ports: [{name: ssh, containerPort: 2222}]
    readinessProbe: {tcpSocket: {port: ssh}}
    resources: {limits: {memory: 16Gi}}
    securityContext: *context
    volumeMounts: [{name: tmp, mountPath: /tmp}, {name: shm, mountPath: /dev/shm}]
volumes: [{name: tmp, emptyDir: {}}, {name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]
""")
NODE = ("containers", 0)
CONTEXT = (*NODE, "securityContext")


@each(
    ("path", "new", "told"),
    [
        (("hostNetwork",), True, "hostNetwork is set"),
        (("volumes", 0), {"name": "tmp", "hostPath": {"path": "/tmp"}}, "volume tmp is of the kind hostPath"),
        (("securityContext", "runAsNonRoot"), False, "node: runAsNonRoot is not true"),
        (("securityContext", "seccompProfile"), GONE, "node: no seccompProfile"),
        ((*CONTEXT, "seccompProfile"), {"type": "Unconfined"}, "node: no seccompProfile"),
        ((*CONTEXT, "runAsUser"), 0, "node: runs as root"),
        ((*CONTEXT, "privileged"), True, "node: privileged"),
        ((*CONTEXT, "allowPrivilegeEscalation"), GONE, "node: allowPrivilegeEscalation is not false"),
        ((*CONTEXT, "capabilities"), {"drop": ["NET_RAW"]}, "node: does not drop ALL capabilities"),
        ((*CONTEXT, "capabilities"), {"drop": ["ALL"], "add": ["KILL"]}, "node: adds the capability KILL"),
        (("initContainers", 0, "securityContext"), GONE, "preflight-check: does not drop ALL capabilities"),
        ((*CONTEXT, "readOnlyRootFilesystem"), GONE, "node: readOnlyRootFilesystem is not true"),
        ((*NODE, "ports"), [{"containerPort": 2222}], "node: port 2222 has the name ''"),
        ((*NODE, "ports"), GONE, "node: readinessProbe asks for port ssh, which is not declared"),
        ((*NODE, "volumeMounts"), [{"name": "tmp", "mountPath": "/tmp"}], "volume shm is mounted nowhere"),
        ((*NODE, "volumeMounts", 1), {"name": "dshm", "mountPath": "/dev/shm"}, "node: there is no volume dshm"),
        ((*NODE, "volumeMounts", 0), {"name": "tmp", "mountPath": "/var"}, "node: nothing is mounted at /tmp"),
        ((*NODE, "name"), "preflight-check", "two containers are called preflight-check"),
        (("terminationGracePeriodSeconds",), GONE, "the pod's grace of 30 s is -20 s longer"),
        ((*NODE, "env"), GONE, "the pod's grace of 60 s is 35 s longer"),
        (("volumes", 1, "emptyDir"), {"medium": "Memory"}, "node: /dev/shm is not in memory, or not bounded"),
        (("volumes", 1, "emptyDir", "sizeLimit"), "12Gi", "node: /dev/shm may take more than half"),
    ],
)
def test_a_pod_that_breaks_a_rule_is_seen(path: tuple[str | int, ...], new: Any, told: str) -> None:
    pod = Pod(where="", spec=changed(GOOD, path, new), job={}, restart="Never")
    found = [text for rule in RULES for text in rule(pod)]
    assert any(told in text for text in found), found
