"""How the controllers name their pods: taken apart from the right, because job names may contain `-worker-0`.

Pure: text in, values out.
"""

from __future__ import annotations

import re

from msgspec import Struct

from trainer_launch.model import Member
from trainer_launch.model.value_parsers import is_address

MAX_MEMBERS = 65_536  # a larger job gets no list of names: nobody would read it
V1_WORKER = "-worker-"  # what is before the index in a pod's name: `<job>-worker-<i>`
V2_NODE = "-node-0-"  # `<job>-node-0-<i>.<job>`
V1_ROLES = ("master", "worker", "chief", "ps", "evaluator", "launcher")

_V1 = re.compile(rf"(?P<job>.+)-(?P<role>{'|'.join(V1_ROLES)})-(?P<index>[0-9]{{1,6}})")
_V2 = re.compile(r"(?P<group>.+)-(?P<job_index>[0-9]{1,6})-(?P<index>[0-9]{1,6})")
_LAUNCHER = re.compile(r".+-launcher(-[0-9]{1,6}-[0-9]{1,6})?")


class V1Name(Struct, frozen=True):
    """`<job>-<role>-<index>`, as the v1 operator and mpi-operator name their pods."""

    job: str
    role: str
    index: int


class V2Name(Struct, frozen=True):
    """`<job>-<replicatedJob>-<jobIndex>-<podIndex>`, as JobSet names its pods; `group` is the first two."""

    group: str
    job_index: int
    index: int


def first_label(host: str) -> str:
    """The part of a DNS name before the first dot; of an address all, as its parts are shared by others."""
    return host if is_address(host) else host.partition(".")[0]


def split_v1(hostname: str) -> V1Name | None:
    """A v1 pod's name, None when it has another form (hostNetwork gives the machine's name)."""
    match = _V1.fullmatch(first_label(hostname))
    return V1Name(match["job"], match["role"], int(match["index"])) if match else None


def split_v2(hostname: str) -> V2Name | None:
    """A JobSet pod's host name, None when it has another form."""
    match = _V2.fullmatch(first_label(hostname))
    return V2Name(match["group"], int(match["job_index"]), int(match["index"])) if match else None


def v2_index(hostname: str) -> int | None:
    """A JobSet pod's index, None when its name has another form."""
    own = split_v2(hostname)
    return own.index if own else None


def is_launcher(host: str) -> bool:
    """Whether a host is an MPI launcher by its name: `<job>-launcher` or `<job>-launcher-0-0`."""
    return _LAUNCHER.fullmatch(first_label(host)) is not None


def members_like(host: str, before_index: str, count: int) -> tuple[Member, ...] | None:
    """The `count` names that follow the pattern of `host`, whose first label ends in `before_index` and 0.

    None when `host` does not follow it or when there are too many.
    """
    label, dot, domain = host.partition(".")
    if not label.endswith(f"{before_index}0") or not 0 <= count <= MAX_MEMBERS:
        return None
    return tuple(Member(f"{label[:-1]}{index}{dot}{domain}") for index in range(count))


def members(host: str, before_index: str, count: int) -> tuple[Member, ...] | None:
    """All nodes of a job whose first is `host`; the only one may have any name."""
    return (Member(host),) if count == 1 else members_like(host, before_index, count)


def is_foreign(hostname: str, node_0: str, index: int) -> bool:
    """Whether pod `index`, called `hostname`, is in another replicatedJob than its TrainJob's first node."""
    own, first = split_v2(hostname), split_v2(node_0)
    if own is None or first is None or not first.group.endswith("-node"):
        return False
    job = first.group.removesuffix("node")  # "<job>-"
    return own.group.startswith(job) and own.group != first.group and own.index == index
