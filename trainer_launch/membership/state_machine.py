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

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import uneven_data
from trainer_launch.membership.generation_end import (
    Step,
    charge,
    die,
    end,
    fail,
    give_up,
    peers_of,
    quit_job,
    settle,
    stumble,
)
from trainer_launch.membership.heartbeats import (
    expire,
    give_way,
    greet,
    leave,
    lose,
    printable,
    with_key,
    with_node,
)
from trainer_launch.membership.state import (
    Close,
    Connected,
    Disconnect,
    Event,
    Gone,
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
    is_working,
    missing,
    waiting,
)
from trainer_launch.model.frozen_replace import replace


def begin(settings: Settings) -> State:
    """Know nothing of the job but its settings; what ran before is learned from those who call."""
    return State(settings=settings)


def step(state: State, event: Event, now_s: float) -> Step:
    """Decide what an event changes and who has to be told what."""
    match event:
        case Connected():
            return state, ()
        case Said(peer, msg.Hello() as hello):
            return greet(state, peer, hello, now_s)
        case Said(peer, message) if peer in state.peers:
            heard = replace(state, heard=with_key(state.heard, peer, now_s))
            return _hear(heard, heard.nodes[heard.peers[peer]], message, now_s)
        case Said(peer, _):
            return state, (Disconnect(peer),)
        case Gone(peer, ended):
            known = peer in state.peers
            return lose(state, state.peers[peer], "is gone", now_s, ended=ended) if known else (state, ())
        case Looked():
            return give_way(state, event, now_s)
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
        case msg.Failed(generation) if _is_current(state, node, generation):
            return fail(state, node, message, now_s)
        case msg.Done(generation) if _is_current(state, node, generation):
            return _note_done(state, node)
        case msg.Leave(reason):
            return leave(state, node, reason, now_s)
        case msg.Quit(reason):
            return quit_job(state, node, printable(reason))
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
    if state.run is not None and join.generation == state.run.number:
        state = uneven_data.reported(state, node.key, join)
    joined = replace(state.nodes[node.key], joined=True)
    state = replace(with_node(state, joined), joined_s=now_s)
    return settle(state, replies, now_s)


def _note_store(state: State, node: Node, store: msg.Store, now_s: float) -> Step:
    run = state.run
    if run is None or state.phase is not Phase.FORMED or run.members[0] != node.key:
        return state, ()
    return _go(replace(state, run=replace(run, store=store)), now_s)


def _note_taken(state: State, node: Node, now_s: float) -> Step:
    run = state.run
    if run is None or state.phase is not Phase.FORMED:
        return state, ()
    return _go(replace(state, run=replace(run, took=run.took | {node.key})), now_s)


def _go(state: State, now_s: float) -> Step:
    """Workers start when the store is open and, where other seats could form one too, all members know of it."""
    run, claims = state.run, state.claims
    if run is None or run.store is None:
        return state, ()
    if claims and claims[-1].generation == run.number:
        if len(run.took) < len(run.members):
            return state, ()
        claims = (claims[-1]._replace(sure=True),)
    state = replace(state, phase=Phase.RUNNING, run=replace(run, go_s=now_s), claims=claims)
    go = msg.Go(run.number, run.store.host, run.store.port)
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
    state, replies = expire(state, now_s)
    limit_s = give_up_at_s(state)
    if limit_s is not None and now_s >= limit_s:
        state, more = _stop_waiting(state, now_s)
        replies += more
    charge_s = charge_at_s(state)
    if charge_s is not None and now_s >= charge_s:
        state, more = charge(state)
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


def _stop_waiting(state: State, now_s: float) -> Step:
    if state.phase is Phase.FORMED and state.run is not None:
        host = state.nodes[state.run.members[0]].name
        reason = f"{host} did not open the store in {state.settings.store_timeout_s:g} s"
        state, told = stumble(state, reason, now_s)
        if state.phase is Phase.OVER:
            return state, told
        return die(state, reason, now_s)
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
