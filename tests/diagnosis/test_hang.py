"""What is a hang and what is not: histories of samples in, verdicts out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_launch.diagnosis import hang_detection
from trainer_launch.diagnosis.hang_detection import Activity, HangKind, Rules, Sample, WatchedWorker

T = 10.0
RULES = Rules(timeout_s=T)
RANKS = tuple(WatchedWorker(f"rank {rank}", 100 + rank, 1, rank, rank) for rank in range(3))
ZERO, ONE, TWO = RANKS


def sample(state, cpu_s, switches, sign, has_joined=False):
    """A look at a worker that is one process."""
    process = Activity(pid=1, state=state, cpu_s=cpu_s, switches=switches)
    return Sample(processes=(process,), signs=(sign,), has_joined=has_joined)


class Node:
    """Workers whose samples go on by themselves; `hangs` says when the first verdict came, and which."""

    def __init__(self, workers=RANKS, rules=RULES, *, is_explained=False, has_joined=False):
        self.rules, self.is_explained, self.has_joined = rules, is_explained, has_joined
        self.at_s = 0.0
        self.node = hang_detection.begin(0.0)
        self.samples = {worker: sample("S", 0.0, 0, 0) for worker in workers}

    def live(self, for_s, *, busy=(), states=None, sign_every_s=None, by=ZERO):
        """Let time pass; the first verdict and when it came, counted from the begin of this stretch."""
        start_s, pace_s = self.at_s, self.rules.pace_s
        next_sign_s = start_s
        for _ in range(round(for_s / pace_s)):
            self.at_s += pace_s
            signs = sign_every_s is not None and self.at_s >= next_sign_s
            next_sign_s += sign_every_s if signs else 0.0
            self.samples = {
                worker: sample(
                    state := (states or {}).get(worker, "S"),
                    last.processes[0].cpu_s + pace_s * (1.0 if worker in busy else 0.0 if state == "T" else 0.002),
                    last.processes[0].switches + (1 if worker in busy else 0),
                    last.signs[0] + int(signs and worker is by),
                    self.has_joined,
                )
                for worker, last in self.samples.items()
            }
            self.node = hang_detection.observe(self.node, self.samples, self.at_s, self.rules)
            found = hang_detection.judge(self.node, self.rules, is_explained=self.is_explained)
            if found is not None:
                return found, self.at_s - start_s
        return None, for_s

    def lives(self, for_s, **how):
        assert self.live(for_s, **how) == (None, for_s)


def running(**more):
    """A node that has trained for a while: all busy, rank 0 prints each second."""
    node = Node(**more)
    node.lives(60, busy=RANKS, sign_every_s=1.0)
    return node


def test_a_stopped_worker_hangs_after_the_timeout_whatever_the_others_do():
    found, after_s = running().live(60, busy=(ZERO, TWO), states={ONE: "T"}, sign_every_s=1.0)
    assert (found.kind, found.workers) == (HangKind.STOPPED, (ONE,))
    assert found.text == "rank 1 has been stopped (SIGSTOP) for 10 s"
    assert after_s == pytest.approx(T + 0.5, abs=0.6)


def test_a_worker_that_goes_on_between_stops_does_not_hang():
    """As under cpulimit, where each look may find it stopped."""
    running().lives(5 * T, busy=RANKS, states={ONE: "T"}, sign_every_s=1.0)


def test_a_stopped_worker_is_said_to_be_stopped_also_where_it_was_idle_a_little_before_that_was_seen():
    node = Node()
    node.lives(5 * T, busy=RANKS)
    node.lives(0.5)
    found, after_s = node.live(60, states={ONE: "T"})
    assert (found.kind, found.workers) == (HangKind.STOPPED, (ONE,))
    assert after_s == pytest.approx(T + 0.5, abs=0.6)


def test_workers_that_all_sleep_hang_after_the_timeout():
    found, after_s = running().live(60)
    assert (found.kind, found.workers) == (HangKind.IDLE, RANKS)
    assert found.text == "ranks 0-2 have been idle: no output, no progress and almost no CPU time for 10 s"
    assert after_s == pytest.approx(T + 0.5, abs=1)


def test_a_worker_stuck_in_the_kernel_is_named():
    found, _ = running().live(60, states={TWO: "D"})
    assert found.workers == (TWO,)
    assert found.text.endswith("; rank 2 has been stuck in the kernel (state D)")


def test_sleepers_do_not_hang_while_one_of_them_works_or_output_comes():
    running().lives(hang_detection.PATIENCE * T - 1, busy=(TWO,))
    running().lives(20 * T, sign_every_s=T - 1)


def test_a_worker_that_only_burns_cpu_after_progress_hangs_with_more_patience_and_is_named():
    found, after_s = running().live(100, busy=(TWO,))
    assert (found.kind, found.workers) == (HangKind.BUSY, (TWO,))
    assert found.text == "rank 2 has been busy without progress for 30 s, 30 times the longest earlier pause"
    assert after_s == pytest.approx(hang_detection.PATIENCE * T, abs=1.5)


def test_what_each_worker_has_done_last_is_known_and_who_spins_for_too_long_has_done_nothing():
    node = running()
    node.live(8, busy=(ONE,), sign_every_s=1.0, by=ZERO)
    found = hang_detection.quiet(node.node, (RULES,))
    assert found[ZERO].sign_s == pytest.approx(0.5, abs=0.5)
    assert found[ONE] == (None, 0.0, False)
    assert found[TWO].work_s == pytest.approx(8.0, abs=1.0)
    hang, _ = node.live(60, busy=(ONE,))
    assert hang.kind is HangKind.BUSY
    assert hang_detection.quiet(node.node, (RULES,))[ONE] == (None, None, True)


def test_a_long_step_is_none_as_long_as_it_is_within_what_was_usual():
    node = Node()
    node.lives(40 * T, busy=RANKS, sign_every_s=4 * T)
    node.lives(hang_detection.USUAL * 4 * T - 2, busy=RANKS)
    found, _ = node.live(6 * T, busy=RANKS)
    assert found.kind is HangKind.BUSY


def test_being_busy_is_no_hang_where_no_progress_was_ever_seen():
    Node().lives(100 * T, busy=(ONE,))


def test_chatter_at_the_start_is_no_progress_that_a_long_compilation_could_fall_behind():
    node = Node()
    node.lives(T - 2, busy=RANKS, sign_every_s=1.0)
    node.lives(100 * T, busy=RANKS)


def test_who_starts_has_more_patience_also_without_any_sign():
    found, after_s = Node().live(100)
    assert found.kind is HangKind.IDLE
    assert after_s == pytest.approx(hang_detection.PATIENCE * T, abs=1)


@pytest.mark.parametrize(("for_s", "has_joined", "patience"), [(2, False, 3), (2, True, 1), (1.5 * T, False, 1)])
def test_a_few_lines_of_output_do_not_end_the_start_but_a_collective_does(for_s, has_joined, patience):
    """As with a job that prints what it has been given, and then waits for its data."""
    node = Node(has_joined=has_joined)
    node.lives(for_s, busy=RANKS, sign_every_s=0.5)
    found, after_s = node.live(100)
    assert found.kind is HangKind.IDLE
    assert after_s + for_s * (patience > 1) == pytest.approx(patience * T, abs=1)


def test_a_rank_that_prints_hides_no_idle_one_where_all_nodes_explain_what_that_waits_for():
    """Such as a thread that prints a heartbeat."""
    node = running(is_explained=True)
    found, after_s = node.live(60, sign_every_s=2.0, by=ZERO)
    assert (found.kind, found.workers, found.is_partial) == (HangKind.IDLE, (ONE, TWO), True)
    assert found.text.startswith("ranks 1-2 have been idle")
    assert after_s == pytest.approx(T + 0.5, abs=1)
    running().lives(60, sign_every_s=2.0, by=ZERO)
    assert not running(is_explained=True).live(60)[0].is_partial


def test_a_computation_is_progress_for_as_long_as_the_rules_allow_and_who_waits_may_spin_meanwhile():
    node = running(rules=Rules(timeout_s=T, unlearned_s=100.0))
    found, _ = node.live(100, busy=(TWO,))
    assert found.kind is HangKind.BUSY
    assert hang_detection.quiet(node.node, (node.rules,))[TWO] == (None, 0.0, True)
    while node.at_s < 60 + 101:
        node.live(node.rules.pace_s, busy=(TWO,))
    assert hang_detection.quiet(node.node, (node.rules,))[TWO] == (None, None, True)


def test_new_workers_start_anew():
    node = running()
    node.lives(T - 1)
    node.samples = {
        WatchedWorker(w.name, w.pid + 1000, 2, w.rank, w.local_rank): last for w, last in node.samples.items()
    }
    node.lives(hang_detection.PATIENCE * T - 1)
    assert node.live(3)[0].kind is HangKind.IDLE


def test_a_debugger_pauses_everything():
    node = running()
    node.lives(100 * T, states={TWO: "t"})
    node.lives(T - 1)
    assert node.live(2)[0].kind is HangKind.IDLE


def test_our_own_absence_is_nobodys_hang():
    node = running()
    node.at_s += 100 * T
    node.lives(T - 1)


def test_where_the_work_is_done_elsewhere_being_idle_says_nothing_but_missing_output_does():
    rules = Rules(timeout_s=T, weak_signs=False)
    Node(rules=rules).lives(100 * T)
    found, _ = running(rules=rules).live(100)
    assert found.kind is HangKind.BUSY
    assert found.text.startswith("ranks 0-2 have been silent for 30 s")


def test_auto_does_nothing_before_it_has_learned_and_then_takes_ten_times_the_longest_pause():
    auto = Rules(timeout_s=None)
    Node(rules=auto).lives(3600)
    node = Node(rules=auto)
    node.lives(400, busy=RANKS, sign_every_s=20.0)
    assert hang_detection.limit_s(node.node, auto) == pytest.approx(200, abs=40)
    quick = Node(rules=auto)
    quick.lives(400, busy=RANKS, sign_every_s=1.0)
    assert hang_detection.limit_s(quick.node, auto) == hang_detection.AUTO_FLOOR_S
    found, after_s = quick.live(600)
    assert found.kind is HangKind.IDLE
    assert after_s == pytest.approx(60, abs=7)


def living(for_s=3 * T, worker=ZERO, child_begins_s=-3600.0, child_ends_s=3600.0, **per_s):
    """The verdict on a worker whose main thread sleeps for ever, 60 s after it has begun to.

    It and its child, which has begun then, do this in each second: `main_…`, `beside_…`, `child_…`.
    """
    node, pace_s = hang_detection.begin(0.0), RULES.pace_s
    waits = per_s.pop("main_waits_for_child", False)
    for number in range(round((60 + for_s) / pace_s)):
        at_s = number * pace_s
        quiet_s = max(0.0, at_s - 60)
        did = {name: count * quiet_s for name, count in per_s.items()}
        main = Activity(
            pid=1,
            cpu_s=min(at_s, 60.0) + did.get("main_cpu_s", 0.0),
            written=int(did.get("main_written", 0)),
            read=int(did.get("main_read", 0)),
            beside_cpu_s=did.get("beside_cpu_s", 0.0),
            beside_bytes=int(did.get("beside_bytes", 0)),
            switches=int(did.get("main_switches", 0)),
            waits_for_child=waits and at_s > 60,
        )
        child = Activity(
            pid=2,
            parent=1,
            age_s=quiet_s - child_begins_s,
            cpu_s=did.get("child_cpu_s", 0.0),
            switches=int(did.get("child_switches", 0)),
            read=int(did.get("child_read", 0)),
            written=int(did.get("child_written", 0)),
        )
        processes = (main, child) if child_begins_s <= quiet_s < child_ends_s else (main,)
        look = Sample(processes=processes, signs=(int(min(at_s, 60.0) // 5),))
        node = hang_detection.observe(node, {worker: look}, at_s, RULES)
        if (hang := hang_detection.judge(node, RULES)) is not None:
            return hang.kind
    return None


KiB = 1 << 10


@pytest.mark.parametrize(
    "per_s",
    [
        {},
        {"main_read": 8},
        {"beside_bytes": 3, "beside_cpu_s": 0.001},
        {"beside_bytes": 150 * KiB, "beside_cpu_s": 0.01},
        {"child_written": KiB, "child_read": 35 * KiB, "child_cpu_s": 0.004, "child_switches": 20},
        {"child_switches": 2, "child_begins_s": 15.0},
    ],
    ids=[
        "quiet",
        "woken",
        "heartbeat",
        "MLflow each second",
        "W&B each second",
        "a program that a thread has started",
    ],
)
def test_whoever_writes_metrics_beside_a_main_thread_that_hangs_hides_nothing(per_s):
    assert living(**per_s) is HangKind.IDLE


@pytest.mark.parametrize(
    "per_s",
    [
        {"main_written": 3},
        {"main_read": 512},
        {"main_cpu_s": 0.05},
        {"beside_cpu_s": 0.1},
        {"beside_bytes": 1024 * KiB},
        {"child_cpu_s": 0.1},
        {"child_read": 1024 * KiB},
        {"child_switches": 2, "child_begins_s": 0.0},
        {"child_switches": 2, "child_begins_s": 0.0, "child_ends_s": 2.5 * T},
        {"child_switches": 2, "main_waits_for_child": True},
    ],
    ids=[
        "it writes a checkpoint",
        "it reads from a slow disk",
        "it computes a little",
        "a thread evaluates",
        "a thread uploads",
        "a data loader decodes",
        "a data loader reads",
        "a program that it has started for this and polls",
        "the same, which has ended a moment ago",
        "a program that it waits for",
    ],
)
def test_a_main_thread_that_only_waits_while_others_work_for_it_does_not_hang(per_s):
    assert living(for_s=2.9 * T, **per_s) is None


def test_what_works_beside_a_main_thread_for_too_long_is_busy_without_progress():
    assert living(for_s=10 * T, beside_cpu_s=0.5) is HangKind.BUSY


def test_in_a_program_of_unknown_shape_every_main_thread_counts_but_no_writer_beside_it():
    program = WatchedWorker("program", 1, 1)
    assert living(worker=program, for_s=2.9 * T, child_switches=2) is None
    assert living(worker=program, beside_bytes=3) is HangKind.IDLE


def test_a_program_that_only_looks_after_its_children_many_times_a_second_hides_no_hang_of_theirs():
    program = WatchedWorker("torchrun", 1, 1)
    assert living(worker=program, main_switches=12, main_cpu_s=0.005, beside_cpu_s=0.005) is HangKind.IDLE
    for works in ({"main_cpu_s": 0.05}, {"main_read": 512}, {"child_switches": 2}, {"child_begins_s": 1e9}):
        assert living(worker=program, for_s=2.9 * T, main_switches=12, **works) is None


LATE = Rules(timeout_s=None, unlearned_s=1800.0)


def test_before_anything_is_learned_a_long_silence_is_reported_from_the_start_on():
    """As in the rendezvous, or at the first collective."""
    node = Node(rules=LATE)
    node.lives(1790)
    found, for_s = node.live(30)
    assert (found.kind, found.limit_s, for_s) == (HangKind.IDLE, 1800.0, pytest.approx(10, abs=LATE.pace_s))


def test_before_anything_is_learned_a_stopped_worker_is_reported_and_a_busy_one_is_not():
    found, for_s = Node(rules=LATE).live(2000, busy=(ZERO,), states={ONE: "T"})
    assert (found.kind, for_s) == (HangKind.STOPPED, pytest.approx(1800, abs=2 * LATE.pace_s))
    Node(rules=LATE).lives(7200, busy=(ZERO,))


def test_before_anything_is_learned_all_nodes_are_asked_early_and_again_once_the_long_limit_has_passed():
    """Once a rank has been in a collective; where nobody explains what it waits for, only then."""
    alone = Node(rules=LATE, has_joined=True)
    alone.lives(9, busy=RANKS, sign_every_s=3.0)
    alone.lives(1780)
    node = Node(rules=LATE, has_joined=True, is_explained=True)
    node.lives(9, busy=RANKS, sign_every_s=3.0)
    found, for_s = node.live(100)
    assert (found.kind, found.limit_s, found.is_early) == (HangKind.IDLE, 60.0, True)
    assert for_s == pytest.approx(60, abs=2 * LATE.pace_s)
    for _ in range(int(1800 / LATE.pace_s)):
        found, _ = node.live(LATE.pace_s)
    assert not found.is_early


def test_what_was_learned_takes_the_place_of_the_long_limit():
    node = Node(rules=LATE)
    node.lives(60, busy=RANKS, sign_every_s=10.0)
    found, _ = node.live(200)
    assert (found.kind, found.limit_s) == (HangKind.IDLE, pytest.approx(120, abs=30))


looks = st.lists(
    st.tuples(
        st.floats(0.1, 2.0),  # until the next look
        st.integers(0, 3),  # new output
        st.floats(0, 2.0),  # CPU time
        st.integers(0, 5),  # wake-ups
        st.sampled_from("RSDTt"),
    ),
    max_size=60,
)


def history(steps, rules=RULES):
    """All verdicts on one worker's history: (time, last strong sign, how long it was stopped, verdict)."""
    node, at_s, sign_s, stopped_s = hang_detection.begin(0.0), 0.0, 0.0, 0.0
    cpu_s, switches, signs = 0.0, 0, 0
    for pause_s, output, used_s, woken, state in steps:
        at_s += pause_s
        sign_s = at_s if output else sign_s
        stopped_s = stopped_s + pause_s if state == "T" else 0.0
        cpu_s, switches, signs = cpu_s + used_s, switches + woken, signs + output
        node = hang_detection.observe(node, {ZERO: sample(state, cpu_s, switches, signs)}, at_s, rules)
        yield at_s, sign_s, stopped_s, hang_detection.judge(node, rules)


@given(looks)
def test_nobody_hangs_who_is_not_stopped_and_was_heard_within_the_timeout(steps):
    for at_s, sign_s, stopped_s, found in history(steps):
        if found is not None and found.kind is not HangKind.STOPPED:
            assert at_s - sign_s >= T
        if found is not None and found.kind is HangKind.STOPPED:
            assert stopped_s >= T
