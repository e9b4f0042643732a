"""What exit codes lead to, by a Job's podFailurePolicy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.kubernetes.published import Pod

ANCESTOR = "trainer.kubeflow.org/trainjob-ancestor-step"
DEFAULT = "Count"
# As the design has them: 2 and 30 say that the job itself has to be mended, 20 and 138 that another node may do.
STOPS, AGAIN = frozenset({"FailJob"}), frozenset({"Count", "Ignore", "FailIndex"})
MAIN = {2: STOPS, 138: AGAIN, 143: AGAIN, 137: AGAIN}
PREFLIGHT = {2: STOPS, 30: STOPS, 20: AGAIN}


def action(rules: Sequence[Mapping[str, Any]], container: str, code: int) -> str:
    """What a Job does about a pod whose container has ended so: the first rule that fits; without one it counts."""
    for rule in rules:
        asked = rule.get("onExitCodes")
        if asked is None or asked.get("containerName") not in (None, container):
            continue
        if (code in asked["values"]) == (asked["operator"] == "In"):
            return str(rule["action"])
    return DEFAULT


def failure_policy(pod: Pod) -> Iterator[str]:
    """What a Job's podFailurePolicy lacks, or would be refused for."""
    rules = pod.job.get("podFailurePolicy", {}).get("rules", [])
    if not rules:
        yield "there is no podFailurePolicy"
        return
    if pod.restart != "Never":
        yield f"a podFailurePolicy needs restartPolicy Never, not {pod.restart or 'the default'}"
    names = {container["name"] for container in pod.containers}
    for rule in rules:
        asked = rule.get("onExitCodes", {})
        if asked.get("containerName", next(iter(names))) not in names:
            yield f"a rule is for the container {asked['containerName']}, which is not there"
        values = asked.get("values", [1])
        if values != sorted(set(values)) or (asked.get("operator") == "In" and 0 in values):
            yield f"exit codes {values} have to be in order, without 0"
    if not any(rule["action"] == "Ignore" and _of_disruption(rule) for rule in rules):
        yield "an eviction would count as a failure"
    for container in pod.containers:
        wanted = MAIN if container in pod.spec["containers"] else PREFLIGHT
        for code, allowed in wanted.items():
            if (found := action(rules, container["name"], code)) not in allowed:
                yield f"{container['name']}: exit code {code} leads to {found}"


def _of_disruption(rule: Mapping[str, Any]) -> bool:
    return any(one.get("type") == "DisruptionTarget" for one in rule.get("onPodConditions", []))
