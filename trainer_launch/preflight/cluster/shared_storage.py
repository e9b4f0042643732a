"""Whether the nodes' folders for checkpoints are one: each leaves a token there, others look for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.model.findings import Basis, Fault, Finding, Scope, Status
from trainer_launch.model.units import grouped
from trainer_launch.preflight.check import Where, at_once, check
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_facts import listed
from trainer_launch.preflight.cluster.nodes import Cluster, Key, Node, Send, Settings

NAME = "shared-storage"
SEEK_S = 10.0  # for a node's child to look
_REPORT_S = 3.0
_BEFORE = 2  # nodes whose tokens each one looks for, beside node 0's
_MOUNT = "mount one volume there in all pods (ReadWriteMany: NFS, Lustre, CephFS ...), no emptyDir or hostPath"
_SEE = "see the mount of that volume on its machine, and its access mode"


@check(NAME, Where.CLUSTER)
def shared_storage(cluster: Cluster) -> list[Finding]:
    """Each folder of --storage is the same for all nodes, where it has to be."""
    return cluster.sharing.findings()


class Sharing:
    """What the nodes saw in each other's folders."""

    def __init__(self, settings: Settings, nodes: Sequence[Node]) -> None:
        self._settings = settings
        # Who cannot write there at all is told by its own check.
        self._nodes = [one for one in nodes if settings.storage and not _cannot_write(one)]
        self._names = {str(node.key): node.name for node in self._nodes}
        self._seen: dict[Key, Mapping[str, str]] = {}
        self.until_s = 0.0

    def begin(self, now_s: float) -> Iterator[Send]:
        """Let all look; every token has been left by now."""
        self.until_s = now_s + SEEK_S + _REPORT_S
        keys = [str(node.key) for node in self._nodes]
        for number, node in enumerate(self._nodes):
            before = (keys[(number - back) % len(keys)] for back in range(1, _BEFORE + 1))
            others = dict.fromkeys((keys[0], *before))
            others.pop(keys[number], None)
            if node.peer is not None:
                yield Send(node.peer, msg.Seek(tuple(others)))

    def take(self, key: Key, sought: msg.Sought) -> None:
        """What a node has found, by folder."""
        self._seen.setdefault(key, sought.found)

    def is_due(self, now_s: float, lost: Collection[Key]) -> bool:
        """Whether all have looked that can."""
        missing = [node for node in self._nodes if node.key not in self._seen and node.key not in lost]
        return not missing or now_s >= self.until_s

    def findings(self) -> list[Finding]:
        """One for each folder."""
        return [self._judged(folder, must) for folder, must in self._settings.storage.items()] if self._seen else []

    def _judged(self, folder: str, must: bool) -> Finding:
        groups = self._groups(folder)
        count = sum(map(len, groups))
        if count < 2:
            return shared_storage.unknown(f"no two nodes have looked into {folder}", scope=Scope.JOB)
        most = groups[0]
        if len(most) == count:
            text = f"{folder} is one shared directory on all {count} nodes"
            return shared_storage.passed(text, scope=Scope.JOB, measured=True)
        if len(most) == 1:
            return _own(folder, count, must)
        return self._divided(folder, groups, count, must)

    def _divided(self, folder: str, groups: Sequence[Sequence[str]], count: int, must: bool) -> Finding:
        has_majority = 2 * len(groups[0]) > count
        odd = [self._names[key] for group in groups[1:] for key in group] if has_majority else []
        if has_majority:
            text = f"{folder} is one folder for {len(groups[0])} of {count} nodes, and another one on {listed(odd)}"
        else:
            told = "; ".join(listed([self._names[key] for key in group]) for group in groups[:4])
            text = f"{folder} is one folder for some nodes each, and not for all: {told}"
        fault = Fault.NODE if has_majority else Fault.JOB
        return shared_storage.bad(
            fault if must else None,
            text,
            scope=Scope.NODE if has_majority else Scope.JOB,
            subject=", ".join(odd),
            measured=len(groups[0]),
            expected=count,
            unit="nodes",
            basis=Basis.PEER,
            action=_SEE if has_majority else _MOUNT,
        )

    def _groups(self, folder: str) -> list[list[str]]:
        """The nodes that see each other there, directly or by others; the largest group first."""
        looked = [str(node.key) for node in self._nodes if folder in self._seen.get(node.key, {})]
        leader = {key: key for key in looked}

        def led_by(key: str) -> str:
            while leader[key] != key:
                leader[key] = key = leader[leader[key]]
            return key

        for node in self._nodes:
            for other in self._seen.get(node.key, {}).get(folder, "").split(","):
                if other in leader:
                    leader[led_by(str(node.key))] = led_by(other)
        return sorted(grouped((led_by(key), key) for key in looked).values(), key=lambda group: -len(group))


def _own(folder: str, count: int, must: bool) -> Finding:
    text = f"{folder} is not shared: each of the {count} nodes has its own directory there"
    if not must:
        return shared_storage.passed(text, scope=Scope.JOB, measured=False)
    return shared_storage.failed(Fault.JOB, text, scope=Scope.JOB, measured=False, expected=True, action=_MOUNT)


def _cannot_write(node: Node) -> bool:
    return any(one.check == "storage" and one.status is Status.FAIL for one in node.findings)


# -- tokens in shared folders ------------------------------------------------------------------


_LEAVE_S = 8.0
_ABREAST = 8


class Tokens:
    """Those of one node."""

    def __init__(self, folders: Sequence[str], rank: int, try_out: Callable[[str, str, float], Tried]) -> None:
        self._folders, self._rank, self._try_out = folders, rank, try_out
        self._salt = ""

    def leave(self, salt: str) -> None:
        """Leave them under a name that only this cluster preflight has; where that fails, others do not find it."""
        self._salt = salt
        tried = self._in_each("leave", (self._name(str(self._rank)),), _LEAVE_S)
        self._folders = [folder for folder, its in tried.items() if not its.timed_out]  # one hang is enough

    def seek(self, others: Sequence[str]) -> dict[str, str]:
        """By folder, whose tokens are there; a folder that could not be looked into is left out."""
        tried = self._in_each("seek", [self._name(other) for other in others], SEEK_S)
        return {
            folder: ",".join(other for other in others if its.values.get(self._name(other)))
            for folder, its in tried.items()
            if its.is_good
        }

    def remove(self) -> None:
        """Once is enough."""
        if self._salt:
            self._in_each("remove", (self._name(str(self._rank)),), _LEAVE_S)
        self._salt = ""

    def _name(self, of: str) -> str:
        return f".trainer-launch-token-{self._salt}-{of}"

    def _in_each(self, what: str, names: Sequence[str], limit_s: float) -> Mapping[str, Tried]:
        if not self._folders:
            return {}

        def tried(folder: str) -> Tried:
            return self._try_out(what, json.dumps({"folder": folder, "names": list(names)}), limit_s)

        return at_once(self._folders, tried, _ABREAST)
