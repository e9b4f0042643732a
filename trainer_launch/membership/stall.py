"""A job that does not go on: the coordinator asks every member what its ranks show, and explains it to all. Pure.

what happens                                   | what follows
-----------------------------------------------|---------------------------------------------------------
a member sees no progress, and tells its ranks | all other members that are not done are asked
the last of them answers                       | all members are told the explanation
one does not answer in time                    | the same; its ranks are unknown
the generation ends meanwhile                  | nothing
a member tells its ranks again soon            | nothing: it has not heard the explanation yet;
                                               | but all are asked anew if somebody made progress then

Nobody is stopped for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.generation import peers_of
from trainer_launch.membership.state import Key, Node, Reply, Send, Stall, State, runs
from trainer_launch.model.collectives import Life, RankState, explain, unexplained

Step = tuple[State, tuple[Reply, ...]]
_ASKED_WORKERS_S = timeouts.SHOW_RANKS_S / 2  # for so long a member has asked its workers before it tells


def note_ranks(state: State, node: Node, said: msg.Ranks, now_s: float) -> Step:
    """A member tells its ranks: the first one to do so has everybody asked."""
    run, stall = state.run, state.stall
    if run is None or node.key not in run.members:
        return state, ()
    is_soon = state.explained_s is not None and now_s < state.explained_s + timeouts.EXPLAIN_AGAIN_S
    was_active = state.explained is not None and state.explained.active and said.limit_s > 0
    if is_soon and stall is None and not was_active:  # who showed progress then may hang now
        return state, ()  # said before it heard the explanation
    if stall is None:
        others = tuple(key for key in who_can_answer(state) if key != node.key)
        waiting = frozenset(others)
        stall = Stall(
            generation=run.number,
            asked_s=now_s,
            waiting=waiting,
            states=said.states,
            at_ns=said.at_ns,
            limit_s=said.limit_s,
        )
        asked = tuple(Send(peer, msg.ShowRanks(run.number)) for peer in peers_of(state, others))
        state = replace(state, stall=stall)
        return (state, asked) if waiting else _close(state, asked, now_s)
    stall = replace(
        stall,
        waiting=stall.waiting - {node.key},
        states=(*stall.states, *said.states)[: msg.MAX_STATES],
        at_ns=max(stall.at_ns, said.at_ns),
        limit_s=max(stall.limit_s, said.limit_s),
    )
    state = replace(state, stall=stall)
    return (state, ()) if stall.waiting else _close(state, (), now_s)


def tick(state: State, now_s: float) -> Step:
    """Explain what is known when the time is over."""
    is_due = state.stall is not None and now_s >= state.stall.asked_s + timeouts.SHOW_RANKS_S
    return _close(state, (), now_s) if is_due else (state, ())


def _close(state: State, told: tuple[Reply, ...], now_s: float) -> Step:
    """Tell all members; nothing of a generation that is over."""
    stall, run = state.stall, state.run
    state = replace(state, stall=None, explained_s=now_s)
    if stall is None or run is None or not runs(state) or run.number != stall.generation:
        return state, told
    names = [state.nodes[key].name for key in stall.waiting if key in state.nodes]
    seen_s = stall.asked_s - _ASKED_WORKERS_S
    ranks = tuple({one.rank: one for one in (*stall.states, *_finished(state, seen_s))}.values())
    found = explain(ranks, stall.at_ns, stall.limit_s)
    if found is None:
        all_ranks = sum(max(1, state.nodes[key].workers) for key in run.members if key in state.nodes)
        found = unexplained(ranks, all_ranks, stall.limit_s)
        if names:  # who has not answered may be at work
            found = replace(found, accuses=False)
    text = found.text + (f"; no answer from {', '.join(names[:4])}" if names else "")
    named = found.ranks[: msg.MAX_RANKS]
    message = msg.Explained(stall.generation, text, named, found.reason, found.helps, found.accuses, found.active)
    state = replace(state, explained=message)
    return state, (*told, *(Send(peer, message) for peer in peers_of(state, run.members)))


def _finished(state: State, seen_s: float) -> Iterator[RankState]:
    """The ranks of nodes that are done; the others' states are not older than `seen_s`."""
    done = {} if state.run is None else state.run.done
    for number, key, ranks in each_member(state):
        if key in done:
            quiet_s = max(0.0, seen_s - done[key])
            yield from (RankState(rank=rank, node=number, life=Life.FINISHED, quiet_s=quiet_s) for rank in ranks)


# -- all members, whatever they are asked ----------------------------------------------------------


def who_can_answer(state: State) -> tuple[Key, ...]:
    """The members that are connected and not done."""
    run = state.run
    return () if run is None else tuple(k for k in run.members if k not in run.done and peers_of(state, (k,)))


def each_member(state: State) -> Iterator[tuple[int, Key, range]]:
    """Number, key and ranks of each member."""
    first = 0
    for number, key in enumerate(() if state.run is None else state.run.members):
        ranks = range(first, first + (state.nodes[key].workers if key in state.nodes else 0))
        first = ranks.stop
        yield number, key, ranks
