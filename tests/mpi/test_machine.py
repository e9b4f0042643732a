"""What becomes of an MPI job: hosts come and go, ranks fail, somebody asks to stop."""

from __future__ import annotations

import signal
from typing import TypeVar

import pytest
from msgspec.structs import replace

from trainer_launch.model import Member
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi import job_state_machine
from trainer_launch.mpi.job_state_machine import MAX_EARLY
from trainer_launch.mpi.mpirun_messages import Said

A, B, C, D = (Member(name, 1) for name in ("a", "b", "c", "d"))
REFUSED = "port: Connection refused"
NOTHING = Said()
T = TypeVar("T")


class Job:
    """A job in the hands of a test: time passes when it is told to."""

    def __init__(self, *members: Member, **settings: object) -> None:
        self.now_s = 100.0
        self.log: list[st.Action] = []
        given = replace(st.JobSettings(), **settings)
        self.state, actions = job_state_machine.begin(given, members, self.now_s)
        self.log += actions

    def take(self, event: st.Event) -> None:
        self.state, actions = job_state_machine.step(self.state, event)
        self.log += actions

    def ready(self, *names: str) -> None:
        absent = {m.host: REFUSED for m in self.state.members if m.host not in names}
        self.take(st.Ready(frozenset(names), absent, self.now_s))

    def ends(self, code: int, said: Said = NOTHING, *lines: str) -> None:
        self.take(st.Exited(code, said, lines, self.now_s))

    def answered(self, **missing: str) -> None:
        self.take(st.Answered(missing, self.now_s))

    def fails(self, code: int = 7, *lines: str, after_s: float = 60.0) -> None:
        """Rank 1 fails, and all hosts are there."""
        self.now_s += after_s
        self.ends(code, Said(rank=1, exit_code=code), *lines)
        self.answered()

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(st.Tick(self.now_s))

    def done(self, kind: type[T]) -> list[T]:
        return [action for action in self.log if isinstance(action, kind)]

    @property
    def starts(self) -> list[list[str]]:
        return [[m.host for m in start.members] for start in self.done(st.Start)]

    @property
    def said(self) -> str:
        return "; ".join(say.text for say in self.done(st.Say))

    @property
    def end(self) -> st.End:
        assert self.state.phase is st.Phase.DONE, self.state.phase
        assert self.state.end is not None
        return self.state.end


def running(*members: Member, **settings: object) -> Job:
    job = Job(*members, **settings)
    job.ready(*(m.host for m in members))
    return job


# -- waiting ----------------------------------------------------------------------------------


def test_an_empty_list_is_waited_for() -> None:
    job = Job()
    job.ready()
    assert job.starts == []
    job.take(st.Hosts((A,), job.now_s))
    job.ready("a")
    assert job.starts == [["a"]]


def test_hosts_that_never_come_end_the_job_with_138_and_where_each_is_stuck() -> None:
    job = Job(A, B, wait_s=30)
    job.ready("a")
    job.passes(30)
    assert job.end.code == 138
    assert job.end.failure is not None
    assert job.end.failure["message"] == f"1 of 2 hosts ready; missing: b: {REFUSED}"


def test_with_a_minimum_it_goes_on_with_fewer_after_a_patience() -> None:
    job = Job(A, B, C, min_hosts=2, shrink_s=10)
    job.ready("a", "c")
    job.passes(9)
    assert job.starts == []
    job.passes(1)
    assert job.starts == [["a", "c"]]
    assert "without b" in job.said


def test_at_the_start_hosts_that_just_come_are_gathered_even_without_a_patience() -> None:
    job = Job(A, B, C, min_hosts=1, shrink_s=0)
    job.ready("a")
    job.passes(2)
    job.ready("a", "b")
    job.passes(2)
    assert job.starts == []
    job.ready("a", "b", "c")
    assert job.starts == [["a", "b", "c"]]


# -- ends of ranks ----------------------------------------------------------------------------


def test_a_failed_rank_costs_one_restart_of_the_whole_jobs_budget() -> None:
    job = running(A, B, max_restarts=2)
    job.fails()
    job.fails()
    assert job.starts == [["a", "b"]] * 3
    job.fails(9)
    assert job.end.code == 9
    assert job.end.failure is not None
    assert job.end.failure["rank"] == 1
    assert "the restart budget is used up (2 restarts)" in str(job.end.failure["why_not_again"])


def test_a_rank_that_was_killed_ends_the_job_with_its_signal() -> None:
    job = running(A, max_restarts=0)
    job.ends(137, Said(rank=3, signal=9, host="a"))
    job.answered()
    assert job.end.code == 137
    assert job.end.failure is not None
    assert (job.end.failure["signal"], job.end.failure["hostname"]) == (9, "a")


def test_who_only_lost_another_rank_is_not_named_and_its_code_is_not_the_jobs() -> None:
    """Open MPI 5 may tell the end of such a rank, and of nobody else."""
    cut_off = Said(rank=2, exit_code=14, host="a", cut_off=True)
    job = running(A, max_restarts=0)
    job.ends(14, cut_off)
    job.answered()
    assert job.end.code == 138
    assert job.end.failure is not None
    assert job.end.failure["reason"] == "PeerLost"
    assert "rank" not in job.end.failure
    assert "mpirun does not say which" in str(job.end.failure["message"])


@pytest.mark.parametrize(
    ("code", "said", "lines", "expected"),
    [
        (7, Said(rank=1, exit_code=7, cut_off=True), (), 7),
        (14, Said(rank=1, exit_code=14), (), 14),
        (137, Said(rank=1, signal=9, cut_off=True), (), 137),
        (14, Said(rank=1, exit_code=14, cut_off=True), ("ValueError: no such shard",), 14),
    ],
)
def test_who_has_failed_by_itself_is_named_also_if_others_lost_it(
    code: int, said: Said, lines: tuple[str, ...], expected: int
) -> None:
    job = running(A, max_restarts=0)
    job.ends(code, said, *lines)
    job.answered()
    assert job.end.code == expected
    assert job.end.failure is not None
    assert job.end.failure["rank"] == 1


@pytest.mark.parametrize(
    ("code", "line", "starts"),
    [
        (1, "SyntaxError: invalid syntax", 1),
        (1, "ModuleNotFoundError: No module named 'nope'", 2),
        (2, "usage: train.py", 2),
        (127, "", 2),
    ],
)
def test_what_fails_the_same_way_each_time_is_not_started_again(code: int, line: str, starts: int) -> None:
    job = running(A, B)
    for _ in range(starts):
        job.fails(code, line, after_s=1)
    assert job.end.code == code
    assert len(job.starts) == starts


def test_what_cannot_be_parsed_hours_later_is_started_again() -> None:
    job = running(A, B)
    job.fails(1, "SyntaxError: invalid syntax", after_s=36_000)
    assert len(job.starts) == 2


# -- lost hosts -------------------------------------------------------------------------------


def test_a_lost_host_is_waited_for_and_costs_nothing() -> None:
    job = running(A, B, max_restarts=0)
    job.now_s += 60
    job.take(st.Lost("b", job.now_s))
    job.ends(205, Said(lost="b"))
    assert job.done(st.Ask) == [st.Ask(("a",), job.state.settings.ask_s)]
    job.answered()
    assert len(job.starts) == 1
    job.ready("a", "b")
    assert job.starts == [["a", "b"]] * 2


def test_a_rank_that_fails_because_another_host_went_away_costs_nothing() -> None:
    job = running(A, B, max_restarts=0)
    job.now_s += 60
    job.ends(1, Said(rank=0, exit_code=1))
    job.answered(b=REFUSED)
    assert job.state.phase is st.Phase.WAITING
    assert job.state.failures == 0


def test_with_a_minimum_the_rest_goes_on_at_once_where_no_patience_is_asked_for() -> None:
    job = running(A, B, C, min_hosts=2, shrink_s=0)
    job.now_s += 60
    job.ends(205, Said(lost="b"))
    job.answered(b=REFUSED)
    assert job.starts[-1] == ["a", "c"]


def test_who_is_gone_on_without_has_to_show_that_it_is_there_again() -> None:
    """mpirun itself has named it, so nobody has asked it: what was seen of it is from before its loss."""
    job = running(A, B, C, min_hosts=2, shrink_s=0)
    job.now_s += 60
    job.ends(205, Said(lost="b"))
    job.answered()
    assert job.starts[-1] == ["a", "c"]
    assert [*map(type, job.log)].index(st.Start, -1) == len(job.log) - 1
    assert st.Await((A, B, C), ("b",)) in job.log


def test_of_two_lost_hosts_only_the_one_that_stays_away_is_named_at_the_end() -> None:
    job = running(A, B, C, rejoin_s=20)
    job.now_s += 60
    job.ends(205, Said(lost="b"))
    job.answered(c=REFUSED)
    job.ready("a", "b")
    job.passes(20)
    assert str(job.end.failure).count("b did not come back") == 0
    assert "2 of 3 hosts ready; missing: c" in str(job.end.failure)


def test_a_lost_host_that_does_not_come_back_ends_the_job_with_138_and_its_name() -> None:
    job = running(A, B, rejoin_s=20)
    job.now_s += 60
    job.ends(205, Said(lost="b.domain"))
    job.answered(b=REFUSED)
    job.passes(20)
    assert job.end.code == 138
    assert "b did not come back" in str(job.end.failure)


def test_an_mpirun_that_does_not_end_its_ranks_is_killed_and_its_hosts_are_swept() -> None:
    job = running(A, B)
    job.take(st.Lost("b", job.now_s))
    job.passes(job_state_machine.END_S)
    assert job.done(st.Signal) == [st.Signal(signal.SIGKILL)]
    job.ends(137)
    assert job.done(st.Sweep) == [st.Sweep(("a",))]


def test_an_mpirun_that_does_not_know_of_the_loss_is_told_to_end_its_ranks() -> None:
    job = running(A, B)
    job.take(st.Lost("b", job.now_s, said=False))
    assert job.done(st.Signal) == [st.Signal(signal.SIGTERM)]


def test_a_job_that_never_lasts_ends_though_losses_cost_nothing() -> None:
    job = running(A, B)
    for _ in range(MAX_EARLY):
        job.now_s += 1
        job.ends(205, Said(lost="b"))
        job.answered(b=REFUSED)
        job.ready("a", "b")
    assert job.end.code == 138
    assert f"{MAX_EARLY} starts in a row" in str(job.end.failure)


def test_where_no_daemon_could_be_started_all_hosts_have_to_let_us_in_first() -> None:
    job = running(A, B, wait_s=60)
    job.ends(255, Said(unreached="b", words="b: Permission denied (publickey)"))
    job.answered()
    assert job.done(st.Await)[-1] == st.Await((A, B), ("a", "b"), True)
    assert len(job.starts) == 1
    job.passes(61)
    assert job.end.code == 138


def test_a_trouble_with_daemons_of_hours_ago_makes_no_later_one_the_last() -> None:
    job = running(A, B, wait_s=60)
    trouble = Said(unreached="b", words="ssh: connect to host b port 22: Connection refused")
    for _ in range(3):
        job.ends(255, trouble)
        job.answered()
        job.ready("a", "b")
        job.now_s += 3600
    assert len(job.starts) == 4
    job.ends(205, Said(lost="b"))
    job.answered(b=REFUSED)
    job.ready("a", "b")
    job.now_s += 1
    job.ends(255, trouble)
    job.answered()
    assert job.state.phase is st.Phase.WAITING


def test_daemons_that_take_long_to_fail_are_not_started_for_ever() -> None:
    """As where a firewall swallows what they send home."""
    job = running(A, B, wait_s=300)
    for _ in range(4):
        job.now_s += 130
        job.ends(255, Said(unreached="", words="ORTE has lost communication"))
        job.answered()
        if job.state.phase is st.Phase.DONE:
            break
        job.ready("a", "b")
    assert job.end.code == 138


# -- membership -------------------------------------------------------------------------------


def test_hosts_that_come_later_are_gathered_and_let_in_with_one_new_start() -> None:
    job = running(A, B, min_hosts=1)
    job.now_s += 60
    job.take(st.Hosts((A, B, C, D), job.now_s))
    job.ready("a", "b", "c")
    job.passes(1)
    job.ready("a", "b", "c", "d")
    job.passes(2)
    assert job.done(st.Signal) == [st.Signal(signal.SIGTERM)]
    job.ends(1)
    job.answered()
    assert job.starts == [["a", "b"], ["a", "b", "c", "d"]]
    assert job.state.failures == 0


def test_a_job_that_was_interrupted_for_others_is_no_longer_due_for_it() -> None:
    """Or the agent would spin until mpirun has ended."""
    job = running(A, B, min_hosts=1)
    job.take(st.Hosts((A, B, C), job.now_s))
    job.ready("a", "b", "c")
    assert job_state_machine.due_s(job.state) == job.now_s + 3
    job.passes(3)
    assert job.state.phase is st.Phase.ENDING
    assert job_state_machine.due_s(job.state) == job.now_s + job_state_machine.END_S
    job.ends(1)
    assert job_state_machine.due_s(job.state) == job.now_s + job.state.settings.ask_s + job_state_machine.ANSWER_S


def test_no_more_hosts_are_let_in_than_the_maximum() -> None:
    job = running(A, B, min_hosts=1, max_hosts=2)
    job.take(st.Hosts((A, B, C), job.now_s))
    job.ready("a", "b", "c")
    job.passes(60)
    assert job.done(st.Signal) == []


def test_a_host_that_leaves_the_list_is_gone_on_without() -> None:
    job = running(A, B, C, min_hosts=1)
    job.now_s += 60
    job.take(st.Hosts((A, C), job.now_s))
    assert job.done(st.Signal) == [st.Signal(signal.SIGTERM)]
    job.ends(1)
    job.answered(b=REFUSED)
    assert job.starts[-1] == ["a", "c"]


# -- being asked to stop ----------------------------------------------------------------------


def test_ranks_are_told_first_then_mpirun_then_nobody_is_asked() -> None:
    job = running(A, B, grace_s=20)
    job.take(st.Asked(job.now_s))
    assert job.done(st.TellRanks) == [st.TellRanks(("a", "b"))]
    assert job.done(st.Signal) == []
    job.passes(14)
    assert job.done(st.Signal) == [st.Signal(signal.SIGTERM)]
    job.passes(job_state_machine.END_S)
    assert job.done(st.Signal)[-1] == st.Signal(signal.SIGKILL)
    job.ends(137)
    assert job.end.code == 143


# -- draining ---------------------------------------------------------------------------------


def test_ranks_that_drain_have_no_deadline_and_are_not_started_again() -> None:
    job = running(A, B, C, min_hosts=1, max_hosts=2)
    job.ready("a", "b")
    job.take(st.Drained(job.now_s))
    assert job_state_machine.due_s(job.state) is None
    job.now_s += 3600
    job.ends(7, Said(rank=1, exit_code=7))
    assert (job.end.code, job.end.failure) == (143, None)
    assert len(job.starts) == 1


@pytest.mark.parametrize("first", ["others", "drained"])
def test_ranks_that_drain_are_not_interrupted_for_others_nor_for_the_list(first: str) -> None:
    job = running(A, B, min_hosts=1)
    if first == "drained":
        job.take(st.Drained(job.now_s))
    job.take(st.Hosts((A, C, D), job.now_s) if first == "drained" else st.Hosts((A, B, C, D), job.now_s))
    job.ready("a", "b", "c", "d")
    if first == "others":
        job.take(st.Drained(job.now_s))
    job.passes(60)
    assert job_state_machine.due_s(job.state) is None
    assert job.done(st.Signal) == []


def test_who_drains_can_still_be_asked_to_stop() -> None:
    job = running(A, B, grace_s=20)
    job.take(st.Drained(job.now_s))
    job.take(st.Asked(job.now_s))
    assert job.done(st.TellRanks) == [st.TellRanks(("a", "b"))]
    job.passes(14)
    assert job.done(st.Signal) == [st.Signal(signal.SIGTERM)]
