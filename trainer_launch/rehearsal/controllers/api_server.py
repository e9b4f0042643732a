"""Names and labels that an API server refuses, as each controller makes them of a job's own. Pure.

kubernetes-sigs/jobset pkg/webhooks/jobset_webhook.go; kubeflow/mpi-operator pkg/apis/kubeflow/validation;
Kubernetes' pkg/apis/batch/validation. The v1 operator gives each pod a Service of the same name.
"""

from __future__ import annotations

import re

from trainer_launch.model.units import counted
from trainer_launch.rehearsal.controllers.documents import Field
from trainer_launch.rehearsal.controllers.pod_values import Workload

MOST = 63  # characters of a host name, of a Service's name and of a label's value
LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")  # RFC 1035
_OF_A_JOB = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_ALONE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_RANDOM = "xxxxx"  # stands for what comes behind generateName, and behind the name of a Job's pod


def check(job: Field, made: Workload) -> None:
    """Raises UsageError: a cluster refuses the job, or what its controller makes of it, for a name."""
    metadata = job.get("metadata")
    is_generated, is_set = not metadata.get("name").given, made.kind in ("JobSet", "TrainJob")
    name = metadata.get("generateName" if is_generated else "name")
    whole = f"{name.text()}{_RANDOM}" if is_generated else made.name
    texts: list[str] = []
    for draft in made.drafts:
        allowed = LABEL if made.kind != "Job" else _ALONE if draft.completion_index is None else _OF_A_JOB
        pod = draft.hostname.replace(made.name, whole, 1)
        if not allowed.fullmatch(pod):
            first = ", a letter first" if allowed is LABEL else ""
            raise name.bad(f"lower-case letters, digits and '-'{first}: a cluster refuses a pod called {pod}")
        texts += [f"{pod}-{_RANDOM}" if is_set else pod]
        texts += [text.replace(made.name, whole) for text in draft.labels.values()]
    longest = max(texts, key=len)
    if len(longest) > MOST:
        others = " or replicatedJobs[].name" if is_set else ""
        raise name.bad(
            f"{counted(len(longest) - MOST, 'character')} less in it{others}: "
            f"a cluster allows {MOST} for {longest}, which has {len(longest)}"
        )
