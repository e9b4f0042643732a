"""A job that does not go on: the coordinator asks every member what its ranks show, and explains it to all. Pure.

what happens                                   | what follows
-----------------------------------------------|---------------------------------------------------------
a member sees no progress, and tells its ranks | all other members that are not done are asked
a person asks a member for an incident         | the same, and nobody is accused for it
the last of them answers                       | all members are told the explanation, and of all ranks
one does not answer in time                    | the same; its ranks are unknown
the generation ends meanwhile                  | nothing
a member tells its ranks again soon            | nothing: it has not heard the explanation yet;
                                               | but all are asked anew if somebody made progress then

Nobody is stopped for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import (
    Doing,
    Explanation,
    Life,
    Ns,
    RankState,
    brief,
    entered_in_words,
    errors_in_words,
    explain,
    never_entered,
    unexplained,
)
from trainer_launch.membership.notes import Judge, Judgement, Members, MemberView, Tell
from trainer_launch.model.codec import MAX_RANKS, Amount, Tagged, Text, encode
from trainer_launch.model.units import counted

STALL = "stall"  # the topic
MAX_STATES = 16384  # of all nodes, in an explanation
_STACKS = 4  # that are told where there are too many ranks for a message
_MESSAGE_BYTES = 48_000  # leaves room in a line
_LATELY_S = 10.0  # in which ranks of a healthy job make progress
SHOW_RANKS_S = 6.0  # for all members to tell what their ranks show: each asks its workers for half of it
EXPLAIN_AGAIN_S = 3.0  # between two explanations: what nodes say meanwhile was said before they heard it
EndStates: TypeAlias = Annotated[tuple[RankState, ...], Meta(max_length=MAX_RANKS)]  # when a generation failed


class Ranks(Tagged, frozen=True):
    """The states of a node's ranks: it sees no progress, or was asked."""

    states: Annotated[tuple[RankState, ...], Meta(max_length=MAX_RANKS)]
    at_ns: Ns
    limit_s: Amount = 0.0  # it has seen none for so long; 0: it was asked
    is_early: bool = False  # before it knows which pauses are usual
    is_request: bool = False  # by a person


class ShowRanks(Tagged, frozen=True):
    """Another node sees no progress, or a person wants to know: tell what your ranks show."""

    is_request: bool = False


class RanksOfAll(Tagged, frozen=True):
    """The states of the ranks of all nodes, for every node's incident; `sentence`: a person asked for it."""

    states: Annotated[tuple[RankState, ...], Meta(max_length=MAX_RANKS)]
    sentence: Text = ""


ToNode: TypeAlias = ShowRanks | RanksOfAll | Explanation


class StallStatus(Struct, frozen=True):
    """Why the present generation did not go on, the last time that it did not."""

    stall: Text | None = None
    stall_age_s: Amount | None = None


class _StallRound(Struct, frozen=True, kw_only=True):
    """A member sees no progress, and all are asked what their ranks show."""

    asked_s: float
    waiting: frozenset[int]  # the members that have not answered
    known: Ranks = Ranks((), 0)  # so far, of those that have


class StallJudge(Judge, frozen=True, kw_only=True):
    """Why the present generation does not go on."""

    topic: ClassVar[str] = STALL
    hears = Ranks
    carried = EndStates
    question: _StallRound | None = None
    explained: Explanation | None = None  # the last stall
    explained_s: float = 0.0  # and when

    def begin(self, members: Sequence[MemberView], now_s: float) -> Judge:
        """Nothing of a generation that is over is told."""
        return StallJudge()

    def hear(self, number: int, body: Ranks, members: Members, now_s: float) -> Judgement:
        """A member tells its ranks: the first one to do so has everybody asked."""
        asked: tuple[Tell, ...] = ()
        before, last = self.question, self.explained
        if before is None:
            was_active = last is not None and last.active and body.limit_s > 0  # who showed progress may hang now
            is_late = last is not None and now_s < self.explained_s + EXPLAIN_AGAIN_S and not was_active
            if is_late and not body.is_request:
                return self, ()  # said before it heard the explanation
            others = frozenset(member.number for member in members() if member.answers) - {number}
            before = _StallRound(asked_s=now_s, waiting=others)
            asked = (Tell(sorted(others), ShowRanks(body.is_request)),)
        known = before.known
        is_early = known.is_early and (body.is_early or not body.limit_s)
        known = Ranks(
            states=(*known.states, *body.states)[:MAX_STATES],
            at_ns=max(known.at_ns, body.at_ns),
            limit_s=max(known.limit_s, body.limit_s),
            is_early=is_early if known.limit_s else body.is_early,  # all that have seen no progress say so
            is_request=known.is_request or body.is_request,
        )
        now = replace(before, waiting=before.waiting - {number}, known=known)
        judge = replace(self, question=now, due_s=now.asked_s + SHOW_RANKS_S)
        if now.waiting:
            return judge, asked
        after, news = judge.tick(members, now_s)
        return after, (*asked, *news)

    def tick(self, members: Members, now_s: float) -> Judgement:
        """Explain to all members what is known."""
        question = self.question
        if question is None:
            return self, ()
        everybody, now = members(), question.known
        names = [member.name for member in everybody if member.number in question.waiting]
        finished = _finished(everybody, question.asked_s - SHOW_RANKS_S / 2)
        ranks = tuple({state.rank: state for state in (*now.states, *finished)}.values())
        of = sum(max(1, len(member.ranks)) for member in everybody)
        why = explain(ranks, now.at_ns, now.limit_s, of)
        if why is None:
            why = unexplained(ranks, of, now.limit_s)
            if names:  # who has not answered may be at work
                why = replace(why, accuses=False)
        is_proof = bool(why.reason) or 0 < 2 * len(why.ranks) <= len(ranks)
        if now.is_early and not is_proof:  # a first step may take long, but does not leave a few ranks idle
            why = replace(why, accuses=False)
        text = why.text + (f"; no answer from {', '.join(names[:4])}" if names else "")
        why = replace(why, text=text, ranks=why.ranks[:MAX_RANKS])
        all_numbers, news = range(len(everybody)), list[Tell]()
        if why.accuses or now.is_request:
            sentence = _on_request(ranks, text) if now.is_request else ""
            news.append(Tell(all_numbers, RanksOfAll(fitting(ranks, why.ranks), sentence)))
        if not now.limit_s and now.is_request:  # no node has seen a hang
            return replace(self, question=None, due_s=None), news
        return StallJudge(explained=why, explained_s=now_s), (*news, Tell(all_numbers, why))

    def explain_end(self, bodies: Sequence[EndStates]) -> str:
        """Tell which ranks had printed an error though they finished, and which collective each entered last."""
        states = [state for states in bodies for state in states]
        return "; ".join(filter(None, (errors_in_words(states), entered_in_words(states))))

    def explain_timeout(self, bodies: Sequence[EndStates], rank: int) -> tuple[str, tuple[int, ...]]:
        """The ranks that had not entered the collective in which a rank timed out, in words too, where proven."""
        why = never_entered([state for states in bodies for state in states], rank)
        return ("", ()) if why is None else (why.text, why.ranks)

    def status(self, now_s: float) -> StallStatus:
        """The explanation, where somebody hangs."""
        last = self.explained
        if last is None or not last.accuses:
            return StallStatus()
        return StallStatus(last.text, round(max(0.0, now_s - self.explained_s), 1))


def fitting(states: Sequence[RankState], named: Collection[int] = ()) -> tuple[RankState, ...]:
    """As much of these as fits into a message: above all where those are that are named, or not in a collective."""
    suspects = {*named} or {state.rank for state in states if state.doing is not Doing.COLLECTIVE}
    chosen = sorted(states, key=lambda state: state.rank not in suspects)[:MAX_RANKS]
    for most, has_stack in ((4, {state.rank for state in states}), (4, suspects), (1, suspects), (0, suspects)):
        shortened = [brief(state, most) for state in chosen]
        shortened = [state if state.rank in has_stack else replace(state, stack="") for state in shortened]
        if sum(len(encode(state)) for state in shortened) <= _MESSAGE_BYTES:
            return tuple(shortened)
    first = {state.rank for state in chosen[:_STACKS]}
    bare = [replace(state, groups={}, why="too much to tell") for state in chosen]
    bare = [state if state.rank in first else replace(state, stack="") for state in bare]
    sizes = accumulate(len(encode(state)) for state in bare)
    return tuple(state for state, size in zip(bare, sizes, strict=True) if size <= _MESSAGE_BYTES)


def _on_request(ranks: Sequence[RankState], text: str) -> str:
    """The sentence of what a person asked for. Nodes are not asked at one time: ranks that move explain nothing."""
    active = sum(state.is_active(_LATELY_S) for state in ranks)
    if active:
        text = f"{active} of {counted(len(ranks), 'rank')} made progress in the last {_LATELY_S:g} s"
    elif all(state.quiet_s is None for state in ranks):
        text = f"{counted(len(ranks), 'rank')}, of whose progress nothing is known"
    return f"collected on request: {text}"


def _finished(members: Sequence[MemberView], shown_s: float) -> Iterator[RankState]:
    """The ranks of nodes that are done; the others' states are not older than `shown_s`."""
    for member in members:
        if member.done_s is not None:
            quiet_s = max(0.0, shown_s - member.done_s)
            for rank in member.ranks:
                yield RankState(rank=rank, node=member.number, life=Life.FINISHED, quiet_s=quiet_s)
