"""Who is connected as which node, and how a node is lost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.generation_end import Step, die, forgive, settle
from trainer_launch.membership.state import (
    Disconnect,
    Key,
    Looked,
    Node,
    Reply,
    Send,
    State,
    has_finished,
    is_working,
    runs,
)
from trainer_launch.model.frozen_replace import replace

_K = TypeVar("_K")
_V = TypeVar("_V")


def greet(state: State, peer: int, hello: msg.Hello, now_s: float) -> Step:
    """A node says who it is."""
    refusal = _refusal(state, peer, hello, now_s)
    if refusal is not None:
        return state, (Send(peer, refusal), Disconnect(peer))
    node = Node(
        node_rank=hello.node_rank,
        host=hello.host,
        incarnation=hello.incarnation,
        peer=peer,
        claims=hello.claims,
        workers=hello.workers,
        role=hello.role,
    )
    state, replies = _replace_old(state, node, now_s)
    finished = has_finished(state, node.key)
    state = replace(
        with_node(state, replace(node, returning=hello.generation > 0)),
        peers=with_key(state.peers, peer, node.key),
        heard=with_key(state.heard, peer, now_s),
        generation=max(state.generation, hello.generation),
        restarts=max(state.restarts, hello.restarts),
        gather_from_s=now_s if state.gather_from_s is None else state.gather_from_s,
        lease_check_s=_earlier(state.lease_check_s, now_s + state.settings.told_lease_s),
    )
    replies += (Send(peer, msg.Welcome(state.settings.told_lease_s)),)
    if state.end is not None:
        return state, (*replies, Send(peer, state.end))
    if hello.generation and not finished:
        reason = "this node or the coordinator was away, so its generation is over"
        replies += (Send(peer, msg.Restart(hello.generation, reason)),)
    return settle(state, replies, now_s)


def _refusal(state: State, peer: int, hello: msg.Hello, now_s: float) -> msg.Refused | None:
    settings = state.settings
    if hello.version != msg.VERSION:
        return msg.Refused(f"the coordinator speaks version {msg.VERSION}, not {hello.version}", retry=False)
    if hello.job != settings.job:
        return msg.Refused(f"this coordinator serves job {settings.job}, not {hello.job}", retry=False)
    rank = hello.node_rank
    if rank is not None and settings.min_nodes == settings.max_nodes <= rank:
        return msg.Refused(
            f"this job has nodes 0 to {settings.max_nodes - 1}, there is no node {rank}", retry=False
        )
    if settings.seat is not None and (elsewhere := _elsewhere(state, hello, now_s)):
        return elsewhere
    if peer in state.peers:
        return msg.Refused("a connection is for one node", retry=False)
    old = None if rank is None else state.nodes.get(rank)
    if old is None or old.peer is None or old.host == hello.host:
        return None
    # Who renews is heard every third of the lease: silence for half of it may well be the end of that node.
    silent = now_s - state.heard[old.peer] > settings.told_lease_s / 2
    return msg.Refused(f"{old.name} is there already, so {hello.host} cannot be node {rank} as well", retry=silent)


def _elsewhere(state: State, hello: msg.Hello, now_s: float) -> msg.Refused | None:
    """Whom this seat does not take: anybody while it yields; a standby, who has no generation to go on with."""
    if hello.node_rank is None:
        return msg.Refused("a job that may go on without node 0 needs its nodes' ranks", retry=False)
    if state.yielding_until_s is not None and now_s < state.yielding_until_s:
        return msg.Refused("a node with a lower index is there again", retry=True)
    if state.settings.seat != 0 and state.run is None and not hello.claims:
        return msg.Refused("this is a standby, and no generation has run here", retry=True)
    return None


def give_way(state: State, looked: Looked, now_s: float) -> Step:
    """What is known of other seats: node 0's begins where nobody else is; the others send their nodes to it."""
    seat = state.settings.seat
    state = replace(state, absent=looked.absent)
    lower = [rank for rank in looked.there if seat is not None and rank < seat]
    if not lower or not state.peers or state.end is not None or (runs(state) and 0 not in lower):
        return settle(state, (), now_s)
    reason = f"node {min(lower)} is there again"
    state, told = die(state, reason, now_s)
    word = msg.Refused(reason, retry=True)
    told += tuple(reply for peer in state.peers for reply in (Send(peer, word), Disconnect(peer)))
    until_s = now_s + state.settings.yield_s
    return replace(state, yielding_until_s=until_s, run=None, suspicion=None, gather_from_s=None), told


def _replace_old(state: State, node: Node, now_s: float) -> Step:
    """A node's new connection ends its old one; another process of it also ends the old process."""
    old = state.nodes.get(node.key)
    if old is None or old.peer is None:
        return state, ()
    told: tuple[Reply, ...] = ()
    if old.incarnation != node.incarnation:
        told = (Send(old.peer, msg.Refused(f"a newer process has come for {old.name}", retry=False)),)
    state, replies = lose(state, old.key, "came back", now_s)
    return state, (*told, Disconnect(old.peer), *replies)


def lose(state: State, key: Key, how: str, now_s: float, *, ended: bool = False) -> Step:
    """A node is not connected any more."""
    node = state.nodes[key]
    working = is_working(state, key)
    state = replace(
        with_node(state, replace(node, peer=None, joined=False, lost_s=now_s)),
        peers=without_key(state.peers, node.peer),
        heard=without_key(state.heard, node.peer),
    )
    if ended and state.run is not None and key in state.run.members:
        state = replace(state, ended=with_key(state.ended, key, state.run.number))
    return _go_on_without(state, node, how, now_s, working=working)


def _go_on_without(state: State, node: Node, how: str, now_s: float, *, working: bool) -> Step:
    state, told = forgive(state, node)
    if not working:
        return settle(state, told, now_s)
    state, more = die(state, f"{node.name} {how}", now_s, but=node.key)
    return state, (*told, *more)


def leave(state: State, node: Node, reason: str, now_s: float) -> Step:
    """It goes on purpose: it stays connected but is not waited for."""
    working = is_working(state, node.key)
    state = with_node(state, replace(node, joined=False, returning=False))
    return _go_on_without(state, node, f"leaves: {printable(reason)}", now_s, working=working)


def expire(state: State, now_s: float) -> Step:
    """End the leases of those who were silent for too long, unless it is we who were not looking."""
    if state.lease_check_s is None or now_s < state.lease_check_s:
        return state, ()
    lease_s = state.settings.told_lease_s
    replies: tuple[Reply, ...] = ()
    if now_s > state.lease_check_s + lease_s / 2:  # this process was stopped: their lines may not be read yet
        state = replace(state, heard=dict.fromkeys(state.heard, now_s))
    for peer in [peer for peer, at_s in state.heard.items() if now_s >= at_s + lease_s]:
        if peer in state.peers:
            state, more = lose(state, state.peers[peer], f"was silent for {lease_s:g} s", now_s)
            replies = (*replies, Disconnect(peer), *more)
    first_s = min(state.heard.values(), default=None)
    return replace(state, lease_check_s=None if first_s is None else first_s + lease_s), replies


def printable(text: str) -> str:
    """As a part of one line of a log."""
    return "".join(c if c.isprintable() else " " for c in text[:200])


def _earlier(one_s: float | None, other_s: float) -> float:
    return other_s if one_s is None else min(one_s, other_s)


def with_node(state: State, node: Node) -> State:
    """The state with this node in place of what was known of it."""
    before = state.nodes.get(node.key)
    n_joined = state.n_joined + node.joined - (before is not None and before.joined)
    return replace(state, nodes=with_key(state.nodes, node.key, node), n_joined=n_joined)


def with_key(values: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    """A mapping with one more, or another, value."""
    return values | {key: value}  # type: ignore[operator, no-any-return] # {**values} takes 8 times as long


def without_key(values: Mapping[_K, _V], key: _K | None) -> Mapping[_K, _V]:
    """A mapping without this key."""
    kept = values | {}  # type: ignore[operator]
    kept.pop(key, None)
    return kept  # type: ignore[no-any-return]
