"""When a generation may form, and of whom. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.field_checks import MAX_TEXT, Claim
from trainer_launch.membership.majority import binding, may_form, remember, spell
from trainer_launch.membership.state import Members, Node, Phase, Reply, Run, Say, Send, State, runs
from trainer_launch.model.frozen_replace import replace
from trainer_launch.model.units import counted


def reckon(state: State) -> State:
    """Set when to form, or when to let newcomers in."""
    if state.phase is Phase.GATHERING:
        return replace(state, form_at_s=_form_at_s(state), admit_at_s=None)
    return replace(state, form_at_s=None, admit_at_s=_admit_at_s(state))


def form_when_due(state: State, now_s: float) -> tuple[State, tuple[Reply, ...]]:
    """Form the next generation when its time has come; its members are told who they are."""
    if state.form_at_s is None or now_s < state.form_at_s:
        return state, ()
    chosen = _choose(state)
    run = Run(number=state.generation + 1, members=Members.of(chosen), formed_s=now_s)
    members = {node.key: replace(node, joined=False, returning=True) for node in chosen}
    # Who is neither here nor in it is forgotten: names of pods that never return must not pile up.
    kept = {key: node for key, node in state.nodes.items() if node.peer is not None}
    claim = _claim(state, chosen, run.number)
    state = replace(
        state,
        phase=Phase.FORMED,
        run=run,
        claims=state.claims if claim is None else remember(binding(state), claim),
        formed=state.formed | {run.number},
        generation=run.number,
        nodes={**kept, **members},
        n_joined=state.n_joined - len(chosen),
        failure=None,
        form_at_s=None,
        said=None,
    )
    size, restarts = counted(len(chosen), "node"), counted(state.restarts, "restart")
    say = Say(f"generation {run.number}: {size}, {restarts} so far", warns=run.number > 1)
    return reckon(state), (say, *_tell(chosen, run.number, state.restarts, claim))


def _claim(state: State, chosen: list[Node], number: int) -> Claim | None:
    if state.settings.seat is None:
        return None
    ranks = spell(node.node_rank or 0 for node in chosen)
    return Claim(number, state.settings.seat, ranks, sure=False) if len(ranks) <= MAX_TEXT else None


def _tell(chosen: list[Node], number: int, restarts: int, claim: Claim | None) -> list[Reply]:
    return [
        Send(node.peer, msg.Formed(number, i, len(chosen), restarts, i == 0, claim, *ranks))
        for i, (node, ranks) in enumerate(zip(chosen, _ranks(chosen), strict=True))
        if node.peer is not None
    ]


def _ranks(chosen: list[Node]) -> Iterator[tuple[int, int, int, int]]:
    """Each node's first rank and the world size, then both within its role: numbered by node, as torchrun does."""
    if any(node.workers == 0 for node in chosen):
        yield from [(0, 0, 0, 0)] * len(chosen)
        return
    of_role, before_of_role = Counter[str](), Counter[str]()
    for node in chosen:
        of_role[node.role] += node.workers
    before, all_workers = 0, of_role.total()
    for node in chosen:
        yield before, all_workers, before_of_role[node.role], of_role[node.role]
        before += node.workers
        before_of_role[node.role] += node.workers


def _choose(state: State) -> list[Node]:
    """Who was in the last generation stays in; ranks follow the nodes' order, never the order of arrival."""
    last = state.run.members if state.run else ()
    joined = [node for node in state.nodes.values() if node.joined]
    joined.sort(key=lambda node: (node.key not in last, node.order))
    return sorted(joined[: state.settings.max_nodes], key=lambda node: node.order)


def _form_at_s(state: State) -> float | None:
    """At once when nobody can be missed; else after a moment for others, if fewer than max are allowed."""
    settings, begun_s = state.settings, state.gather_from_s
    if state.n_joined < settings.min_nodes or begun_s is None or not may_form(state):
        return None
    if state.run is not None and all(key in state.nodes and state.nodes[key].joined for key in state.run.members):
        return state.joined_s
    if state.n_joined >= settings.max_nodes:
        ready_s = state.joined_s
    elif settings.shrink_after_s is None:
        return None
    else:
        ready_s = max(state.joined_s + settings.gather_s, begun_s + settings.shrink_after_s)
        if settings.seat == 0 and state.run is None:  # more pods are about to start, or to come back
            ready_s = max(ready_s, begun_s + settings.window_of_seat_0_s)
    return max(ready_s, begun_s + settings.settle_s) if _is_one_late(state) else ready_s


def _is_one_late(state: State) -> bool:
    """Whether a live member of the last generation still stops its workers; no spare takes its place meanwhile."""
    last = state.run.members if state.run else None
    return any(
        node.returning and not node.joined and node.peer is not None and (last is None or key in last)
        for key, node in state.nodes.items()
    )


def _admit_at_s(state: State) -> float | None:
    """A moment after the latest newcomer, while there is room and nobody has finished; at once if no more fit."""
    if not runs(state) or state.run is None or state.run.done:
        return None
    room = state.settings.max_nodes - len(state.run.members)
    if room <= 0 or state.n_joined == 0:
        return None
    return state.joined_s + (state.settings.gather_s if state.n_joined < room else 0.0)
