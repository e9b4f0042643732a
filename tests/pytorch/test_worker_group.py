"""The worker group's decisions: what it tells the coordinator, what it starts and stops, how it ends."""

from __future__ import annotations

import signal
from typing import Any, cast

import pytest
from msgspec.structs import replace

from trainer_launch.membership import protocol as say
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import Connected, Disconnected
from trainer_launch.model import Endpoint, Exit, FailureRecord, Membership, Plan, Verdict, Workers
from trainer_launch.pytorch import group_loop, worker_group
from trainer_launch.pytorch.group_incidents import what_failed
from trainer_launch.pytorch.worker_group import Phase
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.system import System

WORKERS = Workers(count=2, argv=("python", "-u", "train.py"), env={}, errors="/run/errors", run_dir="/run")
MEMBER = Membership(
    job="job",
    coordinator=Endpoint("node-0", 29500),
    node_rank=0,
    host="node-0",
    address=None,
    patience_s=60.0,
    max_restarts=3,
)
PLAN = Plan(engine="torch", processes=(), workers=WORKERS, membership=MEMBER, grace_s=10.0)
FORKING = replace(PLAN, workers=replace(WORKERS, forks=True))
PEER_LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1"


class Group:
    """The machine with a clock, and all that it asked for."""

    def __init__(self, plan: Plan = PLAN) -> None:
        self.now_s = 0.0
        self.state, actions = worker_group.begin(plan, "me", 0.0)
        self.actions: list[worker_group.Action] = list(actions)

    def __call__(self, event: worker_group.Event) -> list[worker_group.Action]:
        """One step; what it asks for."""
        self.state, actions = worker_group.step(self.state, event)
        self.actions += actions
        return list(actions)

    def hear(self, news: Any) -> list[worker_group.Action]:
        return self(worker_group.Heard(self.now_s, news))

    def told(self) -> list[say.FromNode]:
        return [action.message for action in self.actions if isinstance(action, worker_group.Tell)]

    def ends(
        self,
        rank: int,
        code: int | None = 0,
        number: int | None = None,
        message: str = "",
        said_first: bool = False,
    ) -> list[worker_group.Action]:
        exit_ = Exit(process=f"rank {rank}", code=code if number is None else None, signal=number, at_s=self.now_s)
        death = FailureRecord(
            rank=rank, local_rank=rank, exit_code=exit_.code, signal=number, message=message or None
        )
        return self(worker_group.WorkerEnded(exit_, death, said_first))

    def phase(self) -> Phase:
        return self.state.phase

    def clear(self) -> list[worker_group.Action]:
        return self(ev.Childless(self.now_s))

    def outcome(self) -> Any:
        return group_loop.outcome(self.state, cast(System, _System()), Evidence())


class _System:
    def now(self) -> float:
        return 1.0

    def descendants(self) -> tuple[str, ...]:
        return ()

    def last_lines(self, _name: str, _rank: int | None = None) -> tuple[str, ...]:
        return ()


def formed(generation: int = 1, *, hosts_store: bool = True, restarts: int = 0) -> say.Formed:
    return say.Formed(generation, 0, 1, restarts, hosts_store, None, 0, 2, 0, 2)


def running(plan: Plan = PLAN) -> Group:
    group = Group(plan)
    group.hear(Connected())
    train(group)
    return group


def train(group: Group, generation: int = 1) -> None:
    """From joining to running."""
    group.hear(formed(generation))
    group(worker_group.Prepared(group.now_s))
    group(worker_group.StoreOpened(group.now_s, "node-0", 1234))
    group.hear(say.Go(generation, "node-0", 1234))
    assert group.state.phase is Phase.RUNNING


def failures(group: Group) -> list[say.Failed]:
    return [message for message in group.told() if isinstance(message, say.Failed)]


def starts(group: Group) -> list[worker_group.StartWorkers]:
    return [action for action in group.actions if isinstance(action, worker_group.StartWorkers)]


def test_a_node_that_can_never_start_workers_leaves_before_anybody_stops_for_it() -> None:
    group = Group(FORKING)
    group.hear(Connected())
    group(worker_group.CannotStart(1.0, "importing torch failed", 2))
    assert isinstance(group.told()[-1], say.Leave)
    assert group.state.phase is Phase.ENDED


def test_a_failure_is_told_at_once_and_the_others_are_asked_to_end() -> None:
    group = running()
    actions = group.ends(1, 7, message="ValueError: no")
    failed = failures(group)[0]
    assert (failed.rank, failed.exit_code, failed.error) == (1, 7, "ValueError")
    assert ev.SignalLeader("rank 0", signal.SIGTERM) in actions


def test_after_a_failure_the_node_joins_again_when_nothing_is_left() -> None:
    group = running()
    group.ends(1, 7, message="ValueError: no")
    group.ends(0, None, signal.SIGTERM)
    assert group.phase() is Phase.RUNNING
    group.clear()
    assert group.phase() is Phase.JOINING
    assert group.told()[-1] == say.Join("me", 1, (), failed=True)
    train(group, 2)
    assert group.state.starts == 2


def test_who_lost_a_peer_is_told_only_when_nobody_else_failed_for_a_reason_of_its_own() -> None:
    group = running()
    group.ends(0, 1, message=PEER_LOST)
    assert not failures(group)
    group.ends(1, 7, message="ValueError: no")
    (failed,) = failures(group)
    assert failed.rank == 1


def test_a_lost_peer_alone_is_told_once_all_have_ended() -> None:
    group = running()
    group.ends(1, 0)
    group.ends(0, 1, message=PEER_LOST)
    group.clear()
    (failed,) = failures(group)
    assert failed.lost_peer
    assert failed.finished == (1,)


def test_workers_that_we_ended_are_not_guiltier_than_who_lost_a_peer() -> None:
    group = running()
    group.ends(0, 1, message=PEER_LOST)
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    (failed,) = failures(group)
    assert failed.rank == 0


def test_a_restart_stops_the_workers_and_joins_again_with_how_they_ended_before() -> None:
    group = running()
    group.ends(1, 0)
    actions = group.hear(say.Restart(1, "node 1 is gone"))
    assert ev.SignalLeader("rank 0", signal.SIGTERM) in actions
    group.ends(0, None, signal.SIGTERM)
    group.clear()
    assert group.told()[-1] == say.Join("me", 1, (1,), failed=False)
    assert not failures(group)


@pytest.mark.parametrize("grows", [True, False])
def test_a_restart_is_an_incident_unless_the_job_grows_whatever_its_reason_says(grows: bool) -> None:
    restart = say.Restart(1, "node 3, who may join", grows=grows)
    told = what_failed(worker_group.Heard(1.0, restart), running().state)
    assert told == (None if grows else "generation 1 is over: node 3, who may join")


def test_a_restart_while_it_stops_after_a_lost_peer_means_that_the_failure_was_elsewhere() -> None:
    group = running()
    group.ends(0, 1, message=PEER_LOST)
    group.hear(say.Restart(1, "rank 3 failed on node 1"))
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    assert not failures(group)
    assert group.state.phase is Phase.JOINING


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_an_error_that_was_there_before_the_restart_is_told_also_after_it(number: int | None) -> None:
    """Whom it cut off was faster to end; the worker itself was still ending."""
    group = running()
    group.ends(0, 0)
    group.hear(say.Restart(1, "rank 3 failed on node 1"))
    group.ends(1, 1, number, message="ValueError: no", said_first=True)
    group.clear()
    (failed,) = failures(group)
    assert (failed.rank, failed.exit_code, failed.signal, failed.error) == (1, 1, None, "ValueError")
    assert not failed.lost_peer
    assert group.told()[-1] == say.Join("me", 1, (0,), failed=True)
    group.hear(say.GiveUp("rank 1 failed", "node 0", 1, 1, None, "ValueError: no"))
    assert (group.outcome().failure.rank, group.outcome().failure.exit_code) == (1, 1)


def test_only_the_first_such_error_is_told() -> None:
    group = running()
    group.hear(say.Restart(1, "rank 3 failed on node 1"))
    for rank in (1, 0):
        group.ends(rank, 1, message=f"ValueError: {rank}", said_first=True)
    assert [failed.rank for failed in failures(group)] == [1]


@pytest.mark.parametrize(
    ("number", "message", "said_first"),
    [
        (None, "Preempted: by a handler of SIGTERM", False),
        (signal.SIGABRT, "", False),
        (signal.SIGTERM, "", False),
        (None, PEER_LOST, True),
        (None, "", True),
    ],
)
def test_what_a_worker_does_after_the_restart_or_because_of_a_peer_is_not_told(
    number: int | None, message: str, said_first: bool
) -> None:
    group = running()
    group.hear(say.Restart(1, "rank 3 failed on node 1"))
    group.ends(0, 1, number, message=message, said_first=said_first)
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    assert failures(group) == []
    assert group.told()[-1] == say.Join("me", 1, (), failed=False)


def test_an_error_that_ends_the_generation_itself_is_told_once() -> None:
    group = running()
    group.ends(1, 1, message="ValueError: no")
    group.hear(say.Restart(1, "rank 3 failed on node 1"))
    group.ends(0, 1, message="ValueError: no", said_first=True)
    assert [failed.rank for failed in failures(group)] == [1]


def test_after_its_own_success_a_node_starts_again_when_another_nodes_worker_failed() -> None:
    group = running()
    group.ends(0)
    group.ends(1)
    group.clear()
    group.hear(say.Restart(1, "rank 3 failed on node 1"))
    train(group, 2)
    assert group.state.starts == 2


# -- requests to stop ---------------------------------------------------------------------------


def test_a_failure_after_a_request_to_stop_is_not_told() -> None:
    group = running()
    group(ev.Signalled(0.0, signal.SIGTERM))
    group.ends(0, 1, message="ValueError: interrupted")
    assert not failures(group)


# -- the coordinator is away --------------------------------------------------------------------


def test_a_short_absence_of_the_coordinator_stops_no_worker() -> None:
    group = running()
    group.hear(Disconnected("reset"))
    group(ev.Deadline(1.0))
    assert group.state.run is not None
    assert group.state.run.alive
    group.hear(Connected())
    assert group.state.deadline_s is None


def test_a_longer_one_stops_them_and_costs_no_restart() -> None:
    group = running()
    group.hear(Disconnected("reset"))
    assert group.state.deadline_s == pytest.approx(timeouts.BLIP_S)
    actions = group(ev.Deadline(timeouts.BLIP_S))
    assert ev.SignalLeader("rank 0", signal.SIGTERM) in actions
    group.ends(0, None, signal.SIGTERM)
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    assert group.state.phase is Phase.JOINING
    assert not failures(group)


def test_a_coordinator_that_never_answers_ends_the_node_as_an_infrastructure_failure() -> None:
    group = Group()
    assert group.state.deadline_s == pytest.approx(MEMBER.patience_s)
    group(ev.Deadline(MEMBER.patience_s))
    outcome = group.outcome()
    assert (outcome.verdict, outcome.failure.reason, outcome.failure.exit_code) == (Verdict.FAILED, "PeerLost", 138)
    assert "did not answer for 60 s" in outcome.failure.message


def test_workers_that_succeeded_count_although_the_coordinator_is_gone_for_good() -> None:
    group = running()
    group.ends(0)
    group.ends(1)
    group.clear()
    group.hear(Disconnected("reset"))
    group(ev.Deadline(timeouts.GONE_S))
    assert group.outcome().verdict is Verdict.SUCCEEDED


# -- how it ends --------------------------------------------------------------------------------


def test_the_faulty_node_ends_with_its_workers_code() -> None:
    group = running()
    group.ends(1, 7, message="ValueError: no")
    group.ends(0, None, signal.SIGTERM)
    group.clear()
    group.hear(say.GiveUp("the budget is used up", "node 0", 1, 7, None, "ValueError: no"))
    failure = group.outcome().failure
    assert (failure.rank, failure.exit_code, failure.reason) == (1, 7, "Failed")
    assert "ValueError: no" in failure.message
    assert "the budget is used up" in failure.evidence


def test_the_others_end_as_those_that_lost_a_peer() -> None:
    group = running()
    group.hear(say.Restart(1, "rank 3 failed"))
    group.ends(0, None, signal.SIGTERM)
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    group.hear(say.GiveUp("the budget is used up", "node 1", 3, 7, None, "ValueError: no"))
    failure = group.outcome().failure
    assert (failure.exit_code, failure.reason) == (138, "PeerLost")
    assert "it said: ValueError: no" in failure.message


def test_a_cause_of_its_own_is_everybodys() -> None:
    group = running()
    group.hear(say.GiveUp("rank 1 finished while rank 0 waited", None, 0, 1, None, None, "ProgramError"))
    group.ends(0, None, signal.SIGTERM)
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    failure = group.outcome().failure
    assert (failure.reason, failure.exit_code, failure.again) == ("ProgramError", 1, False)


def test_a_spare_that_was_not_needed_succeeds() -> None:
    group = Group()
    group.hear(say.Finished())
    assert group.outcome().verdict is Verdict.SUCCEEDED


def test_what_cannot_start_ends_with_its_own_code_and_leaves_the_job() -> None:
    group = Group()
    group.hear(formed())
    group(worker_group.CannotStart(0.0, "--start-method is forkserver, but torch starts threads", 2))
    failure = group.outcome().failure
    assert (failure.reason, failure.exit_code) == ("Misconfigured", 2)
    assert isinstance(group.told()[-1], say.Leave)


@pytest.mark.parametrize("code", [1, 138])
def test_what_cannot_start_is_this_nodes_own_failure_and_no_lost_peer(code: int) -> None:
    group = running()
    group(worker_group.CannotStart(0.0, "cannot open /logs/stdout.log", code))
    failure = group.outcome().failure
    assert (failure.reason, failure.exit_code) == ("NotStarted", code)
    assert "pods" not in failure.hint
    assert group.told()[-1] == say.Leave("cannot open /logs/stdout.log")


def test_a_name_that_does_not_resolve_ends_the_wait_for_it() -> None:
    group = Group(replace(PLAN, wait_for=("node-0",), wait_s=5.0))
    assert group.actions == [ev.Resolve(("node-0",))]
    group(ev.Unresolved(1.0, "not resolved yet: node-0"))
    group(ev.Deadline(5.0))
    failure = group.outcome().failure
    assert (failure.reason, failure.message) == ("PeerLost", "not resolved yet: node-0")


# -- hangs, stores, starts ----------------------------------------------------------------------


def test_a_hang_kills_all_workers_and_names_the_rank_at_fault() -> None:
    group = running()
    actions = group(ev.Hung(1.0, "rank 1 has been stopped", ("a.py:3",), 1, 1))
    assert ev.SignalGroup("rank 0", signal.SIGKILL) in actions
    failed = failures(group)[0]
    assert (failed.rank, failed.signal) == (1, signal.SIGKILL)
    group.ends(0, None, signal.SIGKILL)
    group.ends(1, None, signal.SIGKILL)
    group.clear()
    group.hear(say.GiveUp("the budget is used up", "node 0", 1, None, 9, None))
    assert group.outcome().failure.reason == "Hung"


def test_a_killed_store_process_is_named_and_costs_one_generation() -> None:
    group = running()
    gone = Exit(process="store 1", code=None, signal=signal.SIGKILL, at_s=1.0)
    group(worker_group.StoreEnded(1.0, gone))
    (failed,) = failures(group)
    assert failed.message == "the store process of generation 1 was killed (signal 9)"
    group.ends(0, 1, message=PEER_LOST)
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    assert group.state.phase is Phase.JOINING


STORE_GONE = worker_group.StoreEnded(1.0, Exit(process="store 1", code=None, signal=signal.SIGKILL, at_s=1.0))


def test_a_store_killed_before_any_worker_has_begun_costs_this_generation() -> None:
    group = Group()
    group.hear(Connected())
    group.hear(formed())
    group(worker_group.Prepared(0.0))
    group(worker_group.StoreOpened(0.0, "node-0", 1234))
    group(STORE_GONE)
    assert group.state.phase is Phase.JOINING
    assert isinstance(group.told()[-2], say.Failed)
    group.hear(say.Go(1, "node-0", 1234))
    assert not starts(group), "not without a store"
    train(group, 2)


def test_a_store_killed_while_a_generation_is_stopped_is_no_second_failure() -> None:
    group = running()
    group.ends(1, 3)
    told = group.told()
    group(STORE_GONE)
    assert group.told() == told


def test_a_store_killed_after_this_nodes_workers_have_succeeded_is_named_and_costs_nothing() -> None:
    """The other nodes' workers may not need it again; if they do, they fail."""
    group = running()
    group.ends(0)
    group.ends(1)
    group.clear()
    told = group.told()
    assert group(STORE_GONE) == [ev.Say("the store process of generation 1 was killed (signal 9)")]
    assert (group.state.phase, group.told()) == (Phase.DONE, told)


def test_a_job_that_ends_for_a_killed_store_says_so_on_every_node() -> None:
    text = "the store process of generation 1 was killed (signal 9)"
    group = running()
    group(STORE_GONE)
    group.ends(0, None, signal.SIGTERM)
    group.ends(1, None, signal.SIGTERM)
    group.clear()
    group.hear(
        say.GiveUp(f"{text} on node 0, and --max-restarts 0 allows no restart", "node 0", None, None, 9, text)
    )
    failure = group.outcome().failure
    assert (failure.reason, failure.message, failure.rank, failure.exit_code) == ("Killed", text, None, 137)


def test_a_store_process_that_ends_while_the_pod_stops_is_nobodys_failure() -> None:
    group = running()
    group(ev.Signalled(0.0, signal.SIGTERM))
    group(worker_group.StoreEnded(1.0, Exit(process="store 1", code=None, signal=9, at_s=1.0)))
    assert not failures(group)


def test_a_program_that_cannot_be_executed_fails_with_the_shells_code() -> None:
    group = running()
    group(ev.SpawnFailed(0.0, "rank 0", 127, "cannot execute 'absent'"))
    failed = failures(group)[0]
    assert (failed.rank, failed.exit_code, failed.message) == (0, 127, "cannot execute 'absent'")
