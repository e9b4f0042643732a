"""How long names and labels may be in a cluster, as each controller makes them of a job's own. Pure.

kubernetes-sigs/jobset pkg/webhooks/jobset_webhook.go; kubeflow/mpi-operator pkg/apis/kubeflow/validation;
Kubernetes' pkg/apis/batch/validation. The v1 operator gives each pod a Service of the same name.
"""

from __future__ import annotations

from trainer_launch.model.units import counted
from trainer_launch.rehearsal.controllers.documents import Field
from trainer_launch.rehearsal.controllers.pod_values import Workload

MOST = 63  # characters of a host name, of a Service's name and of a label's value
_RANDOM = "xxxxx"  # stands for what comes behind generateName, and behind the name of a Job's pod


def check(job: Field, made: Workload) -> None:
    """Raises UsageError: a cluster refuses the job, or what its controller makes of it: a name is too long."""
    metadata, is_set = job.get("metadata"), made.kind in ("JobSet", "TrainJob")
    is_generated = not metadata.get("name").given
    name = metadata.get("generateName" if is_generated else "name")
    whole = f"{name.text()}{_RANDOM}" if is_generated else made.name
    behind = f"-{_RANDOM}" if is_set else ""  # JobSet counts it, other controllers do not
    names = (text for draft in made.drafts for text in (draft.hostname + behind, *draft.labels.values()))
    longest = max((text.replace(made.name, whole) for text in names), key=len)
    if len(longest) > MOST:
        others = " or replicatedJobs[].name" if is_set else ""
        raise name.bad(
            f"{counted(len(longest) - MOST, 'character')} less in it{others}: "
            f"a cluster allows {MOST} for {longest}, which has {len(longest)}"
        )
