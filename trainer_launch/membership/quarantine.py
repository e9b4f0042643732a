"""Which machines are not admitted again, and why: what their own workers' deaths have shown. Pure.

The first failure of a generation accuses the machine of its node: at once if it proves that a device failed, else
at the third time within an hour, if it may be the machine's doing. It does not if another node's worker failed by
itself in the same generation, which may be the program's doing. Nor is the third time enough if another machine had
such a death within that hour: what happens to several machines is the fault of none.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.protocol import MAX_QUARANTINED, Quarantine
from trainer_launch.membership.state import Accused, Disconnect, Node, Phase, Reply, Say, Send, State
from trainer_launch.model.units import counted, printable

Step: TypeAlias = tuple[State, tuple[Reply, ...]]
INCIDENTS = 3
FAILING_NODES = "failing_nodes.txt"  # preflight's list of faulty nodes: their host names, one on each line
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}")
_WHY_CHARS = 200


def accuse(state: State, node: Node, failed: msg.Failed) -> State:
    """Remember what a generation's first failure shows about its node; a job of one node has no other."""
    if failed.lost_peer or not failed.fault or not node.machine or state.settings.all_nodes == 1:
        return replace(state, accused=None)
    told = _short(failed.evidence or failed.message)
    return replace(
        state, accused=Accused(key=node.key, machine=node.machine, is_proof=failed.fault == msg.DEVICE, why=told)
    )


def hear(state: State, node: Node, join: msg.Join) -> State:
    """A member tells how its workers ended; a proof counts even if a peer was faster to tell of its loss."""
    if state.run is None or node.key not in state.run.members:
        return state
    state = replace(state, failed_itself={**state.failed_itself, node.key: join.failed})
    if state.accused is not None or join.fault != msg.DEVICE or not node.machine or state.settings.all_nodes == 1:
        return state
    return replace(
        state, accused=Accused(key=node.key, machine=node.machine, is_proof=True, why=_short(join.evidence))
    )


def judge(state: State, now_s: float) -> Step:
    """Before the next generation: whether the accused may be in it."""
    accused, is_alone = state.accused, _is_alone(state)
    state = replace(state, accused=None, failed_itself={})
    if accused is None or not is_alone:
        return state, ()
    recent = tuple(one for one in state.incidents if one[0] > now_s - timeouts.INCIDENTS_WITHIN_S)
    incidents = (*recent, (now_s, accused.machine))[-msg.MAX_NODES :]
    state = replace(state, incidents=incidents)
    own = [machine for _, machine in incidents if machine == accused.machine]
    if not accused.is_proof and (len(own) < INCIDENTS or len(own) < len(incidents)):
        return state, ()
    why = accused.why
    if not accused.is_proof:
        why = _short(f"{counted(len(own), 'incident')} of its own within an hour; the last one: {why}")
    node = state.nodes.get(accused.key)
    return (state, ()) if node is None else evict(add(state, node, why), node)


def add(state: State, node: Node, why: str) -> State:
    """Put a node's machine on the list, or only the node where others share its machine; the oldest gives way."""
    beside = [one for one in state.nodes.values() if one.machine == node.machine and one.key != node.key]
    entry = Quarantine(node.host, "" if beside else node.machine, why)
    return replace(state, quarantined=(*state.quarantined, entry)[-MAX_QUARANTINED:])


def evict(state: State, node: Node) -> Step:
    """Tell a node that waits for a generation that it is not admitted; one that stops its workers hears later."""
    reason = why_not(state, node.host, node.machine)
    if reason is None or not node.joined or node.peer is None:
        return state, ()
    gone = replace(node, joined=False, returning=False)
    state = replace(state, nodes={**state.nodes, node.key: gone}, n_joined=state.n_joined - 1)
    say = Say(f"{node.name} is quarantined: {reason.removeprefix(_IS)}")
    return state, (say, Send(node.peer, msg.Quarantined(reason, retry=False)), Disconnect(node.peer))


_IS = "this node is quarantined: "


def why_not(state: State, host: str, machine: str) -> str | None:
    """Why a node is not admitted, as it is told; None: it is."""
    entry = _entry(state, host, machine)
    return None if entry is None else f"{_IS}{entry.why}"


def greet(state: State, hello: msg.Hello, now_s: float) -> tuple[State, msg.Refused | None]:
    """What a node's first words change, and why it is not admitted.

    It tells whom it knows to be quarantined, so that a new coordinator learns of them; who is here by then stays.
    """
    here = {node.machine for node in state.nodes.values() if node.peer is not None}
    known = {one.machine for one in state.quarantined}
    told = tuple(
        one._replace(why=_short(one.why))
        for one in hello.quarantined
        if one.machine and one.machine not in here | known
    )
    state = replace(state, quarantined=(*state.quarantined, *told)[-MAX_QUARANTINED:])
    if hello.fault and state.generation and hello.machine and _entry(state, hello.host, hello.machine) is None:
        node = Node(node_rank=hello.node_rank, host=hello.host, incarnation="", peer=None, machine=hello.machine)
        state = add(state, node, _short(f"its preflight failed: {hello.fault}"))
    reason = why_not(state, hello.host, hello.machine)
    if reason is None or hello.node_rank == (state.settings.candidate or 0):  # it is this launcher's own node
        return state, None
    if _is_last_resort(state, now_s):
        entry = _entry(state, hello.host, hello.machine)
        left = tuple(one for one in state.quarantined if one != entry)
        incidents = tuple(one for one in state.incidents if one[1] != hello.machine)
        return replace(state, quarantined=left, incidents=incidents), None
    return state, msg.Quarantined(reason, retry=False)


def hosts_in(text: str) -> tuple[str, ...]:
    """The hosts that preflight's list names; what is no host name is left out."""
    return tuple(line for line in map(str.strip, text.splitlines()) if _HOST.fullmatch(line))[:MAX_QUARANTINED]


def named(hosts: tuple[str, ...]) -> tuple[Quarantine, ...]:
    """Their entries."""
    return tuple(Quarantine(host, "", "preflight found it faulty (failing_nodes.txt)") for host in hosts)


def _short(text: str) -> str:
    """As a part of one line, in so few bytes that the whole list fits into each message."""
    return printable(text, " ").encode("ascii", "replace").decode()[:_WHY_CHARS]


def _entry(state: State, host: str, machine: str) -> Quarantine | None:
    return next(
        (one for one in state.quarantined if (one.machine == machine if one.machine else one.host == host)), None
    )


def _is_last_resort(state: State, now_s: float) -> bool:
    """Whether no other nodes have come for so long that the job cannot go on without this one."""
    begun_s, here = state.gather_from_s, [node for node in state.nodes.values() if node.peer is not None]
    if state.phase is not Phase.GATHERING or begun_s is None or now_s < begun_s + timeouts.LAST_RESORT_S:
        return False
    return len(here) < state.settings.min_nodes


def _is_alone(state: State) -> bool:
    """Whether all other members that are still there have told that none of their workers failed by itself."""
    if state.run is None or state.accused is None:
        return False
    others = [state.nodes[key] for key in state.run.members if key in state.nodes and key != state.accused.key]
    return not any(state.failed_itself.get(node.key, node.peer is not None) for node in others)
