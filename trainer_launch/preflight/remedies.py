"""What a program may do about a finding: a word beside the English action. Rules and facts bring their own.

A platform drains and replaces machines by these words. So a finding whose cause is not certain has none: a missing
node, a link of which either end may be faulty, a machine that is only slow, a file server that does not answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from trainer_launch.model.findings import OF_MACHINES, Fault, Finding, Scope, Status

_JOB: Mapping[Fault | None, str] = {Fault.JOB: "FIX_JOB"}
_JOB_ALWAYS = {**_JOB, None: "FIX_JOB"}  # its warnings, too
_IMAGE_ALWAYS: Mapping[Fault | None, str] = {Fault.JOB: "FIX_IMAGE", None: "FIX_IMAGE"}
_MACHINE: Mapping[Fault | None, str] = {Fault.NODE: "DRAIN"}
# By check, then by whose fault a failure is; None: a warning.
REMEDIES: Mapping[str, Mapping[Fault | None, str]] = {
    "nccl-ib-hca": {**_JOB_ALWAYS, **_MACHINE},
    **dict.fromkeys(("roll-call", "shared-storage"), _JOB),
    **dict.fromkeys(("clock", "pairs"), _MACHINE),
    "mpi-ssh": _JOB,
    "mpi-programs": _IMAGE_ALWAYS,
}


def with_remedy(finding: Finding) -> Finding:
    """The finding with its remedy, if its cause is certain; what is about no single machine names none for one."""
    if finding.without_policy is not None or finding.status not in (Status.WARN, Status.FAIL):
        return finding
    remedy = finding.remedy or REMEDIES.get(finding.check, {}).get(finding.fault, "")
    is_of_one = finding.scope in (Scope.NODE, Scope.GPU, Scope.RAIL)
    remedy = "" if remedy in OF_MACHINES and not is_of_one else remedy
    return finding if remedy == finding.remedy else replace(finding, remedy=remedy)
