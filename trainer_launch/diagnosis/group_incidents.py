"""A worker group's incidents: when one is collected, what the coordinator is told of it, and what comes of that."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import Explanation, RankState, brief, entered_in_words, last_entered
from trainer_launch.diagnosis.hang_detection import Quiet
from trainer_launch.diagnosis.incident_bundle import FAILURE, HANG
from trainer_launch.diagnosis.incident_collection import Collected, Collector
from trainer_launch.diagnosis.stall import SHOW_RANKS_S
from trainer_launch.diagnosis.topics import STALL, Ranks, ShowRanks
from trainer_launch.diagnosis.worker_samples import WatchedGroup
from trainer_launch.membership import protocol as say
from trainer_launch.model import Death
from trainer_launch.model.codec import encode

if TYPE_CHECKING:
    from trainer_launch.diagnosis.hang_watch import Watch

_MESSAGE_BYTES = 48_000  # leaves room in a line
_OTHER_SIZE = re.compile(r"(\d{1,19}) vs (\d{1,19})\. Received data size doesn't match expected size")
_AT_END_S = 0.01  # to read what has been written
_OUTPUT_S = 0.2  # for the last output of a worker that was aborted
_log = logging.getLogger(__name__)


class GroupIncidents:
    """The incidents of one group; without a collector nothing is collected, and nothing is known of ranks."""

    def __init__(
        self, group: WatchedGroup, send: Callable[[say.FromNode], None], collector: Collector | None
    ) -> None:
        self._group, self._recorders, self._send, self._collector = group, group.recorders, send, collector
        self._stalled: Collected | None = None  # what was told to the coordinator last
        self._unexplained = 0, 0  # a generation, and how often ranks were told there without an explanation since
        self._failed: tuple[int, Mapping[str, tuple[int, ...]]] = (0, {})  # who entered what last, of a generation
        self._explained: tuple[int, Explanation | None] = (0, None)  # of a generation: why no rank went on

    def close(self) -> None:
        """Wait a moment for what is being written."""
        _, last = self._explained
        if last is not None and not last.accuses and not self._unexplained[1]:
            self._drop_stalled()
        if self._collector is not None:
            self._collector.close()

    def tell_ranks(self, collected: Collected | None) -> None:
        """Tell the coordinator what our ranks show, which asks all others, too."""
        if collected is not self._stalled:
            self._drop_stalled()
        generation, count = self._unexplained
        self._unexplained = self._group.generation, 1 if generation != self._group.generation else count + 1
        self._stalled = collected
        states = () if collected is None else fitting((*collected.incident.states, *self._ending(collected)))
        limit_s = 0.0 if collected is None else collected.limit_s
        self._send(say.Note(self._group.generation, STALL, Ranks(states, time.time_ns(), limit_s)))

    def _ending(self, collected: Collected) -> list[RankState]:
        """Ranks whose processes are gone, while the group has not heard of their ends yet: they hang nowhere."""
        known = {state.rank for state in collected.incident.states}
        ours = [place.rank for place in self._group.places.values()]
        return [RankState(rank=rank, node=self._group.node_rank, quiet_s=0.0) for rank in ours if rank not in known]

    # -- what happens -------------------------------------------------------------------------

    def failed(self, sentence: str, *, was_killed: bool) -> None:
        """This generation ends for that; nobody was stopped for it yet. Who was killed cannot say where."""
        if self._collector is None:
            return
        alive = self._group.processes.pids()

        def whole(states: Sequence[RankState]) -> str:
            entered = entered_in_words(self._entered(states))
            return f"{sentence}; {entered}" if was_killed and entered else sentence

        self._collector.collect(FAILURE, whole, names=[name for name in self._group.places if name not in alive])

    def _entered(self, states: Sequence[RankState]) -> Mapping[str, tuple[int, ...]]:
        """Who entered what last; the coordinator is told when it is told of the end."""
        known = [state for state in states if state.groups]
        self._failed = self._group.generation, last_entered([*self._states_at_end(), *known])
        return self._failed[1]

    def completed(self, message: say.FromNode) -> say.FromNode:
        """A message about the end of a generation, with which collectives its ranks here entered last."""
        generation, entered = self._failed
        if isinstance(message, say.Failed | say.Join) and message.generation == generation:
            return replace(message, notes={STALL: entered} if entered else {})
        if isinstance(message, say.Join) and message.generation:  # all had ended before another node failed
            self._recorders.answers(0, time.monotonic() + _AT_END_S)
            entered = last_entered(self._states_at_end())
            return replace(message, notes={STALL: entered} if entered else {})
        return message

    def _states_at_end(self) -> list[RankState]:
        """What ranks have said at the end of their programs, also those whose processes still end."""
        said = [(self._group.places.get(name), one) for name, one in self._recorders.at_end.items()]
        return [RankState(rank=place.rank, groups=one.groups) for place, one in said if place is not None]

    def with_explanation(self, hang: Death) -> Death:
        """All nodes together know more than this one."""
        generation, known = self._explained
        if known is None or not known.accuses or generation != self._group.generation:
            return hang
        rank = hang.rank if hang.rank in known.ranks or not known.ranks else known.ranks[0]
        return replace(hang, message=known.text, rank=rank, reason=known.reason or hang.reason)

    def hear(self, note: object, watch: Watch | None) -> None:
        """Another node sees no progress; and what came of it."""
        match note:
            case ShowRanks():
                self._show_ranks(None if watch is None else watch.quiet())
                if watch is not None:
                    watch.reported()
            case Explanation():
                self._note_explanation(note)
                if watch is not None:
                    watch.explained(note)

    def _show_ranks(self, quiet: Mapping[int, Quiet] | None) -> None:
        seen = self._stalled  # it may have been seen here, too, at the same time
        if seen is None or time.time() - seen.incident.time_s > SHOW_RANKS_S:
            seen = (
                None if self._collector is None else self._collector.collect(HANG, "another node sees no progress")
            )
            seen = seen.with_quiet(quiet) if seen is not None and quiet is not None else seen
        self.tell_ranks(seen)

    def _drop_stalled(self) -> None:
        """It was no incident, unless people know of it."""
        if self._collector is not None and self._stalled is not None:
            self._collector.drop(self._stalled)
        self._stalled = None

    def _note_explanation(self, told: Explanation) -> None:
        self._explained, seen, (_, rounds) = (self._group.generation, told), self._stalled, self._unexplained
        self._unexplained = self._group.generation, 0
        if not told.accuses:
            _log.info("no progress: %s", told.text)
            if rounds <= 1:  # what was told since may have begun the next round, which is explained with it
                self._drop_stalled()
            return
        where = f"; collected in {seen.folder}" if seen is not None and seen.folder else ""
        _log.warning("suspected hang: %s%s", told.text, where)
        if self._collector is not None and seen is not None:
            self._collector.explained(seen, told.text, told.reason, told.ranks, told.helps)


def aborted(death: Death, last_lines: Callable[[], Sequence[str]]) -> Death:
    """The death of a worker by SIGABRT, with what gloo says of it: it aborts who receives more than it expected.

    The last output may come a moment after the end: workers that end together are waited for together.
    """
    until_s = death.at_s + _OUTPUT_S
    while not (lines := " ".join(last_lines())).count("terminate called") and time.monotonic() < until_s:
        time.sleep(0.005)
    found = _OTHER_SIZE.search(lines)
    if found is None:
        return death
    text = f"rank {death.rank} and its peers entered different collectives: gloo received {found[1]} bytes"
    text += f" where rank {death.rank} expected at most {found[2]}; a restart will not help"
    return replace(death, reason="ProgramError", message=text)


def fitting(states: Sequence[RankState]) -> tuple[RankState, ...]:
    """As much of these as fits into a message: fewer collectives of each group, then only groups that wait."""
    for most in (4, 1, 0):
        told = tuple(brief(state, most) for state in states)
        if sum(len(encode(state)) for state in told) <= _MESSAGE_BYTES:
            return told
    return tuple(replace(state, groups={}, why="too much to tell") for state in states)[: say.MAX_RANKS]
