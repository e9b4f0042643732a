"""Whether the nodes' folders for checkpoints are one: each leaves a token there, others look for it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.model.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.model.units import grouped
from trainer_launch.preflight.check import Where, at_once, check
from trainer_launch.preflight.cluster.nodes import Cluster, listed

NAME = "shared-storage"
_LEAVE_S = 8.0
_SEEK_S = 10.0
_MOUNT = "mount one volume there in all pods (ReadWriteMany: NFS, Lustre, CephFS ...), no emptyDir or hostPath"
_SEE = "see the mount of that volume on its machine, and its access mode"


@check(NAME, Where.CLUSTER)
def shared_storage(cluster: Cluster) -> Iterator[Finding]:
    """Each shared: directory of --storage is the same on all nodes."""
    # Of a node that cannot write there at all, its own check speaks.
    failed = {
        node.rank
        for node in cluster.nodes
        for finding in node.report.findings
        if finding.check == "storage" and finding.status is Status.FAIL
    }
    able = [node for node in cluster.nodes if node.rank not in failed]
    for folder, must in cluster.settings.storage.items() if len(cluster.nodes) > 1 else ():
        groups = grouped((node.report.tokens[folder], node.name) for node in able if folder in node.report.tokens)
        yield _judged(folder, sorted(groups.values(), key=len, reverse=True), must)


def _judged(folder: str, groups: Sequence[Sequence[str]], must: bool) -> Finding:
    """Of the nodes that have looked there, those of each group have one folder; the largest group is the first."""
    count = sum(map(len, groups))
    if count < 2:
        return shared_storage.unknown(f"no two nodes have looked into {folder}", scope=Scope.JOB)
    if len(groups) == 1:
        text = f"{folder} is one shared directory on all {count} nodes"
        return shared_storage.passed(text, scope=Scope.JOB, measured=True)
    if len(groups) == count:
        text = f"{folder} is not shared: each of the {count} nodes has its own directory there"
        if not must:
            return shared_storage.passed(text, scope=Scope.JOB, measured=False)
        more = {"scope": Scope.JOB, "measured": False, "expected": True, "action": _MOUNT}
        return shared_storage.failed(Fault.JOB, text, **more)
    more = {"measured": len(groups[0]), "expected": count, "unit": "nodes", "basis": Basis.PEER}
    if 2 * len(groups[0]) > count:
        odd = [name for group in groups[1:] for name in group]
        text = f"{folder} is one folder for {len(groups[0])} of {count} nodes, and another one on {listed(odd)}"
        more |= {"scope": Scope.NODE, "subject": ", ".join(odd), "action": _SEE}
        return shared_storage.bad(Fault.NODE if must else None, text, **more)
    members = "; ".join(listed(group) for group in groups[:4])
    text = f"{folder} is one folder for some nodes each, and not for all: {members}"
    return shared_storage.bad(Fault.JOB if must else None, text, scope=Scope.JOB, action=_MOUNT, **more)


class Tokens:
    """The files of a node, under a name that only it has: a node that sees the file has the same folder.

    The name is new, so no client of a file server remembers that it is absent, and every node writes a file of its
    own: not all file systems let a single node win a race to create a file.
    """

    def __init__(self, folders: Sequence[str], own: str, try_out: Callable[[str, str, float], Tried]) -> None:
        self._folders, self._own, self._try_out = folders, own, try_out
        self._are_left = False

    def leave(self, limit_s: float) -> None:
        """Leave them; where that fails, others do not find them."""
        self._are_left = True
        tried = self._in_each("leave", lambda folder: _path(folder, self._own), min(limit_s, _LEAVE_S))
        self._folders = [folder for folder, its in tried.items() if not its.timed_out]  # one hang is enough

    def seek(self, tokens: Sequence[str]) -> dict[str, str]:
        """By folder, the first of these tokens that is there, or else this node's own.

        A folder that could not be looked into is left out.
        """
        if not tokens:
            return {}
        tried = self._in_each(
            "seek", lambda folder: json.dumps([_path(folder, token) for token in tokens]), _SEEK_S
        )
        return {
            folder: next((token for token in tokens if its.values.get(_path(folder, token))), self._own)
            for folder, its in tried.items()
            if its.is_good
        }

    def remove(self) -> None:
        """Once is enough."""
        if self._are_left:
            self._in_each("remove", lambda folder: _path(folder, self._own), _LEAVE_S)
        self._are_left = False

    def _in_each(self, what: str, argument: Callable[[str], str], limit_s: float) -> Mapping[str, Tried]:
        def tried(folder: str) -> Tried:
            return self._try_out(what, argument(folder), limit_s)

        return at_once(self._folders, tried, len(self._folders)) if self._folders else {}


def _path(folder: str, token: str) -> str:
    return os.path.join(folder, f".trainer-launch-token-{token}")
