"""Who is named for a failure: a rank that failed by itself or finished while others waited; never an innocent."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.membership.world import World, running
from trainer_launch.diagnosis.collectives import Collective, Group, RankState
from trainer_launch.diagnosis.stall import STALL, StallJudge
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts

SENTENCE = "rank 1 finished with exit code 0 while rank 0 still waited for it: uneven data, a restart will not help"
CLOSED = "RuntimeError: gloo: Connection closed by peer"


def waits(world, peer, rank=0, finished=(), **how):
    world.say(peer, msg.Failed(world.number, rank, 1, None, CLOSED, "RuntimeError", True, finished), **how)


def last_entered(rank, number):
    """What a node tells of its rank."""
    last = (Collective(number, "all_reduce", "", 1),)
    return (RankState(rank=rank, groups={"0": Group(title="default_pg", entered=number, last=last)}),)


def returns(world, peer, finished=(), failed=False):
    world.say(peer, msg.Join(world.incarnations[peer], world.number, finished, failed))


def test_a_single_node_whose_rank_1_finished_while_rank_0_waited_is_over_at_once():
    world, (peer,) = running(1)
    waits(world, peer, finished=(1,))
    given_up = world.last(peer, msg.GiveUp)
    assert given_up.reason == SENTENCE
    assert (given_up.cause, given_up.rank, given_up.exit_code) == ("ProgramError", 0, 1)


def test_a_node_that_is_done_while_another_still_waits_ends_the_job_without_a_restart():
    world, (zero, one) = running(2)
    world.say(one, msg.Done(world.number))
    waits(world, zero)
    assert not world.is_over, "node 1 may be lost and the news of it slow"
    returns(world, one, finished=(1,))
    returns(world, zero, failed=True)
    assert world.is_over
    ends = [world.last(peer, msg.GiveUp) for peer in (zero, one)]
    assert {end.cause for end in ends} == {"ProgramError"}
    assert {end.reason for end in ends} == {SENTENCE}
    assert world.state.restarts == 0


def test_several_ranks_that_finished_are_all_named_once():
    world, (zero, one) = running(2)
    waits(world, zero, finished=(1,))
    returns(world, one, finished=(2, 3))
    returns(world, zero)
    assert world.last(zero, msg.GiveUp).reason.startswith("ranks 1-3 finished with exit code 0")


def test_the_sentence_has_what_each_rank_entered_last_as_far_as_its_node_knows():
    world, (zero, one) = running(2, judges=[StallJudge()])
    eleventh, tenth = (last_entered(rank, number) for rank, number in ((0, 11), (1, 10)))
    failed = msg.Failed(world.number, 0, 1, None, CLOSED, "RuntimeError", True, notes={STALL: eleventh})
    world.say(zero, failed)
    for _ in range(2):  # a node may say it again
        world.say(one, msg.Join(world.incarnations[one], world.number, (1,), notes={STALL: tenth}))
    world.join(zero)
    assert world.last(zero, msg.GiveUp).reason == SENTENCE.replace(
        ": uneven",
        "; last entered: rank 0 all_reduce #11 of default_pg, rank 1 all_reduce #10 of default_pg: uneven",
    )


def test_of_a_killed_rank_all_nodes_tell_what_the_others_entered_last():
    world, (zero, one, two) = running(3, judges=[StallJudge()], max_restarts=0)
    world.say(one, msg.Failed(world.number, 1, None, 9))
    for rank, peer in ((2, two), (0, zero)):
        world.say(peer, msg.Join(world.incarnations[peer], world.number, notes={STALL: last_entered(rank, 6)}))
    world.join(one)
    ends = [world.last(peer, msg.GiveUp) for peer in (zero, one, two)]
    assert {end.seen for end in ends} == {"last entered: ranks 0,2 all_reduce #6 of default_pg"}


@pytest.mark.parametrize(
    "said",
    [
        msg.Failed(1, 0, 1, None, "ValueError: x", "ValueError"),
        msg.Failed(1, 0, None, 6, "the ranks entered different collectives", cause="ProgramError"),
    ],
)
def test_who_says_of_its_end_something_itself_needs_no_collectives(said):
    world, (peer,) = running(1, judges=[StallJudge()], max_restarts=0)
    world.say(peer, replace(said, notes={STALL: last_entered(0, 6)}))
    assert world.last(peer, msg.GiveUp).seen == ""


def restarted(world, peers):
    world.join(*peers)
    world.pass_time(5)
    assert not world.is_over
    assert world.state.restarts == 1


def test_who_says_of_its_end_something_else_is_started_again_though_another_had_finished():
    world, (zero, one) = running(2)
    world.say(zero, msg.Failed(world.number, 0, 1, None, "ValueError: x", "ValueError", False, (1,)))
    returns(world, one, finished=(1,))
    restarted(world, (zero, one))


def test_a_worker_that_failed_for_a_reason_of_its_own_is_the_cause_whoever_told_first():
    world, (zero, one, two) = running(3)
    waits(world, zero)
    returns(world, one, finished=(1,))
    returns(world, two, failed=True)
    restarted(world, (zero,))


def test_where_nobody_had_finished_a_closed_connection_is_started_again():
    world, (zero, one) = running(2)
    waits(world, zero)
    returns(world, one)
    restarted(world, (zero,))


@pytest.mark.parametrize("leaves", [True, False], ids=["asked to stop", "killed"])
def test_a_pod_that_goes_is_no_program_that_finished(leaves):
    world, (zero, one) = running(2)
    waits(world, zero)
    world.say(one, msg.Leave("asked to stop")) if leaves else world.gone(one)
    world.join(zero)
    world.come(1)
    world.pass_time(5)
    assert not world.is_over
    assert world.state.restarts == 0, "a lost pod costs nothing"


def test_a_node_that_has_not_told_how_its_workers_ended_leaves_it_open():
    world, (zero, one) = running(2)
    waits(world, zero, finished=(1,))
    world.pass_time(10, silent=())
    assert not world.is_over
    assert world.state.restarts == 1
    restarted(world, (zero, one))


def test_a_pod_that_came_back_meanwhile_has_nothing_to_tell():
    world, (zero, one) = running(2)
    waits(world, zero, finished=(1,))
    world.say(one, msg.Join(world.incarnations[one], 0))
    world.join(zero)
    world.pass_time(5)
    assert not world.is_over


def cut_off(world, peer, rank=0):
    world.say(peer, msg.Failed(world.number, rank, 1, None, CLOSED, "RuntimeError", True))


def fails(world, peer, rank, message="ValueError: no"):
    world.say(peer, msg.Failed(world.number, rank, 1, None, message, message.partition(":")[0]))


def test_who_failed_by_itself_is_named_although_who_lost_it_was_faster():
    """Its worker may need seconds to end, as with a context of CUDA, and its connections close first."""
    world, (zero, one, two) = running(max_restarts=0)
    cut_off(world, zero)
    fails(world, one, 1)
    assert (
        "rank 1 failed on node 1 (pod-1) with exit code 1: ValueError: no; rank 0 had only lost its connection"
        in world.said
    )
    world.join(one, zero, two)
    given_up = world.last(zero, msg.GiveUp)
    assert (given_up.rank, given_up.node, given_up.message) == (1, "node 1 (pod-1)", "ValueError: no")
    assert given_up.reason.startswith("rank 1 failed on node 1 (pod-1) with exit code 1, and ")


def test_it_costs_one_restart_like_any_failure():
    world, (zero, one, two) = running(max_restarts=1)
    cut_off(world, zero)
    fails(world, one, 1)
    world.join(one, zero, two)
    assert [world.last(peer, msg.Formed).restarts for peer in (zero, one, two)] == [1, 1, 1]
    assert [world.count(peer, msg.Restart) for peer in (zero, one, two)] == [0, 1, 1]


def test_the_first_of_those_that_failed_by_themselves_stays_named():
    world, (zero, one, two) = running(max_restarts=0)
    cut_off(world, zero)
    fails(world, one, 1)
    fails(world, two, 2)
    cut_off(world, two, 2)
    world.join(one, zero, two)
    assert world.last(zero, msg.GiveUp).rank == 1
    world, (zero, one, two) = running(max_restarts=0)
    fails(world, zero, 0)
    fails(world, one, 1)
    world.join(one, zero, two)
    assert world.last(zero, msg.GiveUp).rank == 0, "it had not lost a peer"


def test_nobody_else_is_named_for_words_of_an_earlier_generation_or_of_a_node_that_is_no_member():
    world, (zero, one, two) = running(max_restarts=1)
    number = world.number
    world.fail(one)
    world.join(one, zero, two)
    world.open_store()
    newcomer = world.call(3)
    cut_off(world, zero)
    world.say(one, msg.Failed(number, 1, 1, None, "ValueError: no", "ValueError"))
    fails(world, newcomer, 3)
    world.join(one, zero, two)
    assert world.last(zero, msg.GiveUp).rank == 0


def test_two_starts_in_a_row_that_end_with_the_same_error_are_seen_behind_who_lost_the_peer():
    world, (zero, one, two) = running(max_restarts=9)
    for _ in range(2):
        cut_off(world, zero)
        fails(world, one, 1, "ModuleNotFoundError: No module named 'x'")
        if not world.is_over:
            world.join(one, zero, two)
            world.open_store()
    assert world.is_over
    assert "two starts in a row" in world.last(zero, msg.GiveUp).reason


# -- who failed first -----------------------------------------------------------------------------


LATE = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"


def told(rank, ago_s=0.0, number=None, message="", **more):
    code = None if number else 1
    return msg.Failed(1, rank, code, number, message, message.partition(":")[0] or None, ago_s=ago_s, **more)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (told(0, number=11), told(2, ago_s=0.4, message="ValueError: x"), 2),
        (told(0, number=11), told(2, message="ValueError: x"), 0),
        (told(0, ago_s=0.4, message="ValueError: x"), told(2, number=11), 0),
        (told(0, number=9), told(2, ago_s=0.4, message="RuntimeError: cannot go on"), 0),
        (told(0, message="RuntimeError: cannot go on"), told(2, number=9), 2),
        (told(0, message=CLOSED, lost_peer=True), told(2, ago_s=0.4, message=CLOSED, lost_peer=True), 0),
        (told(0, message=CLOSED, lost_peer=True), told(2, message=LATE, lost_peer=True, timed_out=True), 2),
        (
            told(0, message=LATE, lost_peer=True, timed_out=True),
            told(2, ago_s=0.4, message=LATE, lost_peer=True, timed_out=True),
            0,
        ),
        (told(0, message="ValueError: x"), told(2, ago_s=0.4, message=LATE, lost_peer=True, timed_out=True), 0),
    ],
    ids=[
        "crashed of an error",
        "crashed first",
        "as told",
        "killed",
        "fails of a kill",
        "victims",
        "lost who timed out",
        "timed out both",
        "timed out after an error",
    ],
)
def test_who_failed_first_is_named_whoever_told_first(first, second, named):
    world, (zero, one, two) = running(max_restarts=0)
    world.say(zero, first)
    world.say(two, second)
    world.join(zero, one, two)
    assert world.last(one, msg.GiveUp).rank == named


@pytest.mark.parametrize("code", [1, 7])
def test_of_ranks_that_end_in_the_same_way_on_several_nodes_and_say_nothing_none_is_named(code):
    world, (zero, one, two) = running(max_restarts=0)
    world.say(zero, told(0))
    world.say(two, replace(told(2, ago_s=0.4), exit_code=code))
    world.say(one, told(1))
    world.join(zero, one, two)
    end = world.last(one, msg.GiveUp)
    assert (end.is_victim, end.rank) == (True, 0) if code == 1 else (False, 2)
    assert end.reason.count("nothing tells which of them is the cause") == (code == 1)
    assert end.exit_reason == "" or code != 1


@pytest.mark.parametrize("order", ["lost first", "timed out first"])
def test_what_a_node_has_told_of_its_end_counts_also_when_another_waited_until_a_time_out(order):
    world, (zero, one, two) = running(3)
    world.say(one, msg.Done(world.number))
    late = {"message": LATE, "lost_peer": True, "timed_out": True}
    ends = [(zero, told(0, message=CLOSED, lost_peer=True)), (two, told(2, **late))]
    for peer, failed in ends if order == "lost first" else reversed(ends):
        world.say(peer, failed)
        returns(world, peer)
    returns(world, one, finished=(1,))
    assert world.is_over
    assert "rank 1 finished with exit code 0" in world.last(zero, msg.GiveUp).reason
    assert world.state.restarts == 0


def test_workers_that_wait_for_nobody_have_a_moment_where_only_victims_are_known():
    patience = {}
    for name, failed in {
        "lost": told(0, message=CLOSED, lost_peer=True),
        "timed out": told(0, message="timed out", lost_peer=True, timed_out=True),
        "own": told(0, message="ValueError: x"),
    }.items():
        world, (zero, one, _two) = running(max_restarts=0)
        world.say(zero, failed)
        patience[name] = world.last(one, msg.Restart).patience_s
        world.pass_time(timeouts.LEASE_S + 0.1)
        assert world.is_over == (name == "own"), "the others may still say why"
        world.pass_time(timeouts.PATIENCE_S + 0.1)
        assert world.is_over
    assert patience == {"lost": timeouts.PATIENCE_S, "timed out": 0.0, "own": 0.0}


@pytest.mark.parametrize("tells", ["Failed", "Join"])
def test_ranks_that_may_have_been_asked_to_leave_prove_no_uneven_data(tells):
    """As by a SIGTERM from elsewhere, on which a program saves and ends with 0."""
    world, (zero, one) = running(2, max_restarts=0)
    asked: dict[str, Any] = {"finished": (1,), "may_be_asked": True}
    world.say(zero, told(0, message=CLOSED, lost_peer=True, **(asked if tells == "Failed" else {})))
    more = asked if tells == "Join" else {}
    world.say(one, msg.Join(world.incarnations[one], world.number, **more))
    world.join(zero)
    given_up = world.last(zero, msg.GiveUp)
    assert (given_up.cause, given_up.is_victim) == ("PeerLost", True)
    assert given_up.reason.startswith("rank 1 finished with exit code 0 while rank 0 still waited for it, and ")
    assert "uneven" not in given_up.reason


class Judge(StallJudge, frozen=True):
    """Knows who had not entered."""

    def begin(self, members, now_s):
        return self

    def explain_timeout(self, bodies, rank):
        return (f"rank 2 had not entered it; rank {rank} waited", (2,)) if len(bodies) == 2 else ("", ())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_time_out_names_who_had_not_entered_and_its_node_or_nobody(is_known):
    world = World(2, judges=[Judge()], max_restarts=0)
    zero, one = world.come(0, 1, workers=2)
    world.pass_time(1.0)
    world.open_store()
    notes = {STALL: ()}
    world.say(zero, told(0, message="timed out", lost_peer=True, timed_out=True, notes=notes))
    world.say(one, msg.Join(world.incarnations[one], 1, notes=notes if is_known else {}))
    world.join(zero)
    end = world.last(zero, msg.GiveUp)
    if is_known:
        assert (end.cause, end.rank, end.node_rank, end.host, end.is_victim) == ("Hung", 2, 1, "pod-1", False)
        assert end.reason.startswith("rank 2 had not entered it; rank 0 waited, and ")
    else:
        assert (end.cause, end.rank, end.is_victim) == (None, 0, True)


def test_workers_that_the_launcher_ended_were_killed_by_nobody_else():
    world, (zero, one, two) = running(max_restarts=0)
    world.say(one, told(1, number=9, message="rank 1 has been stopped", exit_reason="Hung"))
    ended = "rank 1 on node 1 (pod-1) was ended by the launcher, because it hung"
    assert world.last(zero, msg.Restart).reason == f"{ended}: rank 1 has been stopped"
    world.join(zero, one, two)
    assert world.last(two, msg.GiveUp).reason.startswith(f"{ended}, and ")


def test_a_rank_that_another_nodes_launcher_names_for_a_hang_has_its_own_place():
    world = World(2, max_restarts=0)
    zero, one = world.come(0, 1, workers=2)
    world.pass_time(1.0)
    world.open_store()
    world.say(zero, told(3, number=9, message="rank 3 never entered it", exit_reason="Hung"))
    world.join(zero, one)
    end = world.last(one, msg.GiveUp)
    assert (end.node, end.node_rank, end.rank) == ("node 1 (pod-1)", 1, 3)
    assert end.reason.startswith("rank 3 on node 1 (pod-1) was ended by the launcher, because it hung")


def test_the_log_says_what_the_failed_worker_said():
    world, (zero, one, two) = running(max_restarts=0)
    fails(world, one, 1)
    world.join(one, zero, two)
    assert "the job has failed: rank 1 failed on node 1 (pod-1) with exit code 1, and " in world.said[-1]
    assert world.said[-1].endswith(": ValueError: no")
