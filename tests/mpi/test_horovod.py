"""horovodrun's command line as we write it, the ssh that it finds, and what is heard of its words."""

from __future__ import annotations

import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.launching import program
from tests.planning.requests import request
from trainer_launch.model import Job, Member, NodeRange
from trainer_launch.mpi import hosted_program
from trainer_launch.mpi.hosted_program import Horovodrun
from trainer_launch.mpi.mpi_job import Preparation, prepared
from trainer_launch.mpi.mpirun_messages import MpirunReport, with_line_of_horovod
from trainer_launch.planning import engines, mpi_options


def said(*lines: str, is_elastic: bool = False) -> MpirunReport:
    it = MpirunReport()
    for line in lines:
        it = with_line_of_horovod(it, line, is_elastic=is_elastic)
    return it


def elastic(line: str) -> str:
    typed = mpi_options.parse(shlex.split(f"horovodrun {line} x"))
    return shlex.join(hosted_program.elastic_options(typed, 2, "/s", "eth0"))


def test_a_static_command_has_the_hosts_of_now_and_none_where_it_runs_here() -> None:
    hosts = hosted_program.with_slots((Member("w-0", 2), Member("w-1")))
    assert hosted_program.static_options(3, hosts) == ("--num-proc=3", "--hosts=w-0:2,w-1:1", "--disable-cache")
    assert hosted_program.static_options(3, ()) == ("--num-proc=3", "--disable-cache")


def test_an_elastic_command_asks_our_script_and_takes_hosts_back() -> None:
    assert elastic("-np 2 --max-np 3 --host-discovery-script ./mine") == (
        "--num-proc=2 --host-discovery-script=/s --disable-cache --min-num-proc=2 "
        "--blacklist-cooldown-range 2 30 --network-interfaces=eth0"
    )


def test_what_the_user_says_of_interfaces_minimum_and_cooldown_stands() -> None:
    line = "-np 2 --min-np 1 --blacklist-cooldown-range 5 9 --network-interface ib0"
    assert elastic(line) == "--num-proc=2 --host-discovery-script=/s --disable-cache"


def test_only_allowed_variables_go_into_command_lines() -> None:
    given = {"A": "1", "TOKEN": "x", "PATH": "/bin", "HOSTNAME": "launcher", "TRAINER_LAUNCH_GRACE": "5"}
    told = hosted_program.horovod_env({**given, "TRAINER_LAUNCH_MPI_RUN": "mark"}, (), "/ours")
    assert told == {"A": "1", "PATH": "/ours:/bin", "PYTHONUNBUFFERED": "1", "TRAINER_LAUNCH_MPI_RUN": "mark"}
    assert hosted_program.horovod_env(given, ("TOKEN",), "/ours")["TOKEN"] == "x"


def preparation(folder: Path, line: str) -> Preparation:
    """horovodrun before its first start; its real ssh shows its arguments."""
    program(folder / "ssh", "echo $@")
    task = request(
        line, Job(contract="c", nodes=NodeRange(1, 1)), {"PATH": f"{folder}:/usr/bin:/bin"}, scratch=str(folder)
    )
    return prepared(task, engines.plan(task).processes[0])


def made(folder: Path, line: str) -> Horovodrun:
    return preparation(folder, line).program  # type: ignore[return-value]


def test_threads_look_at_the_hosts_while_the_rest_of_the_launcher_is_loaded(tmp_path: Path) -> None:
    probes = preparation(tmp_path, "horovodrun -np 2 -p 2022 -H a.invalid:1,b.invalid:1 x").probes
    assert set(probes.readiness) == {"a.invalid", "b.invalid"}
    assert probes.due_s is None, "an attempt is under way for each"


def test_an_elastic_job_begins_with_the_processes_asked_for_and_goes_on_with_the_least(tmp_path: Path) -> None:
    program = made(tmp_path, "horovodrun -np 4 --min-np 2 -H a:2,b:2,c:2 x")
    assert (program.first_hosts, program.least_hosts, program.adds_hosts) == (2, 1, True)


def test_the_ssh_that_horovodrun_finds_begins_nothing_once_the_job_is_asked_to_stop(tmp_path: Path) -> None:
    program = made(tmp_path, "horovodrun -np 1 -p 2022 -H a.invalid:1 x")
    ssh = program.process((), (), 1, {}).env["PATH"].partition(":")[0] + "/ssh"
    words = (ssh, "-o", "StrictHostKeyChecking=no", "a.invalid", "true")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "-p 2022 -o StrictHostKeyChecking=no a.invalid true\n")
    program.stopping()
    assert subprocess.run(words, timeout=60).returncode == 143


def test_a_start_looks_no_names_up_because_a_dead_name_server_would_hold_the_launcher_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = made(tmp_path, "horovodrun -np 1 --min-np 1 -H a.invalid:1 x")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("looked a name up"))
    argv = program.process((Member("a.invalid", 1),), (), 1, {"a.invalid": "127.0.0.1"}).argv
    assert "--network-interfaces=lo" in argv


@pytest.mark.parametrize(("ended", "code", "number"), [(42, 42, None), (137, None, 9)])
def test_the_first_rank_that_fails_is_the_cause_in_a_static_job(
    ended: int, code: int | None, number: int | None
) -> None:
    lines = (
        f"Process 1 exit with status code {ended}.",
        "Process 0 exit with status code 143.",
    )
    heard = said("[1]<stdout>:bye", *lines)
    assert (heard.rank, heard.exit_code, heard.signal) == (1, code, number)


def test_of_an_elastic_job_the_last_failure_counts_but_not_who_was_ended_for_it() -> None:
    lines = ("Process 1 exit with status code 7.", "Process 0 exit with status code 3.")
    heard = said(*lines, "Process 2 exit with status code 255.", is_elastic=True)
    assert (heard.rank, heard.exit_code) == (0, 3)
    heard = said(
        *lines, "Process 0 exit with status code 137.", "Process 2 exit with status code 143.", is_elastic=True
    )
    assert (heard.rank, heard.exit_code, heard.signal) == (0, None, 9)


def test_a_host_that_an_elastic_job_went_on_without_is_not_the_cause_of_its_end() -> None:
    survived = (
        "[2]<stderr>:ssh: connect to host w-2 port 22: Connection refused",
        "[1]<stderr>:Connection to w-1 closed by remote host.",
        "Process 1 exit with status code 255.",
    )
    assert said(*survived, is_elastic=True).rank is None
    heard = said(*survived, "Process 0 exit with status code 42.", is_elastic=True)
    assert heard == MpirunReport(rank=0, exit_code=42)


@pytest.mark.parametrize("is_elastic", [False, True])
def test_an_ssh_that_lost_its_host_is_no_failure_of_the_rank(is_elastic: bool) -> None:
    lines = "[1]<stderr>:Connection to w-1 closed by remote host.", "Process 1 exit with status code 255."
    assert said(*lines, is_elastic=is_elastic) == MpirunReport(lost="w-1")


@pytest.mark.parametrize(
    "words",
    [
        "client_loop: send disconnect: Broken pipe",
        "Connection reset by 10.0.0.2 port 22",
        "Connection closed by 10.0.0.2 port 22",
    ],
)
def test_an_ssh_that_names_no_host_is_no_failure_of_the_rank(words: str) -> None:
    assert said(f"[1]<stderr>:{words}", "Process 1 exit with status code 255.") == MpirunReport(words=words)


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
        "Process 3 exit with status code 0.",
        "Process 3 exit with status code 256.",
        "x" * 100_000,
        "",
    ],
)
def test_what_ranks_print_is_not_believed(line: str) -> None:
    assert said(line) == MpirunReport()
