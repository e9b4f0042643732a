r"""Who is a member of the job, lost, back: what the coordinator does, as a pure state machine.

`step(state, event, now_s) -> (state, replies)`

state \ event | Join           | a member lost, leaves | Failed; no Store in time | Store | all Done | too long
--------------|----------------|-----------------------|--------------------------|-------|----------|---------
GATHERING     | enough: FORMED | wait on               | ignore, or `correct`     | -     | -        | OVER
FORMED        | a member's:    | GATHERING, free of    | GATHERING, Failed is     | RUN-  | -        | see left
RUNNING       | GATHERING; a   | charge                | charged; too often: OVER | NING  | OVER     | -
              | prepared new-  |                       |                          | -     |          |
              | comer's:       |                       |                          |       |          |
              | soon GATHERING |                       |                          |       |          |
OVER          | the end again  | -                     | -                        | -     | -        | -

Every way from FORMED or RUNNING to GATHERING tells the other members once to stop their workers and join again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import quarantine, timeouts
from trainer_launch.membership.election import binding, note_look
from trainer_launch.membership.generation import (
    Step,
    begin_judging,
    carried,
    charge,
    correct,
    die,
    end,
    fail,
    forgive,
    give_up,
    hear_note,
    note_ends,
    note_loss,
    peers_of,
    settle,
    stumble,
    tick_judges,
)
from trainer_launch.membership.notes import Judge
from trainer_launch.membership.state import (
    Close,
    Disconnect,
    Event,
    Gone,
    Key,
    Looked,
    Node,
    Phase,
    Reply,
    Said,
    Say,
    Send,
    Settings,
    State,
    Tick,
    charge_at_s,
    give_up_at_s,
    has_finished,
    is_working,
    members_of,
    missing,
    newcomers,
    runs,
    waiting,
    why_stranger,
)
from trainer_launch.model.units import printable

_K = TypeVar("_K")
_V = TypeVar("_V")


def begin(settings: Settings, judges: Sequence[Judge] = ()) -> State:
    """Know nothing of the job but its settings; what ran before is learned from those who call."""
    return State(settings=settings, quarantined=quarantine.named(settings.failing), judges=tuple(judges))


def step(state: State, event: Event, now_s: float) -> Step:
    """Decide what an event changes and who has to be told what."""
    match event:
        case Said(peer, msg.Hello() as hello):
            return _greet(state, peer, hello, now_s)
        case Said(peer, message) if peer in state.peers:
            heard = replace(state, heard=_with_key(state.heard, peer, now_s))
            return _hear(heard, heard.nodes[heard.peers[peer]], message, now_s)
        case Said(peer, _):
            return state, (Disconnect(peer),)
        case Gone(peer, ended) if peer in state.peers:
            key = state.peers[peer]
            may_return = not ended and _is_training(state, key)
            return _await(state, key) if may_return else _lose(state, key, "is gone", now_s, ended=ended)
        case Gone():
            return state, ()
        case Looked():
            return _give_way(state, event, now_s)
        case Tick():
            return _tick(state, now_s)
        case Close(reason):
            return end(state, msg.GiveUp(reason)) if state.phase is not Phase.OVER else (state, ())


# -- what a node says -------------------------------------------------------------------------


def _hear(state: State, node: Node, message: msg.Message, now_s: float) -> Step:
    match message:
        case msg.Renew():
            return state, ()
        case msg.Join():
            return _join(state, node, message, now_s)
        case msg.Store(generation) if _is_current(state, node, generation):
            return _note_store(state, node, message, now_s)
        case msg.Took(generation) if _is_current(state, node, generation):
            return _note_taken(state, node, now_s)
        case msg.Failed(generation):
            note = fail if _is_current(state, node, generation) else correct
            return note(state, node, message, now_s)
        case msg.Done(generation) if _is_current(state, node, generation):
            return _note_done(state, node, now_s)
        case msg.Note(generation) if _is_current(state, node, generation):
            return hear_note(state, node, message, now_s)
        case msg.Leave(reason):
            return _leave(state, node, reason, now_s)
    return state, ()  # about a generation that is over


def _is_current(state: State, node: Node, generation: int) -> bool:
    return state.run is not None and generation == state.run.number and is_working(state, node.key)


def _join(state: State, node: Node, join: msg.Join, now_s: float) -> Step:
    if join.incarnation != node.incarnation or node.peer is None:
        return state, ()
    if state.end is not None:
        return state, (Send(node.peer, state.end),)
    replies: tuple[Reply, ...] = ()
    notes = carried(state, join.notes)
    if is_working(state, node.key) and state.run is not None:
        if join.generation < state.run.number:  # said before it heard of this generation
            return state, ()
        state, replies = die(state, f"{node.name} starts again", now_s, but=node.key)
    if state.run is not None and join.generation == state.run.number:
        state = quarantine.hear(note_ends(state, node.key, join, notes), node, join)
    is_new = runs(state) or not node.joined  # else it only tells that it can start workers now
    known = state.nodes[node.key]
    joined = replace(known, joined=True, prepared=join.prepared, notes=notes, joined_s=now_s)
    joined = replace(joined, is_faulty=quarantine.why_not(state, node.host, node.machine) is not None)
    state = replace(_with_node(state, joined), joined_s=now_s if is_new else state.joined_s)
    if node.node_rank != (state.settings.candidate or 0):
        state, told = quarantine.evict(state, joined)
        replies += told
    elif join.device_fault and joined.is_faulty:  # who ends takes the coordinator, and with it this list, along
        text = f"{node.name} is quarantined: it serves the coordinator, and trains only if too few others are there"
        replies += (Say(text),)
    return settle(state, replies, now_s)


def _note_store(state: State, node: Node, store: msg.Store, now_s: float) -> Step:
    run = state.run
    if run is None or state.phase is not Phase.FORMED or run.members.get(node.key) != 0:
        return state, ()
    return _go(replace(state, run=replace(run, store=store)), now_s)


def _note_taken(state: State, node: Node, now_s: float) -> Step:
    run = state.run
    if run is None or state.phase is not Phase.FORMED:
        return state, ()
    return _go(replace(state, run=replace(run, took=run.took | {node.key})), now_s)


def _go(state: State, now_s: float) -> Step:
    """Workers start when the store is open and, if there are other candidates, all members know of it."""
    run, claims = state.run, state.claims
    if run is None or run.store is None:
        return state, ()
    if claims and claims[-1].generation == run.number:
        if len(run.took) < len(run.members):
            return state, ()
        claims = (replace(claims[-1], sure=True),)
    state = replace(state, phase=Phase.RUNNING, run=replace(run, go_s=now_s), claims=claims)
    state = begin_judging(state, members_of(state), now_s)
    go = msg.Go(run.number, run.store.host, run.store.port)
    return state, tuple(Send(peer, go) for peer in peers_of(state, run.members))


def _note_done(state: State, node: Node, now_s: float) -> Step:
    run = state.run
    if run is None or state.phase is not Phase.RUNNING:
        return state, ()
    run = replace(run, done={**run.done, node.key: run.done.get(node.key, now_s)})
    state = replace(state, run=run, admit_at_s=None)
    return end(state, msg.Finished()) if len(run.done) == len(run.members) else (state, ())


# -- who is there, and who is lost ----------------------------------------------------------------


def _greet(state: State, peer: int, hello: msg.Hello, now_s: float) -> Step:
    """A node says who it is."""
    refusal = _refusal(state, peer, hello, now_s)
    if refusal is None:
        state, refusal = quarantine.greet(state, hello, now_s)
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
        machine=hello.machine,
        label=hello.label,
    )
    if _has_same_workers(state, node, hello):
        return _resume(state, node, now_s)
    state, replies = _replace_old(state, node, now_s)
    finished = has_finished(state, node.key)
    state = replace(
        _with_node(state, replace(node, returning=hello.generation > 0)),
        peers=_with_key(state.peers, peer, node.key),
        heard=_with_key(state.heard, peer, now_s),
        unseen=_without_key(state.unseen, hello.node_rank),
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
    if stranger := why_stranger(settings.job, hello):
        return stranger
    rank = hello.node_rank
    if rank is not None and settings.min_nodes == settings.max_nodes and rank >= settings.all_nodes:
        text = f"this job has nodes 0 to {settings.all_nodes - 1}, there is no node {rank}"
        return msg.Refused(text, retry=False)
    if settings.candidate is not None and (elsewhere := _elsewhere(state, hello, now_s)):
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
    """Whom this one does not take: anybody while it yields; a standby, while nobody here knows of a generation."""
    if hello.node_rank is None:
        return msg.Refused("a job that may go on without node 0 needs its nodes' ranks", retry=False)
    if state.yielding_until_s is not None and now_s < state.yielding_until_s:
        return msg.Refused("a node with a lower index is there again", retry=True)
    if state.settings.candidate != 0 and state.run is None and not (hello.claims or binding(state)):
        return msg.Refused("this is a standby, and no generation has run here", retry=True)
    return None


def _give_way(state: State, looked: Looked, now_s: float) -> Step:
    """Note who else is there: node 0's begins where nobody else is; the others send their nodes to it."""
    own = state.settings.candidate
    state = note_look(state, looked, now_s)
    lower = [rank for rank in looked.there if own is not None and rank < own]
    if not lower or not state.peers or state.end is not None or (runs(state) and 0 not in lower):
        return settle(state, (), now_s)
    reason = f"node {min(lower)} is there again"
    state, told = die(state, reason, now_s)
    word = msg.Refused(reason, retry=True)
    told += tuple(reply for peer in state.peers for reply in (Send(peer, word), Disconnect(peer)))
    until_s = now_s + timeouts.YIELD_S
    return replace(state, yielding_until_s=until_s, run=None, suspicion=None, gather_from_s=None), told


def _replace_old(state: State, node: Node, now_s: float) -> Step:
    """A node's new connection ends its old one; another process of it also ends the old process."""
    old = state.nodes.get(node.key)
    if old is None or (old.peer is None and old.away_from_s is None):
        return state, ()
    told: tuple[Reply, ...] = () if old.peer is None else (Disconnect(old.peer),)
    if old.peer is not None and old.incarnation != node.incarnation:
        told = (Send(old.peer, msg.Refused(f"a newer process has come for {old.name}", retry=False)), *told)
    state, replies = _lose(state, old.key, "came back", now_s)
    state, charged = note_loss(state, old, now_s) if old.incarnation != node.incarnation else (state, ())
    return state, (*told, *replies, *charged)


def _is_training(state: State, key: Key) -> bool:
    return state.phase is Phase.RUNNING and is_working(state, key)


def _await(state: State, key: Key) -> Step:
    """A reset connection says nothing of its node: a firewall may have ended it. The node keeps its lease."""
    node = state.nodes[key]
    from_s = state.heard[node.peer] if node.peer is not None else 0.0
    state = replace(
        _with_node(state, replace(node, peer=None, away_from_s=from_s)),
        peers=_without_key(state.peers, node.peer),
        heard=_without_key(state.heard, node.peer),
        lease_check_s=_earlier(state.lease_check_s, from_s + state.settings.told_lease_s),
    )
    return state, ()


def _has_same_workers(state: State, node: Node, hello: msg.Hello) -> bool:
    """Whether the process that calls again still runs the workers of the present generation."""
    old, run = state.nodes.get(node.key), state.run
    is_same = old is not None and old.incarnation == node.incarnation
    return is_same and _is_training(state, node.key) and run is not None and hello.generation == run.number


def _resume(state: State, node: Node, now_s: float) -> Step:
    """The node's new connection takes the place of its old one; nothing restarts."""
    old, run, peer = state.nodes[node.key], state.run, node.peer
    if run is None or run.store is None or peer is None:
        return state, ()
    peers, heard = _without_key(state.peers, old.peer), _without_key(state.heard, old.peer)
    state = replace(
        _with_node(state, replace(old, peer=peer, away_from_s=None, claims=node.claims)),
        peers=_with_key(peers, peer, node.key),
        heard=_with_key(heard, peer, now_s),
        lease_check_s=_earlier(state.lease_check_s, now_s + state.settings.told_lease_s),
    )
    go = msg.Go(run.number, run.store.host, run.store.port)  # the first may have been lost with the connection
    told: tuple[Reply, ...] = () if old.peer is None else (Disconnect(old.peer),)
    say = Say(f"{node.name} is connected again within its lease; nothing restarts", warns=False)
    return state, (*told, say, Send(peer, msg.Welcome(state.settings.told_lease_s)), Send(peer, go))


def _lose(
    state: State, key: Key, how: str, now_s: float, *, ended: bool = False, since_s: float | None = None
) -> Step:
    """A node is not connected any more; `since_s`: it may have been lost for so long."""
    node = state.nodes[key]
    working = is_working(state, key)
    state = replace(
        _with_node(state, replace(node, peer=None, joined=False, lost_s=now_s, away_from_s=None)),
        peers=_without_key(state.peers, node.peer),
        heard=_without_key(state.heard, node.peer),
    )
    if ended and state.run is not None and key in state.run.members:
        state = replace(state, ended=_with_key(state.ended, key, state.run.number))
    state, replies = _go_on_without(state, node, how, now_s, working=working, since_s=since_s)
    state, charged = note_loss(state, node, now_s) if ended else (state, ())
    return state, (*replies, *charged)


def _go_on_without(
    state: State, node: Node, how: str, now_s: float, *, working: bool, since_s: float | None = None
) -> Step:
    state, told = forgive(state, node)
    if not working:
        return settle(state, told, now_s)
    state, more = die(state, f"{node.name} {how}", now_s, but=node.key, since_s=since_s)
    return state, (*told, *more)


def _leave(state: State, node: Node, reason: str, now_s: float) -> Step:
    """It goes on purpose: it stays connected but is not waited for."""
    working = is_working(state, node.key)
    state = _with_node(state, replace(node, joined=False, returning=False))
    return _go_on_without(state, node, f"leaves: {_printable(reason)}", now_s, working=working)


def _expire(state: State, now_s: float) -> Step:
    """End the leases of those who were silent for too long, unless it is we who were not looking."""
    if state.lease_check_s is None or now_s < state.lease_check_s:
        return state, ()
    lease_s = state.settings.told_lease_s
    replies: tuple[Reply, ...] = ()
    if now_s > state.lease_check_s + lease_s / 2:  # this process was stopped: their lines may not be read yet
        state = replace(state, heard=dict.fromkeys(state.heard, now_s))
        for node in _away(state):
            state = _with_node(state, replace(node, away_from_s=now_s))
    for peer, at_s in [(peer, at_s) for peer, at_s in state.heard.items() if now_s >= at_s + lease_s]:
        if peer in state.peers:
            how = f"was silent for {lease_s:g} s"
            state, more = _lose(state, state.peers[peer], how, now_s, since_s=at_s)
            replies = (*replies, Disconnect(peer), *more)
    for node in _away(state):
        if node.away_from_s is not None and now_s >= node.away_from_s + lease_s:
            state, more = _lose(state, node.key, "is gone", now_s, since_s=node.away_from_s)
            replies = (*replies, *more)
    away_s = [node.away_from_s for node in _away(state) if node.away_from_s is not None]
    first_s = min([*state.heard.values(), *away_s], default=None)
    return replace(state, lease_check_s=None if first_s is None else first_s + lease_s), replies


def _away(state: State) -> list[Node]:
    return [node for node in state.nodes.values() if node.away_from_s is not None]


def _printable(text: str) -> str:
    """As a part of one line of a log."""
    return printable(text[:200], " ")


def _earlier(one_s: float | None, other_s: float) -> float:
    return other_s if one_s is None else min(one_s, other_s)


def _with_node(state: State, node: Node) -> State:
    """The state with this node in place of what was known of it."""
    before = state.nodes.get(node.key)
    n_joined = state.n_joined + node.joined - (before is not None and before.joined)
    return replace(state, nodes=_with_key(state.nodes, node.key, node), n_joined=n_joined)


def _with_key(values: Mapping[_K, _V], key: _K, value: _V) -> Mapping[_K, _V]:
    """A mapping with one more, or another, value."""
    return values | {key: value}  # type: ignore[operator, no-any-return] # {**values} takes 8 times as long


def _without_key(values: Mapping[_K, _V], key: _K | None) -> Mapping[_K, _V]:
    """A mapping without this key."""
    kept = values | {}  # type: ignore[operator]
    kept.pop(key, None)
    return kept  # type: ignore[no-any-return]


# -- time -------------------------------------------------------------------------------------


def _tick(state: State, now_s: float) -> Step:
    state, replies = _expire(state, now_s)
    limit_s = give_up_at_s(state)
    if limit_s is not None and now_s >= limit_s:
        state, more = _stop_waiting(state, now_s)
        replies += more
    charge_s = charge_at_s(state)
    if charge_s is not None and now_s >= charge_s:
        state, more = charge(state)
        replies += more
    if state.admit_at_s is not None and now_s >= state.admit_at_s and state.run is not None:
        names = ", ".join(node.name for node in newcomers(state))
        state, more = die(state, f"{names[:500]} may join", now_s, grows=True)
        replies += more
    state, more = tick_judges(state, now_s)
    replies += more
    state, more = settle(state, (), now_s)
    replies += more
    if state.say_at_s is not None and now_s >= state.say_at_s:
        state, more = _say(state)
        replies += more
    return state, replies


def _stop_waiting(state: State, now_s: float) -> Step:
    if state.phase is Phase.FORMED and state.run is not None:
        host = state.nodes[next(iter(state.run.members))].name
        reason = f"{host} did not open the store in {state.settings.store_timeout_s:g} s"
        state, told = stumble(state, reason, now_s)
        if state.phase is Phase.OVER:
            return state, told
        return die(state, reason, now_s)
    names = ", ".join(missing(state)) or "more nodes"
    return give_up(state, f"waited {state.settings.rejoin_timeout_s:g} s for {names}")


def _say(state: State) -> Step:
    """Tell those that wait what they wait for, when it is new to them: more than workers that are being stopped."""
    now = waiting(state)
    if not now.present:  # nobody waits: all nodes start, stop their workers, or leave
        return replace(state, say_at_s=None), ()
    stopping = sum(node.returning and not node.joined and node.peer is not None for node in state.nodes.values())
    if now.missing and stopping == now.wanted - now.present:
        return replace(state, say_at_s=None), ()
    peers = frozenset(node.peer for node in state.nodes.values() if node.joined and node.peer is not None)
    known, told = state.said or (None, frozenset())
    state = replace(state, say_at_s=None, said=(now, peers))
    new = peers if now != known else peers - told
    says = (Say(_sentence(now, state.settings.rejoin_timeout_s)),) if now != known and now.missing else ()
    return state, (*says, *(Send(peer, now) for peer in sorted(new)))


def _sentence(now: msg.Waiting, at_most_s: float) -> str:
    more = now.wanted - now.present - len(now.missing)
    names = ", ".join(now.missing) + (f" and {more} more" if more > 0 else "")
    return f"{now.present} of {now.wanted} nodes, waiting up to {at_most_s:g} s for {names}"
