"""What a node tells the coordinator of its ranks when another node sees no progress."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
from msgspec.structs import replace

from tests.pytorch.nodes import PLAN
from tests.supervisor.fakes import FakeSystem
from trainer_launch.diagnosis.collectives import (
    Collective,
    Doing,
    Explanation,
    Group,
    Life,
    RankState,
    Recorded,
    explain,
)
from trainer_launch.diagnosis.group_incidents import GroupIncidents
from trainer_launch.diagnosis.hang_detection import Quiet
from trainer_launch.diagnosis.incident_bundle import HANG, Incident
from trainer_launch.diagnosis.incident_collection import Collected, quiet_s
from trainer_launch.diagnosis.stall import STALL, Ranks, RanksOfAll, ShowRanks, StallJudge
from trainer_launch.diagnosis.worker_samples import WorkerPlace
from trainer_launch.membership import protocol as say
from trainer_launch.model import Death, Process
from trainer_launch.pytorch.worker_group import WorkerGroup
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_observer import RunObserver

NOW_NS = 10**18
ACTIVE = Explanation(text="it is making progress", accuses=False, active=True)
FINISHED = Death(rank=0, local_rank=0, code=0)


def incident(*states: RankState) -> Collected:
    found = Incident(
        sentence="", kind=HANG, time_s=0.0, job="", host="", node_rank=0, generation=1,
        reason="", ranks=(), restart_helps=None, states=states,
    )  # fmt: skip
    folder = f"/nowhere/{[state.rank for state in states]}"
    return Collected(folder=folder, incident=found, limit_s=2.0)


def group_of() -> WorkerGroup:
    """Of node 0."""
    system = FakeSystem()
    return WorkerGroup(Processes(PLAN, system, RunObserver()))


def told_of(*states: RankState) -> tuple[RankState, ...]:
    """What node 0, which has the ranks 0 and 1, tells."""
    group = group_of()
    group.places = {f"rank {rank}": WorkerPlace(rank, rank) for rank in (0, 1)}
    group.generation = 1
    told: list[say.FromNode] = []
    incidents = GroupIncidents(group, told.append, None)
    incidents.tell_ranks(incident(*states))
    (note,) = told
    assert isinstance(note, say.Note)
    assert isinstance(note.body, Ranks)
    return note.body.states


class Collecting:
    """A collector that only counts what becomes of its incidents, in which ranks show these states."""

    def __init__(self, *states: RankState) -> None:
        self.states, self.sentences = states, list[str]()
        self.dropped: list[Collected] = []
        self.kept: list[Collected] = []
        self.collected: list[tuple[str, bool]] = []  # kinds, and whether it was said to be the same hang
        self.shown: list[tuple[RanksOfAll, Collected]] = []

    def collect(self, kind: str, sentence: object, *, is_same: bool = False, **_: object) -> Collected:
        self.collected.append((kind, is_same))
        if callable(sentence):
            self.sentences.append(sentence(self.states))
            return incident(*self.states)
        made = incident(waits(len(self.collected)))
        return replace(made, incident=replace(made.incident, time_s=time.time()), limit_s=0.0)

    def complete(self, collected: Collected, states: tuple[RankState, ...], sentence: str) -> None:
        self.shown.append((RanksOfAll(states, sentence), collected))

    def drop(self, collected: Collected) -> None:
        self.dropped.append(collected)

    def explained(self, collected: Collected, *_: object) -> None:
        self.kept.append(collected)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("reports", [1, 2], ids=["asked", "reports again before it hears of the first round"])
def test_what_is_collected_is_kept_as_long_as_a_round_may_still_name_somebody_by_it(reports: int) -> None:
    group, collecting = group_of(), Collecting()
    group.generation = 1
    incidents = GroupIncidents(group, lambda _: None, cast(Any, collecting))
    seen = incident(waits(1))
    for _ in range(reports):
        incidents.tell_ranks(seen)
    incidents.hear(say.Note(1, STALL, ACTIVE), None)
    assert collecting.dropped == [seen] * (reports == 1)
    incidents.hear(say.Note(1, STALL, Explanation(text="rank 1 hangs", ranks=(1,), accuses=True)), None)
    assert collecting.kept == [seen] * (reports == 2)
    incidents.close()
    assert len(collecting.dropped) == (reports == 1)


EXPLAINED = Explanation(text="rank 1 never entered all_reduce #6", ranks=(1,))


class Quietly:
    """A hang watch over workers that have made no progress since a hang was reported, or have."""

    def __init__(self, *, is_reported: bool) -> None:
        self.is_reported = is_reported
        self.reports = 0

    def reported(self) -> None:
        self.reports += 1

    def explained(self, _: Explanation) -> None:
        pass

    def quiet(self) -> dict[int, Any]:
        return {}


def asked(watch: Quietly, *notes: Any) -> tuple[Collecting, list[Ranks], GroupIncidents]:
    """A node's incidents after these notes of the coordinator, and what it told of its ranks."""
    group, collecting, sent = group_of(), Collecting(), list[say.FromNode]()
    group.generation = 1
    incidents = GroupIncidents(group, sent.append, cast(Any, collecting))
    for note in notes:
        incidents.hear(say.Note(1, STALL, note), cast(Any, watch))
    return collecting, [note.body for note in sent if isinstance(note, say.Note)], incidents


def test_what_a_person_asks_for_is_collected_told_and_suspects_nobody() -> None:
    watch, answer = Quietly(is_reported=False), RanksOfAll((waits(1),), "collected on request: nothing waits")
    collecting, told, _ = asked(watch, ShowRanks(is_request=True), answer)
    assert collecting.collected == [("request", False)]
    assert [(ranks.is_request, ranks.limit_s) for ranks in told] == [(True, 0.0)]
    assert [shown for shown, _ in collecting.shown] == [answer]
    assert watch.reports == 0, "its own workers may still be suspected"


def test_a_request_takes_no_explained_hangs_place_and_joins_one_that_is_still_looked_into() -> None:
    watch = Quietly(is_reported=True)
    explained, _, _ = asked(watch, ShowRanks(), EXPLAINED, ShowRanks(is_request=True))
    assert explained.collected == [("hang", True), ("request", False)]
    assert explained.dropped in ([], explained.kept), "which is kept, as people were told of it"
    pending, told, _ = asked(watch, ShowRanks(), ShowRanks(is_request=True))
    assert pending.collected == [("hang", True)]
    assert [ranks.is_request for ranks in told] == [False, True]
    assert pending.dropped == []


@pytest.mark.parametrize("is_same", [True, False])
def test_another_node_that_asks_again_about_the_same_quiet_gets_the_same_incident(is_same: bool) -> None:
    watch = Quietly(is_reported=is_same)
    collecting, told, _ = asked(watch, ShowRanks())
    assert (collecting.collected, watch.reports) == ([("hang", is_same)], 1)
    assert not told[0].is_request


def test_after_the_clock_was_set_back_other_nodes_are_told_what_ranks_show_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, before_s = time.time(), time.time() + 3600
    collecting, _, incidents = asked(Quietly(is_reported=False))
    for clock_s in (before_s, now_s):
        monkeypatch.setattr(time, "time", lambda clock_s=clock_s: clock_s)
        incidents.show_ranks(None, is_request=False)
    assert len(collecting.collected) == 2


@pytest.mark.parametrize(
    ("is_quiet", "has_ended", "is_same"),
    [(True, False, True), (True, True, False), (False, False, False)],
    ids=["ended for the hang", "a worker failed here", "moved since"],
)
def test_a_generation_that_another_node_ends_for_the_hang_is_no_second_incident(
    is_quiet: bool, has_ended: bool, is_same: bool
) -> None:
    watch = Quietly(is_reported=is_quiet)
    collecting, _, incidents = asked(watch, ShowRanks(), EXPLAINED)
    incidents._group.places = {"rank 0": WorkerPlace(0, 0)} if has_ended else {}
    incidents.failed("generation 1 is over", was_killed=False)
    assert collecting.collected[1:] == [("failure", is_same)]


def test_a_rank_that_was_too_slow_to_answer_tells_by_its_end_what_it_had_entered() -> None:
    group, collecting = group_of(), Collecting(RankState(rank=0, why="it did not answer in time"))
    group.generation, group.places = 1, {"rank 0": WorkerPlace(0, 0)}
    incidents = GroupIncidents(group, lambda _: None, cast(Any, collecting))
    incidents.failed("generation 1 is over", was_killed=False)
    group.recorders.at_end["rank 0"] = Recorded(groups=waits(0).groups)
    joining = incidents.completed(say.Join("a", 1))
    assert isinstance(joining, say.Join)
    assert [state.groups for state in cast(Any, joining.notes[STALL])] == [waits(0).groups]


def waits(rank: int) -> RankState:
    return RankState(rank=rank, node=rank, groups={"0": Group(title="pg", ranks="0-2", entered=6, done=5)})


def test_a_rank_whose_end_the_group_has_not_heard_of_yet_is_told_and_nobody_is_accused_for_it() -> None:
    states = told_of(RankState(rank=1, node=0, quiet_s=0.1))
    assert [state.rank for state in states] == [1, 0]
    found = explain((*states, waits(2)), NOW_NS, 2.0)
    assert found is not None
    assert not found.accuses, found.text
    assert found.active, "all are asked again soon"


BACKWARD = "/lib/torch/autograd/graph.py:829 (_engine_run_backward)\n/app/train.py:9 (step)"
SHARDED = "/lib/torch/optim/adam.py:5 (step)\n/lib/torch/distributed/optim/zero_redundancy_optimizer.py:3 (step)"
REDUCES = "/lib/torch/distributed/distributed_c10d.py:9 (all_reduce)\n/lib/torch/autograd/graph.py:829 (f)"


@pytest.mark.parametrize(
    ("stack", "waits", "is_at_work"),
    [(BACKWARD, False, True), (SHARDED, False, True), (BACKWARD, True, False), (REDUCES, False, False)],
)
def test_cpu_work_of_a_backward_pass_is_progress_but_not_that_of_a_wait_in_a_collective(
    stack: str, waits: bool, is_at_work: bool
) -> None:
    groups = {"0": Group(title="pg", ranks="0-2", entered=6 if waits else 5, done=5)}
    state = RankState(rank=0, doing=Doing.COLLECTIVE, place="waits in x", stack=stack, groups=groups)
    known = replace(state, quiet_s=quiet_s(state, Quiet(sign_s=40.0, work_s=0.5), NOW_NS))
    assert known.is_active(15.0) == is_at_work


def test_ranks_that_have_entered_a_collective_since_the_watch_looked_do_not_hang() -> None:
    """As after a slow import, on a busy machine."""
    last = (Collective(6, "all_reduce", "[[4]] Float", NOW_NS - 10**6),)
    group = Group(title="pg", ranks="0-1", entered=6, done=5, last=last)
    states = [RankState(rank=rank, doing=Doing.COLLECTIVE, groups={"0": group}) for rank in range(2)]
    states = [replace(state, quiet_s=quiet_s(state, Quiet(6.0, 6.0), NOW_NS)) for state in states]
    found = explain(states, NOW_NS, 2.0)
    assert found is not None
    assert (found.accuses, found.active) == (False, True), found.text


@pytest.mark.parametrize(("ago_s", "accuses"), [(0.5, False), (50.0, True)])
def test_a_rank_that_has_just_finished_is_no_suspect_though_its_last_collective_is_long_ago(
    ago_s: float, accuses: bool
) -> None:
    """As after the export of a model: what the others wait in may be over by now."""
    groups = {
        "0": replace(waits(0).groups["0"], entered=5, last=(Collective(5, "all_reduce", "", NOW_NS - 10**12),))
    }
    state = RankState(rank=0, life=Life.FINISHED, groups=groups, quiet_s=ago_s)
    state = replace(state, quiet_s=quiet_s(state, Quiet(None, None), NOW_NS))
    found = explain((state, waits(1), waits(2)), NOW_NS, 15.0)
    assert found is not None
    assert found.accuses == accuses, found.text


@pytest.mark.parametrize(("error", "is_uneven"), [("", True), ("ValueError: record 17 is corrupt", False)])
def test_a_rank_that_printed_an_error_and_left_with_exit_code_0_is_the_cause_and_not_its_data(
    error: str, is_uneven: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, lines = group_of(), ("Traceback (most recent call last):", error)
    group.deaths.append(replace(FINISHED, process="rank 0"))
    group.unasked.add("rank 0")
    group.recorders.open("rank 0")
    system = cast(FakeSystem, group.system)
    monkeypatch.setattr(system, "last_lines", lambda name: lines)
    system.clock_s = FINISHED.at_s + 60.0
    (state,) = group.ended()
    found = explain((state, waits(1), waits(2)), NOW_NS, 2.0)
    assert found is not None
    assert ("uneven" in found.text) == is_uneven
    assert (found.ranks, found.reason) == ((0,), "ProgramError" if is_uneven else "Hung")
    words = StallJudge().explain_end([(state, waits(1))])
    assert [error in text for text in (found.text, words)] == [True, True]
    assert (group.left_unasked() == {"rank 0"}) == is_uneven, "where it was not asked to leave, data is uneven"
    group.recorders.close()


@pytest.mark.parametrize(("later_s", "accuses"), [(0.0, False), (4.0, False), (6.0, True)])
def test_who_has_just_finished_has_left_nobody_waiting_for_its_data(later_s: float, accuses: bool) -> None:
    """What another node tells of a rank that waits may be from before that; once it cannot be, data is uneven."""
    group = group_of()
    group.deaths.append(FINISHED)
    cast(FakeSystem, group.system).clock_s = FINISHED.at_s + later_s
    found = explain((*group.ended(), waits(1), waits(2)), NOW_NS, 2.0)
    assert found is not None
    assert (found.accuses, found.active) == (accuses, not accuses), found.text
    assert not accuses or "uneven" in found.text


@pytest.mark.parametrize(
    ("why", "rank", "local_rank", "is_taken"),
    [
        (Explanation(text="rank 1 never entered", ranks=(1,)), 1, None, True),
        (Explanation(text="rank 0 never entered", ranks=(0, 1)), 0, 0, True),
        (Explanation(text="the ranks wait in a circle", reason="ProgramError"), None, None, True),
        (Explanation(text="rank 1 is in a checkpoint", ranks=(1,), accuses=False), 1, None, True),
        (Explanation(text="rank 1 makes progress", ranks=(1,), accuses=False, active=True), 0, 0, False),
        (Explanation(text="no progress", accuses=False), 0, 0, False),
    ],
    ids=["another's", "its own", "nobody's alone", "may take long", "works", "unexplained"],
)
def test_a_hang_names_the_rank_that_all_nodes_together_know_and_never_a_victim(
    why: Explanation, rank: int | None, local_rank: int | None, is_taken: bool
) -> None:
    group = group_of()
    group.generation = 1
    incidents = GroupIncidents(group, lambda _: None, None)
    incidents.hear(say.Note(1, STALL, why), None)
    hang = Death(rank=0, local_rank=0, message="rank 0 has been idle", reason="Hung")
    found = incidents.with_explanation(hang)
    assert (found.rank, found.local_rank) == (rank, local_rank)
    assert found.message == (why.text if is_taken else hang.message)
    assert found.reason == (why.reason or "Hung")


def test_when_a_killed_rank_ended_is_no_progress() -> None:
    group = group_of()
    group.deaths.append(Death(rank=0, local_rank=0, code=137, signal=9))
    (state,) = group.ended()
    assert state.quiet_s is None


IN_GROUP = {"0": Group(title="pg", ranks="0-1", entered=6, done=5)}
LEAVES = "waits in destroy_process_group, called from a.py:9 (main)"


@pytest.mark.parametrize(
    ("state", "is_free"),
    [
        (RankState(rank=1, place="in a.py:5 (save_logs)"), True),
        (RankState(rank=1, place=LEAVES, doing=Doing.COLLECTIVE), True),
        (RankState(rank=1, place="in a.py:5 (next)", doing=Doing.DATA, groups=IN_GROUP), True),
        (RankState(rank=1, place="waits in all_reduce", doing=Doing.COLLECTIVE), False),
        (RankState(rank=1, place="in a.py:5 (wait)", groups=IN_GROUP), False),
        (RankState(rank=1), False),
        (RankState(rank=1, place="in a.py:5 (save_logs)", life=Life.STOPPED), False),
    ],
    ids=["cleans up", "leaves", "reads data meanwhile", "waits", "waits itself", "nobody knows", "stopped"],
)
def test_workers_that_wait_for_nobody_when_a_generation_ends_are_known(state: RankState, is_free: bool) -> None:
    incidents, _ = failing(RankState(rank=0, life=Life.DEAD), state)
    assert incidents.failed("rank 0 failed", was_killed=False) == ({"rank 1"} if is_free else set())


def failing(*states: RankState) -> tuple[GroupIncidents, Collecting]:
    """Of node 0, of whose ranks 0 and 1 the second still runs."""
    group, collecting = group_of(), Collecting(*states)
    group.places = {f"rank {rank}": WorkerPlace(rank, rank) for rank in (0, 1)}
    group.processes.begin()
    group.processes.add(Process(name="rank 1", argv=(), env={}), 100)
    return GroupIncidents(group, lambda _: None, cast(Any, collecting)), collecting


def test_the_incident_of_a_collective_that_timed_out_says_who_had_not_entered_it() -> None:
    def recorded(rank: int, entered: int, **known: Any) -> RankState:
        last = (Collective(entered, "all_reduce", "[]", NOW_NS),)
        group = Group(title="pg", ranks="0-1", entered=entered, done=entered, last=last)
        return RankState(rank=rank, groups={"0": group}, **known)

    victim = recorded(0, 7, life=Life.DEAD)
    incidents, collecting = failing(victim, recorded(1, 6, place="in a.py:5 (evaluate)"))
    incidents.failed("rank 0 timed out", was_killed=False, timed_out=0)
    (sentence,) = collecting.sentences
    assert sentence == (
        "rank 1 had not entered all_reduce #7 of pg; rank 0 waited in it; rank 1 was in a.py:5 (evaluate); "
        "rank 0 timed out"
    )
