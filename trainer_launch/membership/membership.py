r"""The coordinator's acts: which node is a member of the job, lost, back.

Each thing that happens is a call that changes the state, and sends and says what follows.

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

import logging
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import quarantine, timeouts
from trainer_launch.membership.election import note_claims, note_look, remember
from trainer_launch.membership.generation import (
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
    send_members,
    settle,
    tick_judges,
)
from trainer_launch.membership.notes import Judge
from trainer_launch.membership.state import (
    MAX_NAMED,
    CoordinatorSettings,
    JobPhase,
    JobState,
    Looked,
    NodeRecord,
    Run,
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
from trainer_launch.model.exit_codes import MISCONFIGURED
from trainer_launch.model.units import counted, listed, printable

_MOST_UNOPENED = 5  # generations in a row whose store was not opened: it is no chance any more


def begin(
    settings: CoordinatorSettings,
    send: Callable[[int, msg.FromServer], None],
    disconnect: Callable[[int], None],
    log: Callable[[str, int], None],
    judges: Sequence[Judge] = (),
) -> JobState:
    """Know nothing of the job but its settings; what ran before is learned from those who call."""
    return JobState(
        settings=settings,
        send=send,
        disconnect=disconnect,
        log=log,
        quarantined=quarantine.named(settings.failing),
        judges={judge.topic: judge for judge in judges},
    )


def hear(state: JobState, peer: int, message: msg.Message, now_s: float) -> None:
    """A line has come over a connection."""
    node = state.peers.get(peer)
    if isinstance(message, msg.Hello):
        _greet(state, peer, message, now_s)
    elif node is None:
        state.disconnect(peer)
    else:
        node.heard_s = now_s
        _hear(state, node, message, now_s)


def hang_up(state: JobState, peer: int, now_s: float, *, ended: bool = True) -> None:
    """A connection is over: its process has ended, or (`ended` is False) it was reset."""
    node = state.peers.get(peer)
    if node is None:
        return
    if not ended and _is_training(state, node):
        # A reset says nothing of the node: a firewall may have ended the connection. The node keeps its lease.
        _unlink(state, node)
        node.is_away = True
        _watch_lease(state, node)
    else:
        _lose(state, node, "is gone", now_s, ended=ended)


def close(state: JobState, reason: str) -> None:
    """The coordinator's own side ends the job."""
    if state.phase is not JobPhase.OVER:
        end(state, msg.GiveUp(reason))


def _hear(state: JobState, node: NodeRecord, message: msg.Message, now_s: float) -> None:
    run = state.run
    is_current = is_working(state, node.key) and getattr(message, "generation", None) == run.number
    match message:
        case msg.Join():
            _join(state, node, message, now_s)
        case msg.Failed() if is_current:
            fail(state, node, message, now_s)
        case msg.Failed():
            correct(state, node, message, now_s)
        case msg.Leave(reason):
            _leave(state, node, reason, now_s)
        case msg.Note() if is_current:
            hear_note(state, node, message, now_s)
        case msg.Store() if is_current and state.phase is JobPhase.FORMED and run.members[node.key] == 0:
            run.store, state.unopened = message, 0
            _go(state, now_s)
        case msg.Took() if is_current and state.phase is JobPhase.FORMED:
            run.took.add(node.key)
            if run.claim is not None:
                node.claims = remember(node.claims, run.claim)
            _go(state, now_s)
        case msg.Done() if is_current and state.phase is JobPhase.RUNNING:
            run.done.setdefault(node.key, now_s)
            state.admit_at_s = None
            if len(run.done) == len(run.members):
                end(state, msg.Finished())
    # Anything else is a Renew, or about a generation that is over.


def _join(state: JobState, node: NodeRecord, join: msg.Join, now_s: float) -> None:
    if join.incarnation != node.hello.incarnation or node.peer is None:
        return
    if state.end is not None:
        state.send(node.peer, state.end)
        return
    node_notes = carried(state, join.notes)
    if is_working(state, node.key):
        if join.generation < state.run.number:  # said before it heard of this generation
            return
        die(state, f"{node.name} starts again", now_s, but=node.key)
    if state.run.members and join.generation == state.run.number:
        note_ends(state, node.key, join, node_notes)
        quarantine.hear(state, node, join)
    if runs(state) or not node.joined:  # else it only tells that it can start workers now
        state.joined_s = now_s
    state.set_joined(node, True)
    node.prepared, node.notes, node.joined_s = join.prepared, node_notes, now_s
    node.kept, node.last_generation = join.kept, join.generation
    node.is_faulty = quarantine.why_not(state, node.hello) is not None
    if node.node_rank != (state.settings.candidate or 0):
        quarantine.evict(state, node)
    elif join.device_fault and node.is_faulty:  # who ends takes the coordinator, and with it this list, along
        text = f"{node.name} is quarantined: it serves the coordinator, and trains only if too few others are there"
        state.say(text)
    settle(state, now_s)


def _go(state: JobState, now_s: float) -> None:
    """Workers start when the store is open and, if there are other candidates, all members know of it."""
    run = state.run
    if run.store is None:
        return
    if run.claim is not None:
        if len(run.took) < len(run.members):
            return
        # A sure claim ends all doubts: no earlier generation matters any more.
        state.claims, state.formed, state.ended = (replace(run.claim, sure=True),), set(), {}
        for key in run.members:
            state.nodes[key].claims = state.claims
    state.phase, run.go_s = JobPhase.RUNNING, now_s
    begin_judging(state, members_of(state), now_s)
    send_members(state, msg.Go(run.number, run.store.host, run.store.port))


def _greet(state: JobState, peer: int, hello: msg.Hello, now_s: float) -> None:
    """A node says who it is."""
    stranger, hello = why_stranger(state.settings.job, hello), _with_rank(state, hello)
    refusal = stranger or _refusal(state, peer, hello, now_s) or quarantine.greet(state, hello, now_s)
    if refusal is not None:
        note_refused(state, hello, refusal)
        state.send(peer, refusal)
        state.disconnect(peer)
        return
    node = NodeRecord(
        node_rank=hello.node_rank or 0,
        hello=hello,
        peer=peer,
        heard_s=now_s,
        returning=hello.generation > 0,
        claims=hello.claims,
    )
    old = state.nodes.get(node.key)
    is_same = old is not None and old.hello.incarnation == hello.incarnation and _is_training(state, old)
    if old is not None and is_same and state.run.number == hello.generation:
        _resume(state, old, node)
        return
    if old is not None and old.has_lease:
        _replace_old(state, old, node, now_s)
    finished = has_finished(state, node.key)
    state.nodes[node.key] = state.peers[peer] = node
    state.hosts[node.key] = hello.host
    state.unseen.pop(node.node_rank, None)
    note_claims(state, hello.claims)
    state.generation = max(state.generation, hello.generation)
    state.restarts = max(state.restarts, hello.restarts)
    state.gather_from_s = now_s if state.gather_from_s is None else state.gather_from_s
    _watch_lease(state, node)
    state.send(peer, msg.Welcome(state.settings.granted_lease_s))
    if state.end is not None:
        state.send(peer, state.end)
        return
    if hello.generation and not finished:
        reason = "this node or the coordinator was away, so its generation is over"
        state.send(peer, msg.Restart(hello.generation, reason))
    settle(state, now_s)


def _with_rank(state: JobState, hello: msg.Hello) -> msg.Hello:
    """A Hello with the node's rank; nodes without one get theirs as they come, after the coordinator's own node.

    A node is identified by its host name. While it is away its rank waits for it, unless no other rank is free.
    In a job that is complete a node gets a rank behind all others, and waits as a spare does.
    """
    if hello.node_rank is not None and not hello.arrives:
        return hello
    hosts, taken = state.hosts, set()
    for rank, node in state.nodes.items():
        before = node.hello
        is_back = before.incarnation == hello.incarnation or (node.is_away and before.host == hello.host)
        if node.has_lease and not is_back:
            taken.add(rank)
    all_nodes = state.settings.all_nodes
    free = set(range(1, max(all_nodes, 2 + max(taken, default=0)))) - taken

    def order(rank: int) -> tuple[bool | int, ...]:
        return rank != hello.node_rank, hosts.get(rank) != hello.host, rank >= all_nodes, rank in hosts, rank

    return replace(hello, node_rank=min(free, key=order), arrives=True)


def _refusal(state: JobState, peer: int, hello: msg.Hello, now_s: float) -> msg.Refused | None:
    settings = state.settings
    rank = hello.node_rank or 0
    if not hello.arrives and settings.min_nodes == settings.max_nodes and rank >= settings.all_nodes:
        text = f"this job has nodes 0 to {settings.all_nodes - 1}, there is no node {rank}"
        return msg.Refused(text, retry=False)
    if hello.nodes not in (0, settings.all_nodes) and settings.min_nodes == settings.max_nodes:
        has = counted(settings.all_nodes, "node")
        return msg.Refused(f"the coordinator's job has {has}, this node's job {hello.nodes}", retry=False)
    if settings.candidate is not None and (elsewhere := _elsewhere(state, hello, now_s)):
        return elsewhere
    if peer in state.peers:
        return msg.Refused("a connection is for one node", retry=False)
    old = state.nodes.get(rank)
    if old is None or old.peer is None or old.hello.host == hello.host:
        return None
    # Who renews is heard every third of the lease: silence for half of it may well be the end of that node.
    silent = now_s - old.heard_s > settings.granted_lease_s / 2
    return msg.RefusedHere(
        f"{old.name} is there already, so {hello.host} cannot be node {rank} as well", retry=silent
    )


def note_refused(state: JobState, hello: msg.Hello, refusal: msg.Refused, *, proven: bool = True) -> None:
    """Remember a node of the job that is configured otherwise, in case that no other comes in its place.

    One that has not `proven` that it knows the job's secret may be anybody, and covers up no other.
    """
    rank = -1 if hello.node_rank is None else hello.node_rank  # -1: of whatever rank it would have got
    is_lasting = type(refusal) is msg.Refused and not refusal.retry and rank < state.settings.all_nodes
    if is_lasting and (proven or rank not in state.refused):
        state.refused[rank] = f"{hello.host} was refused: {refusal.reason}"


def _elsewhere(state: JobState, hello: msg.Hello, now_s: float) -> msg.Refused | None:
    """The refusal by a coordinator that yields, or by a standby while no node here has been in a generation."""
    if state.yielding_until_s is not None and now_s < state.yielding_until_s:
        return msg.Refused("a node with a lower index is there again", retry=True)
    if state.settings.candidate != 0 and not state.run.members and not (hello.claims or state.claims):
        return msg.Refused("this is a standby, and no generation has run here", retry=True)
    return None


def look(state: JobState, looked: Looked, now_s: float) -> None:
    """Other candidates were looked for: node 0's begins where nobody else is; others send their nodes to it.

    A generation that runs does not stop for a node 0 that still imports.
    """
    own = state.settings.candidate
    note_look(state, looked, now_s)
    lower = [rank for rank in looked.there if own is not None and rank < own]
    stays = runs(state) and (0 not in lower or not looked.ready)
    if not lower or not state.peers or state.end is not None or stays:
        settle(state, now_s)
        return
    reason = f"node {min(lower)} is there again"
    die(state, reason, now_s, grows=True)
    for peer in state.peers:
        state.send(peer, msg.Refused(reason, retry=True))
        state.disconnect(peer)
    state.yielding_until_s = now_s + timeouts.YIELD_S
    state.run, state.suspicion, state.gather_from_s = Run(), None, None


def _replace_old(state: JobState, old: NodeRecord, node: NodeRecord, now_s: float) -> None:
    """A node's new connection ends its old one; another process of it also ends the old process."""
    is_another = old.hello.incarnation != node.hello.incarnation
    if old.peer is not None:
        if is_another:
            state.send(old.peer, msg.RefusedHere(f"a newer process has taken the place of {old.name}", retry=False))
        state.disconnect(old.peer)
    _lose(state, old, "came back", now_s)
    if is_another:
        note_loss(state, old, now_s)


def _is_training(state: JobState, node: NodeRecord) -> bool:
    return state.phase is JobPhase.RUNNING and is_working(state, node.key)


def _unlink(state: JobState, node: NodeRecord) -> None:
    if node.peer is not None:
        del state.peers[node.peer]
        node.peer = None


def _watch_lease(state: JobState, node: NodeRecord) -> None:
    ends_s = node.heard_s + state.settings.granted_lease_s
    state.lease_check_s = ends_s if state.lease_check_s is None else min(ends_s, state.lease_check_s)


def _resume(state: JobState, old: NodeRecord, node: NodeRecord) -> None:
    """The new connection of a node whose workers run takes the place of its old one; nothing restarts."""
    run, peer = state.run, node.peer
    if run.store is None or peer is None:
        return
    if old.peer is not None:
        state.disconnect(old.peer)
    _unlink(state, old)
    state.peers[peer] = old
    old.peer, old.is_away, old.heard_s, old.claims = peer, False, node.heard_s, node.claims
    _watch_lease(state, old)
    state.say(f"{node.name} is connected again within its lease; nothing restarts", logging.INFO)
    state.send(peer, msg.Welcome(state.settings.granted_lease_s))
    # The first Go may have been lost with the connection.
    state.send(peer, msg.Go(run.number, run.store.host, run.store.port))


def _lose(
    state: JobState, node: NodeRecord, how: str, now_s: float, *, ended: bool = False, since_s: float | None = None
) -> None:
    """A node is not connected any more; `since_s`: it may have been lost for so long."""
    working = is_working(state, node.key)
    _unlink(state, node)
    state.set_joined(node, False)
    node.is_away, node.lost_s = False, now_s
    if ended and node.claims:
        state.ended[node.key] = node.claims
    _go_on_without(state, node, how, now_s, working=working, since_s=since_s)
    if ended:
        note_loss(state, node, now_s)


def _go_on_without(
    state: JobState, node: NodeRecord, how: str, now_s: float, *, working: bool, since_s: float | None = None
) -> None:
    forgive(state, node)
    if working:
        die(state, f"{node.name} {how}", now_s, but=node.key, since_s=since_s)
    else:
        settle(state, now_s)


def _leave(state: JobState, node: NodeRecord, reason: str, now_s: float) -> None:
    """A node goes on purpose: it stays connected but is not waited for."""
    working = is_working(state, node.key)
    state.set_joined(node, False)
    node.returning = False
    _go_on_without(state, node, f"is leaving: {printable(reason[:200], ' ')}", now_s, working=working)


def _expire(state: JobState, now_s: float) -> None:
    """End the leases of those who were silent for too long, unless it is we who were not looking."""
    if state.lease_check_s is None or now_s < state.lease_check_s:
        return
    lease_s = state.settings.granted_lease_s
    nodes = [node for node in state.nodes.values() if node.has_lease]
    if now_s > state.lease_check_s + lease_s / 2:  # this process was stopped: their lines may not be read yet
        for node in nodes:
            node.heard_s = now_s
    for node in nodes:
        is_forgotten = state.nodes.get(node.key) is not node  # a generation has formed without it meanwhile
        if now_s >= node.heard_s + lease_s and not is_forgotten:
            how = "is gone" if node.peer is None else f"was silent for {lease_s:g} s"
            if node.peer is not None:
                state.disconnect(node.peer)
            _lose(state, node, how, now_s, since_s=node.heard_s)
    first_s = min((node.heard_s for node in state.nodes.values() if node.has_lease), default=None)
    state.lease_check_s = None if first_s is None else first_s + lease_s


def tick(state: JobState, now_s: float) -> None:
    """Time has passed."""
    _expire(state, now_s)
    limit_s = give_up_at_s(state)
    if limit_s is not None and now_s >= limit_s:
        _stop_waiting(state, now_s)
    charge_s = charge_at_s(state)
    if charge_s is not None and now_s >= charge_s:
        charge(state)
    if state.admit_at_s is not None and now_s >= state.admit_at_s:
        names = ", ".join(node.name for node in newcomers(state))
        die(state, f"{names[:500]} may join", now_s, grows=True)
    tick_judges(state, now_s)
    settle(state, now_s)
    if state.say_at_s is not None and now_s >= state.say_at_s:
        _say(state)


def _stop_waiting(state: JobState, now_s: float) -> None:
    if state.phase is JobPhase.FORMED:
        host = state.nodes[next(iter(state.run.members))]
        if not host.prepared:
            _wait_for_start(state, host, state.run, now_s)
            return
        reason = f"{host.name} did not open the store in {state.settings.store_timeout_s:g} s"
        state.unopened += 1
        if state.unopened >= _MOST_UNOPENED:
            give_up(state, f"{reason}, {state.unopened} times in a row")
        die(state, reason, now_s)
        return
    text = f"waited {state.settings.rejoin_timeout_s:g} s for {', '.join(missing(state)) or 'more nodes'}"
    why = [text for rank, text in state.refused.items() if rank not in state.nodes]
    if why:
        end(state, msg.GiveUp("; ".join([text, *why[:MAX_NAMED]]), exit_code=MISCONFIGURED, cause="Misconfigured"))
    else:
        give_up(state, text)


def _wait_for_start(state: JobState, host: NodeRecord, run: Run, now_s: float) -> None:
    """A node that keeps its lease is well, even if its image is still pulled and torch takes minutes to import."""
    run.late_s, at_most_s = now_s - run.formed_s, state.settings.rejoin_timeout_s
    what = f"{host.name} still starts: it has been importing torch for {run.late_s:.0f} s"
    if run.late_s >= at_most_s:
        give_up(state, f"{what}, and --wait-timeout is {at_most_s:g} s")
        return
    state.say(f"{what}; waiting for it up to {at_most_s:g} s")
    count = len(run.members)
    send_members(state, msg.Waiting(count - 1, count, (f"{host.name}, which still imports torch",)), host.key)


def _say(state: JobState) -> None:
    """Tell those that wait what they wait for, when it is new to them: more than workers that are being stopped."""
    state.say_at_s = None
    now = waiting(state)
    if not now.present:  # nobody waits: all nodes start, stop their workers, or leave
        return
    stopping = sum(node.returning and not node.joined and node.peer is not None for node in state.nodes.values())
    if now.missing and stopping == now.wanted - now.present:
        return
    peers = frozenset(node.peer for node in state.joined if node.peer is not None)
    before, informed = state.announced or (None, frozenset())
    state.announced = now, peers
    if now != before and now.missing:
        state.say(_sentence(state, now))
    for peer in sorted(peers if now != before else peers - informed):
        state.send(peer, now)


def _sentence(state: JobState, now: msg.Waiting) -> str:
    more = now.wanted - now.present - len(now.missing)
    names = ", ".join(now.missing) + (f" and {more} more" if more > 0 else "")
    hosts = [node.hello.host for node in state.joined] if state.settings.by_arrival else []
    here = f" ({listed(hosts, MAX_NAMED)})" if hosts else ""  # whose names nobody has written down before
    at_most_s = state.settings.rejoin_timeout_s
    return f"{now.present} of {now.wanted} nodes{here}, waiting up to {at_most_s:g} s for {names}"
