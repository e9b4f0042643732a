"""The hang watch over workers that only pretend: whom it strikes, when, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.diagnosis.test_frames import BATCH, REDUCE
from trainer_launch.diagnosis import stacks
from trainer_launch.diagnosis.collectives import Doing, Explanation
from trainer_launch.diagnosis.hang_detection import PATIENCE, Activity, Rules, Sample, WatchedWorker
from trainer_launch.diagnosis.hang_watch import ANSWER_S, Watch, Watched
from trainer_launch.diagnosis.incident_bundle import HANG
from trainer_launch.diagnosis.incident_collection import About, Collected, Collector

T = 10.0
ZERO, ONE = (WatchedWorker(f"rank {rank}", 2**22 + rank, 1, rank, rank) for rank in (1, 2))


class Workers:
    """Workers with these stacks; they trained until time 0 and now sleep, or are in these states."""

    def __init__(self, stacks, states=(), answer_s=0.0, outside=()):
        self.stacks, self.states = stacks, dict(states)
        self.outside = dict(outside)  # what they wait for, as their system calls show
        self.at_s, self.answer_s = 0.0, answer_s  # the time, and how long they take to tell where they are
        self.asked = 0
        self.looks = 0

    def look(self):
        self.looks += 1
        signs = (min(self.looks, 3),)
        return {
            worker: Sample(
                processes=(Activity(pid=worker.pid, state=self.states.get(worker, "S")),),
                signs=signs,
                has_joined=True,
            )
            for worker in self.stacks
        }

    def present(self):
        return {worker: self.states.get(worker, "S") for worker in self.stacks}

    def children(self, workers):
        return dict.fromkeys(workers, ())

    def doing(self, worker, text, *, has_joined=False):
        return self.outside.get(worker, stacks.doing(stacks.main_thread(text)))

    def ask_all(self, workers):
        self.asked += 1
        self.at_s += self.answer_s
        return {worker.pid: self.stacks[worker] for worker in workers if self.stacks[worker]}


class Timed(Watch):
    """Its time is that of its workers."""

    def look(self, now_s):
        workers: Any = self._workers
        workers.at_s = max(now_s, workers.at_s)
        return super().look(workers.at_s)


@pytest.fixture
def watch(tmp_path):
    made = []

    def make(workers, *, alone=True, tell=None, **rules):
        watched = Watched(**{"rules": Rules(timeout_s=T), **rules}, alone=alone, explained=tell is not None)
        about = About(place=str(tmp_path / "stacks"), env={})
        made.append(Collector(about, workers, lambda name: ()))
        return Timed(watched, workers, lambda: workers.at_s, made[-1], tell)

    yield make
    for collector in made:
        collector.close()


def struck_at_s(made, until_s=100.0):
    """When it first finds a hang, and which."""
    now_s, hung = 0.0, None
    while now_s < until_s and hung is None:
        now_s = made.due_s
        hung = made.look(now_s)
    return now_s, hung


def test_who_is_elsewhere_while_the_others_wait_is_to_blame(watch, tmp_path):
    at_s, hung = struck_at_s(watch(Workers({ZERO: REDUCE, ONE: BATCH})))
    assert at_s == pytest.approx(T, abs=3)
    assert (hung.rank, hung.local_rank) == (ONE.rank, ONE.local_rank)
    assert "idle" in hung.message
    (saved,) = (tmp_path / "stacks").iterdir()
    assert hung.lines == (
        "rank 1: waits in all_reduce, called from train.py:31 (step)",
        "rank 2: in data.py:22 (read_batch)",
        f"collected in {saved}",
    )
    assert str(saved) not in hung.message, "other pods are told it, too"


@pytest.mark.parametrize("stacks", [REDUCE, ""], ids=["in a collective", "unknown"])
def test_who_merely_waits_leaves_another_node_the_time_to_be_found_out(watch, stacks):
    workers = Workers({ZERO: stacks, ONE: stacks})
    assert struck_at_s(watch(workers, alone=False))[0] == pytest.approx(PATIENCE * T + 2.5, abs=3)
    assert workers.asked == 2, "once to see where they are, once for the record"
    alone = Workers({ZERO: stacks, ONE: stacks})
    assert struck_at_s(watch(alone))[0] == pytest.approx(T, abs=3)


def test_a_rank_in_a_transfer_is_not_at_fault_at_once_nor_is_one_beside_it(watch):
    """Though no other node could be waited for, and whatever its stack shows."""
    for doing, at_s in ((Doing.TRANSFER, PATIENCE * T + 2.5), (Doing.UNKNOWN, T)):
        made = watch(Workers({ZERO: BATCH, ONE: BATCH}, outside={ONE: doing}))
        assert struck_at_s(made)[0] == pytest.approx(at_s, abs=3)


@pytest.mark.parametrize("doing", [Doing.INPUT, Doing.DEBUGGER])
def test_nobody_is_ended_while_a_rank_waits_for_a_person(watch, doing):
    assert struck_at_s(watch(Workers({ZERO: REDUCE, ONE: BATCH}, outside={ONE: doing})))[1] is None


def test_without_stacks_and_explanation_no_rank_is_the_cause(watch):
    """As of workers that were started with exec; of a single rank it is clear."""
    assert struck_at_s(watch(Workers({ZERO: "", ONE: ""})))[1].rank is None
    assert struck_at_s(watch(Workers({ZERO: ""})))[1].rank == ZERO.rank


def test_a_nodes_only_worker_is_not_the_cause_where_all_nodes_together_know_none(watch):
    """As where all ranks wait for a lock on a file, one of them for ever."""
    text = "no progress, but none of 3 known ranks waits in a recorded collective"
    coordinator = Coordinator(Explanation(text=text, accuses=False))
    hung = coordinator.struck_at_s(watch(Workers({ZERO: BATCH}), alone=False, tell=coordinator.tell))[1]
    assert (hung.rank, hung.message) == (None, text)


class Coordinator:
    """Explains what it is told, at once or after some seconds."""

    def __init__(self, explanation, after_s=0.0):
        self.explanation, self.after_s, self.told_at_s = explanation, after_s, []

    def struck_at_s(self, made, until_s=100.0):
        now_s, hung = 0.0, None
        while now_s < until_s and hung is None:
            now_s = made.due_s
            hung = made.look(now_s)
            now_s = made._workers.at_s
            if self.told_at_s and self.told_at_s[-1] is None:
                self.told_at_s[-1] = now_s
            if self.explanation and self.told_at_s and now_s >= self.told_at_s[-1] + self.after_s:
                made.explained(self.explanation)
        return now_s, hung

    def tell(self, collected):
        self.told_at_s.append(None)


def explained(*ranks, accuses=True, cause="", active=False):
    return Explanation(text="a sentence", ranks=ranks, reason=cause, accuses=accuses, active=active)


@pytest.mark.parametrize(
    ("explanation", "at_s"),
    [
        (explained(ONE.rank), T),
        (explained(), T),
        (explained(77, cause="ProgramError"), T),
        (explained(77), PATIENCE * T + 2.5),
        (explained(ONE.rank, accuses=False), PATIENCE * T + 2.5),
        (explained(accuses=False), T),
        (None, T + ANSWER_S),
    ],
    ids=["ours", "nobody's", "proven", "another node's", "may take long", "unexplained", "no answer"],
)
def test_where_a_coordinator_can_be_asked_who_has_the_cause_is_ended_at_once(watch, explanation, at_s):
    coordinator = Coordinator(explanation, after_s=1.0)
    made = watch(Workers({ZERO: REDUCE, ONE: BATCH}), alone=False, tell=coordinator.tell)
    struck_s, hung = coordinator.struck_at_s(made)
    assert struck_s == pytest.approx(at_s, abs=3.5)
    if explanation is not None and explanation.accuses and explanation.ranks == (ONE.rank,):
        assert hung.rank == ONE.rank


@pytest.mark.parametrize("ranks", [(77,), (ONE.rank,), ()])
def test_nobody_is_ended_while_the_cause_shows_progress_and_all_are_asked_again_and_again(watch, ranks):
    told: list[Collected] = []
    made = watch(Workers({ZERO: REDUCE, ONE: BATCH}), alone=False, tell=told.append)
    known = 0
    while made.due_s < 20 * T:
        assert made.look(made.due_s) is None
        if known < len(told):
            known = len(told)
            made.explained(explained(*ranks, accuses=False, active=True))
    assert 10 <= known <= 20


class Spinning(Workers):
    """They trained for two timeouts, and now burn CPU, as those that wait in NCCL do."""

    def look(self):
        signs = (min(self.looks, int(2 * T / Rules(timeout_s=T).pace_s)),)
        return {
            worker: Sample(processes=(replace(look.processes[0], cpu_s=float(self.looks)),), signs=signs)
            for worker, look in super().look().items()
        }


class BesideSpinning(Spinning):
    """The first one sleeps instead."""

    def look(self):
        zero, one = super().look().values()
        return {ZERO: replace(zero, processes=(Activity(pid=ZERO.pid),)), ONE: one}


@pytest.mark.parametrize(("is_active", "at_s"), [(False, (2 + PATIENCE) * T), (True, None)])
def test_who_spins_in_a_collective_is_ended_unless_the_cause_shows_progress(watch, is_active, at_s):
    coordinator = Coordinator(explained(77, accuses=not is_active, active=is_active), after_s=1.0)
    made = watch(Spinning({ZERO: REDUCE}), alone=False, tell=coordinator.tell)
    struck_s, hung = coordinator.struck_at_s(made, until_s=20 * T)
    assert coordinator.told_at_s
    assert (hung is None) == is_active
    assert at_s is None or struck_s == pytest.approx(at_s, abs=5)


@pytest.mark.parametrize("explanation", [explained(accuses=False), None])
def test_collecting_for_long_is_no_gap_and_leaves_all_nodes_time_to_explain(watch, explanation):
    coordinator = Coordinator(explanation, after_s=1.0)
    made = watch(Spinning({ZERO: BATCH}, answer_s=9.0), alone=False, tell=coordinator.tell)
    struck_s, hung = coordinator.struck_at_s(made, until_s=20 * T)
    assert hung is not None
    assert len(coordinator.told_at_s) == 1
    assert struck_s - coordinator.told_at_s[0] >= (9.0 + 1.0 if explanation else ANSWER_S)


class Heartbeat(Workers):
    """The first one prints so often; the second one computes until then."""

    def __init__(self, stacks, until_s=0.0, beats=10**6):
        super().__init__(stacks)
        self.until_s, self.beats = until_s, beats

    def look(self):
        samples = super().look()
        zero, one = samples.values()
        computes = (replace(one.processes[0], cpu_s=min(self.at_s, self.until_s)),)
        return {ZERO: replace(zero, signs=(min(self.looks, self.beats),)), ONE: replace(one, processes=computes)}


@pytest.mark.parametrize("until_s", [0.0, 7.0])
def test_a_heartbeat_of_one_rank_does_not_hide_another_which_is_ended_once_it_was_quiet_itself(watch, until_s):
    coordinator = Coordinator(explained(ONE.rank), after_s=1.0)
    made = watch(
        Heartbeat({ZERO: REDUCE, ONE: BATCH}, until_s),
        tell=coordinator.tell,
        report=Rules(timeout_s=T / 2),
    )
    struck_s, hung = coordinator.struck_at_s(made)
    assert struck_s == pytest.approx(until_s + T, abs=3)
    assert hung.rank == ONE.rank
    assert len(coordinator.told_at_s) == 1, "one hang, one incident"


def test_all_nodes_are_asked_once_about_an_evaluation_and_again_once_it_has_ended_in_a_hang(watch):
    told: list[Collected] = []
    workers = Heartbeat({ZERO: REDUCE, ONE: BATCH}, until_s=6 * T, beats=1)
    report = Rules(timeout_s=T, unlearned_s=1800.0)
    made = watch(workers, tell=told.append, rules=None, report=report)
    at_s: list[float] = []
    while made.due_s < 12 * T:
        made.look(made.due_s)
        if len(told) > len(at_s):
            at_s.append(workers.at_s)
            made.explained(explained(ONE.rank, accuses=len(at_s) > 1, active=len(at_s) == 1))
    assert at_s == [pytest.approx(T, abs=3), pytest.approx(7 * T, abs=3)]


def test_workers_that_wait_beside_one_at_work_are_ended_only_if_all_nodes_explain_it(watch):
    coordinator = Coordinator(None)
    made = watch(Heartbeat({ZERO: REDUCE, ONE: BATCH}), tell=coordinator.tell)
    assert coordinator.struck_at_s(made)[1] is None
    assert struck_at_s(watch(Heartbeat({ZERO: REDUCE, ONE: BATCH})))[1] is None


def test_a_rank_that_is_at_work_without_progress_is_ended_also_beside_one_that_waits(watch):
    """Where nothing explains it, as before the first process group."""
    coordinator = Coordinator(explained(accuses=False), after_s=1.0)
    made = watch(BesideSpinning({ZERO: BATCH, ONE: BATCH}), tell=coordinator.tell)
    struck_s, hung = coordinator.struck_at_s(made, until_s=20 * T)
    assert struck_s == pytest.approx((2 + PATIENCE) * T, abs=5)
    assert hung.rank == ONE.rank
    assert "busy without progress" in hung.message


def test_a_rank_that_was_at_work_until_now_gets_the_time_for_a_transfer_from_then_on(watch):
    """Its peers have been idle for longer."""
    workers = Workers({ZERO: REDUCE, ONE: BATCH})
    told: list[Collected] = []
    made = watch(workers, alone=False, tell=told.append)
    hung, asked, active_s = None, 0, 0.0
    while hung is None:
        hung = made.look(made.due_s)
        if asked < len(told):
            asked, is_active = len(told), workers.at_s < 4 * T
            active_s = workers.at_s if is_active else active_s
            made.explained(explained(77, accuses=False, active=is_active))
    assert active_s > 2 * T
    assert workers.at_s == pytest.approx(active_s + PATIENCE * T + 2.5, abs=3)


@pytest.mark.parametrize(("after_s", "times"), [(100.0, 1), (2000.0, 2)])
def test_a_hang_before_anything_is_learned_is_reported_once_early_and_once_late(watch, after_s, times):
    told: list[Collected] = []
    rules = Rules(timeout_s=None, unlearned_s=1800.0)
    made = watch(Workers({ZERO: REDUCE, ONE: BATCH}), tell=told.append, rules=None, report=rules)
    while made.due_s < after_s:
        assert made.look(made.due_s) is None
    assert [one.is_early for one in told] == [True, False][:times]


@pytest.mark.parametrize("rules", [{}, {"rules": None, "report": Rules(timeout_s=T)}])
def test_who_showed_progress_and_then_hangs_is_reported_though_it_was_asked_before(watch, rules):
    told: list[Collected] = []
    made = watch(Workers({ZERO: BATCH}), alone=False, tell=told.append, **rules)
    for _ in range(3):
        made.look(made.due_s)
    made.reported()
    made.explained(explained(ZERO.rank, accuses=False, active=True))
    while not told and made.due_s < 2 * T:
        made.look(made.due_s)
    assert [one.limit_s for one in told] == [T]
    assert [state.quiet_s for state in told[0].incident.states] == [pytest.approx(T, abs=1)]


@pytest.mark.parametrize(
    ("ranks", "again"), [((ONE.rank,), True), ((), True), ((77,), False)], ids=["ours", "unknown", "another node's"]
)
def test_whoever_may_have_the_cause_reports_again_where_it_has_hung_by_the_time_of_the_explanation(
    watch, ranks, again
):
    told: list[Collected] = []
    made = watch(
        Workers({ZERO: REDUCE, ONE: BATCH}), alone=False, tell=told.append, rules=None, report=Rules(timeout_s=T)
    )
    while not told:
        made.look(made.due_s)
    made.explained(explained(*ranks, accuses=False, active=True))
    while made.due_s < 6 * T:
        made.look(made.due_s)
    assert len(told) == 1 + again, "once, as long as nobody explains it"


def test_nobody_is_ended_for_what_was_known_of_an_earlier_quiet(watch):
    workers = Workers({ZERO: REDUCE, ONE: BATCH})
    coordinator = Coordinator(None)
    made = watch(workers, alone=False, tell=coordinator.tell)
    while not coordinator.told_at_s:
        assert made.look(made.due_s) is None
    made.explained(explained(ONE.rank, accuses=False))
    workers.looks = 1  # they go on for a moment
    struck_s, _ = coordinator.struck_at_s(made)
    assert len(coordinator.told_at_s) == 2, "all are asked anew"
    assert struck_s > T + ANSWER_S


@pytest.mark.parametrize("report", [None, Rules(timeout_s=T / 4)])
def test_a_program_that_is_no_worker_of_torchs_is_named_without_a_rank_and_idle_until_its_end(watch, report):
    made = watch(Workers({WatchedWorker("program", 2**22 + 3, 1): ""}), report=report)
    at_s, hung = struck_at_s(made)
    assert hung.message == (
        f"program has been idle: no output, no progress and almost no CPU time for {at_s - hung.at_s:.0f} s"
    )
    assert hung.lines[0] == "program: state S"
    assert hung.rank is None


def test_stacks_that_cannot_be_saved_hold_nothing_up(watch, tmp_path, caplog):
    (tmp_path / "stacks").write_text("a file")
    workers = Workers({ZERO: "", ONE: ""})
    assert struck_at_s(watch(workers))[0] == pytest.approx(T, abs=3)
    assert "cannot save an incident" in caplog.text


def test_the_error_that_a_thread_printed_before_its_rank_hung_is_told_with_the_place(tmp_path):
    printed = (
        "Exception in thread Thread-1:",
        "Traceback (most recent call last):",
        "OSError: shard 3 is truncated",
    )
    workers: Any = Workers({ZERO: REDUCE, ONE: BATCH})
    made = Collector(About(place=str(tmp_path), env={}), workers, lambda name: printed)
    states = made.collect(HANG, "rank 2 is idle", texts=workers.ask_all((ZERO, ONE))).incident.states
    made.close()
    assert [state.place for state in states] == [
        "waits in all_reduce, called from train.py:31 (step)",
        "in data.py:22 (read_batch), after OSError: shard 3 is truncated",
    ]
