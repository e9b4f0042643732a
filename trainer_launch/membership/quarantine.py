"""Machines that are not admitted again, and why: a worker's death or a preflight proved them faulty.

The coordinator's launcher alone remembers them; the next coordinator begins with preflight's list.
"""

from __future__ import annotations

import re

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.protocol import MAX_QUARANTINED, Quarantine
from trainer_launch.membership.state import JobPhase, JobState, NodeRecord
from trainer_launch.model.units import printable

FAILING_NODES = "failing_nodes.txt"  # preflight's list of faulty nodes: `HOST`, or `HOST\tMACHINE`, on each line
NO_MACHINE = "unknown"
_LINE = re.compile(r"[A-Za-z0-9._-]{1,253}(\t[ -~]{1,253})?")
_WHY_CHARS = 200


def hear(state: JobState, node: NodeRecord, join: msg.Join) -> None:
    """A member joins again: its worker's death may prove that a device of its machine failed."""
    if join.device_fault and state.settings.all_nodes > 1 and _entry(state, node.hello) is None:
        _add(state, node.hello, join.device_fault)


def _add(state: JobState, hello: msg.Hello, why: str) -> Quarantine:
    """Put a node's machine on the list, or only the node where others share its machine; the oldest gives way."""
    others = (node.hello for node in state.nodes.values() if node.node_rank != hello.node_rank)
    is_shared = any(other.machine == hello.machine for other in others)
    # So short, on one line, that the whole list fits into each message.
    short = printable(why, " ").encode("ascii", "replace").decode()[:_WHY_CHARS]
    entry = Quarantine(hello.host, "" if is_shared else hello.machine, short)
    state.quarantined = (*state.quarantined, entry)[-MAX_QUARANTINED:]
    return entry


def evict(state: JobState, node: NodeRecord) -> None:
    """Tell a node that waits for a generation that it is not admitted; one that stops its workers hears later."""
    reason = why_not(state, node.hello)
    if reason is None or not node.joined or node.peer is None:
        return
    state.set_joined(node, False)
    node.returning = False
    state.say(f"{node.name} is quarantined: {reason.removeprefix(_IS)}")
    state.send(node.peer, msg.Quarantined(reason, retry=False))
    state.disconnect(node.peer)


_IS = "this node is quarantined: "


def why_not(state: JobState, hello: msg.Hello) -> str | None:
    """Why a node is not admitted, as it is told; None: it is."""
    entry = _entry(state, hello)
    return None if entry is None else f"{_IS}{entry.why}"


def greet(state: JobState, hello: msg.Hello, now_s: float) -> msg.Refused | None:
    """Note what a node's first words prove; why it is not admitted."""
    entry = _entry(state, hello)
    if hello.fault and state.generation and entry is None:
        entry = _add(state, hello, f"its preflight failed: {hello.fault}")
    if entry is None or hello.node_rank == (state.settings.candidate or 0):  # it is this launcher's own node
        return None
    if _is_last_resort(state, now_s):
        state.quarantined = tuple(other for other in state.quarantined if other != entry)
        return None
    return msg.Quarantined(f"{_IS}{entry.why}", retry=False)


def nodes_in(text: str) -> tuple[str, ...]:
    """The lines of preflight's list that make sense. A pod's name alone does not tell its machine."""
    lines = [line for line in map(str.strip, text.splitlines()) if _LINE.fullmatch(line)]
    return tuple(line for line in lines if not line.endswith(f"\t{NO_MACHINE}"))[:MAX_QUARANTINED]


def named(lines: tuple[str, ...]) -> tuple[Quarantine, ...]:
    """Their entries."""
    split = (line.partition("\t") for line in lines)
    return tuple(Quarantine(host, of, "preflight found it faulty (failing_nodes.txt)") for host, _, of in split)


def _entry(state: JobState, hello: msg.Hello) -> Quarantine | None:
    for entry in state.quarantined:
        if entry.machine == hello.machine if entry.machine else entry.host == hello.host:
            return entry
    return None


def _is_last_resort(state: JobState, now_s: float) -> bool:
    """Whether no other nodes have come for so long that the job cannot go on without this one."""
    begun_s, here = state.gather_from_s, [node for node in state.nodes.values() if node.peer is not None]
    if state.phase is not JobPhase.GATHERING or begun_s is None or now_s < begun_s + timeouts.LAST_RESORT_S:
        return False
    return len(here) < state.settings.min_nodes
