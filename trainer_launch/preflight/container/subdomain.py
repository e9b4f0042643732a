"""Node 0's address is in this pod's own DNS domain: Trainer v2 names it without regard to a JobSet's subdomain."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject

NAME = "subdomain"


def check(subject: Subject) -> Iterator[Finding]:
    """Compare with what kubelet has written to /etc/hosts: `address host.subdomain.namespace.svc.zone host`."""
    if not subject.job.contract.startswith("trainer-v2"):
        yield Finding(check=NAME, status=Status.SKIPPED, text="only Kubeflow Trainer v2 makes such names")
        return
    own = own_subdomain(subject.hosts_file, subject.host.hostname)
    told = subject.topology.coordinator.host.split(".") if subject.topology.coordinator else []
    stem = subject.host.hostname.rpartition("-")[0].rpartition("-")[0].rpartition("-")[0]
    if own is None or len(told) < 2 or not told[0].startswith(f"{stem}-"):
        yield Finding(check=NAME, status=Status.SKIPPED, text="this pod has no name in a domain to compare with")
    elif told[1] == own:
        yield Finding(check=NAME, status=Status.PASS, text=f"node 0 is in this pod's domain {own}", measured=own)
    else:
        fails = not _resolves(subject, ".".join(told))
        right = ".".join((told[0], own, *told[2:]))
        yield Finding(
            check=NAME,
            status=Status.FAIL if fails else Status.WARN,
            fault=Fault.JOB if fails else None,
            text=f"node 0 is said to be {'.'.join(told)}, but this job's pods are in the domain {own}",
            measured=told[1],
            expected=own,
            action=f"remove network.subdomain from the JobSet template, or set --master-addr {right}",
        )


def _resolves(subject: Subject, name: str) -> bool:
    try:
        return bool(subject.lookup(name))
    except OSError:
        return False


def own_subdomain(hosts_file: str, hostname: str) -> str | None:
    """The label after the host's own in its full name, None when there is no full name."""
    for line in hosts_file.splitlines():
        names = line.partition("#")[0].split()[1:]
        if hostname in names:
            for name in names:
                labels = name.split(".")
                if labels[0] == hostname and len(labels) > 2 and "svc" in labels:
                    return labels[1]
    return None
