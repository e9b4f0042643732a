"""One node in whole jobs: what it tells the coordinator, what it starts and stops, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from tests.pytorch.nodes import MEMBER, PEER_LOST, PLAN, WORKERS, Here
from tests.supervisor.fakes import KILL, TERM, Program, failure_of
from trainer_launch.host import slow_files
from trainer_launch.membership import protocol as say
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import Connected
from trainer_launch.model import Death, Outcome, Verdict
from trainer_launch.model.errors import NodeError
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.pytorch import worker_group
from trainer_launch.pytorch.generations import LostPeer, Survivors
from trainer_launch.supervisor import outcome
from trainer_launch.supervisor.system import Happened

USR2 = int(signal.SIGUSR2)
DRAINS = replace(PLAN, signals={USR2: SignalAction.DRAIN})
FAILS = Program(ends_s=1, code=7, error="ValueError: no")
ENDS = Program(ends_s=1)
LOST = Program(ends_s=1, code=1, error=PEER_LOST)
IGNORES = Program(term_s=None)
STUCK = Program(term_s=None, is_stuck=True)
GIVE_UP = say.GiveUp("the budget is used up", "node 0", 1, 7, None, "ValueError: no")

ErrorsAt = Callable[..., None]


def how(ended: Outcome) -> tuple[Verdict, str | None, int]:
    return ended.verdict, failure_of(ended).reason if ended.failure else None, outcome.exit_code(ended)


# -- failures -----------------------------------------------------------------------------------


def test_after_a_failure_the_others_are_stopped_and_the_node_joins_again(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_1=[FAILS, ENDS], rank_0=[Program(), ENDS])
    assert how(here.run()) == (Verdict.SUCCEEDED, None, 0)
    (failed,) = here.coordinator.failures
    assert (failed.rank, failed.exit_code, failed.error) == (1, 7, "ValueError")
    assert (1, "leader", "rank 0", TERM) in here.system.calls
    first, second = here.coordinator.joins
    assert second == say.Join(first.incarnation, 1, failed=True)
    assert here.system.starts("rank 0") == [0, 1.1]


def test_who_lost_a_peer_is_told_only_when_nobody_else_failed_for_a_reason_of_its_own(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[LOST, ENDS], rank_1=[Program(term_code=7, error="ValueError: no"), ENDS])
    here.run()
    assert [failed.rank for failed in here.coordinator.failures] == [1]


@pytest.mark.parametrize("other", [ENDS, Program()], ids=["finished", "ended by us"])
def test_a_lost_peer_alone_is_told_once_all_have_ended(tmp_path: Path, other: Program) -> None:
    late = Program(ends_s=2, code=1, error=PEER_LOST)
    here = Here(tmp_path, rank_0=[late, ENDS], rank_1=[other, ENDS])
    failed = here.fails()
    assert (failed.rank, failed.lost_peer, failed.finished) == (0, True, (1,) if other is ENDS else ())


CLEANS_UP = Program(ends_s=4, code=1, error="ValueError: no")
FREE = ("rank 1",)


def test_a_worker_that_waits_for_nobody_may_still_say_why_its_peers_lost_their_connections(tmp_path: Path) -> None:
    """As one that has left its group, and raises a moment later."""
    here = Here(tmp_path, rank_0=[LOST, ENDS], rank_1=[CLEANS_UP, ENDS], free=FREE)
    failed = here.fails()
    assert (failed.rank, failed.lost_peer, failed.error) == (1, False, "ValueError")
    assert here.system.starts("rank 0") == [0, 4]


@pytest.mark.parametrize(
    ("program", "free", "stopped_s"),
    [
        (Program(), (), 1),
        (Program(), FREE, 1 + timeouts.PATIENCE_S),
        (Program(ends_s=3), FREE, None),
        (Program(ends_s=3, code=1, error=PEER_LOST), FREE, None),
    ],
    ids=["it waits for others", "it computes", "it finishes", "it is a victim, too"],
)
def test_who_only_looks_guilty_is_waited_for_a_moment_and_never_named(
    tmp_path: Path, program: Program, free: tuple[str, ...], stopped_s: float | None
) -> None:
    here = Here(tmp_path, rank_0=[LOST, ENDS], rank_1=[program, ENDS], free=free)
    failed = here.fails()
    assert (failed.rank, failed.lost_peer) == (0, True)
    asked_s = [call[0] for call in here.system.calls if call[1:] == ("leader", "rank 1", TERM)]
    assert asked_s == ([] if stopped_s is None else [stopped_s])


@pytest.mark.parametrize("other", [Program(ends_s=2, number=KILL), Program(ends_s=2, number=signal.SIGSEGV)])
def test_whoever_ends_first_by_itself_meanwhile_is_named_at_once(tmp_path: Path, other: Program) -> None:
    plan = replace(PLAN, workers=replace(WORKERS, count=3))
    here = Here(tmp_path, plan, rank_0=[LOST, ENDS], rank_1=[Program(), ENDS], rank_2=[other, ENDS], free=FREE)
    failed = here.fails()
    assert (failed.rank, failed.signal) == (2, other.number)
    assert (2, "leader", "rank 1", TERM) in here.system.calls


LATE = "RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"


def test_of_two_victims_the_one_that_timed_out_is_told_although_who_lost_it_was_seen_first(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[LOST, ENDS], rank_1=[Program(ends_s=2, code=1, error=LATE), ENDS], free=FREE)
    failed = here.fails()
    assert (failed.rank, failed.lost_peer, failed.timed_out) == (1, True, True)


@pytest.mark.parametrize("ends_s", [1, 2])
def test_a_time_out_is_told_although_who_lost_that_rank_on_another_node_was_told_first(
    tmp_path: Path, ends_s: int
) -> None:
    late = Program(ends_s=ends_s, code=1, error=LATE)
    here = Here(tmp_path, rank_0=[late, ENDS], rank_1=[Program(term_s=2), ENDS], free=FREE)
    failed = here.hears(1.5, say.Restart(1, "rank 3 failed on node 1", patience_s=timeouts.PATIENCE_S)).fails()
    assert (failed.rank, failed.lost_peer, failed.timed_out) == (0, True, True)


def test_a_time_out_waits_for_nobody(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[Program(1, 1, error=LATE), ENDS], rank_1=[Program(), ENDS], free=FREE)
    failed = here.fails()
    assert (failed.rank, failed.lost_peer, failed.timed_out) == (0, True, True)
    assert (1, "leader", "rank 1", TERM) in here.system.calls


@pytest.mark.parametrize("patience_s", [0.0, timeouts.PATIENCE_S])
def test_a_node_waits_likewise_when_only_victims_on_another_node_are_known(
    tmp_path: Path, patience_s: float
) -> None:
    here = Here(tmp_path, rank_0=[Program(), ENDS], rank_1=[CLEANS_UP, ENDS], free=FREE)
    here.hears(1.5, say.Restart(1, "rank 3 failed on node 1", patience_s=patience_s)).run()
    assert [failed.rank for failed in here.coordinator.failures] == ([1] if patience_s else [])
    assert here.coordinator.joins[1].failed == bool(patience_s)


@pytest.mark.parametrize("news", [say.Restart(1, "node 1 is gone"), say.GiveUp("it is over")])
def test_the_coordinators_word_ends_the_wait(tmp_path: Path, news: say.Restart | say.GiveUp) -> None:
    here = Here(tmp_path, rank_0=[LOST, ENDS], rank_1=[Program(), ENDS], free=FREE)
    here.hears(2, news).run()
    assert (2, "leader", "rank 1", TERM) in here.system.calls
    assert here.coordinator.failures == [] or isinstance(news, say.GiveUp)


def test_nobody_is_waited_for_while_the_coordinator_is_gone(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[LOST, ENDS], rank_1=[Program(), ENDS], free=FREE)
    here.loses_coordinator(0.5).hears(3, Connected()).run()
    assert (1, "leader", "rank 1", TERM) in here.system.calls


@pytest.fixture
def errors_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ErrorsAt:
    """A worker writes its error then, and ends later."""

    def errors(here: Here, at_s: float, local_rank: int, text: str, age_s: float = 0.1) -> None:
        def writes() -> None:
            file = next(tmp_path.rglob(f"{local_rank}")) / "error.json"
            file.write_text(json.dumps({"message": {"message": text, "errorCode": 1}}))
            now_s = file.stat().st_mtime + age_s  # of real time none goes by here
            clock = SimpleNamespace(time=lambda: now_s, monotonic=time.monotonic)
            monkeypatch.setattr(worker_group, "time", clock)

        here.does(at_s, writes)

    return errors


@pytest.mark.parametrize(
    ("number", "text", "named"),
    [
        (signal.SIGSEGV, "ValueError: no", 1),
        (signal.SIGSEGV, PEER_LOST, 0),
        (KILL, "ValueError: no", 0),
    ],
    ids=["a crash after an error", "a crash that others saw", "a kill"],
)
def test_who_has_written_an_error_before_a_crash_is_its_cause_though_it_ends_later(
    tmp_path: Path, errors_at: ErrorsAt, number: int, text: str, named: int
) -> None:
    slow = Program(term_s=0.5, term_code=1, error=text)
    here = Here(tmp_path, rank_0=[Program(ends_s=2, number=number), ENDS], rank_1=[slow, ENDS])
    errors_at(here, 1.9, 1, text)
    failed = here.fails()
    assert failed.rank == named


@pytest.mark.parametrize(("age_s", "named"), [(0.0, 0), (1.0, 1)])
@pytest.mark.parametrize("text", ["<NONE>", "RuntimeError: a peer is gone"], ids=["a code", "words of its own"])
def test_who_handles_the_end_of_a_peer_that_said_nothing_is_not_its_cause(
    tmp_path: Path, errors_at: ErrorsAt, text: str, age_s: float, named: int
) -> None:
    """Such as by sys.exit(1), or by another exception."""
    slow = Program(term_s=0.5, term_code=1)
    here = Here(tmp_path, rank_0=[Program(ends_s=2, code=7), ENDS], rank_1=[slow, ENDS])
    errors_at(here, 1.9, 1, text, age_s)
    here.run()
    assert [failed.rank for failed in here.coordinator.failures] == [named]


@pytest.mark.parametrize("number", [TERM, KILL])
def test_who_was_killed_is_named_though_who_lost_it_is_seen_first(tmp_path: Path, number: int) -> None:
    """A launcher that had no CPU for a while sees both ends at once."""
    here = Here(tmp_path, rank_0=[Program(error=PEER_LOST), ENDS], rank_1=[Program(), ENDS])

    def both_have_ended() -> Happened:
        rank_0, rank_1 = list(here.system.alive)
        return Happened(ended=here.system._end(rank_0, 1).ended + here.system._end(rank_1, -number).ended)

    here.system.at(1.0, both_have_ended)
    failed = here.fails()
    assert (failed.rank, failed.signal, failed.lost_peer) == (1, number, False)


def test_a_program_that_cannot_be_executed_fails_with_the_shells_code(tmp_path: Path) -> None:
    here = Here(tmp_path, missing=("rank 0",))
    here.coordinator.give_up = say.GiveUp("no restart", "node 0", 0, 127, None, "no rank 0")
    ended = here.run()
    (failed,) = here.coordinator.failures
    assert (failed.rank, failed.exit_code, failed.message) == (0, 127, "no rank 0")
    assert how(ended) == (Verdict.FAILED, "NotRunnable", 127)


def test_what_a_worker_has_left_behind_has_sigterm_at_once_and_sigkill_after_two_seconds(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[Program(ends_s=1, leaves=(IGNORES,))], rank_1=[Program(ends_s=8)])
    here.run()
    assert (1, "group", "rank 0", TERM) in here.system.calls
    assert (3, "group", "rank 0", KILL) in here.system.calls


def test_the_first_request_does_not_hurry_a_stop_that_a_failure_began(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_1=[FAILS], rank_0=[IGNORES])
    here.system.signalled(2, TERM)
    here.run()
    assert (9, "all again", TERM) in here.system.calls


def test_nobody_has_asked_us_to_stop_so_a_worker_that_frees_much_memory_has_longer(tmp_path: Path) -> None:
    slow = Program(ends_s=16, number=KILL, term_s=None, is_stuck=True)
    here = Here(tmp_path, rank_1=[FAILS, ENDS], rank_0=[slow, ENDS])
    assert here.run().survivors == ()
    assert here.system.starts("rank 0") == [0, 16]


# -- the coordinator ends a generation ------------------------------------------------------------


def test_a_restart_stops_the_workers_and_joins_again_with_how_they_ended_before(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_1=[ENDS, ENDS], rank_0=[Program(), ENDS])
    here.hears(5, say.Restart(1, "node 1 is gone")).run()
    assert (here.coordinator.joins[1].finished, here.coordinator.joins[1].failed) == ((1,), False)
    assert here.coordinator.failures == []
    assert here.system.starts("rank 0") == [0, 5.1]


@pytest.mark.parametrize("code", [1, None], ids=["it left", "of our signal"])
def test_an_error_that_was_there_before_the_restart_is_told_also_after_it(tmp_path: Path, code: int | None) -> None:
    """Whom it cut off was faster to end; the worker itself was still ending."""
    slow = Program(term_s=1, term_code=code, error="ValueError: no")
    here = Here(tmp_path, rank_0=[Program(ends_s=1)], rank_1=[slow])

    def writes_its_error() -> None:
        file = next(tmp_path.rglob("1")) / "error.json"
        file.write_text('{"message": {"message": "ValueError: no"}}')

    here.does(4, writes_its_error).hears(5, say.Restart(1, "rank 3 failed on node 1"))
    here.does(5.5, lambda: setattr(here.coordinator, "forms", False))
    here.hears(9, say.GiveUp("rank 1 failed", "node 0", 1, 1, None, "ValueError: no"))
    ended = here.run()
    (failed,) = here.coordinator.failures
    assert (failed.rank, failed.exit_code, failed.signal, failed.error) == (1, 1, None, "ValueError")
    assert (here.coordinator.joins[1].finished, here.coordinator.joins[1].failed) == ((0,), True)
    assert (failure_of(ended).rank, failure_of(ended).exit_code) == (1, 1)


@pytest.mark.parametrize(
    "after",
    [
        Program(term_code=1, error="Preempted: by a handler of SIGTERM"),
        Program(term_s=0.5, ends_s=5.2, number=signal.SIGABRT),
        Program(term_code=1, error=PEER_LOST),
    ],
)
def test_what_a_worker_does_after_the_restart_or_because_of_a_peer_is_not_told(
    tmp_path: Path, after: Program
) -> None:
    here = Here(tmp_path, rank_0=[after, ENDS], rank_1=[Program(), ENDS])
    here.hears(5, say.Restart(1, "rank 3 failed on node 1")).run()
    assert here.coordinator.failures == []
    assert not here.coordinator.joins[1].failed


@pytest.mark.parametrize("code", [None, 1])
def test_a_restart_that_is_told_again_while_workers_are_stopped_says_nothing_of_their_ends(
    tmp_path: Path, code: int | None
) -> None:
    """As to a node whose connection was reset meanwhile."""
    here = Here(tmp_path, rank_1=[Program(term_code=code), ENDS], rank_0=[Program(term_s=2), ENDS])
    here.hears(5, say.Restart(1, "node 1 is gone")).hears(6, say.Restart(1, "this node was away")).run()
    assert not here.coordinator.joins[1].failed


def test_a_restart_is_heard_where_the_file_server_of_error_files_is_gone(tmp_path: Path, monkeypatch) -> None:
    here = Here(tmp_path, rank_0=[Program(), ENDS], rank_1=[Program(), ENDS])
    server, exists, answers = threading.Event(), os.path.exists, list[bool]()

    def asks(path: str) -> bool:
        answers.append(server.wait(30.0))
        return answers[-1] and exists(path)

    def is_gone() -> None:
        monkeypatch.setattr(slow_files, "mount_of", lambda _path: ("/gone", "nfs4"))
        monkeypatch.setattr(os.path, "exists", asks)

    def is_back() -> None:
        server.set()
        for thread in list(slow_files._waiting):
            thread.join()

    here.does(4, is_gone).hears(5, say.Restart(1, "node 1 is gone")).does(5.01, is_back)
    assert how(here.run()) == (Verdict.SUCCEEDED, None, 0)
    assert set(answers) == {True}, "nobody waits until it answers"


def test_after_its_own_success_a_node_starts_again_when_another_nodes_worker_failed(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[ENDS, ENDS], rank_1=[ENDS, ENDS])
    here.coordinator.ends = False
    here.hears(5, say.Restart(1, "rank 3 failed on node 1"))
    here.does(5.5, lambda: setattr(here.coordinator, "ends", True))
    assert how(here.run()) == (Verdict.SUCCEEDED, None, 0)
    assert here.system.starts("rank 0") == [0, 5]


# -- what outlives its generation -----------------------------------------------------------------


def test_a_worker_that_outlives_sigkill_and_dies_in_the_next_generation_harms_nobody(tmp_path: Path) -> None:
    """As one that was frozen, or hung in a dead NFS: its pending SIGKILL ends it while others bear its name."""
    here = Here(tmp_path, rank_1=[STUCK, Program(ends_s=100)], rank_0=[FAILS, Program(ends_s=100)])
    thawed = here.system
    here.does(0.5, lambda: setattr(here, "old", thawed.pid_of("rank 1")))
    thawed.at(60, lambda: thawed._end(here.old, -KILL))  # type: ignore[attr-defined]
    ended = here.run()
    assert how(ended) == (Verdict.SUCCEEDED, None, 0)
    assert [failed.rank for failed in here.coordinator.failures] == [0]
    assert len(here.system.starts("rank 1")) == 2
    assert ended.survivors == ()


def test_what_is_stuck_does_not_keep_later_generations_from_ending(tmp_path: Path, caplog) -> None:
    here = Here(tmp_path, rank_1=[STUCK, Program(), ENDS], rank_0=[FAILS, FAILS, ENDS])
    ended = here.run()
    first, second, third = here.system.starts("rank 0")
    assert second - first > 10
    assert third - second == pytest.approx(1.1)
    assert (ended.verdict, len(ended.survivors)) == (Verdict.SUCCEEDED, 1)
    assert "still running after SIGKILL: pid" in caplog.text


# -- requests to stop -----------------------------------------------------------------------------


def test_a_request_to_stop_is_told_at_once_and_a_failure_after_it_is_not(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[Program(term_code=1, error="ValueError: interrupted")])
    here.system.signalled(5, TERM)
    assert how(here.run()) == (Verdict.STOPPED, "Stopped", 143)
    assert here.coordinator.failures == []
    assert here.coordinator.said[-2:] == [say.Leave("it was asked to stop")] * 2
    assert (5, "leader", "rank 0", TERM) in here.system.calls


@pytest.mark.parametrize("at_s", [1.05, 1.5, 6])
def test_a_request_during_a_restart_starts_nothing_again(tmp_path: Path, at_s: float) -> None:
    """While the others are stopped, and while the node waits for a generation."""
    here = Here(tmp_path, rank_1=[FAILS], rank_0=[Program(term_s=1)])
    here.does(1, lambda: setattr(here.coordinator, "forms", False))
    here.system.signalled(at_s, TERM)
    ended = here.run()
    assert (how(ended)[::2], ended.failure is None) == ((Verdict.STOPPED, 143), at_s == 6)
    assert here.system.starts("rank 0") == [0]


@pytest.mark.parametrize("number", [TERM, USR2])
def test_a_request_or_a_drain_without_workers_ends_the_node(tmp_path: Path, number: int) -> None:
    here = Here(tmp_path, plan=DRAINS)
    here.coordinator.forms = False
    here.system.signalled(5, number)
    assert how(here.run()) == (Verdict.STOPPED, None, 143)
    assert here.coordinator.said[-1] == say.Leave("it was asked to stop")


@pytest.mark.parametrize("number", [TERM, USR2])
def test_a_request_or_a_drain_after_the_job_has_failed_keeps_the_cause(tmp_path: Path, number: int) -> None:
    here = Here(tmp_path, plan=DRAINS, rank_1=[FAILS], rank_0=[Program(term_s=3)])
    here.coordinator.give_up = GIVE_UP
    here.system.signalled(2, number)
    assert how(here.run()) == (Verdict.FAILED, "Failed", 7)
    assert here.system.starts("rank 0") == [0]


def test_a_request_that_comes_with_the_next_generation_starts_no_worker(tmp_path: Path) -> None:
    """Nobody would tell that worker to end."""
    here = Here(tmp_path)
    here.coordinator.forms = False

    def both() -> Happened:
        here.coordinator.tell(say.Formed(1, 0, 1, 0, True, None, 0, 2, 0, 2))
        return Happened(signals=(TERM,))

    here.system.at(5, both)
    ended = here.run()
    assert (how(ended), ended.took_s) == ((Verdict.STOPPED, None, 143), 5)
    assert here.system.starts("rank 0") == []


def draining(tmp_path: Path, **more) -> Here:
    """Both workers note the drain at 5 s and go on; nothing but SIGTERM ends them."""
    here = Here(tmp_path, plan=DRAINS, **more)
    here.system.signalled(5, USR2)
    return here


def test_workers_that_end_after_a_drain_end_the_node_as_one_that_was_stopped(tmp_path: Path) -> None:
    here = draining(tmp_path, rank_0=[Program(8)], rank_1=[Program(9)])
    assert how(here.run()) == (Verdict.STOPPED, None, 143)


def test_a_worker_that_fails_while_the_node_drains_is_named_and_the_others_have_their_time(
    tmp_path: Path, caplog
) -> None:
    """It may have saved, and ended as its script does then. Other nodes hear at once that this one leaves."""
    here = draining(tmp_path, rank_1=[Program(8, code=7, error="ValueError: no")], rank_0=[Program(60)])
    ended = here.run()
    assert (how(ended)[::2], round(ended.took_s, 1)) == ((Verdict.STOPPED, 143), 60)
    assert (8, "leader", "rank 0", TERM) not in here.system.calls
    assert (here.coordinator.failures, here.coordinator.said[-2:]) == ([], [say.Leave("it was asked to stop")] * 2)
    assert "rank 1 ended with exit code 7: ValueError: no" in caplog.text


@pytest.mark.parametrize(
    "news", [say.Restart(1, "node 1 was lost"), say.GiveUp("the job has failed"), say.Finished()]
)
def test_a_draining_node_leaves_when_its_generation_or_the_job_is_over(tmp_path: Path, news) -> None:
    """Workers that wait for a lost peer in a collective never end by themselves."""
    here = draining(tmp_path).hears(8, news)
    ended = here.run()
    assert (how(ended)[::2], round(ended.took_s, 1)) == ((Verdict.STOPPED, 143), 8.1)
    assert here.system.starts("rank 0") == [0]


@pytest.mark.parametrize("drain", [TERM, USR2])
@pytest.mark.parametrize(
    "ends",
    [lambda here: here.hears(8, say.Restart(1, "rank 3 failed")), lambda here: here.loses_coordinator(6)],
    ids=["a worker of another node has failed", "the coordinator is gone"],
)
def test_a_worker_that_was_told_to_drain_by_sigterm_hears_no_second_one_while_it_saves(
    tmp_path: Path, drain: int, ends: Callable[[Here], Here]
) -> None:
    """To many programs the second one means "abort now", and the checkpoint is lost."""
    plan = replace(PLAN, signals={drain: SignalAction.DRAIN})
    saves = Program(ends_s=14, term_s=None)
    here = ends(Here(tmp_path, plan=plan, rank_0=[saves], rank_1=[saves]))
    here.system.signalled(5, drain)
    assert how(here.run()) == (Verdict.STOPPED, None, 143)
    asked = [call for call in here.system.calls if call[1:] == ("leader", "rank 0", TERM)]
    assert [call[0] for call in asked] == [5 if drain == TERM else 8]


def test_a_draining_node_leaves_when_its_coordinator_is_lost(tmp_path: Path) -> None:
    ended = draining(tmp_path).loses_coordinator(8).run()
    assert (how(ended)[::2], round(ended.took_s, 1)) == ((Verdict.STOPPED, 143), 8.1 + timeouts.BLIP_S)


def test_a_draining_node_whose_workers_hang_kills_them_and_leaves(tmp_path: Path) -> None:
    ended = draining(tmp_path, rank_0=[IGNORES], watch=Watch(20)).run()
    assert (how(ended)[::2], round(ended.took_s, 1)) == ((Verdict.STOPPED, 143), 20)


# -- the coordinator is away ----------------------------------------------------------------------


def test_a_short_absence_of_the_coordinator_stops_no_worker(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[Program(9)], rank_1=[Program(9)])
    here.loses_coordinator(5).hears(5 + 0.9 * timeouts.BLIP_S, Connected())
    assert (how(here.run())[0], len(here.system.starts("rank 0"))) == (Verdict.SUCCEEDED, 1)


def test_a_longer_one_stops_them_and_costs_no_restart(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[Program(), ENDS], rank_1=[Program(), ENDS])
    here.loses_coordinator(5).hears(9, Connected()).run()
    assert (5 + timeouts.BLIP_S, "leader", "rank 0", TERM) in here.system.calls
    assert (len(here.coordinator.joins), here.coordinator.failures) == (2, [])


@pytest.mark.parametrize(("away_s", "lost_s"), [(5.0, 5.5), (5.5, 5.0)])
def test_with_its_coordinator_and_a_peer_lost_a_generation_ends_at_once_and_costs_no_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away_s: float, lost_s: float
) -> None:
    """A survivor that has lost a peer trains no more, whatever becomes of the coordinator."""
    here = Here(tmp_path, rank_0=[Program(), ENDS], rank_1=[Program(), ENDS])
    words: list[tuple[str, LostPeer]] = []
    monkeypatch.setattr(Survivors, "hear", lambda _: [words.pop()] if words else [])
    here.does(lost_s, lambda: words.append(("rank 0", LostPeer(PEER_LOST))))
    here.loses_coordinator(away_s).hears(9, Connected()).run()
    assert (5.5, "leader", "rank 0", TERM) in here.system.calls
    assert (len(here.coordinator.joins), here.coordinator.failures) == (2, [])


def test_a_coordinator_that_never_answers_ends_the_node_as_an_infrastructure_failure(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.coordinator.forms = False
    ended = here.loses_coordinator(0).run()
    assert how(ended) == (Verdict.FAILED, "PeerLost", 138)
    assert f"did not answer for {MEMBER.patience_s:g} s: no address for node-0 yet" in failure_of(ended).message


def test_workers_that_succeeded_count_although_the_coordinator_is_gone_for_good(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[ENDS], rank_1=[ENDS])
    here.coordinator.ends = False
    assert how(here.loses_coordinator(5).run())[0] is Verdict.SUCCEEDED


# -- how it ends ----------------------------------------------------------------------------------


def test_the_faulty_node_ends_with_its_workers_code_and_says_why_it_is_not_restarted(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_1=[FAILS])
    here.coordinator.give_up = GIVE_UP
    ended = here.run()
    assert (failure_of(ended).rank, *how(ended)) == (1, Verdict.FAILED, "Failed", 7)
    assert "ValueError: no" in failure_of(ended).message
    assert "the budget is used up" in failure_of(ended).evidence


ELSEWHERE = replace(GIVE_UP, node="node 1 (pod-1)", node_rank=1, host="pod-1", rank=3)


@pytest.mark.parametrize(("reason", "helps"), [("OutOfMemory", None), ("ProgramError", False), ("Crashed", True)])
def test_the_others_tell_the_cause_its_place_and_whether_a_restart_helps(
    tmp_path: Path, reason: str, helps: bool | None
) -> None:
    ended = Here(tmp_path).hears(5, replace(ELSEWHERE, exit_reason=reason, helps=helps)).run()
    assert how(ended) == (Verdict.FAILED, reason, 138), "as those that lost a peer, they may go on elsewhere"
    failed = failure_of(ended)
    assert (failed.rank, failed.node_rank, failed.host, failed.restart_helps) == (3, 1, "pod-1", helps)
    assert "it said: ValueError: no" in failed.message
    assert failed.hint == "see the termination message of node 1 (pod-1)"


def test_a_victim_is_named_on_no_node(tmp_path: Path) -> None:
    ended = Here(tmp_path).hears(5, replace(ELSEWHERE, is_victim=True, exit_reason="PeerLost")).run()
    assert (*how(ended), failure_of(ended).rank) == (Verdict.FAILED, "PeerLost", 138, None)
    late = Here(tmp_path).hears(5, replace(ELSEWHERE, is_victim=True, exit_reason="Hung")).run()
    assert (*how(late), failure_of(late).rank) == (Verdict.FAILED, "Hung", 138, None), "its time-out is the cause"
    assert failure_of(late).restart_helps is None
    here = Here(tmp_path, rank_0=[LOST])
    here.coordinator.give_up = replace(GIVE_UP, rank=0, node_rank=0, exit_code=1, is_victim=True)
    ended = here.run()
    assert (*how(ended), failure_of(ended).rank) == (Verdict.FAILED, "PeerLost", 138, None)
    assert failure_of(ended).message.startswith("rank 0 ended with exit code 1, because another rank")


def test_ranks_that_left_are_told_in_place_of_their_victims(tmp_path: Path) -> None:
    left = replace(GIVE_UP, reason="rank 1 finished while rank 0 waited", rank=0, is_victim=True, cause="PeerLost")
    for here in (Here(tmp_path), Here(tmp_path, rank_0=[LOST])):
        failed = failure_of(here.hears(5, left).run())
        assert (failed.reason, failed.message, failed.exit_code) == ("PeerLost", left.reason, 138)
        assert failed.rank is None
        assert "check the other pods" not in (failed.hint or "")


def test_a_late_rank_is_named_on_every_node_with_its_own(tmp_path: Path) -> None:
    late = say.GiveUp("rank 3 had not entered it", "node 1 (pod-1)", 3, cause="Hung", node_rank=1, host="pod-1")
    here = Here(tmp_path, rank_0=[LOST])
    here.coordinator.give_up = late
    failed = failure_of(here.run())
    assert (failed.reason, failed.rank, failed.node_rank, failed.host) == ("Hung", 3, 1, "pod-1")
    assert (failed.message, failed.signal) == (late.reason, None)


def test_a_cause_of_its_own_is_everybodys(tmp_path: Path) -> None:
    uneven = say.GiveUp("rank 1 finished while rank 0 waited", None, 0, 1, None, None, "ProgramError")
    ended = Here(tmp_path).hears(5, uneven).run()
    assert (how(ended), failure_of(ended).again) == ((Verdict.FAILED, "ProgramError", 1), False)


def test_a_spare_that_was_not_needed_succeeds(tmp_path: Path) -> None:
    here = Here(tmp_path)
    here.coordinator.forms = False
    ended = here.hears(5, say.Finished()).run()
    assert (how(ended)[0], "spare" in ended.note) == (Verdict.SUCCEEDED, True)


# -- what cannot be started -----------------------------------------------------------------------

CANNOT = NodeError("the store cannot be opened: the fork server ended during its imports (signal 9)")


def test_a_node_that_can_never_start_workers_leaves_before_anybody_stops_for_it(tmp_path: Path) -> None:
    here = Here(tmp_path, plan=replace(PLAN, workers=replace(WORKERS, forks=True)))
    here.starter.refusals = [CANNOT]
    ended = here.run()
    assert (*how(ended), here.system.starts("rank 0")) == (Verdict.FAILED, "NotStarted", 138, [])
    assert here.coordinator.said[-1] == say.Leave(str(CANNOT)), "and it is no lost peer"


def test_a_fork_server_that_cannot_be_replaced_ends_no_training_job(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=[Program(9)], rank_1=[Program(9)])
    here.does(5, lambda: here.starter.problems.append(CANNOT))
    here.system.at(5, lambda: Happened(ended=((here.starter.SERVER, -KILL),)))
    assert how(here.run()) == (Verdict.SUCCEEDED, None, 0)


@pytest.mark.parametrize("fails_again", [False, True])
def test_the_next_start_tries_it_again_before_others_wait_for_this_node(tmp_path: Path, fails_again: bool) -> None:
    here = Here(tmp_path, rank_0=[Program(), ENDS], rank_1=[Program(), ENDS])
    here.does(5, lambda: here.starter.problems.append(CANNOT))
    if fails_again:
        here.does(5, lambda: here.starter.refusals.append(CANNOT))
    ended = here.hears(7, say.Restart(1, "rank 3 failed")).run()
    joins = [join.prepared for join in here.coordinator.joins]
    if fails_again:
        assert (how(ended)[1], joins) == ("NotStarted", [True, False])
    else:
        assert (how(ended)[0], joins) == (Verdict.SUCCEEDED, [True, False, True])


# -- hangs and stores -----------------------------------------------------------------------------


class Watch:
    """Finds a hang then."""

    def __init__(self, at_s: float, reason: str = "Hung") -> None:
        self.due_s, self._reason = at_s, reason

    def look(self, now_s: float) -> Death:
        self.due_s = now_s + 1000
        return Death(rank=1, local_rank=1, reason=self._reason, message="rank 1 has been stopped", at_s=now_s)

    def explained(self, _told: object) -> None:
        pass


def test_a_hang_kills_all_workers_at_once_and_names_the_rank_at_fault(tmp_path: Path) -> None:
    here = Here(tmp_path, watch=Watch(5))
    here.coordinator.give_up = say.GiveUp("the budget is used up", "node 0", 1, None, 9, None)
    ended = here.run()
    (failed,) = here.coordinator.failures
    assert (failed.rank, failed.signal) == (1, KILL)
    assert [call for call in here.system.calls if call[1] == "all again"] == [(5, "all again", KILL)]
    assert (*how(ended), ended.took_s) == (Verdict.FAILED, "Hung", 138, 5)


@pytest.mark.parametrize("reason", ["Hung", "ProgramError"])
def test_a_hang_is_collected_once_whoever_is_to_blame(tmp_path: Path, reason: str) -> None:
    here = Here(tmp_path, watch=Watch(5, reason=reason))
    here.coordinator.give_up = say.GiveUp("the budget is used up", "node 0", 1, None, 9, None)
    here.run()
    assert here.incidents.collected == []


def test_a_hung_worker_that_sigkill_does_not_end_is_named_and_the_node_joins_without_it(
    tmp_path: Path, caplog
) -> None:
    here = Here(tmp_path, watch=Watch(5), rank_1=[STUCK, ENDS], rank_0=[Program(), ENDS])
    ended = here.run()
    assert how(ended) == (Verdict.SUCCEEDED, None, 0)
    assert here.system.starts("rank 1") == [0, 15]
    kills = [call[0] for call in here.system.calls if call[1:] == ("all again", KILL)]
    assert kills[:4] == [5, 5.1, 5.3, 5.7]
    assert "still running after SIGKILL: pid" in caplog.text


def store_killed(here: Here, at_s: float) -> Here:
    here.system.at(at_s, lambda: Happened(ended=((here.starter.STORE, -KILL),)))
    return here


STORE_GONE = "the store process of generation 1 was killed (signal 9)"


def test_a_killed_store_process_is_named_and_costs_one_generation(tmp_path: Path) -> None:
    here = store_killed(Here(tmp_path, rank_0=[Program(), ENDS], rank_1=[Program(), ENDS]), 5)
    assert how(here.run())[0] is Verdict.SUCCEEDED
    assert [failed.message for failed in here.coordinator.failures] == [STORE_GONE]
    assert here.system.starts("rank 0") == [0, 5.1]


def test_a_job_that_ends_for_a_killed_store_says_so_on_every_node(tmp_path: Path) -> None:
    here = store_killed(Here(tmp_path), 5)
    text = f"{STORE_GONE} on node 0, and --max-restarts 0 allows no restart"
    here.coordinator.give_up = say.GiveUp(text, "node 0", None, None, 9, STORE_GONE)
    ended = here.run()
    assert (failure_of(ended).message, failure_of(ended).rank) == (STORE_GONE, None)
    assert how(ended) == (Verdict.FAILED, "Killed", 137)


def test_a_store_killed_while_a_generation_is_stopped_is_no_second_failure(tmp_path: Path) -> None:
    here = store_killed(Here(tmp_path, rank_1=[FAILS, ENDS], rank_0=[Program(term_s=1), ENDS]), 1.5)
    here.run()
    assert [failed.rank for failed in here.coordinator.failures] == [1]


def test_a_store_killed_after_success_or_while_the_pod_stops_costs_nothing(tmp_path: Path) -> None:
    """The other nodes' workers may not need it again; if they do, they fail."""
    here = store_killed(Here(tmp_path, rank_0=[ENDS], rank_1=[ENDS]), 5)
    here.coordinator.ends = False
    assert how(here.hears(9, say.Finished()).run())[0] is Verdict.SUCCEEDED
    here = store_killed(Here(tmp_path, rank_0=[Program(term_s=2)]), 6)
    here.system.signalled(5, TERM)
    here.run()
    assert here.coordinator.failures == []
