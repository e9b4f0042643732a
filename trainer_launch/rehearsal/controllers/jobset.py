"""The rules of a JobSet and of its Jobs, read: success, failure, order of start. Pure.

What the controllers would do and a rehearsal does not is told by `ignored`.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.user_patterns import EXPECTED, compiled
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import ChildRules, Draft, ExitRule, Rules, SetRule, Success

_BACKOFF = 6  # a Job's own default
_BOUNDLESS = 2**31 - 1  # the same where each index has a limit of its own
_ACTIONS = ("FailJob", "Ignore", "Count", "FailIndex")
_SET_ACTIONS = (
    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob",
    "RestartJobAndIgnoreMaxRestarts",
)  # fmt: skip
_REASONS = (
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
)
_STRATEGIES = ("Recreate", "BlockingRecreate", "InPlaceRestart")
_JOB = (
    "parallelism", "completions", "completionMode", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes",
    "activeDeadlineSeconds", "podFailurePolicy", "template", "selector", "manualSelector",
)  # fmt: skip
_JOB_IGNORED = ("ttlSecondsAfterFinished", "suspend", "successPolicy", "podReplacementPolicy", "managedBy")
_SET_IGNORED = ("suspend", "coordinator", "managedBy", "ttlSecondsAfterFinished")


def read(spec: Field, drafts: tuple[Draft, ...], children: dict[str, ChildRules], deadline: Field) -> Rules:
    """The rules of a JobSet with these pods; `deadline` is that of whoever made the JobSet."""
    names = tuple(dict.fromkeys(draft.role for draft in drafts))
    success, failure = spec.get("successPolicy"), spec.get("failurePolicy")
    success.only(("operator", "targetReplicatedJobs"))
    failure.only(("maxRestarts", "rules", "restartStrategy"))
    chosen = [one.choice(names) for one in success.get("targetReplicatedJobs").items()] or names
    targets = dict.fromkeys(draft.child for draft in drafts if draft.role in chosen)
    return Rules(
        family="jobset",
        success=Success(
            groups=tuple(tuple(d.hostname for d in drafts if d.child == child) for child in targets),
            any_of=success.get("operator").choice(("All", "Any"), "All") == "Any",
        ),
        clean="Running",  # a finished JobSet deletes the Jobs that still run
        deadline_s=float(deadline.number(least=1)) if deadline.given else None,
        children=children,
        max_restarts=failure.get("maxRestarts").number(0),
        set_rules=tuple(_set_rule(rule, names) for rule in failure.get("rules").items()),
        is_blocking=failure.get("restartStrategy").choice(_STRATEGIES, "Recreate") == "BlockingRecreate",
    )


def _set_rule(rule: Field, names: tuple[str, ...]) -> SetRule:
    rule.only(("name", "action", "onJobFailureReasons", "onJobFailureMessagePatterns", "targetReplicatedJobs"))
    return SetRule(
        action=rule.get("action").choice(_SET_ACTIONS),
        reasons=tuple(one.choice(_REASONS) for one in rule.get("onJobFailureReasons").items()),
        jobs=tuple(one.choice(names) for one in rule.get("targetReplicatedJobs").items()),
        patterns=tuple(map(_pattern, rule.get("onJobFailureMessagePatterns").items())),
    )


def _pattern(found: Field) -> str:
    if compiled(found.text()) is None:
        raise found.bad(EXPECTED)
    return found.text()


def read_job(spec: Field, name: str, restart: str) -> ChildRules:
    """The rules of a Job of the replicatedJob `name`; `restart` is its pods' restartPolicy."""
    spec.only((*_JOB, *_JOB_IGNORED))
    policy = spec.get("podFailurePolicy")
    policy.only(("rules",))
    rules = tuple(_exit_rule(rule, number) for number, rule in enumerate(policy.get("rules").items()))
    per_index, most, deadline = (
        spec.get(key) for key in ("backoffLimitPerIndex", "maxFailedIndexes", "activeDeadlineSeconds")
    )
    for found in (policy, per_index):
        if found.given and restart != "Never":
            raise found.bad("restartPolicy: Never in the pod, as Kubernetes wants it", found=None)
    if most.given and not per_index.given:
        raise most.bad("backoffLimitPerIndex beside it, as Kubernetes wants it")
    return ChildRules(
        backoff_limit=spec.get("backoffLimit").number(_BOUNDLESS if per_index.given else _BACKOFF, most=_BOUNDLESS),
        exit_rules=rules,
        per_index=per_index.number() if per_index.given else None,
        max_failed_indexes=most.number() if most.given else None,
        deadline_s=float(deadline.number(least=1)) if deadline.given else None,
        replicated=name,
    )


def _exit_rule(rule: Field, number: int) -> ExitRule:
    rule.only(("action", "onExitCodes", "onPodConditions"))
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
    if codes.given is conditions.given:
        raise rule.bad("onExitCodes or onPodConditions")
    codes.only(("containerName", "operator", "values"))
    met = [one.get("type").text() for one in conditions.items() if one.get("status").text("True") == "True"]
    return ExitRule(
        action=rule.get("action").choice(_ACTIONS),
        container=codes.get("containerName").text("") or None,
        among=not codes.given or codes.get("operator").choice(("In", "NotIn")) == "In",
        codes=tuple(value.number(most=255) for value in codes.get("values").items()),
        conditions=tuple(met) if codes.given or met else ("none",),
        number=number,
    )


def ignored(spec: Field, jobs: list[Field]) -> Iterator[str]:
    """What of a JobSet and its Jobs means something to their controllers and nothing here."""
    for key in _SET_IGNORED:
        if spec.get(key).given:
            yield _said(spec, key)
    if spec.get("failurePolicy", "restartStrategy").value == "InPlaceRestart":
        yield "restartStrategy InPlaceRestart: pods are recreated"
    for job in jobs:
        batch = job.get("template", "spec")
        if batch.get("completions").given and batch.get("completions").value != batch.get("parallelism").value:
            yield "completions of a Job: it has as many pods as its parallelism says"
        for key in _JOB_IGNORED:
            if job.get("template", "spec", key).given:
                yield _said(job.get("template", "spec"), key, "of a Job")


def _said(found: Field, key: str, whose: str = "") -> str:
    if key == "suspend":
        return "suspend: the rehearsal runs anyway" if found.get(key).flag() else "suspend"
    return f"{key} {whose}".rstrip()
