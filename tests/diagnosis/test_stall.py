"""A job that does not go on: all members are asked once, and all are told the same sentence."""

from __future__ import annotations

import pytest

from tests.diagnosis.test_collectives import NOW, group
from tests.membership import world as worlds
from trainer_launch.diagnosis.collectives import Doing, Explanation, RankState
from trainer_launch.diagnosis.stall import (
    EXPLAIN_AGAIN_S,
    SHOW_RANKS_S,
    STALL,
    Ranks,
    RanksOfAll,
    ShowRanks,
    StallJudge,
    fitting,
)
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import state
from trainer_launch.model.codec import MAX_LINE_BYTES, encode

READ = "in data.py:22 (read_batch)"


def tells(world, peer, *ranks, after=6, generation=1, limit_s=0.0, **known):
    """A node shows these ranks; who is `after` #6 waits in #7."""
    groups = {"0": group(after, 6, ranks="0-2")}
    states = tuple(RankState(rank=rank, node=peer - 1, groups=groups, **known) for rank in ranks)
    world.note(peer, STALL, Ranks(states, NOW, limit_s), generation)


def stall(world):
    """What the table has of it."""
    return state.status(world.state, world.now_s).notes[STALL]


def told(world, peer):
    return world.last(peer, Explanation)


def test_the_first_that_sees_no_progress_has_all_others_asked_and_all_hear_one_sentence():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    tells(world, one, 1, after=7)
    assert [world.count(peer, ShowRanks) for peer in (zero, one, two)] == [1, 0, 1]
    tells(world, zero, 0, after=7)
    assert told(world, zero) is None, "node 2 may know more"
    tells(world, two, 2, place=READ)
    sentences = {told(world, peer).text for peer in (zero, one, two)}
    assert sentences == {
        "rank 2 (node 2) never entered all_reduce #7 of default_pg, [[4]] Float; ranks 0-1 have waited in it for "
        "40 s; rank 2 is in data.py:22 (read_batch)"
    }
    assert told(world, zero).ranks == (2,)
    assert not world.is_over
    assert world.count(zero, msg.Restart) == 0, "nobody is stopped for it"


def test_who_does_not_answer_in_time_is_named_as_such_and_not_accused():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    tells(world, zero, 0, after=7)
    tells(world, one, 1, after=7)
    world.pass_time(SHOW_RANKS_S + 1)
    text = told(world, zero).text
    assert "ranks 0-1 have waited in " in text
    assert "; nothing is known of rank 2 here" in text
    assert "never entered" not in text
    assert text.endswith("; no answer from node 2 (pod-2)")
    assert world.count(two, Explanation) == 1


def test_a_node_that_is_lost_meanwhile_ends_the_question_with_its_generation():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    tells(world, zero, 0, after=7)
    world.gone(two)
    tells(world, one, 1, after=7)
    world.pass_time(SHOW_RANKS_S + 1)
    assert told(world, zero) is None


def test_the_ranks_of_nodes_that_are_done_have_finished_and_are_not_asked():
    world = worlds.World(3, judges=[StallJudge()])
    zero, one, two = world.come(0, 1, 2, workers=1)
    world.open_store()
    world.say(two, msg.Done(1))
    tells(world, zero, 0, after=7)
    assert world.count(two, ShowRanks) == 0
    tells(world, one, 1, after=7)
    assert told(world, one).text.startswith("rank 2 finished with exit code 0, and ranks 0-1 have waited")
    assert (told(world, one).reason, told(world, one).helps) == ("ProgramError", False)


def test_who_has_finished_just_now_is_not_accused_of_what_others_saw_before():
    """An evaluation ends, the job is over, and the others' states are older than that."""
    world = worlds.World(3, judges=[StallJudge()])
    zero, one, two = world.come(0, 1, 2, workers=1)
    world.open_store()
    world.say(two, msg.Done(1))
    for wait_s, is_uneven in ((1.0, False), (30.0, True)):
        world.pass_time(wait_s)
        tells(world, zero, 0, after=7, limit_s=4.0)
        tells(world, one, 1, after=7)
        found = told(world, one)
        assert (found.reason == "ProgramError", found.accuses, not found.active) == (is_uneven,) * 3
        assert found.text.endswith("which may be over by now") != is_uneven


def test_ranks_that_wait_for_nothing_are_told_without_blame():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    for peer, rank in ((zero, 0), (one, 1), (two, 2)):
        tells(world, peer, rank)
    assert told(world, zero).text == "no progress, but none of 3 known ranks waits in a recorded collective"
    assert not told(world, zero).accuses
    assert stall(world).stall is None, "nobody hangs"


def test_what_was_said_before_the_explanation_was_heard_asks_nobody_again():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    for peer, rank in ((zero, 0), (one, 1), (two, 2)):
        tells(world, peer, rank, after=7)
    tells(world, one, 1, after=7)
    assert world.count(zero, ShowRanks) == 0
    assert world.count(zero, Explanation) == 1
    world.pass_time(EXPLAIN_AGAIN_S + 1)
    tells(world, one, 1, after=7)
    assert world.count(zero, ShowRanks) == 1


def test_a_rank_of_another_node_that_shows_progress_is_not_accused_until_it_shows_none():
    """The limit is that of the node that asks."""
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    for peer, known in ((one, {"limit_s": 30.0}), (two, {})):
        tells(world, peer, peer - 1, after=7, quiet_s=31.0, **known)
    tells(world, zero, 0, place="in eval.py:12 (evaluate)", quiet_s=2.0)
    first = told(world, one)
    assert (first.ranks, first.accuses, first.active) == ((0,), False, True)
    assert first.text.endswith("rank 0 is in eval.py:12 (evaluate), still making progress")
    tells(world, two, 2, after=7, quiet_s=31.0)
    assert world.count(zero, ShowRanks) == 1, "a late answer is no question"
    tells(world, zero, 0, place="in eval.py:12 (evaluate)", quiet_s=30.0, limit_s=30.0)
    for peer in (one, two):
        tells(world, peer, peer - 1, after=7, quiet_s=60.0)
    assert (told(world, one).ranks, told(world, one).accuses) == ((0,), True)


def test_status_tells_the_sentence_and_how_old_it_is_until_the_generation_is_over():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    for peer, rank in ((zero, 0), (one, 1), (two, 2)):
        tells(world, peer, rank, after=7 if rank else 6, place=READ)
    world.now_s += 5
    now = stall(world)
    assert now.stall == told(world, zero).text
    assert now.stall_age_s == 5.0
    world.fail(one)
    assert stall(world).stall is None


def test_a_failure_that_a_restart_cannot_mend_ends_the_job_with_its_cause():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    text = "the ranks disagree about collective #7"
    world.say(one, msg.Failed(1, 1, None, 9, text, cause="ProgramError"))
    assert world.is_over
    ends = [world.last(peer, msg.GiveUp) for peer in (zero, one, two)]
    assert {(end.reason, end.cause, end.rank) for end in ends} == {(text, "ProgramError", 1)}


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(("missing", "is_named"), [((2,), True), ((1, 2), False), ((), False)])
def test_before_it_is_known_which_pauses_are_usual_only_a_few_idle_ranks_are_accused(is_early, missing, is_named):
    """A first collective of all ranks may take long, and so may all but one of them before it."""
    world, peers = worlds.running(judges=[StallJudge()])
    for peer, rank in zip(peers, range(3), strict=True):
        groups = {"0": group(6 if rank in missing else 7, 6, ranks="0-2")}
        state = RankState(rank=rank, groups=groups, place=READ, quiet_s=61.0)
        ranks = Ranks((state,), NOW, 60.0, is_early=is_early) if rank == 0 else Ranks((state,), NOW)
        world.note(peer, STALL, ranks)
    assert told(world, peers[0]).accuses is (is_named or not is_early)


# -- what all nodes are told of all ranks ------------------------------------------------------


def test_every_node_gets_the_stack_of_the_rank_that_is_named():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    stack = "data.py:22 (read_batch)\ntrain.py:31 (main)"
    for peer, rank in ((zero, 0), (one, 1), (two, 2)):
        tells(world, peer, rank, after=7 if rank else 6, place=READ, stack=stack if rank == 0 else "")
    for peer in (zero, one, two):
        shown = world.last(peer, RanksOfAll)
        assert shown.sentence == "", "nobody has asked for it"
        assert {state.rank: state.stack for state in shown.states} == {0: stack, 1: "", 2: ""}


def states_of_large_node(stack: str) -> list[RankState]:
    waits = [RankState(rank=rank, doing=Doing.COLLECTIVE, stack=stack) for rank in range(1000)]
    return [*waits, RankState(rank=1000, place=READ, stack=stack)]


@pytest.mark.parametrize("stack", ["", "x" * 2000])
def test_as_many_ranks_are_told_as_a_message_has_room_for_and_the_suspect_with_its_stack(stack):
    states = states_of_large_node(stack)
    told_states = fitting(states)
    assert len(encode(RanksOfAll(told_states))) < MAX_LINE_BYTES
    assert (told_states[0].rank, told_states[0].stack) == (1000, stack)
    assert fitting(states, named=(7,))[0].rank == 7


# -- a person asks -----------------------------------------------------------------------------


def asks(world, peer, *ranks, quiet_s=None, limit_s=0.0):
    groups = {"0": group(7 if peer != 1 else 6, 6, ranks="0-2")}
    states = tuple(RankState(rank=rank, groups=groups, place=READ, quiet_s=quiet_s) for rank in ranks)
    world.note(peer, STALL, Ranks(states, NOW, limit_s, is_request=True))


def test_who_is_asked_by_a_person_has_all_nodes_collect_and_nobody_is_accused():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    asks(world, one, 1, quiet_s=70.0)
    assert [world.last(peer, ShowRanks) for peer in (zero, one, two)] == [ShowRanks(True), None, ShowRanks(True)]
    asks(world, zero, 0, quiet_s=70.0)
    asks(world, two, 2, quiet_s=70.0)
    for peer in (zero, one, two):
        assert told(world, peer) is None, "no hang was suspected"
        shown = world.last(peer, RanksOfAll)
        assert [state.rank for state in shown.states] == [0, 1, 2]
        assert shown.sentence.startswith("collected on request: rank 0 never entered all_reduce #7 of default_pg")
    assert stall(world).stall is None
    assert not world.is_over


@pytest.mark.parametrize(
    ("quiet_s", "words"),
    [
        ((1.0, 70.0, 70.0), "1 of 3 ranks made progress in the last 10 s"),
        ((1.0, 2.0, 3.0), "3 of 3 ranks made progress in the last 10 s"),
        ((None, None, None), "3 ranks, of whose progress nothing is known"),
    ],
)
def test_what_nodes_show_one_after_the_other_explains_nothing_while_ranks_move(quiet_s, words):
    world, peers = worlds.running(judges=[StallJudge()])
    for rank, (peer, quiet) in enumerate(zip(peers, quiet_s, strict=True)):
        asks(world, peer, rank, quiet_s=quiet)
    assert world.last(peers[0], RanksOfAll).sentence == f"collected on request: {words}"


def test_a_request_while_a_hang_is_looked_into_gets_its_answer_and_so_does_the_hang():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    tells(world, one, 1, after=7, limit_s=5.0, quiet_s=9.0)
    asks(world, zero, 0, quiet_s=20.0)
    tells(world, two, 2, after=7, quiet_s=9.0)
    assert world.count(two, RanksOfAll) == world.count(two, Explanation) == 1
    assert world.last(two, RanksOfAll).sentence.startswith("collected on request: ")
    assert told(world, two).accuses


def test_a_request_is_heard_though_a_hang_was_just_explained_and_leaves_that_as_it_was():
    world, (zero, one, two) = worlds.running(judges=[StallJudge()])
    for peer, rank in ((zero, 0), (one, 1), (two, 2)):
        tells(world, peer, rank, after=7 if rank else 6, place=READ)
    before = stall(world).stall
    for peer, rank in ((zero, 0), (one, 1), (two, 2)):
        asks(world, peer, rank, quiet_s=70.0)
    assert world.last(zero, RanksOfAll).sentence
    assert stall(world).stall == before is not None


@pytest.mark.parametrize("answers", [True, False])
def test_ranks_that_wait_outside_recorded_collectives_hang_only_if_no_other_can_be_at_work(answers):
    world, peers = worlds.running(judges=[StallJudge()])
    for peer, rank in zip(peers[: 3 if answers else 2], range(3), strict=False):
        groups, place = {"0": group(6, 6, ranks="0-2")}, "waits in recv, called from a.py:9 (stage)"
        waits = RankState(rank=rank, groups=groups, doing=Doing.COLLECTIVE, place=place)
        world.note(peer, STALL, Ranks((waits,), NOW))
    world.pass_time(SHOW_RANKS_S + 1)
    assert told(world, peers[0]).accuses is answers
    who = "all ranks" if answers else "all known ranks"
    assert told(world, peers[0]).text.startswith(f"{who} wait for each other outside recorded collectives")


def test_who_waits_for_a_rank_that_is_not_started_yet_is_not_said_to_hang():
    """As in init_process_group, while a node that has just joined still starts its workers."""
    world, peers = worlds.running(judges=[StallJudge()])
    waits = RankState(
        rank=1, doing=Doing.COLLECTIVE, place="waits in init_process_group, called from a.py:9 (main)"
    )
    for peer, states in zip(peers, ((), (waits,), ()), strict=True):
        world.note(peer, STALL, Ranks(states, NOW))
    assert not told(world, peers[0]).accuses
