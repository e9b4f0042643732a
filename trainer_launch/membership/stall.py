"""A job that does not go on: the coordinator asks every member what its ranks show, and explains it to all. Pure.

what happens                                   | what follows
-----------------------------------------------|---------------------------------------------------------
a member sees no progress, and tells its ranks | all other members that are not done are asked
the last of them answers                       | all members are told the explanation
one does not answer in time                    | the same; its ranks are unknown
the generation ends meanwhile                  | nothing
a member tells its ranks again soon            | nothing: it has not heard the explanation yet

Nobody is stopped for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.state import Key, Node, Reply, Send, Stall, State, runs
from trainer_launch.model.collectives import Explanation, Life, RankState, explain
from trainer_launch.model.frozen import replace

Step = tuple[State, tuple[Reply, ...]]


def note_ranks(state: State, node: Node, said: msg.Ranks, now_s: float) -> Step:
    """A member tells its ranks: the first one to do so has everybody asked."""
    run, stall = state.run, state.stall
    if run is None or not _is_member(state, node.key):
        return state, ()
    if state.explained_s is not None and now_s < state.explained_s + timeouts.EXPLAIN_AGAIN_S:
        return state, ()  # said before it heard the explanation
    if stall is None:
        waiting = frozenset(key for key in run.members if key != node.key and _can_answer(state, key))
        stall = Stall(generation=run.number, asked_s=now_s, waiting=waiting, states=said.states, at_ns=said.at_ns)
        asked = tuple(Send(peer, msg.ShowRanks(run.number)) for key in waiting if (peer := _peer(state, key)))
        state = replace(state, stall=stall)
        return (state, asked) if waiting else _close(state, asked, now_s)
    stall = replace(
        stall,
        waiting=stall.waiting - {node.key},
        states=(*stall.states, *said.states)[: msg.MAX_STATES],
        at_ns=max(stall.at_ns, said.at_ns),
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
    ranks = {one.rank: one for one in (*stall.states, *_finished(state))}
    found = explain(tuple(ranks.values()), stall.at_ns) or _nothing_waits(len(ranks))
    names = [state.nodes[key].name for key in stall.waiting if key in state.nodes]
    text = found.text + (f"; no answer from {', '.join(names[:4])}" if names else "")
    message = msg.Explained(
        stall.generation, text, found.ranks[: msg.MAX_RANKS], found.reason, found.helps, found.accuses
    )
    state = replace(state, explained=message)
    peers = [peer for key in run.members if (peer := _peer(state, key)) is not None]
    return state, (*told, *(Send(peer, message) for peer in peers))


def _nothing_waits(known: int) -> Explanation:
    text = f"no progress, but none of {known} known ranks waits in a recorded collective"
    return Explanation(text=text, accuses=False)


def _finished(state: State) -> Iterator[RankState]:
    """The ranks of nodes that are done."""
    run, first = state.run, 0
    for number, key in enumerate(run.members if run is not None else ()):
        node = state.nodes.get(key)
        workers = 0 if node is None else node.workers
        if run is not None and key in run.done:
            for rank in range(first, first + workers):
                yield RankState(rank=rank, node=number, life=Life.FINISHED)
        first += workers


def _is_member(state: State, key: Key) -> bool:
    return state.run is not None and key in state.run.members


def _can_answer(state: State, key: Key) -> bool:
    return _peer(state, key) is not None and state.run is not None and key not in state.run.done


def _peer(state: State, key: Key) -> int | None:
    node = state.nodes.get(key)
    return None if node is None else node.peer
