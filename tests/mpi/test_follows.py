"""A job whose program adds and drops hosts itself, as Horovod does: what the agent leaves to it, and what not."""

from __future__ import annotations

from tests.mpi.test_machine import REFUSED, A, B, C, Job
from trainer_launch.model import Member
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi.mpirun_messages import Said


def elastic(*members: Member, ready: tuple[str, ...] = ("a", "b")) -> Job:
    job = Job(*members, follows=True, first_hosts=2, min_hosts=1)
    job.ready(*ready)
    job.passes(5.0)
    return job


def test_the_first_start_waits_for_the_processes_asked_for_and_later_ones_for_the_minimum() -> None:
    job = elastic(A, B, C, ready=("a",))
    assert job.starts == []
    job.ready("a", "b")
    job.passes(5.0)
    assert job.starts == [["a", "b"]]
    job.ends(1, Said(words="lost"))
    job.answered(b=REFUSED)
    job.ready("a")
    job.passes(5.0)
    assert job.starts == [["a", "b"], ["a"]]


def test_hosts_that_come_or_go_while_it_runs_are_its_own_affair() -> None:
    job = elastic(A, B)
    job.take(st.Hosts((A, B, C), job.now_s))
    job.ready("a", "b", "c")
    job.passes(10.0)
    job.take(st.Hosts((A, C), job.now_s))
    job.passes(10.0)
    assert job.state.phase is st.Phase.RUNNING
    assert job.done(st.Signal) == []
    assert job.starts == [["a", "b"]]


def test_only_hosts_that_are_in_the_job_at_its_end_can_be_the_lost_ones() -> None:
    """A host that was lost and replaced an hour ago excuses no failure of today."""
    job = elastic(A, B)
    job.ready("a")
    job.take(st.Hosts((A, B, C), job.now_s))
    job.ready("a", "c")
    job.passes(60.0)
    job.ends(7, Said(rank=1, exit_code=7))
    assert job.done(st.Ask)[-1].hosts == ("a", "c")
    job.answered()
    assert "restart 1 of 3" in job.said
