"""The right to form a generation: the rule that never lets two parts of a job train at the same time.

A claim is a generation as its members and its coordinator know it. It is sure once every member has taken it, and
only then do workers start. The next generation needs, of the last sure claim and of every unsure one after it, the
votes of more than half of the members; of exactly half only with the vote of the coordinator's own node. A
coordinator never forgets a claim that a node has told it, though that node is gone.

Each vote counts once. So a vote is a process's, not a rank's: it votes for a claim that it has taken, where it has
joined and becomes a member again. A process that has ended votes where its own kernel has ended its connection. A
process that was started since has no vote: its predecessor may have voted elsewhere. The exception is node 0, which
never joins elsewhere: if all other nodes but one vote for its predecessor's claim, the new one does so, too. The
other node and the predecessor may have gone on without them, but that node cannot go on alone.

Where that is not enough, looks are the evidence: none has found any of the missing nodes for longer than name
servers remember, and longer than workers run on without a coordinator. Then each node that has joined votes,
whatever it has taken. Where nobody knows of a generation, only node 0 begins one, with all nodes or by the same
evidence. That a name is unknown or that its address refuses proves nothing by itself: a Service drops pods that are
not ready, a name server answers from memory, an address may belong to another pod by now. But coordinators
elsewhere look for node 0 as well, and their nodes come to it. Nodes that train elsewhere need not come while node 0
still imports, unless a look has not found a node: without that one, node 0 may begin.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from trainer_launch.membership import timeouts
from trainer_launch.membership.protocol import MAX_CLAIMS, Claim
from trainer_launch.membership.state import JobState, Key, Looked, NodeRecord, runs
from trainer_launch.model.units import numbers_in


def may_form(state: JobState) -> bool:
    """Whether those that have joined may go on, as far as the others may be alive elsewhere."""
    others = _missing(state)
    if state.settings.candidate is None or not others or _has_votes(state):
        return True
    if not state.claims and state.settings.candidate != 0:
        return False
    joined = {node.key for node in state.joined}
    are_enough = all(_is_majority(claim, ranks_of(claim) & joined) for claim in state.claims)
    return are_enough and all(_is_unseen(state, rank) for rank in others)


def choose(state: JobState) -> list[NodeRecord]:
    """The next members: those of the last generation stay in; ranks follow the nodes' order, never the arrival."""
    joined = state.joined
    claim = max(state.claims, key=lambda claim: claim.generation, default=None)
    last: Collection[Key] = {node.key for node in joined if node.returning}  # a new coordinator is told
    if state.run.members and (claim is None or claim.generation <= state.run.number):
        last = state.run.members
    elif claim is not None:
        last = ranks_of(claim)
    fit = [node for node in joined if not node.is_faulty]
    joined = fit if len(fit) >= state.settings.min_nodes else joined  # a faulty one trains only where it is needed
    joined.sort(key=lambda node: (node.is_faulty, node.key not in last, node.node_rank))
    return sorted(joined[: state.settings.max_nodes], key=lambda node: node.place)


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
    if runs(state):
        return frozenset({0} if own else ())
    others = _missing(state)
    is_stuck = state.n_joined > 0 and (not own or bool(state.claims)) and not _has_votes(state)
    return frozenset(range(own)) | (others if is_stuck else frozenset())


def note_claims(state: JobState, claims: Iterable[Claim]) -> None:
    """Keep the last sure claim that anyone has told, and the unsure ones after it.

    An unsure one that was formed here has not started its workers, and never will.
    """
    open_claims = {*state.claims, *claims} - state.formed
    last = max((claim.generation for claim in open_claims if claim.sure), default=-1)
    kept = [claim for claim in open_claims if claim.generation > last or (claim.sure and claim.generation == last)]
    kept.sort(key=lambda claim: (not claim.sure, -claim.generation, claim.coordinator, claim.ranks))
    state.claims = tuple(kept[:MAX_CLAIMS])


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


def _missing(state: JobState) -> frozenset[int]:
    """The ranks that have not joined, so that their nodes may train elsewhere."""
    ranks = frozenset(range(state.settings.all_nodes)).union(*map(ranks_of, state.claims))
    return ranks - {node.node_rank for node in state.joined}


def _has_votes(state: JobState) -> bool:
    """Whether the processes here have the right to go on, whatever the others do."""
    if not state.claims:
        return False
    voters = choose(state) if state.n_joined > state.settings.max_nodes else state.joined
    others = frozenset(range(1, state.settings.all_nodes))
    is_home = state.settings.candidate == 0 and any(node.key == 0 for node in voters)
    for claim in state.claims:
        ranks = ranks_of(claim)
        votes = {node.key for node in voters if _votes(node, claim)}
        votes |= {rank for rank, taken in state.ended.items() if _has_taken(taken, claim)}
        if is_home and claim.coordinator == 0 and len((others | ranks) - votes - {0}) <= 1:
            votes.add(0)
        if not _is_majority(claim, votes & ranks):
            return False
    return True


def _votes(node: NodeRecord, claim: Claim) -> bool:
    """Whether a process that lives has a vote: one from before an unsure claim proves that it never started."""
    if node.is_faulty and node.key != 0:  # it serves the coordinator, and may leave it without being a member
        return False
    is_older = not claim.sure and any(own.generation < claim.generation for own in node.claims)
    return is_older or _has_taken(node.claims, claim)


def _has_taken(taken: tuple[Claim, ...], claim: Claim) -> bool:
    """Whether a process has taken a claim; it may only remember a later one of the same nodes, see `remember`."""
    return any(
        own.generation >= claim.generation and (own.coordinator, own.ranks) == (claim.coordinator, claim.ranks)
        for own in taken
    )


def _is_majority(claim: Claim, votes: Collection[int]) -> bool:
    most = len(ranks_of(claim))
    return 2 * len(votes) > most or (2 * len(votes) == most and claim.coordinator in votes)
