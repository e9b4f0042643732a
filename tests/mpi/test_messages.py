"""What real mpiruns print when a job ends, and what it is taken for."""

from __future__ import annotations

import pytest

from trainer_launch.model import Death
from trainer_launch.mpi.mpirun_command import INTEL, MPICH, OPEN_MPI, Dialect, recognised
from trainer_launch.mpi.mpirun_messages import MpirunEnd, MpirunReport, death_of, first_failure, with_line

# As they were printed by Open MPI 4.1.4 and 5.0.11, and MPICH 4.0.2; Intel's from its developer guide.
EXIT_4 = """
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[40304,1],1]
  Exit code:    7
"""
EXIT_5 = EXIT_4.replace("[[40304,1],1]", "[prterun-launcher-1@1,3]")
KILLED_4 = "mpirun noticed that process rank 1 with PID 222 on node job-node-0-1.job exited on signal 9 (Killed)."
KILLED_5 = """
prterun noticed that process rank 1 with PID 130 on node job-node-0-1 exited on
signal 9 (Killed).
"""
CUT_OFF_5 = """
[job-node-0-2.job:00000] *** An error occurred in Socket closed
[job-node-0-2.job:00000] *** reported by process [2580873217,2]
[job-node-0-2.job:00000] *** on a NULL communicator
[job-node-0-2.job:00000] *** Unknown error
prterun has exited due to process rank 2 with PID 15 on node job-node-0-2.job calling
"abort". This may have caused other processes in the application to be
"""
LOST_4 = """
ORTE has lost communication with a remote daemon.

  HNP daemon   : [[40304,0],0] on node launcher
  Remote daemon: [[40304,0],2] on node job-node-0-1

This is usually due to either a failure of the TCP network
"""
LOST_5 = """
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-launcher-1@0,0] on node launcher
  Remote daemon: [prterun-launcher-1@0,2] on node job-node-0-1
"""
MPICH_KILLED = """
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 4711 RUNNING AT job-worker-1.job
=   EXIT CODE: 9
=   CLEANING UP REMAINING PROCESSES
===================================================================================
YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)
"""
MPICH_EXIT = "=   PID 4711 RUNNING AT job-worker-1.job\n=   EXIT CODE: 42\n"
MPICH_CUT = "=   PID 4711 RUNNING AT job-worker-1.job\n=   EXIT CODE: 9\n"
INTEL_KILLED = "=   RANK 3 PID 4711 RUNNING AT job-worker-1\n=   KILLED BY SIGNAL: 11 (Segmentation fault)\n"
REFUSED = "ssh: connect to host job-node-0-2 port 2222: Connection refused"
DENIED = "mpiuser@job-node-0-2: Permission denied (publickey)."


def said(text: str) -> MpirunReport:
    result = MpirunReport()
    for line in text.splitlines():
        result = with_line(result, line)
    return result


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (EXIT_4, MpirunReport(rank=1, exit_code=7)),
        (EXIT_4.replace(",1],1]", ",1],0]"), MpirunReport(rank=0, exit_code=7)),
        (EXIT_5, MpirunReport(rank=3, exit_code=7)),
        (KILLED_4, MpirunReport(rank=1, signal=9, host="job-node-0-1.job")),
        (KILLED_5, MpirunReport(rank=1, signal=9, host="job-node-0-1")),
        (MPICH_KILLED, MpirunReport(signal=9, host="job-worker-1.job")),
        (MPICH_CUT, MpirunReport(signal=9, host="job-worker-1.job")),
        (MPICH_EXIT, MpirunReport(exit_code=42, host="job-worker-1.job")),
        (INTEL_KILLED, MpirunReport(rank=3, signal=11, host="job-worker-1")),
        ("MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD", MpirunReport(rank=2)),
        ("Abort(70897423) on node 2 (rank 2 in comm 0): Fatal error in internal_Init_thread", MpirunReport(rank=2)),
        ("mpirun was unable to find the specified executable file, and therefore", MpirunReport(exit_code=127)),
        ("launch.c:73): execvp error on file nope (No such file or directory)", MpirunReport(exit_code=127)),
        ("nothing of note", MpirunReport()),
        (CUT_OFF_5, MpirunReport(cut_off=True)),
    ],
)
def test_the_first_failed_rank_is_found(text: str, expected: MpirunReport) -> None:
    assert said(text) == expected


@pytest.mark.parametrize("text", [LOST_4, LOST_5])
def test_a_lost_host_is_found(text: str) -> None:
    assert said(text).lost == "job-node-0-1"


@pytest.mark.parametrize(
    "line", ["Connection to job-node-0-1 closed by remote host.", "Timeout, server job-node-0-1 not responding."]
)
def test_an_ssh_that_lost_its_host_says_so(line: str) -> None:
    assert said(line).lost == "job-node-0-1"


@pytest.mark.parametrize("text", [REFUSED, DENIED])
def test_a_host_that_no_daemon_could_be_started_on_is_found_with_sshs_own_words(text: str) -> None:
    found = said(text)
    assert found.unreached == "job-node-0-2"
    assert found.words in text


LOST_DAEMON = """PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-job-launcher-0-0-12@0,0] on node job-launcher-0-0
  Remote daemon: [prterun-job-launcher-0-0-12@0,3] on node job-node-0-2.job
"""


def test_a_host_that_ssh_could_not_log_in_to_is_not_lost_when_open_mpi_5_calls_it_so() -> None:
    assert said(LOST_DAEMON).lost == "job-node-0-2.job"
    refused = said(f"Host key verification failed.\n{LOST_DAEMON}")
    assert refused == MpirunReport(unreached="job-node-0-2.job", words="Host key verification failed.")


@pytest.mark.parametrize(
    "line",
    [
        "Exit code: 0",
        "Exit code: 256",
        "Exit code: 7",
        "  Exit code:    " + "9" * 300,
        "=   EXIT CODE: 0",
        "=   KILLED BY SIGNAL: 0",
        "=   KILLED BY SIGNAL: 99999",
    ],
)
def test_what_a_rank_prints_makes_no_success_of_a_failure(line: str) -> None:
    assert MpirunEnd(Death(code=3), said(line)).code == 3
    assert said(f"{line}\n{EXIT_5}") == MpirunReport(rank=3, exit_code=7)


def test_the_first_failure_stands() -> None:
    assert said(f"{KILLED_4}\n{KILLED_4.replace('rank 1', 'rank 0')}").rank == 1


def test_who_only_lost_another_rank_is_not_named_and_its_code_is_not_the_jobs() -> None:
    """Open MPI 5 may tell the end of such a rank, and of nobody else."""
    end = MpirunEnd(Death(code=14), MpirunReport(rank=2, exit_code=14, host="a", cut_off=True))
    death = death_of(first_failure(end), 1)
    assert (death.exit_code, death.rank, death.reason) == (138, None, "PeerLost")
    assert "mpirun does not say which" in str(death.message)


@pytest.mark.parametrize(
    ("code", "said", "lines"),
    [
        (7, MpirunReport(rank=1, exit_code=7, cut_off=True), ()),
        (14, MpirunReport(rank=1, exit_code=14), ()),
        (137, MpirunReport(rank=1, signal=9, cut_off=True), ()),
        (14, MpirunReport(rank=1, exit_code=14, cut_off=True), ("ValueError: no such shard",)),
    ],
)
def test_who_has_failed_by_itself_is_named_also_if_others_lost_it(
    code: int, said: MpirunReport, lines: tuple[str, ...]
) -> None:
    death = death_of(first_failure(MpirunEnd(Death(code=code), said, lines)), 1)
    assert (death.exit_code, death.rank) == (code, 1)


def test_an_mpirun_that_was_killed_itself_is_told_so() -> None:
    death = death_of(MpirunEnd(Death(process="mpirun", signal=9), MpirunReport()), 1)
    assert (death.process, death.rank, death.signal, death.exit_code) == ("mpirun", None, 9, 137)


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("mpirun (Open MPI) 4.1.4\n", Dialect(OPEN_MPI, 4)),
        ("mpirun.openmpi (OpenRTE) 4.1.4\n", Dialect(OPEN_MPI, 4)),
        ("mpirun (Open MPI) 5.0.11\n", Dialect(OPEN_MPI, 5)),
        ("prterun (PRRTE) 3.0.8\n", Dialect(OPEN_MPI, 5)),
        ("HYDRA build details:\n    Version:                                 4.0.2\n", Dialect(MPICH)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\n", Dialect(INTEL)),
        ("usage: mpirun [-h]", None),
    ],
)
def test_an_mpirun_is_known_by_what_it_says_of_its_version(text: str, dialect: Dialect | None) -> None:
    assert recognised(text) == dialect


REFUSALS = (  # what it prints, and what is told of it
    (
        SLOTS := "There are not enough slots available in the system to satisfy the 4\nslots that were requested",
        SLOTS,
    ),
    ('mpirun.openmpi: Error: unknown option "--foo"\nType for usage.', 'unknown option "--foo"'),
    ('mpirun: Error: option "-np" did not have enough parameters (1)', 'option "-np"'),
    ("An unrecognized option was included on the mpirun command line:\n  Option: --foo", "Option: --foo"),
    (
        "Open MPI has detected that a parameter given to a command line\noption does not match the\n  Param:  two",
        "two",
    ),
    ("The specified mapby directive is not recognized:\n  Directive: bogus", "Directive: bogus"),
    ("PRTE was unable to open the hostfile:\n   /nosuch", "/nosuch"),
    ("Open RTE detected a parse error in the hostfile:\n    hosts\nIt occured on line number 1", "line number 1"),
    ("A request was made to bind that would require binding\nprocesses to more cpus than are there", "more cpus"),
    ("mpirun has detected an attempt to run as root.", "run as root"),
    (
        "Sorry!  You were supposed to get help about:\n    a:b\nBut I couldn't open the help file:\n    /x/h",
        "file: /x/h",
    ),
    (
        "A requested component was not found, or was unable to be opened\na\nb\nc\nd\nFramework: plm\nComponent: x",
        "d Framework: plm Component: x",
    ),
    ("[mpiexec@vm] match_arg (utils/args/args.c:163): unrecognized argument foo\n[mpiexec@vm] main (a): x", "foo"),
    ("[mpiexec@vm] HYDU_create_proxy_list (utils/alloc/alloc.c:436): Missing executable.", "Missing executable"),
    ('[proxy:0:0@vm] get_hw_obj_list (topo_hwloc.c:354): unrecognized directive "bogus"', '"bogus"'),
)


def death_with(text: str, *, is_hydras: bool) -> Death:
    said, lines = MpirunReport(), text.splitlines()
    for line in lines:
        said = with_line(said, line)
    return death_of(MpirunEnd(Death(process="mpirun", code=213), said, tuple(lines), is_hydras), 1)


@pytest.mark.parametrize(("text", "words"), REFUSALS)
def test_what_mpirun_refuses_is_its_own_fault_and_quoted(text: str, words: str) -> None:
    death = death_with(text, is_hydras=text.startswith("["))
    assert death.reason == "Misconfigured"
    assert " ".join(words.split()) in str(death.message)


@pytest.mark.parametrize(("text", "words"), REFUSALS)
def test_a_rank_that_prints_the_same_has_failed_by_itself(text: str, words: str) -> None:
    is_hydras = text.startswith("[")
    assert death_with(text, is_hydras=not is_hydras).reason is None, "another implementation has other words"
    of_open_mpi = "  Process name: [[1,1],3]", "Primary job  terminated normally, but 1 process returned"
    for end in ("=   RANK 3 PID 7 RUNNING AT a",) if is_hydras else of_open_mpi:
        assert death_with(f"{text}\n{end}\n", is_hydras=is_hydras).reason is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("prterun was unable to launch the specified application as it could not\naccess an executable:", 126),
        ("mpirun was unable to launch the specified application as it could not\nchange to the specified dir", 126),
        ('PRTE tried to fork a new process via the "execve" system call but\nfailed.\n  Error:  Exec format', 126),
        ("[proxy:0:0@vm] HYDU_create_process (launch.c:73): execvp error on file ./x (Exec format error)", 126),
        ("[proxy:0:0@vm] HYDU_create_process (launch.c:73): execvp error on file ./x (No such file or dir)", 127),
        ("[proxy:0:0@vm] launch_procs (pmip_cb.c:621): unable to change wdir to /nosuch (No such file)", 126),
    ],
)
def test_a_program_that_no_rank_can_execute_ends_with_the_shells_code(text: str, code: int) -> None:
    death = death_with(text, is_hydras=text.startswith("["))
    assert (death.reason, death.exit_code) == ("NotRunnable", code)
    assert str(death.message).startswith(text.split("\n")[0][:40])
