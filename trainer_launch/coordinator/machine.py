r"""What the coordinator does, as a pure state machine: `step(state, event, now_s) -> (state, replies)`.

state \ event | Join           | a member lost, leaves | Failed; no Store in time | Store | all Done | too long
--------------|----------------|-----------------------|--------------------------|-------|----------|---------
GATHERING     | enough: FORMED | wait on               | ignore                   | -     | -        | OVER
FORMED        | a member's:    | GATHERING, free of    | GATHERING, Failed is     | RUN-  | -        | see left
RUNNING       | GATHERING; a   | charge                | charged; too often: OVER | NING  | OVER     | -
              | newcomer's:    |                       |                          | -     |          |
              | soon GATHERING |                       |                          |       |          |
OVER          | the end again  | -                     | -                        | -     | -        | -

Every way from FORMED or RUNNING to GATHERING tells the other members once to stop their workers and join again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from trainer_launch.coordinator import protocol as msg
from trainer_launch.coordinator.ending import Step, die, end, fail, give_up, peers_of, quit_job, settle, stumble
from trainer_launch.coordinator.state import (
    Close,
    Connected,
    Disconnect,
    Event,
    Gone,
    Key,
    Node,
    Phase,
    Reply,
    Said,
    Say,
    Send,
    Settings,
    State,
    Tick,
    give_up_at_s,
    has_finished,
    is_working,
    missing,
    waiting,
)

_K = TypeVar("_K")
_V = TypeVar("_V")


def begin(settings: Settings) -> State:
    """Know nothing of the job but its settings; what ran before is learned from those who call."""
    return State(settings=settings)


def step(state: State, event: Event, now_s: float) -> Step:
    """Decide what an event changes and who has to be told what."""
    match event:
        case Connected():
            return state, ()
        case Said(peer, msg.Hello() as hello):
            return _greet(state, peer, hello, now_s)
        case Said(peer, message) if peer in state.peers:
            heard = replace(state, heard=_with(state.heard, peer, now_s))
            return _hear(heard, heard.nodes[heard.peers[peer]], message, now_s)
        case Said(peer, _):
            return state, (Disconnect(peer),)
        case Gone(peer):
            return _lose(state, state.peers[peer], "is gone", now_s) if peer in state.peers else (state, ())
        case Tick():
            return _tick(state, now_s)
        case Close(reason):
            return end(state, msg.GiveUp(reason)) if state.phase is not Phase.OVER else (state, ())


# -- who is who -------------------------------------------------------------------------------


def _greet(state: State, peer: int, hello: msg.Hello, now_s: float) -> Step:
    refusal = _refusal(state, peer, hello, now_s)
    if refusal is not None:
        return state, (Send(peer, refusal), Disconnect(peer))
    node = Node(node_rank=hello.node_rank, host=hello.host, incarnation=hello.incarnation, peer=peer)
    state, replies = _replace_old(state, node, now_s)
    finished = has_finished(state, node.key)
    state = replace(
        state,
        nodes=_with(state.nodes, node.key, replace(node, returning=hello.generation > 0)),
        peers=_with(state.peers, peer, node.key),
        heard=_with(state.heard, peer, now_s),
        generation=max(state.generation, hello.generation),
        restarts=max(state.restarts, hello.restarts),
        gather_from_s=now_s if state.gather_from_s is None else state.gather_from_s,
        lease_check_s=_earlier(state.lease_check_s, now_s + state.settings.lease_s),
    )
    replies += (Send(peer, msg.Welcome(state.settings.lease_s)),)
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
    if peer in state.peers:
        return msg.Refused("a connection is for one node", retry=False)
    old = None if rank is None else state.nodes.get(rank)
    if old is None or old.peer is None or old.host == hello.host:
        return None
    # Who renews is heard every third of the lease: silence for half of it may well be the end of that node.
    silent = now_s - state.heard[old.peer] > settings.lease_s / 2
    return msg.Refused(f"{old.name} is there already, so {hello.host} cannot be node {rank} as well", retry=silent)


def _replace_old(state: State, node: Node, now_s: float) -> Step:
    """A node's new connection ends its old one; another process of it also ends the old process."""
    old = state.nodes.get(node.key)
    if old is None or old.peer is None:
        return state, ()
    told: tuple[Reply, ...] = ()
    if old.incarnation != node.incarnation:
        told = (Send(old.peer, msg.Refused(f"a newer process has come for {old.name}", retry=False)),)
    state, replies = _lose(state, old.key, "came back", now_s)
    return state, (*told, Disconnect(old.peer), *replies)


def _lose(state: State, key: Key, how: str, now_s: float) -> Step:
    node = state.nodes[key]
    working = is_working(state, key)
    state = replace(
        state,
        nodes=_with(state.nodes, key, replace(node, peer=None, joined=False)),
        peers=_without(state.peers, node.peer),
        heard=_without(state.heard, node.peer),
    )
    if working:
        return die(state, f"{node.name} {how}", now_s, but=key)
    return settle(state, (), now_s)


# -- what a node says -------------------------------------------------------------------------


def _hear(state: State, node: Node, message: msg.Message, now_s: float) -> Step:
    match message:
        case msg.Renew():
            return state, ()
        case msg.Join():
            return _join(state, node, message, now_s)
        case msg.Store(generation, host, port) if _is_current(state, node, generation):
            return _go(state, node, msg.Go(generation, host, port), now_s)
        case msg.Failed(generation) if _is_current(state, node, generation):
            return fail(state, node, message, now_s)
        case msg.Done(generation) if _is_current(state, node, generation):
            return _note_done(state, node)
        case msg.Leave(reason):
            return _leave(state, node, f"leaves: {_printable(reason)}", now_s)
        case msg.Quit(reason):
            return quit_job(state, node, _printable(reason))
    return state, ()  # about a generation that is over


def _is_current(state: State, node: Node, generation: int) -> bool:
    return state.run is not None and generation == state.run.number and is_working(state, node.key)


def _join(state: State, node: Node, join: msg.Join, now_s: float) -> Step:
    if join.incarnation != node.incarnation or node.peer is None:
        return state, ()
    if state.end is not None:
        return state, (Send(node.peer, state.end),)
    replies: tuple[Reply, ...] = ()
    if is_working(state, node.key) and state.run is not None:
        if join.generation < state.run.number:  # said before it heard of this generation
            return state, ()
        state, replies = die(state, f"{node.name} starts again", now_s, but=node.key)
    joined = replace(state.nodes[node.key], joined=True)
    state = replace(state, nodes=_with(state.nodes, node.key, joined), joined_s=now_s)
    return settle(state, replies, now_s)


def _leave(state: State, node: Node, how: str, now_s: float) -> Step:
    """It goes on purpose: it stays connected but is not waited for."""
    gone = replace(node, joined=False, returning=False)
    working = is_working(state, node.key)
    state = replace(state, nodes=_with(state.nodes, node.key, gone))
    return die(state, f"{node.name} {how}", now_s, but=node.key) if working else settle(state, (), now_s)


def _go(state: State, node: Node, go: msg.Go, now_s: float) -> Step:
    run = state.run
    if run is None or state.phase is not Phase.FORMED or run.members[0] != node.key:
        return state, ()
    state = replace(state, phase=Phase.RUNNING, run=replace(run, go_s=now_s))
    return state, tuple(Send(peer, go) for peer in peers_of(state, run.members))


def _note_done(state: State, node: Node) -> Step:
    run = state.run
    if run is None or state.phase is not Phase.RUNNING:
        return state, ()
    run = replace(run, done=run.done | {node.key})
    state = replace(state, run=run, admit_at_s=None)
    return end(state, msg.Finished()) if len(run.done) == len(run.members) else (state, ())


# -- time -------------------------------------------------------------------------------------


def _tick(state: State, now_s: float) -> Step:
    state, replies = _expire(state, now_s)
    limit_s = give_up_at_s(state)
    if limit_s is not None and now_s >= limit_s:
        state, more = _stop_waiting(state, now_s)
        replies += more
    if state.admit_at_s is not None and now_s >= state.admit_at_s and state.run is not None:
        names = ", ".join(n.name for n in state.nodes.values() if n.joined and n.key not in state.run.members)
        state, more = die(state, f"{names[:500]} may join", now_s)
        replies += more
    state, more = settle(state, (), now_s)
    replies += more
    if state.say_at_s is not None and now_s >= state.say_at_s:
        state, more = _say(state)
        replies += more
    return state, replies


def _expire(state: State, now_s: float) -> Step:
    """End the leases of those who were silent for too long, unless it is we who were not looking."""
    if state.lease_check_s is None or now_s < state.lease_check_s:
        return state, ()
    lease_s = state.settings.lease_s
    replies: tuple[Reply, ...] = ()
    if now_s > state.lease_check_s + lease_s / 2:  # this process was stopped: their lines may not be read yet
        state = replace(state, heard=dict.fromkeys(state.heard, now_s))
    for peer in [peer for peer, at_s in state.heard.items() if now_s >= at_s + lease_s]:
        if peer in state.peers:
            state, more = _lose(state, state.peers[peer], f"was silent for {lease_s:g} s", now_s)
            replies = (*replies, Disconnect(peer), *more)
    first_s = min(state.heard.values(), default=None)
    return replace(state, lease_check_s=None if first_s is None else first_s + lease_s), replies


def _stop_waiting(state: State, now_s: float) -> Step:
    if state.phase is Phase.FORMED and state.run is not None:
        host = state.nodes[state.run.members[0]].name
        return stumble(state, f"{host} did not open the store in {state.settings.store_timeout_s:g} s", now_s)
    names = ", ".join(missing(state)) or "more nodes"
    return give_up(state, f"waited {state.settings.rejoin_timeout_s:g} s for {names}")


def _say(state: State) -> Step:
    """Tell those that wait what they wait for, when it is new to them."""
    now = waiting(state)
    peers = frozenset(node.peer for node in state.nodes.values() if node.joined and node.peer is not None)
    known, told = state.said or (None, frozenset())
    state = replace(state, say_at_s=None, said=(now, peers))
    new = peers if now != known else peers - told
    says = (Say(_sentence(now)),) if now != known and now.missing else ()
    return state, (*says, *(Send(peer, now) for peer in sorted(new)))


def _sentence(now: msg.Waiting) -> str:
    more = now.wanted - now.present - len(now.missing)
    return f"{now.present} of {now.wanted} nodes, waiting for {', '.join(now.missing)}" + (
        f" and {more} more" if more > 0 else ""
    )


def _printable(text: str) -> str:
    """As a part of one line of a log."""
    return "".join(c if c.isprintable() else " " for c in text[:200])


def _earlier(one_s: float | None, other_s: float) -> float:
    return other_s if one_s is None else min(one_s, other_s)


def _with(values: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    return {**values, key: value}


def _without(values: Mapping[_K, _V], key: _K | None) -> Mapping[_K, _V]:
    return {k: v for k, v in values.items() if k != key}
