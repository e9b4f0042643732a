"""Kubeflow Trainer v2, Flux runtime: no variable at all, only files and a replaced command."""

from __future__ import annotations

from trainer_launch.contracts import names
from trainer_launch.contracts.source import Marks, Source
from trainer_launch.model import Job, Member, NodeRange, Origin, hostfile

NAME = "trainer-v2-flux"

_ENTRYPOINT = "/etc/flux-config/entrypoint.sh"
_HOSTLIST = "/mnt/flux/config/etc/flux/system/hostlist"

MARKS = Marks(files=(_ENTRYPOINT,))


def read(source: Source) -> Job:
    """Read the broker's host list, which the init container wrote, and the command that Flux wraps."""
    hosts = _hosts(source)
    own = names.split_v2(source.pod.hostname)
    lead = hosts[0] if hosts else (f"{own.stem}-{own.job_index}-0" if own else None)
    index = source.index("JOB_COMPLETION_INDEX", "node_rank", below=len(hosts) if hosts else None, default=None)
    if source.pod.hostname:
        source.note("hostname", source.pod.hostname, Origin.HOSTNAME, "is_coordinator")
    return Job(
        contract=NAME,
        role="node",
        nodes=NodeRange(len(hosts), len(hosts)) if hosts else None,
        node_rank=index,
        hostname_index=own.index if own else None,
        is_coordinator=names.first_label(source.pod.hostname) == lead if lead and source.pod.hostname else None,
        members=tuple(Member(host) for host in hosts) if hosts else None,
        engine="plain",
        details={"lead_broker": lead, "user_command": _user_command(source)},
    )


def _hosts(source: Source) -> tuple[str, ...] | None:
    text = source.file(_HOSTLIST, "hosts")
    if text is None or not text.strip():
        return None
    return hostfile.expand_hostlist(text, _HOSTLIST, source.contract)


def _user_command(source: Source) -> str | None:
    # The controller runs `bash entrypoint.sh '<command and args joined by blanks>'`.
    command = source.pod.command
    if _ENTRYPOINT not in command:
        return None
    after = command[command.index(_ENTRYPOINT) + 1 :]
    return " ".join(after) or None
