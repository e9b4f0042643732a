"""Looks for stragglers: all members are asked now and then, clocks are compared, and who is late is named once."""

from __future__ import annotations

import random
from functools import cache

import pytest
from msgspec.structs import replace

from tests.diagnosis.simulated import START_S, Job
from tests.diagnosis.test_lateness import plain
from tests.membership.world import World
from trainer_launch.diagnosis import stragglers
from trainer_launch.diagnosis.stragglers import (
    STRAGGLERS,
    ClockAnswer,
    ClockQuestion,
    Entered,
    ShowEntries,
    Stragglers,
    StragglerStatus,
)
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.notes import opened
from trainer_launch.membership.state import status

EVERY_S = 60.0


@cache
def played(ranks, slow):
    """What the ranks of such a job tell."""
    job = Job(ranks, plain(dict(slow)))
    return tuple(job.entries(rank) for rank in range(ranks))


class Nodes:
    """Three nodes of two workers each; each has its own clock, and a network that takes its time."""

    def __init__(self, clocks=(0.0, 0.0, 0.0), trip_s=0.0, seed=0, **settings):
        self.world = World(len(clocks), judges=[stragglers.StragglerJudge(every_s=EVERY_S)], **settings)
        self.peers = self.world.come(*range(len(clocks)), workers=2)
        self.world.open_store()
        self.clocks = list(clocks)
        self.trip_s = trip_s
        self._random = random.Random(seed)
        self.silent: set[int] = set()  # nodes

    def sample(self, slow):
        """Pass an interval and answer all questions; `slow` ranks compute for so much longer."""
        asked = self.world.count(self.peers[0], ClockQuestion)
        while self.world.count(self.peers[0], ClockQuestion) == asked:
            self.world.pass_time(1.0)
        self.asked_s = self.world.now_s
        for number in {*range(len(self.peers))} - self.silent:
            self.answer(number, self.peers[number])
            self.world.note(self.peers[number], STRAGGLERS, self.entered(number, slow))
        if self.silent:
            self.world.pass_time(2 * stragglers.SHOW_ENTRIES_S)

    def answer(self, number, peer):
        """Tell this node's clock as often as it is asked; each word takes its time."""
        before = self.world.count(peer, ShowEntries)
        while self.world.count(peer, ShowEntries) == before:
            for other in self.peers:
                self.world.say(other, msg.Renew())
            question = self.world.last(peer, ClockQuestion).number
            self.world.now_s += self._random.uniform(0, self.trip_s)
            at_ns = int((START_S + self.world.now_s + self.clocks[number]) * 1e9)
            self.world.now_s += self._random.uniform(0, self.trip_s)
            self.world.note(peer, STRAGGLERS, ClockAnswer(question, at_ns))

    def entered(self, number, slow):
        """What its two ranks tell, by its clock: the job ran a moment ago."""
        off_ns = int((self.asked_s - 10 + self.clocks[number]) * 1e9)
        told = played(2 * len(self.clocks), tuple(slow.items()))[2 * number : 2 * number + 2]
        moved = tuple(replace(one, start_ns=one.start_ns + off_ns) for one in told)
        return Entered(moved)

    def named(self):
        """By the table."""
        return [one.rank for one in self.table().stragglers]

    def table(self):
        told = status(self.world.state, self.world.now_s)
        assert isinstance(told, msg.JobStatus)
        heard = msg.parse(msg.render(told))
        assert isinstance(heard, msg.JobStatus)
        return opened(StragglerStatus, heard.notes[STRAGGLERS], STRAGGLERS)

    def told(self, number):
        """What each message to this node named."""
        messages = self.world.heard(self.peers[number], Stragglers)
        return [[one.rank for one in m.ranks] for m in messages]

    def said(self):
        return [text for text in self.world.said if "straggler" in text]


@pytest.mark.parametrize("factor", [1.2, 1.5, 3.0])
def test_a_slow_rank_is_named_in_the_third_sample_and_once(factor):
    nodes = Nodes()
    for samples in range(1, 7):
        nodes.sample({3: factor})
        assert nodes.named() == ([3] if samples >= 3 else [])
    assert len(nodes.said()) == 1
    assert nodes.said()[0].startswith("rank 3 (node 1) is a straggler: late in ")
    assert [nodes.told(number) for number in range(3)] == [[], [[3]], []], "its own node is told, too"


def test_who_is_fast_again_is_no_longer_listed_and_nobody_is_told_but_its_node():
    nodes = Nodes()
    for slow in ({3: 1.5}, {3: 1.5}, {3: 1.5}, {}):
        nodes.sample(slow)
    assert (nodes.named(), nodes.told(1), len(nodes.said())) == ([], [[3], []], 1)


def test_two_samples_in_a_row_name_nobody():
    nodes = Nodes()
    for slow in ({3: 1.5}, {3: 1.5}, {}, {3: 1.5}, {3: 1.5}, {2: 1.5}, {3: 1.5}, {3: 1.5}):
        nodes.sample(slow)
        assert nodes.named() == []
    assert nodes.said() == []


@pytest.mark.parametrize("off_s", [-3600.0, -5.0, 5.0, 3600.0])
@pytest.mark.parametrize("slow", [{}, {0: 1.5}, {3: 1.5}, {5: 1.2}], ids=str)
def test_a_clock_that_is_off_names_nobody_and_hides_nobody(off_s, slow):
    for seed in range(3):
        nodes = Nodes((0.0, off_s, 0.0), trip_s=0.003, seed=seed)
        for _ in range(4):
            nodes.sample(slow)
        assert nodes.named() == sorted(slow)


def test_a_node_that_does_not_answer_is_waited_for_and_says_nothing_of_its_ranks():
    nodes = Nodes()
    nodes.silent = {1}
    for _ in range(5):
        nodes.sample({3: 2.0, 0: 1.5})
        assert nodes.named() == [], "a collective of which one member is unknown tells nothing"
    nodes.silent = set()
    for _ in range(3):
        nodes.sample({3: 2.0})
    assert nodes.named() == [3]


def test_a_new_generation_begins_anew():
    nodes = Nodes()
    for _ in range(3):
        nodes.sample({3: 1.5})
    nodes.world.fail(nodes.peers[0])
    nodes.world.pass_time(timeouts.LEASE_S + 1)
    assert nodes.named() == []
    nodes.world.join(*nodes.peers)
    nodes.world.open_store()
    assert nodes.named() == []
    nodes.sample({3: 1.5})
    assert nodes.named() == []


def test_what_a_node_says_of_other_nodes_ranks_or_unasked_does_not_count():
    nodes = Nodes()
    peer = nodes.peers[1]
    job = Job(6, plain({0: 3.0}))
    lie = Entered(tuple(job.entries(rank) for rank in range(6)))
    nodes.world.note(peer, STRAGGLERS, lie)
    nodes.world.note(peer, STRAGGLERS, ClockAnswer(1, 5))
    for _ in range(3):
        nodes.world.pass_time(EVERY_S + 0.5)
        for number in range(1, stragglers.ROUNDS + 1):
            nodes.world.note(peer, STRAGGLERS, ClockAnswer(number, int(nodes.world.now_s * 1e9)))
            nodes.world.note(peer, STRAGGLERS, ClockAnswer(99, 1))
        nodes.world.note(peer, STRAGGLERS, lie)
        nodes.world.pass_time(stragglers.SHOW_ENTRIES_S + 1)
    assert nodes.named() == []


@pytest.mark.parametrize("workers", [1, 0])
def test_a_lone_worker_and_torchs_own_agents_are_never_asked(workers):
    world = World(1, judges=[stragglers.StragglerJudge(every_s=EVERY_S)])
    (peer,) = world.come(0, workers=workers)
    world.open_store()
    world.pass_time(300)
    assert world.count(peer, ClockQuestion) == 0
