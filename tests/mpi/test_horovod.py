"""horovodrun's command line as we write it, and what is heard of its words."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.model import Member
from trainer_launch.mpi import horovod_agent
from trainer_launch.mpi.mpirun_messages import Said
from trainer_launch.planning.mpi_options import split_command

GIVEN = (Member("w-0", 2), Member("w-1", 2))


def said(*lines: str, is_elastic: bool = False) -> Said:
    it = Said()
    for line in lines:
        it = horovod_agent.heard(it, line, is_elastic=is_elastic)
    return it


@pytest.mark.parametrize(
    ("line", "slots", "found"),
    [("-np 2 x", None, (3, 1)), ("-np 2 x", 2, (3, 2)), ("-np 2 --slots-per-host 4 x", 2, (3, 4))],
)
def test_a_host_whose_slots_nobody_told_has_those_that_were_typed(
    line: str, slots: int | None, found: tuple[int, ...]
) -> None:
    given = (Member("a", 3), Member("b"))
    made = horovod_agent.members_of(split_command(shlex.split(line)), given, slots)
    assert tuple(one.slots for one in made) == found


def test_of_typed_hosts_only_those_that_are_there_are_used() -> None:
    command = split_command(shlex.split("-np 2 -H a:1,b:1 x"))
    there = horovod_agent.members_of(command, (Member("a", 1),), None)
    assert "--hosts=a:1" in horovod_agent.static(("horovodrun",), command, there, 1, ())
    assert horovod_agent.horovod_slots(there) == "a:1\n"


def test_a_static_command_has_the_hosts_of_now_and_all_that_was_typed() -> None:
    command = split_command(shlex.split("-np 9 --hostfile /h --gloo --autotune -p 22 -i /k python t.py --lr 1"))
    assert horovod_agent.static(("horovodrun",), command, GIVEN, 4, ("eth0",)) == (
        *("horovodrun", "--num-proc=4", "--hosts=w-0:2,w-1:2", "--disable-cache", "--network-interfaces=eth0"),
        *("--gloo", "--autotune", "--ssh-identity-file=/k", "python", "t.py", "--lr", "1"),
    )


def test_an_elastic_command_asks_our_script_and_takes_hosts_back() -> None:
    command = split_command(shlex.split("-np 2 --max-np 3 --host-discovery-script ./mine x"))
    assert horovod_agent.elastic(("horovodrun",), command, "/s", 2, ("eth0",)) == (
        *("horovodrun", "--num-proc=2", "--host-discovery-script=/s", "--disable-cache", "--min-num-proc=2"),
        *("--blacklist-cooldown-range", "2", "30", "--network-interfaces=eth0", "--max-num-proc=3", "x"),
    )


def test_what_the_user_says_of_interfaces_minimum_and_cooldown_stands() -> None:
    line = "-np 2 --min-np 1 --blacklist-cooldown-range 5 9 --network-interface ib0 x"
    assert horovod_agent.elastic(("h",), split_command(shlex.split(line)), "/s", 2, ("eth0",)) == (
        *("h", "--num-proc=2", "--host-discovery-script=/s", "--disable-cache", "--min-num-proc=1"),
        *("--blacklist-cooldown-range", "5", "9", "--network-interface=ib0", "x"),
    )


def test_the_script_always_tells_slots_as_horovod_fails_without() -> None:
    assert horovod_agent.horovod_slots((Member("a", 2), Member("b"))) == "a:2\nb:1\n"


def test_only_allowed_variables_go_into_command_lines() -> None:
    given = {"A": "1", "TOKEN": "x", "PATH": "/bin", "HOSTNAME": "launcher", "TRAINER_LAUNCH_MPI_RUN": "{}"}
    told = horovod_agent.horovod_env(given, ("A", "PATH", "GONE", "HOSTNAME", "TRAINER_LAUNCH_MPI_RUN"), "/ours")
    assert told == {"A": "1", "PATH": "/ours:/bin", "PYTHONUNBUFFERED": "1"}


# -- what it says -----------------------------------------------------------------------------


def test_the_first_rank_that_fails_is_the_cause_in_a_static_job() -> None:
    heard = said("[1]<stdout>:bye", "Process 1 exit with status code 42.", "Process 0 exit with status code 143.")
    assert (heard.rank, heard.exit_code, heard.signal) == (1, 42, None)


def test_a_rank_that_died_of_a_signal_is_told_so() -> None:
    heard = said("Process 3 exit with status code 137.")
    assert (heard.rank, heard.exit_code, heard.signal) == (3, None, 9)


def test_of_an_elastic_job_the_last_failure_counts_but_not_who_was_ended_for_it() -> None:
    lines = ("Process 1 exit with status code 7.", "Process 0 exit with status code 3.", "Process name: w-0[0]")
    heard = said(*lines, "Process 2 exit with status code 255.", is_elastic=True)
    assert (heard.rank, heard.exit_code, heard.host) == (0, 3, "w-0")


def test_an_ssh_that_lost_its_host_is_no_failure_of_the_rank() -> None:
    heard = said("[1]<stderr>:Connection to w-1 closed by remote host.", "Process 1 exit with status code 255.")
    assert heard.rank is None
    assert heard.words == "Connection to w-1 closed by remote host."


def test_a_rank_may_end_with_255_by_itself() -> None:
    assert said("Process 1 exit with status code 255.").exit_code == 255


@pytest.mark.parametrize(
    ("line", "host"),
    [("ssh not successful for host w-1:", "w-1"), ("Timed out waiting for minimum number of slots", "")],
)
def test_hosts_that_horovod_could_not_reach_are_heard(line: str, host: str) -> None:
    assert said(line).unreached == host


@pytest.mark.parametrize(
    "line",
    [
        "[0]<stdout>:Process 1 exit with status code 7.",
        "[0]<stdout>:Timed out waiting for a miracle",
        "[0]<stdout>:ssh not successful for host x:",
        "Process 1 exit",
        "x" * 100_000,
        "",
    ],
)
def test_what_ranks_print_is_not_believed(line: str) -> None:
    assert said(line) == Said()
