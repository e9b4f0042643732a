"""A worker group's incidents: when one is collected, what the coordinator is told of it, and what comes of that."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import (
    Doing,
    Explanation,
    Life,
    RankState,
    Stage,
    at_timeout,
    entered_in_words,
    never_entered,
)
from trainer_launch.diagnosis.incident_bundle import FAILURE, HANG, REQUEST
from trainer_launch.diagnosis.incident_collection import Collected, Collector
from trainer_launch.diagnosis.stall import SHOW_RANKS_S, STALL, Ranks, RanksOfAll, ShowRanks, ToNode, fitting
from trainer_launch.diagnosis.worker_samples import WatchedGroup
from trainer_launch.membership import protocol as say
from trainer_launch.membership.notes import opened
from trainer_launch.model import Death
from trainer_launch.supervisor.error_lines import headline, recognise

if TYPE_CHECKING:
    from trainer_launch.diagnosis.hang_watch import Watch

_OTHER_SIZE = re.compile(r"(\d{1,19}) vs (\d{1,19})\. Received data size doesn't match expected size")
_TIMEOUT = re.compile(r"Timed out waiting (\d{1,12})ms|ran for (\d{1,12}) milliseconds")  # gloo's and NCCL's words
_AT_END_S = 0.01  # to read what has been written
_OUTPUT_S = 0.2  # for the last output of a worker that was aborted
_log = logging.getLogger(__name__)


class _Stall(Struct, frozen=True, kw_only=True):
    """The reports to the coordinator of a generation that does not go on, and its answer."""

    generation: int = 0
    collected: Collected | None = None  # the last incident that it was told
    unexplained: int = 0  # how often it was told since it explained anything
    explanation: Explanation | None = None


class GroupIncidents:
    """The incidents of one group; without a collector nothing is collected, and nothing is known of ranks."""

    def __init__(
        self, group: WatchedGroup, send: Callable[[say.FromNode], None], collector: Collector | None
    ) -> None:
        self._group, self._recorders, self._send, self._collector = group, group.recorders, send, collector
        self._last_stall = _Stall()
        self._watch: Watch | None = None
        self._failed: tuple[int, tuple[RankState, ...]] = (0, ())  # a generation, and its ranks at its end

    @property
    def _stall(self) -> _Stall:
        """Of the present generation, with what was collected before."""
        last, generation = self._last_stall, self._group.generation
        return last if last.generation == generation else _Stall(generation=generation, collected=last.collected)

    def close(self) -> None:
        """Wait a moment for what is being written."""
        last = self._last_stall
        if last.explanation is not None and not last.explanation.accuses and not last.unexplained:
            self._drop(last.collected)
        if self._collector is not None:
            self._collector.close()

    def tell_ranks(self, collected: Collected | None, *, is_request: bool = False) -> None:
        """Tell the coordinator what our ranks show, which asks all others, too."""
        stall = self._stall
        if collected is None or stall.collected is None or collected.folder != stall.collected.folder:
            self._drop(stall.collected)
        self._last_stall = replace(stall, collected=collected, unexplained=stall.unexplained + 1)
        states: tuple[RankState, ...] = ()
        limit_s, is_early = 0.0, False
        if collected is not None:
            reported = {state.rank for state in collected.incident.states}
            ranks = [place.rank for place in self._group.places.values() if place.rank not in reported]
            # Their processes are gone, and the group has not heard of their ends yet: they hang nowhere.
            ending = [RankState(rank=rank, node=self._group.node_rank, quiet_s=0.0) for rank in ranks]
            states = fitting((*collected.incident.states, *ending))
            limit_s, is_early = collected.limit_s, collected.is_early
        body = Ranks(states, time.time_ns(), limit_s, is_early=is_early, is_request=is_request)
        self._send(say.Note(self._group.generation, STALL, body))

    def failed(self, sentence: str, *, was_killed: bool, timed_out: int | None = None) -> frozenset[str]:
        """Collect an incident: this generation ends for that, and nobody was stopped for it yet.

        A rank that `was_killed` cannot say where it was; `timed_out` is a rank that waited for others in vain.
        Return the processes that seem to wait for nobody.
        """
        if self._collector is None:
            return frozenset()
        alive = self._group.processes.pids()

        def whole(states: Sequence[RankState]) -> str:
            """With who entered what last; the coordinator gets these states when it is told of the end."""
            known = self._with_ends(states)
            self._failed = self._group.generation, known
            why = None if timed_out is None else never_entered(_at_timeout(known, timed_out, sentence), timed_out)
            words = entered_in_words(known) if was_killed else ""
            return "; ".join(filter(None, ("" if why is None else why.text, sentence, words)))

        names = [name for name in self._group.places if name not in alive]
        # All are where they were when a hang was explained: another node ends it.
        is_same = not names and self._watch is not None and self._watch.is_reported
        collected = self._collector.collect(FAILURE, whole, names=names, is_same=is_same)
        free = {state.rank for state in collected.incident.states if _is_free(state)}
        free |= {state.rank for state in self._states_at_end()}  # these only end
        return frozenset(name for name, place in self._group.places.items() if name in alive and place.rank in free)

    def recovered(self, text: str) -> None:
        """Ranks of the last generation have kept their state: its incident says so."""
        if self._collector is not None:
            self._collector.recovered(text)

    def completed(self, message: say.FromNode) -> say.FromNode:
        """A message about the end of a generation, with what its ranks here showed then."""
        if not isinstance(message, say.Failed | say.Join):
            return message
        generation, states = self._failed
        if message.generation != generation:
            if isinstance(message, say.Failed) or not message.generation:
                return message
            states = ()  # all had ended before another node failed
        if isinstance(message, say.Join):  # who was too slow to answer may have told at its end
            self._recorders.answers(0, time.monotonic() + _AT_END_S)
            states = self._with_ends(states)
        if isinstance(message, say.Failed) and message.timed_out:
            states = _at_timeout(states, message.rank, message.message)
        return replace(message, notes={STALL: fitting(states)} if states else {})

    def _with_ends(self, states: Sequence[RankState]) -> tuple[RankState, ...]:
        """These states, and in place of those that show no collectives the reports at the end of programs."""
        ended = {state.rank: state for state in self._states_at_end()}
        ended |= {state.rank: state for state in states if state.groups or state.rank not in ended}
        return tuple(ended.values())

    def _states_at_end(self) -> list[RankState]:
        """The reports of ranks at the end of their programs, also of those whose processes still end."""
        places, node = self._group.places, self._group.node_rank
        how = {state.rank: state.how for state in self._group.ended()}
        return [
            RankState(rank=rank, node=node, stage=Stage.ENDED, groups=answer.groups, how=how.get(rank, ""))
            for name, answer in self._recorders.at_end.items()
            if (rank := places[name].rank if name in places else None) is not None
        ]

    def with_explanation(self, hang: Death) -> Death:
        """All nodes together know more than this one: who is the cause, or that no rank is more than any other."""
        why = self._stall.explanation
        if why is None or why.active or not (why.accuses or why.ranks):
            return hang
        rank = hang.rank if hang.rank in why.ranks else next(iter(why.ranks), None)
        own = hang.local_rank if rank == hang.rank else None
        return replace(hang, message=why.text, rank=rank, local_rank=own, reason=why.reason or hang.reason)

    def hear(self, note: say.Note, watch: Watch | None) -> bool:
        """Another node sees no progress, or all nodes together know why; return whether that accuses somebody."""
        self._watch = watch
        match opened(ToNode, note.body, note.topic) if note.topic == STALL else None:
            case ShowRanks(is_request):
                self.show_ranks(watch, is_request=is_request)
                if watch is not None and not is_request:
                    watch.reported()
            case RanksOfAll(states, sentence):  # other nodes' ranks are part of our incident
                collected = self._last_stall.collected
                if self._collector is not None and collected is not None:
                    self._collector.complete(collected, states, sentence)
            case Explanation() as explanation:
                self._explain(explanation)
                if watch is not None:
                    watch.explained(explanation)
                return explanation.accuses
        return False

    def show_ranks(self, watch: Watch | None, *, is_request: bool = True) -> None:
        """Collect what our ranks show, and tell it: a person asks, or another node that sees no progress."""
        collected = self._last_stall.collected  # our own watch may have collected it at the same time
        is_open = self._last_stall.unexplained > 0 or not is_request  # what was explained keeps its sentence
        # Not below 0, either: the clock may have been set back.
        is_new = collected is not None and 0 <= time.time() - collected.incident.time_s <= SHOW_RANKS_S
        if not (is_open and is_new):
            kind, text = (HANG, "another node sees no progress")
            is_same = watch is not None and watch.is_reported
            if is_request:
                kind, text, is_same = REQUEST, "collected on request", False
            collector = self._collector
            collected = None if collector is None else collector.collect(kind, text, is_same=is_same)
        self.tell_ranks(collected, is_request=is_request)

    def _drop(self, collected: Collected | None) -> None:
        """Remove what was no incident, unless people know of it."""
        if self._collector is not None and collected is not None:
            self._collector.drop(collected)

    def _explain(self, why: Explanation) -> None:
        stall, collected = self._stall, self._last_stall.collected
        self._last_stall = replace(stall, unexplained=0, explanation=why)
        if not why.accuses:
            _log.info("no progress: %s", why.text)
            if stall.unexplained <= 1:  # else what was told since has begun the next round, explained with it
                self._drop(collected)
                self._last_stall = replace(self._last_stall, collected=None)
            return
        where = f"; collected in {collected.folder}" if collected is not None and collected.folder else ""
        _log.warning("suspected hang: %s%s", why.text, where)
        if self._collector is not None and collected is not None:
            self._collector.explained(collected, why)


def _at_timeout(states: tuple[RankState, ...], rank: int | None, message: str) -> tuple[RankState, ...]:
    """The states when a collective of `rank` timed out, where its message says after how long."""
    told = _TIMEOUT.search(message)
    return states if rank is None or told is None else at_timeout(states, rank, int(told[1] or told[2]) / 1000)


def _is_free(state: RankState) -> bool:
    """Whether a rank is known to wait for nobody, such as one that cleans up before it says what failed."""
    waits = state.doing is Doing.COLLECTIVE or (state.waits and not state.is_elsewhere)
    leaves = "destroy_process_group" in state.place
    return state.life is Life.ALIVE and state.place != "" and (leaves or not waits)


def aborted(death: Death, last_lines: Callable[[], Sequence[str]]) -> Death:
    """The death of a worker by SIGABRT, with what gloo says of it: it aborts who receives more than it expected.

    NCCL's watchdog aborts who waited for a peer in vain.

    The last output may come a moment after the end: workers that end together are waited for together.
    """
    until_s = death.at_s + _OUTPUT_S
    while not (lines := " ".join(last_lines())).count("terminate called") and time.monotonic() < until_s:
        time.sleep(0.005)
    sizes = _OTHER_SIZE.search(lines)
    if sizes is None:
        words = headline(last_lines())
        symptom = recognise(words)
        is_victim = death.message is None and symptom is not None and symptom[0].reason in ("Hung", "PeerLost")
        return replace(death, message=words) if is_victim else death
    text = f"rank {death.rank} and its peers entered different collectives: gloo received {sizes[1]} bytes"
    text += f" where rank {death.rank} expected at most {sizes[2]}; a restart will not help"
    return replace(death, reason="ProgramError", message=text)
