"""What becomes of an MPI job: hosts come and go, ranks fail, somebody asks to stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.mpi.jobs import Life, MpiRun, loses, rank_1, unreached
from tests.supervisor.fakes import Program, failure_of
from trainer_launch.model import Verdict
from trainer_launch.mpi.mpi_job import END_S, MAX_EARLY
from trainer_launch.supervisor import outcome

INT, TERM = int(signal.SIGINT), int(signal.SIGTERM)
ENDS = Life(Program(ends_s=60.0))
STUBBORN = Program(term_s=None)


def test_on_one_node_mpirun_starts_at_once_and_the_job_ends_with_it(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "", ENDS)
    job.hosts.has_list = False
    job.system.at(60.0, lambda: job.program.hear("mpirun", 2, b""))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert (job.system.starts("mpirun"), job.system.clock_s) == ([0.0], 60.0)


def test_hosts_that_never_come_end_the_job_with_138_and_where_each_is_stuck(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", away="b", wait_timeout=30.0)
    failure = failure_of(job.run())
    assert (failure.exit_code, failure.reason) == (138, "PeerLost")
    assert failure.message == "1 of 2 hosts ready; missing: b: port: Connection refused"
    assert job.system.clock_s == 30.0


def test_with_a_minimum_it_goes_on_with_fewer_after_a_patience(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = MpiRun(tmp_path, "a b c", ENDS, away="b", min_hosts=2, shrink_after=10.0)
    job.run()
    assert (job.starts, job.system.starts("mpirun")) == (["a c"], [10.0])
    assert "without b" in caplog.text


def test_a_failed_rank_costs_one_restart_of_the_whole_jobs_budget(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", rank_1(7), rank_1(7), rank_1(9), restarts=2)
    ended = job.run()
    assert job.starts == ["a b"] * 3
    failure = failure_of(ended)
    assert (failure.exit_code, failure.rank) == (9, 1)
    assert failure_of(outcome.placed(ended, None, "launcher")).host is None, "the launcher's pod is not accused"
    assert failure.message == "rank 1 ended with exit code 9", "mpirun's own words are no error of the rank"
    assert "the restart budget is used up (2 restarts)" in failure.evidence[-1]


@pytest.mark.parametrize(
    ("code", "lines", "lasts_s", "starts"),
    [
        (1, "SyntaxError: invalid syntax (train.py, line 3)", 1.0, 1),
        (1, "ModuleNotFoundError: No module named 'nope'", 1.0, 2),
        (2, "train.py: error: unrecognized arguments: --lrr", 1.0, 1),
        (2, "data server is busy", 1.0, 4),
        (127, "sh: 1: dvc: not found", 1.0, 4),
        (1, "SyntaxError: invalid syntax (train.py, line 3)", 36_000.0, 4),
    ],
)
def test_what_fails_the_same_way_each_time_is_not_started_again_unless_it_does_hours_later(
    tmp_path: Path, code: int, lines: str, lasts_s: float, starts: int
) -> None:
    job = MpiRun(tmp_path, "a b", *[rank_1(code, lines, after_s=lasts_s)] * 4)
    assert failure_of(job.run()).exit_code == code
    assert len(job.starts) == starts


SLOTS = (
    "There are not enough slots available in the system to satisfy the 4",
    "slots that were requested by the application:",
    "",
    "  ./hello.sh",
    "-" * 74,
)


def test_what_mpirun_refuses_itself_is_misconfigured_and_not_tried_again(tmp_path: Path) -> None:
    text = "".join(f"{line}\n" for line in SLOTS)
    job = MpiRun(tmp_path, "a b", *[Life(Program(ends_s=0.1, code=213), text)] * 4)
    failure = failure_of(job.run())
    assert len(job.starts) == 1
    assert (failure.reason, failure.exit_code, failure.restart_helps) == ("Misconfigured", 2, False)
    assert failure.message.startswith(
        f"mpirun: {' '.join(SLOTS[:2])} ./hello.sh (2 hosts with 2 slots); lower -np, "
    )


def test_a_rank_that_only_prints_what_mpirun_says_is_a_failed_rank(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", *[rank_1(1, *SLOTS)] * 4)
    assert failure_of(job.run()).reason == "Failed"
    assert len(job.starts) == 4


def test_a_program_that_mpirun_cannot_find_is_not_tried_again(tmp_path: Path) -> None:
    text = (
        "mpirun was unable to launch the specified application as it could not access\n"
        "or execute an executable:\n\nExecutable: ./nosuch\nNode: vm\n"
    )
    job = MpiRun(tmp_path, "a b", *[Life(Program(ends_s=0.1, code=1), text)] * 4)
    failure = failure_of(job.run())
    assert (failure.reason, failure.exit_code, len(job.starts)) == ("NotRunnable", 126, 1)
    assert failure.message.endswith("could not access or execute an executable: Executable: ./nosuch Node: vm")


def test_a_hang_costs_a_restart_and_at_last_ends_the_job(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", Life(), Life(), restarts=1, hangs=(30.0, 60.0))
    failure = failure_of(job.run())
    assert (failure.reason, failure.exit_code, failure.message) == ("Hung", 138, "rank 1 hangs")
    assert (job.asked(TERM), len(job.starts)) == ([30.0, 60.0], 2)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_hang_that_ends_the_job_stays_its_end_when_it_is_asked_to_stop_then(
    tmp_path: Path, restarts: int
) -> None:
    """A job that would have started again has stopped."""
    job = MpiRun(tmp_path, "a b", Life(STUBBORN), restarts=restarts, hangs=(30.0,))
    job.system.signalled(31.0, TERM)
    ended = job.run()
    assert (ended.verdict, len(job.starts)) == (Verdict.STOPPED if restarts else Verdict.FAILED, 1)
    assert restarts or failure_of(ended).message == "rank 1 hangs"


def test_a_lost_host_is_waited_for_and_costs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = MpiRun(tmp_path, "a b", loses("b"), ENDS, restarts=0)
    job.system.at(59.0, lambda: job.hosts.leave("b")).at(90.0, lambda: job.hosts.come("b"))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert (job.starts, job.system.starts("mpirun")) == (["a b", "a b"], [0.0, 90.0])
    assert "b is lost" in caplog.text


def test_an_mpirun_that_ends_with_0_because_it_lost_a_host_has_not_succeeded(tmp_path: Path) -> None:
    """As Open MPI 5 does."""
    job = MpiRun(tmp_path, "a b", loses("b", program=Program(ends_s=60.0)), ENDS)
    job.system.at(59.0, lambda: job.hosts.leave("b")).at(90.0, lambda: job.hosts.come("b"))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert job.system.starts("mpirun") == [0.0, 90.0]


def test_nor_is_it_started_again_after_a_request_to_stop(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", loses("b", program=Program(ends_s=60.0)), ENDS)
    job.system.at(59.0, lambda: job.hosts.leave("b")).signalled(60.2, TERM)
    assert (job.run().verdict, len(job.starts)) == (Verdict.STOPPED, 1)


def test_a_rank_that_fails_because_another_host_went_away_costs_nothing(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", rank_1(1), ENDS, restarts=0)
    job.system.at(59.0, lambda: job.hosts.leave("b")).at(90.0, lambda: job.hosts.come("b"))
    assert job.run().verdict is Verdict.SUCCEEDED


def test_with_a_minimum_the_rest_goes_on_and_the_lost_host_has_to_show_that_it_is_there_again(
    tmp_path: Path,
) -> None:
    """mpirun itself has named it, so nobody has asked it: what was seen of it is from before its loss."""
    job = MpiRun(tmp_path, "a b c", loses("b"), ENDS, min_hosts=2, shrink_after=0.0)
    job.system.at(59.0, lambda: job.hosts.leave("b"))
    job.run()
    assert job.starts == ["a b c", "a c"]
    assert job.did("look afresh")[-1][1:] == ("b",)


@pytest.mark.parametrize(
    ("lost", "back", "says"),
    [
        ("b.domain", "", "b did not come back: 2 of 3 hosts ready; missing: b: port"),
        ("b", "b", "2 of 3 hosts ready; missing: c: port"),
    ],
)
def test_a_lost_host_that_stays_away_ends_the_job_with_138_and_its_name(
    tmp_path: Path, lost: str, back: str, says: str
) -> None:
    job = MpiRun(tmp_path, "a b c", loses(lost), wait_timeout=20.0)
    away = ("b", "c") if back else ("b",)
    job.system.at(59.0, lambda: job.hosts.leave(*away)).at(70.0, lambda: job.hosts.come(*back.split()))
    failure = failure_of(job.run())
    assert failure.exit_code == 138
    assert failure.message.startswith(says)


def test_an_mpirun_that_does_not_end_its_ranks_is_killed_and_its_hosts_are_swept(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", loses("b", program=STUBBORN), ENDS)
    job.run()
    assert job.killed_at == [pytest.approx(60.0 + END_S, abs=0.1)]
    assert job.did("sweep") == [(pytest.approx(64.0, abs=0.1), "a")]
    assert len(job.starts) == 2


def test_a_sweep_that_hangs_delays_the_next_start_by_seconds_only(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", loses("b", program=STUBBORN), ENDS)
    job.hosts.hanging = {"a"}
    assert job.run().verdict is Verdict.SUCCEEDED
    assert job.system.starts("mpirun")[1] < 75.0


def test_beside_an_mpirun_that_outlives_sigkill_nothing_is_started(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", loses("b", program=Program(term_s=None, is_stuck=True)))
    ended = job.run()
    assert failure_of(ended).exit_code == 138
    assert "mpirun" in failure_of(ended).message
    assert ended.survivors
    assert (len(job.starts), job.system.clock_s < 90.0) == (1, True)


def test_a_hang_of_what_outlives_sigkill_is_told_as_a_hang_and_restarts_nothing(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", Life(program=Program(term_s=None, is_stuck=True)), restarts=1, hangs=(30.0,))
    failure = failure_of(job.run())
    assert (failure.reason, failure.exit_code, failure.message) == ("Hung", 138, "rank 1 hangs")
    assert "did not end after SIGKILL" in failure.evidence[-1]
    assert len(job.starts) == 1


def test_an_mpirun_that_does_not_care_for_a_lost_host_is_told_to_end_its_ranks(tmp_path: Path) -> None:
    """As Hydra: only its ssh says so."""
    job = MpiRun(tmp_path, "a b", Life(), ENDS)
    job.program.ends_itself = False
    timeout = b"Timeout, server b not responding.\n"
    job.system.at(29.0, lambda: job.hosts.leave("b")).at(30.0, lambda: job.program.hear("mpirun", 2, timeout))
    job.system.at(90.0, lambda: job.hosts.come("b"))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert job.asked(TERM) == [30.0]


def test_a_job_that_never_lasts_ends_though_losses_cost_nothing(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", *[loses("b", after_s=1.0)] * MAX_EARLY)
    failure = failure_of(job.run())
    assert failure.exit_code == 138
    assert f"{MAX_EARLY} starts in a row" in failure.message


DENIED = "b: Permission denied (publickey)."


def test_where_no_daemon_could_be_started_all_hosts_have_to_let_us_in_first(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", unreached(DENIED), wait_timeout=60.0)
    job.system.at(0.5, lambda: setattr(job.hosts, "_away", {"b"}))
    job.hosts.gone = lambda hosts: {}  # type: ignore[method-assign]
    assert failure_of(job.run()).exit_code == 138
    assert (job.hosts.checks_keys, len(job.starts)) == (True, 1)
    assert job.did("look afresh")[-1][1:] == ("a", "b")


def test_daemons_that_take_long_to_fail_are_not_started_for_ever(tmp_path: Path) -> None:
    """As where a firewall swallows what they send home."""
    job = MpiRun(tmp_path, "a b", *[unreached("ORTE has lost communication", 130.0)] * MAX_EARLY)
    assert failure_of(job.run()).exit_code == 138
    assert len(job.starts) == MAX_EARLY


def test_hosts_that_come_later_are_gathered_and_let_in_with_one_new_start_that_costs_nothing(
    tmp_path: Path,
) -> None:
    job = MpiRun(tmp_path, "a b", Life(), ENDS, min_hosts=1, restarts=0)
    job.system.at(30.0, lambda: job.hosts.list("a", "b", "c", "d"))
    job.hosts.leave("d")
    job.system.at(32.0, lambda: job.hosts.come("d"))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert job.starts == ["a b", "a b c d"]
    assert job.asked(TERM) == [33.0]


def test_a_host_that_leaves_the_list_is_gone_on_without(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b c", Life(), ENDS, min_hosts=1)
    job.system.at(30.0, lambda: job.hosts.list("a", "c"))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert job.starts == ["a b c", "a c"]


def elastic(folder: Path, names: str, *lives: Life, away: str = "") -> MpiRun:
    job = MpiRun(folder, names, *lives, away=away, restarts=3, shrink_after=0.0)
    job.program.adds_hosts, job.program.first_hosts, job.program.least_hosts = True, 2, 1
    return job


def test_the_first_start_waits_for_the_processes_asked_for_and_later_ones_for_the_minimum(tmp_path: Path) -> None:
    job = elastic(tmp_path, "a b c", loses("b"), ENDS, away="b c")
    job.system.at(20.0, lambda: job.hosts.come("b")).at(50.0, lambda: job.hosts.leave("b"))
    job.run()
    assert (job.starts, job.system.starts("mpirun")[0]) == (["a b", "a"], 23.0)


def test_hosts_that_come_or_go_while_it_runs_are_its_own_affair(tmp_path: Path) -> None:
    job = elastic(tmp_path, "a b", ENDS)
    job.system.at(20.0, lambda: job.hosts.list("a", "b", "c")).at(40.0, lambda: job.hosts.list("a", "c"))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert (job.asked(TERM), job.starts) == ([], ["a b"])


def test_a_host_that_it_has_lost_has_to_show_that_it_is_there_before_it_is_offered_again(tmp_path: Path) -> None:
    job = elastic(tmp_path, "a b", ENDS)
    job.system.at(20.0, lambda: job.program.hear("mpirun", 2, b"Timeout, server b not responding.\n"))
    assert job.run().verdict is Verdict.SUCCEEDED
    assert (job.asked(TERM), job.did("look afresh")[-1]) == ([], (20.0, "b"))


def test_ranks_are_told_first_then_mpirun_then_nobody_is_asked(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", Life(STUBBORN), grace=20.0)
    job.system.signalled(10.0, TERM)
    ended = job.run()
    assert (ended.verdict, ended.stop_signal) == (Verdict.STOPPED, TERM)
    assert job.did("tell") == [(10.0, "a", "b", "TERM")]
    assert job.asked(TERM) == [24.0]
    assert job.killed_at == [30.0]
    assert job.did("sweep"), "mpirun was killed, and ranks may be left"


@pytest.mark.parametrize(
    "at_s",
    [0.5, 60.05, 60.0 + END_S + 0.05, 65.0, 80.0],
    ids=[
        "while it trains",
        "while it is ended",
        "during the final kills",
        "while hosts are swept",
        "while it waits",
    ],
)
@pytest.mark.parametrize("signals", ["", "TERM=drain"])
def test_a_request_to_stop_is_never_lost_whatever_goes_on(tmp_path: Path, at_s: float, signals: str) -> None:
    """b is lost at 60 s, mpirun is killed 4 s later, and a sweep of its hosts hangs."""
    job = MpiRun(tmp_path, "a b", loses("b", program=STUBBORN), signals=signals, wait_timeout=100.0, grace=300.0)
    job.hosts.hanging = {"a"}
    job.system.at(59.0, lambda: job.hosts.leave("b")).signalled(at_s, TERM)
    job.system.at(90.0, lambda: job.hosts.come("b"))
    ended = job.run()
    assert (ended.verdict, ended.stop_signal) == (Verdict.STOPPED, TERM)
    assert len(job.starts) == 1


def test_what_has_succeeded_before_it_is_asked_to_stop_has_succeeded(tmp_path: Path) -> None:
    child = Program(ends_s=62.0)
    job = MpiRun(tmp_path, "a b", Life(Program(ends_s=60.0, leaves=(child,))))
    job.system.signalled(60.02, TERM)
    assert job.run().verdict is Verdict.SUCCEEDED


def test_ranks_that_drain_have_no_deadline_and_are_not_started_again(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", rank_1(7, after_s=7200.0), signals="TERM=drain")
    job.system.signalled(10.0, TERM)
    ended = job.run()
    assert (ended.verdict, ended.stop_signal) == (Verdict.STOPPED, TERM)
    assert job.did("tell") == [(10.0, "a", "b", "TERM")]
    assert (len(job.starts), job.asked(TERM), job.system.clock_s > 7200) == (1, [], True)


@pytest.mark.parametrize("at_s", [29.0, 31.0], ids=["before others come", "after they have"])
def test_ranks_that_drain_are_not_interrupted_for_others_nor_for_the_list(tmp_path: Path, at_s: float) -> None:
    job = MpiRun(tmp_path, "a b", ENDS, min_hosts=1, signals="TERM=drain")
    names = ("a", "b", "c") if at_s > 30 else ("a", "c", "d")
    job.system.signalled(at_s, TERM).at(30.0, lambda: job.hosts.list(*names))
    job.run()
    assert (job.asked(TERM), len(job.starts)) == ([], 1)


def test_signals_that_mpirun_hands_on_are_left_to_it(tmp_path: Path) -> None:
    usr1 = int(signal.SIGUSR1)
    job = MpiRun(tmp_path, "a b", ENDS)
    job.system.signalled(10.0, usr1)
    assert job.run().verdict is Verdict.SUCCEEDED
    assert (job.asked(usr1), job.did("tell")) == ([10.0], [])


DEAF = Life(Program(term_s=None))


def test_ctrl_c_is_the_ranks_on_all_hosts_first_and_then_mpiruns(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", DEAF, grace=20.0)
    job.system.signalled(10.0, INT)
    assert job.run().stop_signal == INT
    assert job.did("tell") == [(10.0, "a", "b", "INT")]
    assert (job.asked(INT), job.asked(TERM)) == ([24.0], [])


def test_the_second_ctrl_c_kills_at_once(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", DEAF, grace=300.0)
    job.system.signalled(10.0, INT).signalled(11.0, INT)
    job.run()
    assert job.killed_at == [11.0]


def test_the_hosts_that_are_missing_are_named(tmp_path: Path) -> None:
    job = MpiRun(tmp_path, "a b", away="b")
    job.system.signalled(10.0, signal.SIGTERM)
    ended = job.run()
    assert (ended.verdict, job.starts) == (Verdict.STOPPED, [])
    assert ended.note.startswith("it was waiting: 1 of 2 hosts ready; missing: b")
