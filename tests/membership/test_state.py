"""Histories of jobs, through the pure machine."""

from __future__ import annotations

import pytest

from tests.membership.world import World, running
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import JobPhase


def test_ranks_follow_the_node_index_whoever_comes_first():
    world = World(3)
    two, zero, one = world.come(2, 0, 1)
    formed = [world.last(peer, msg.Formed) for peer in (zero, one, two)]
    assert [(f.generation, f.group_rank, f.size, f.is_store_host) for f in formed] == [
        (1, 0, 3, True),
        (1, 1, 3, False),
        (1, 2, 3, False),
    ]


def test_those_who_wait_hear_who_is_missing_and_only_once():
    world = World(3)
    peer = world.come(0)[0]
    world.call(1)
    world.pass_time(60)
    assert [m for m in world.told[peer] if isinstance(m, msg.Waiting)] == [
        msg.Waiting(1, 3, ("node 1 (pod-1)", "node 2"))
    ]
    assert world.said == ["1 of 3 nodes, waiting up to 600 s for node 1 (pod-1), node 2"]


@pytest.mark.parametrize("leaving", [(0,), (0, 1)], ids=["the only node", "both nodes"])
def test_nobody_is_said_to_be_awaited_while_all_nodes_leave(leaving):
    world, peers = running(len(leaving))
    for peer in peers:
        world.say(peer, msg.Leave("asked to stop"))
    world.pass_time(10)  # their workers save
    assert not [text for text in world.said if "waiting up to" in text]


def test_in_a_job_of_many_nodes_those_who_wait_hear_less_often_who_is_missing():
    world = World(1001)
    first, *_ = world.come(*range(500))
    world.pass_time(0.25)
    assert world.count(first, msg.Waiting) == 1
    world.come(500)
    world.pass_time(0.25)
    assert world.count(first, msg.Waiting) == 1, "500 messages take a while, too"
    world.pass_time(0.3)
    assert world.count(first, msg.Waiting) == 2


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"job": "other"}, "job"), ({"version": 0}, "version"), ({"rank": 3}, "no node 3")],
)
def test_strangers_are_refused_for_good(fields, word):
    world = World(3)
    peer = world.call(**{"rank": 0, **fields})
    refused = world.last(peer, msg.Refused)
    assert word in refused.reason
    assert not refused.retry
    assert world.cut == [peer]
    assert not world.state.peers


def test_a_failure_restarts_the_others_once_and_costs_one():
    world, (zero, one, two) = running()
    world.fail(one)
    world.fail(two)
    assert [world.count(peer, msg.Restart) for peer in (zero, one, two)] == [1, 0, 1]
    world.join(zero, one, two)
    assert [world.last(peer, msg.Formed).restarts for peer in (zero, one, two)] == [1, 1, 1]
    assert world.number == 2


@pytest.mark.parametrize("loss", ["gone", "leaves", "silent", "came back"])
def test_a_failure_that_overtakes_the_news_of_a_lost_peer_costs_nothing_and_blames_nobody(loss):
    world, (zero, one, two) = running(max_restarts=0)
    world.pass_time(2, silent={one} if loss == "silent" else ())
    world.fail(zero)
    assert world.count(two, msg.Restart) == 1, "the others stop at once"
    world.join(zero, two)
    back = one
    if loss == "gone":
        world.gone(one)
    elif loss == "leaves":
        world.say(one, msg.Leave("x"))
    elif loss == "silent":
        world.pass_time(3, silent={one})
    if loss != "leaves":
        back = world.call(1)
    world.join(back)
    assert world.last(zero, msg.Formed) == msg.Formed(2, 0, 3, 0, True)
    assert world.state.failure is None
    assert any("because node 1 (pod-1) was lost, which costs no restart" in text for text in world.said)


def test_a_failure_is_charged_when_all_are_back_or_every_lease_would_have_told():
    world, (zero, one, two) = running(max_restarts=0)
    world.fail(one)
    world.join(one, zero)
    world.pass_time(2.9)
    assert not world.is_over
    world.pass_time(0.2)
    assert world.last(zero, msg.GiveUp).node == "node 1 (pod-1)"
    world, (zero, one, two) = running(max_restarts=0)
    world.fail(one)
    world.join(one, zero, two)
    assert world.last(zero, msg.GiveUp).node == "node 1 (pod-1)", "at once"
    world, (one,) = running(1, ranks=(0,), max_restarts=0)
    world.fail(one)
    assert world.last(one, msg.GiveUp).node == "node 0 (pod-0)", "a single node has no peers to lose"


def test_the_loss_of_the_failing_node_itself_excuses_nothing():
    world, (zero, one, two) = running(max_restarts=0)
    world.fail(one)
    world.gone(one)
    world.join(zero, two, world.call(1))
    assert world.is_over


def test_a_lost_peer_is_told_at_once_and_costs_nothing():
    world, (zero, one, two) = running()
    world.gone(one)
    assert world.last(zero, msg.Restart) == msg.Restart(1, "node 1 (pod-1) is gone")
    world.join(zero, two)
    assert world.phase is JobPhase.GATHERING
    back = world.come(1)[0]
    assert world.last(back, msg.Formed) == msg.Formed(2, 1, 3, 0, False)


def test_nobody_is_lost_because_the_coordinator_itself_was_stopped():
    world, (zero, *_) = running()
    world.now_s += 30
    world.tick()
    assert world.count(zero, msg.Restart) == 0
    world.pass_time(5, silent={zero})
    assert zero in world.cut, "from then on leases run again"


def test_a_pod_that_is_back_before_its_lease_ends_takes_its_place():
    world, (zero, one, two) = running()
    back = world.come(1)[0]
    assert not world.last(one, msg.Refused).retry
    assert world.cut == [one]
    assert world.last(zero, msg.Restart).reason == "node 1 (pod-1) came back"
    world.join(zero, two)
    assert world.last(back, msg.Formed).group_rank == 1


def test_two_live_pods_cannot_be_the_same_node():
    world, (zero, one, _) = running()
    world.pass_time(5)
    world.say(one, msg.Renew())
    refused = world.last(world.call(1, host="twin"), msg.Refused)
    assert (refused.retry, world.count(zero, msg.Restart)) == (False, 0)
    assert "node 1 (pod-1) is there already" in refused.reason


def test_a_pod_under_a_new_name_may_try_again_while_the_old_one_is_silent():
    world, (_, one, _) = running()
    world.say(one, msg.Renew())
    world.pass_time(2, silent={one})
    assert world.last(world.call(1, host="twin"), msg.Refused).retry
    world.gone(one)
    assert world.last(world.call(1, host="twin"), msg.Welcome)


def test_a_node_that_leaves_is_named_and_free_of_charge():
    world, (zero, one, two) = running()
    world.say(one, msg.Leave("pre\x1bempted"))
    assert world.last(zero, msg.Restart).reason == "node 1 (pod-1) is leaving: pre empted"
    world.gone(one)
    assert world.count(two, msg.Restart) == 1
    world.join(zero, two, *[world.call(1)])
    assert world.last(zero, msg.Formed).restarts == 0


def test_a_member_that_joins_again_has_lost_its_workers():
    world, (zero, one, two) = running()
    world.join(one, after=0)
    assert world.phase is JobPhase.RUNNING, "said before this generation formed"
    world.join(one)
    assert world.last(zero, msg.Restart).reason == "node 1 (pod-1) starts again"
    world.join(zero, two)
    assert world.number == 2


def test_the_budget_is_the_jobs():
    world, peers = running(max_restarts=2)
    for i in range(2):
        world.fail(peers[i])
        world.join(*peers)
        world.open_store()
    world.fail(peers[2], rank=5, code=42)
    world.join(*peers)
    ends = [world.last(peer, msg.GiveUp) for peer in peers]
    assert {(e.node, e.rank, e.exit_code, e.message) for e in ends} == {("node 2 (pod-2)", 5, 42, "boom")}
    assert "the restart budget is used up (2 restarts)" in ends[0].reason
    assert world.is_over


def test_a_node_that_never_returns_ends_the_job_and_is_named():
    world, (zero, one, two) = running(rejoin_timeout_s=60.0)
    world.fail(one, rank=3, code=7)
    world.gone(one)
    world.join(zero, two)
    world.pass_time(61)
    end = world.last(zero, msg.GiveUp)
    assert end.reason == "waited 60 s for node 1 (pod-1)"
    assert (end.rank, end.exit_code) == (3, 7)


def test_a_store_that_never_opens_ends_the_generation():
    world = World(2, store_timeout_s=5.0)
    peers = world.come(0, 1)
    world.pass_time(6)
    assert [world.count(peer, msg.Restart) for peer in peers] == [1, 1]
    assert world.state.restarts == 0, "only failures of workers are counted"
    for _ in range(4):
        world.join(*peers)
        world.pass_time(6)
    assert world.is_over


# -- elastic ----------------------------------------------------------------------------------


def test_an_elastic_job_waits_a_moment_for_more():
    world = World(1, 3)
    zero = world.come(0)[0]
    world.pass_time(0.3)
    world.come(1)
    world.pass_time(0.4)
    assert world.phase is JobPhase.GATHERING
    world.pass_time(0.2)
    assert world.last(zero, msg.Formed).size == 2


def test_an_elastic_job_goes_on_without_a_lost_node():
    world, (zero, one, two) = running(1, 3)
    world.gone(zero)
    world.join(one, two)
    world.pass_time(0.6)
    assert world.last(one, msg.Formed) == msg.Formed(2, 0, 2, 0, True)


def test_it_waits_for_a_live_node_that_still_stops_its_workers():
    world, (zero, one, two) = running(1, 3)
    world.gone(zero)
    world.join(one)
    world.pass_time(20)
    assert world.phase is JobPhase.GATHERING
    world.join(two)
    world.pass_time(0.6)
    assert world.last(one, msg.Formed).size == 2


def test_it_does_not_wait_for_ever_for_one_that_never_stops():
    world, (zero, one, _) = running(1, 3)
    world.gone(zero)
    world.join(one)
    world.pass_time(36)
    assert world.last(one, msg.Formed).size == 1


def test_newcomers_are_gathered_and_cost_one_restart():
    world, (zero,) = running(1, 4, ranks=(0,))
    for rank in (1, 2):
        world.come(rank)
        world.pass_time(0.3)
    assert world.count(zero, msg.Restart) == 0
    world.pass_time(0.3)
    assert world.count(zero, msg.Restart) == 1
    assert world.last(zero, msg.Restart).grows
    world.join(zero)
    assert (world.phase, world.last(zero, msg.Formed).restarts) == (JobPhase.FORMED, 0), "at once: all are there"
    assert world.last(zero, msg.Formed).size == 3


def test_newcomers_that_take_all_the_room_are_admitted_at_once():
    world, (zero,) = running(1, 3, ranks=(0,))
    for rank in (1, 2):
        world.come(rank)
    world.pass_time(0.01)
    assert world.count(zero, msg.Restart) == 1


def test_nobody_stops_for_a_newcomer_that_cannot_start_workers_yet():
    world, (zero, one) = running(1, 3, ranks=(0, 1))
    newcomer = world.call(2)
    world.join(newcomer, prepared=False)
    world.pass_time(60)
    assert world.count(zero, msg.Restart) == 0
    assert world.last(newcomer, msg.Waiting) == msg.Waiting(2, 3, (), running=True)
    world.join(newcomer, after=0)
    world.pass_time(0.01)
    assert [world.count(peer, msg.Restart) for peer in (zero, one, newcomer)] == [1, 1, 0]
    world.join(zero, one)
    assert world.last(newcomer, msg.Formed).size == 3


def test_only_those_that_can_start_workers_are_counted_as_newcomers():
    world, (zero,) = running(1, 3, ranks=(0,))
    world.join(world.call(1), prepared=False)
    world.come(2)
    world.pass_time(0.4)
    assert world.count(zero, msg.Restart) == 0, "there may be more in a moment: one place is free"
    world.pass_time(0.2)
    assert world.count(zero, msg.Restart) == 1


def test_a_newcomer_that_still_imports_is_taken_when_the_generation_ends_anyway():
    world, peers = running(1, 3, ranks=(0, 1))
    newcomer = world.call(2)
    world.join(newcomer, prepared=False)
    world.fail(peers[0])
    world.join(*peers)
    assert world.last(newcomer, msg.Formed).size == 3


def test_a_node_that_can_start_workers_now_makes_nobody_wait_longer():
    world = World(1, 3)
    zero = world.come(0)[0]
    one = world.call(1)
    world.join(one, prepared=False)
    world.pass_time(0.4)
    world.join(one)
    world.pass_time(0.11)
    assert world.last(zero, msg.Formed).size == 2


def test_a_fixed_job_shrinks_only_after_its_patience():
    world, (zero, one, _) = running(2, 3, shrink_after_s=30.0)
    world.gone(one)
    world.join(zero, 3)
    world.pass_time(29)
    assert world.phase is JobPhase.GATHERING
    world.pass_time(2)
    assert world.last(zero, msg.Formed).size == 2


def test_a_restart_of_those_who_are_there_does_not_wait_for_others():
    world, peers = running(1, 3, ranks=(0, 1))
    world.fail(peers[0])
    world.join(*peers)
    assert world.phase is JobPhase.FORMED


def test_names_of_pods_that_never_return_do_not_pile_up():
    world = World(1, 2)
    steady = world.call(host="steady")
    world.join(steady)
    for i in range(50):
        peer = world.call(host=f"pod-{i}")
        world.join(peer)
        world.pass_time(1)
        world.join(steady)
        world.pass_time(1)
        world.gone(peer)
        world.join(steady)
        world.pass_time(1)
    assert len(world.state.nodes) <= 2


def test_what_the_coordinator_remembers_does_not_grow_with_each_generation():
    world = World(2, candidate=0)
    peers = world.come(0, 1)
    sizes = []
    for number in range(1, 101):
        for peer in peers:
            world.say(peer, msg.Took(number))
        world.open_store()
        assert (world.phase, world.number) == (JobPhase.RUNNING, number)
        world.join(*reversed(peers))
        sizes.append(len(repr(world.state)))
    assert max(sizes[50:]) < min(sizes[10:50]) + 100, "some numbers have more digits"


def fails(world, peer, **how):
    world.say(peer, msg.Failed(world.number, **{"rank": 0, "exit_code": 1, "signal": None, **how}))


def again(world, peers):
    world.join(*peers)
    world.open_store()


def test_a_failure_that_is_no_workers_is_told_in_its_own_words():
    world, (zero, one, _) = running()
    text = "the store process of generation 1 was killed (signal 9)"
    fails(world, zero, rank=None, exit_code=None, signal=9, message=text)
    assert world.last(one, msg.Restart).reason == f"{text} on node 0 (pod-0)"


@pytest.mark.parametrize("error", ["SyntaxError", "IndentationError", "TabError"])
def test_what_cannot_be_parsed_is_not_started_again(error):
    world, (zero, one, _) = running()
    message = f"{error}: invalid syntax (train.py, line 3)"
    fails(world, one, rank=1, message=message, error=error)
    assert world.is_over
    given_up = world.last(zero, msg.GiveUp)
    assert given_up.reason == (
        f"rank 1 failed on node 1 (pod-1) with exit code 1; not restarted, because a {error} is the same each time"
    )
    assert (given_up.rank, given_up.message) == (1, message)


def test_later_a_syntax_error_may_be_of_data_or_of_a_torn_cache_file_and_costs_the_budget():
    world, (zero, one, _) = running()
    world.pass_time(600)
    fails(world, one, rank=1, message="SyntaxError: invalid syntax (<string>, line 1)", error="SyntaxError")
    assert not world.is_over
    reason = world.last(zero, msg.Restart).reason
    assert reason.startswith("rank 1 failed on node 1 (pod-1) with exit code 1: SyntaxError: invalid syntax")


@pytest.mark.parametrize(
    "missing",
    [
        {"message": "ModuleNotFoundError: No module named 'x'", "error": "ModuleNotFoundError"},
        {"message": "/usr/bin/python3: No module named x"},  # by `python -m x`
        {"message": "/bin/python: No module named x.__main__; 'x' is a package and cannot be directly executed"},
        {"message": "/bin/python3.11: Error while finding module specification for 'x.y' (ModuleNotFoundError: …)"},
    ],
)
def test_an_import_that_fails_twice_in_a_row_at_the_start_is_not_tried_a_third_time(missing):
    world, peers = running()
    fails(world, peers[1], rank=1, **missing)
    assert not world.is_over
    again(world, peers)
    fails(world, peers[2], rank=2, **missing)
    assert world.is_over, "whichever rank was the first to tell"
    assert "two starts in a row" in world.last(peers[0], msg.GiveUp).reason


@pytest.mark.parametrize(
    ("message", "is_over"),
    [
        ("NameError: name 'prnt' is not defined", True),
        ("AttributeError: module 'torch.distributed' has no attribute 'init_proces_group'", True),
        ("AttributeError: partially initialized module 'x' has no attribute 'y' (a circular import)", True),
        ("TypeError: Linear.__init__() missing 1 required positional argument: 'out_features'", True),
        ("TypeError: train() got an unexpected keyword argument 'lrr'", True),
        ("TypeError: train() takes 1 positional argument but 2 were given", True),
        ("TypeError: train() takes from 1 to 2 positional arguments but 3 were given", True),
        ("AttributeError: 'NoneType' object has no attribute 'shape'", False),
        ("TypeError: unsupported operand type(s) for +: 'NoneType' and 'int'", False),
        ("UnboundLocalError: cannot access local variable 'x'", False),
        ("KeyError: 'step'", False),
        ("ValueError: NameError: name 'x' is not defined", False),
    ],
)
def test_a_typo_that_ends_two_starts_in_a_row_is_not_tried_again_but_what_values_may_cause_is(
    message: str, is_over: bool
) -> None:
    world, peers = running()
    error = message.partition(":")[0]
    fails(world, peers[0], message=message, error=error)
    assert not world.is_over, "once may be chance"
    again(world, peers)
    fails(world, peers[1], rank=1, message=message, error=error)
    assert world.is_over == is_over


def test_two_slips_that_differ_are_not_the_same_each_time() -> None:
    world, peers = running()
    fails(world, peers[0], message="NameError: name 'a' is not defined", error="NameError")
    again(world, peers)
    fails(world, peers[0], message="NameError: name 'b' is not defined", error="NameError")
    assert not world.is_over


@pytest.mark.parametrize("cause", ["ProgramError", "Misconfigured", "NotRunnable"])
def test_what_a_node_knows_to_be_in_vain_is_not_restarted_and_every_node_has_its_cause(cause):
    world, peers = running()
    fails(world, peers[0], exit_code=2, message="rank 0 refuses its arguments", cause=cause)
    given_up = world.last(peers[1], msg.GiveUp)
    assert (given_up.reason, given_up.cause, given_up.exit_code) == ("rank 0 refuses its arguments", cause, 2)


def test_a_syntax_error_of_data_has_the_whole_budget():
    world, peers = running()
    for _ in range(2):
        fails(world, peers[0], message="SyntaxError: invalid syntax (<unknown>, line 1)", error="SyntaxError")
        again(world, peers)
    assert not world.is_over


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (
            {"message": "ImportError: a", "error": "ImportError"},
            {"message": "ImportError: b", "error": "ImportError"},
        ),
        (
            {"message": "ImportError: a", "error": "ImportError"},
            {"message": "ValueError: a", "error": "ValueError"},
        ),
        ({"message": "ValueError: a", "error": "ValueError"}, {"message": "ValueError: a", "error": "ValueError"}),
        ({"exit_code": 2}, {"exit_code": 1}),
        ({"exit_code": 2}, {"exit_code": 2}),
        ({"exit_code": 127}, {"exit_code": 127}),
        ({"exit_code": 2}, {"exit_code": 127}),
        ({"exit_code": 2, "error": "SystemExit"}, {"exit_code": 2, "error": "SystemExit"}),
        ({"exit_code": 1}, {"exit_code": 1}),
        ({"exit_code": None, "signal": 9}, {"exit_code": None, "signal": 9}),
    ],
)
def test_other_failures_have_the_whole_budget(first, second):
    world, peers = running()
    fails(world, peers[0], **first)
    again(world, peers)
    fails(world, peers[0], **second)
    assert not world.is_over


def test_what_failed_late_or_not_in_a_row_has_the_whole_budget():
    missing = {"message": "ImportError: a", "error": "ImportError"}
    late, peers = running()
    late.pass_time(31)
    fails(late, peers[0], **missing)
    again(late, peers)
    fails(late, peers[0], **missing)
    assert not late.is_over, "the first one was not at the start"
    between, (zero, one, two) = running()
    fails(between, zero, **missing)
    again(between, (zero, one, two))
    between.gone(two)
    again(between, (zero, one, between.call(2)))
    fails(between, zero, **missing)
    assert not between.is_over, "a generation in between ended otherwise"


def test_a_node_that_is_the_whole_job_renews_no_lease_and_never_loses_it():
    world = World(1)
    alone = world.call(0)
    assert world.last(alone, msg.Welcome).lease_s >= 3600
    world.pass_time(60, silent={alone})
    assert world.cut == []
    assert World(2).state.settings.granted_lease_s == 3.0
