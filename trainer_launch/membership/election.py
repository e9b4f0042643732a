"""The right to form a generation: the rule that never lets two parts of a job train at the same time.

A claim is a generation as its members and its coordinator know it. It is sure once every member has taken it, and
only then do workers start. The next generation needs, of the last sure claim and of every unsure one after it, the
votes of more than half of the members; of exactly half only with the vote of the coordinator's own node. A node
votes where it has joined; whose connection was ended by its own kernel votes where its generation was formed. A
process that was never in a generation has no vote elsewhere: its predecessor's may be counted already.

Where nobody knows of a generation, only node 0 begins one: at once if all nodes have joined. Any node that has not
may train elsewhere, in a generation of which the coordinator has lost its memory. That its name is unknown or that
its address refuses proves nothing by itself: a Service drops pods that are not ready, a name server answers from
memory, an address may belong to another pod by now. But coordinators elsewhere look for node 0 as well, and their
nodes come to it. So node 0 begins without a node that no look has found for longer than name servers remember, and
longer than workers run on without a coordinator. Nodes that train elsewhere need not come while node 0 still
imports, unless a look has not found a node: without that one, node 0 may begin.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer_launch.membership import timeouts
from trainer_launch.membership.protocol import MAX_CLAIMS, Claim
from trainer_launch.membership.state import JobPhase, JobState, Looked, NodeRecord, runs
from trainer_launch.model.units import numbers_in


def may_form(state: JobState) -> bool:
    """Whether those that have joined may go on, as far as the others may be alive elsewhere."""
    if state.settings.candidate is None:
        return True
    joined = {node.node_rank: node for node in state.nodes.values() if node.joined}
    claims = binding(state)
    others = frozenset(range(state.settings.all_nodes)).union(*map(ranks_of, claims)) - joined.keys()
    if not others:
        return True  # all are here, so nobody is elsewhere
    if claims:
        return all(_has_majority(state, claim, joined) for claim in claims)
    return state.settings.candidate == 0 and all(_is_unseen(state, rank) for rank in others)


def note_look(state: JobState, looked: Looked, now_s: float) -> None:
    """Remember since when every look has found nobody at a rank; looks that are far apart begin anew."""
    is_next = state.looked_s is not None and now_s - state.looked_s <= timeouts.LOOK_GAP_S
    before = state.unseen if is_next else {}
    state.unseen = {rank: before.get(rank, now_s) for rank in looked.absent}
    state.looked_s = now_s - looked.took_s


def _is_unseen(state: JobState, rank: int) -> bool:
    """Whether the latest look began so long after the end of the first of those that have all found nobody."""
    since_s = state.unseen.get(rank)
    if since_s is None or state.looked_s is None:
        return False
    return state.looked_s - since_s >= max(state.settings.unseen_s, state.settings.shrink_after_s or 0.0)


def wanted_candidates(state: JobState) -> frozenset[int]:
    """The other launchers that this one has to look for now."""
    own = state.settings.candidate
    if own is None or state.end is not None or not state.peers:
        return frozenset()
    if own:
        return frozenset({0}) if runs(state) else frozenset(range(own))
    if state.phase is not JobPhase.GATHERING or state.run is not None or binding(state):
        return frozenset()  # the job has begun
    joined = {node.node_rank for node in state.nodes.values() if node.joined}
    return frozenset(range(state.settings.all_nodes)) - joined if joined else frozenset()


def binding(state: JobState) -> tuple[Claim, ...]:
    """The last sure claim that anyone here knows, and the unsure ones after it."""
    claims = {claim for node in state.nodes.values() if node.peer is not None for claim in node.claims}
    claims |= set(state.claims)
    last = max((claim.generation for claim in claims if claim.sure), default=-1)
    ordered = sorted(claims, key=lambda claim: (claim.generation, claim.coordinator, claim.ranks))
    return tuple(
        claim
        for claim in ordered
        if (claim.sure and claim.generation == last) or (not claim.sure and claim.generation > last)
    )


def remember(claims: Iterable[Claim], new: Claim) -> tuple[Claim, ...]:
    """The claims that still matter after a generation was formed: a sure claim ends all doubts before it."""
    if new.sure:
        return (new,)
    doubt = (False, new.coordinator, new.ranks)
    kept = [claim for claim in claims if (claim.sure, claim.coordinator, claim.ranks) != doubt]
    return (*kept[: MAX_CLAIMS - 1], new)


def ranks_of(claim: Claim) -> frozenset[int]:
    """Its members' ranks."""
    return frozenset(numbers_in(claim.ranks))


def _has_majority(state: JobState, claim: Claim, joined: dict[int, NodeRecord]) -> bool:
    members = ranks_of(claim)
    is_ours = claim.coordinator == state.settings.candidate and claim.generation in state.formed
    own_rank = state.settings.candidate if state.settings.candidate == claim.coordinator else None
    votes = {
        rank
        for rank in members
        if (rank in joined and (is_ours or joined[rank].claims or rank == own_rank))
        or (is_ours and state.ended.get(rank, -1) >= claim.generation)
    }
    return 2 * len(votes) > len(members) or (2 * len(votes) == len(members) and claim.coordinator in votes)
