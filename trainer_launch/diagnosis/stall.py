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

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import (
    MAX_ENTERED,
    Explanation,
    Life,
    RankState,
    entered_in_words,
    explain,
    unexplained,
)
from trainer_launch.diagnosis.topics import MAX_STATES, STALL, LastEntered, Ranks, ShowRanks, StallStatus
from trainer_launch.membership.notes import Judge, Judgement, Members, MemberView, Tell
from trainer_launch.membership.protocol import MAX_RANKS

SHOW_RANKS_S = 6.0  # for all members to tell what their ranks show: each asks its workers for half of it
EXPLAIN_AGAIN_S = 3.0  # between two explanations: what nodes say meanwhile was said before they heard it


class _Question(Struct, frozen=True, kw_only=True):
    """A member sees no progress, and all are asked what their ranks show."""

    asked_s: float
    waiting: frozenset[int]  # who has not answered
    shown: Ranks  # so far, by those that have


class StallJudge(Judge, frozen=True, kw_only=True):
    """Why the present generation does not go on."""

    topic: ClassVar[str] = STALL
    hears = Ranks
    carried = LastEntered
    question: _Question | None = None
    explained: Explanation | None = None  # the last stall
    explained_s: float = 0.0  # and when

    def begin(self, members: Sequence[MemberView], now_s: float) -> Judge:
        """Nothing of a generation that is over is told."""
        return StallJudge()

    def hear(self, number: int, body: Ranks, members: Members, now_s: float) -> Judgement:
        """A member tells its ranks: the first one to do so has everybody asked."""
        before, last = self.question, self.explained
        if before is None:
            was_active = last is not None and last.active and body.limit_s > 0  # who showed progress may hang now
            if last is not None and now_s < self.explained_s + EXPLAIN_AGAIN_S and not was_active:
                return self, ()  # said before it heard the explanation
            others = [member.number for member in members() if member.answers and member.number != number]
            question = _Question(asked_s=now_s, waiting=frozenset(others), shown=body)
            asked = [Tell(others, ShowRanks())]
        else:
            shown = Ranks(
                states=(*before.shown.states, *body.states)[:MAX_STATES],
                at_ns=max(before.shown.at_ns, body.at_ns),
                limit_s=max(before.shown.limit_s, body.limit_s),
            )
            question = replace(before, waiting=before.waiting - {number}, shown=shown)
            asked = []
        judge = replace(self, question=question, due_s=question.asked_s + SHOW_RANKS_S)
        if question.waiting:
            return judge, asked
        after, told = judge.tick(members, now_s)
        return after, (*asked, *told)

    def tick(self, members: Members, now_s: float) -> Judgement:
        """Explain to all members what is known."""
        question = self.question
        if question is None:
            return self, ()
        everybody, shown = members(), question.shown
        names = [member.name for member in everybody if member.number in question.waiting]
        finished = _finished(everybody, question.asked_s - SHOW_RANKS_S / 2)
        ranks = tuple({state.rank: state for state in (*shown.states, *finished)}.values())
        why = explain(ranks, shown.at_ns, shown.limit_s)
        if why is None:
            why = unexplained(ranks, sum(max(1, len(member.ranks)) for member in everybody), shown.limit_s)
            if names:  # who has not answered may be at work
                why = replace(why, accuses=False)
        text = why.text + (f"; no answer from {', '.join(names[:4])}" if names else "")
        why = replace(why, text=text, ranks=why.ranks[:MAX_RANKS])
        return StallJudge(explained=why, explained_s=now_s), (Tell(range(len(everybody)), why),)

    def explain_end(self, bodies: Sequence[Mapping[str, tuple[int, ...]]]) -> str:
        """Which ranks entered which collective last."""
        entered: dict[str, tuple[int, ...]] = {}
        for body in bodies:
            entered |= {what: (*entered.get(what, ()), *ranks) for what, ranks in body.items()}
        return entered_in_words(dict([*entered.items()][:MAX_ENTERED]))

    def status(self, now_s: float) -> StallStatus:
        """The explanation, where somebody hangs."""
        last = self.explained
        if last is None or not last.accuses:
            return StallStatus()
        return StallStatus(last.text, round(max(0.0, now_s - self.explained_s), 1))


def _finished(members: Sequence[MemberView], seen_s: float) -> Iterator[RankState]:
    """The ranks of nodes that are done; the others' states are not older than `seen_s`."""
    for member in members:
        if member.done_s is not None:
            quiet_s = max(0.0, seen_s - member.done_s)
            for rank in member.ranks:
                yield RankState(rank=rank, node=member.number, life=Life.FINISHED, quiet_s=quiet_s)
