"""A job whose names lie, as a state machine: never do two generations train at the same time.

The network of `divided.py` falls apart and heals. Here a node's name server may also answer wrongly about another
node for as long as name servers remember: "no such name" (a Service drops pods that are not ready), an address that
is another pod's by now (it refuses), or nobody's (silence). Launchers stop for a while, and no two clocks agree.
Every decision is membership.py's, so it is `election.may_form` that is tried.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from tests.membership.divided import Divided
from trainer_launch.membership import timeouts
from trainer_launch.membership.election import may_form
from trainer_launch.membership.membership import begin, hang_up, hear, look
from trainer_launch.membership.state import CoordinatorSettings, Looked

NO_SUCH_NAME, ANOTHER_POD, NOBODY = "no such name", "the address of another pod", "the address of nobody"
LOOK_S = timeouts.LOOK_EVERY_S * (1 + timeouts.LOOK_JITTER) + timeouts.LOOK_ANSWER_S


class Lying(Divided):
    """The same job with name servers that lie, nodes that freeze, and clocks of their own."""

    def __init__(self, nodes, least=1, unseen_s=timeouts.UNSEEN_S):
        self.lies = {}  # (who asks, about whom): what it hears, and until when
        self.unready = set()  # whose names nobody hears
        self.frozen = {}  # what a node's launcher has to hear when it goes on
        super().__init__(nodes, least, unseen_s)

    # -- names ----------------------------------------------------------------------------------

    def lie(self, one, other, kind, seconds):
        """Let one's name server lie about another node, unless it did so a moment ago."""
        _, until_s = self.lies.get((one, other), (None, -LOOK_S))
        if one != other and self.now_s >= until_s + LOOK_S:
            self.lies[one, other] = kind, self.now_s + min(seconds, timeouts.DNS_CACHE_S)

    def heard(self, one, other):
        """What one hears about another; None: the truth."""
        kind, until_s = self.lies.get((one, other), (None, 0.0))
        if self.now_s < until_s:
            return kind
        return NO_SUCH_NAME if other in self.unready and one != other else None

    def finds(self, one, other):
        return one == other or self.heard(one, other) is None

    def refuses(self, one, other):
        kind = self.heard(one, other)
        return super().refuses(one, other) if kind is None else kind == ANOTHER_POD

    def seems_absent(self, one, other):
        kind = self.heard(one, other)
        return super().seems_absent(one, other) if kind is None else kind in (NO_SUCH_NAME, ANOTHER_POD)

    # -- time -----------------------------------------------------------------------------------

    def clock_s(self, rank):
        return 1000.0 * rank + self.now_s * (1 + rank / 1000)

    def play(self, seat, happens, *args, **kwargs):
        if seat in self.frozen:
            self.frozen[seat].append(lambda: self.play(seat, happens, *args, **kwargs))
        else:
            super().play(seat, happens, *args, **kwargs)

    def hear(self, agent, message):
        if agent.rank in self.frozen:
            line = agent.coordinator, agent.peer
            self.frozen[agent.rank].append(
                lambda: (agent.coordinator, agent.peer) == line and self.hear(agent, message)
            )
        else:
            super().hear(agent, message)

    def live(self, agent):
        if agent.rank not in self.frozen:
            super().live(agent)

    def scout(self, seat):
        if seat not in self.frozen:
            super().scout(seat)

    def kill(self, rank):
        self.frozen.pop(rank, None)
        super().kill(rank)

    def thaw(self, rank):
        for happens in self.frozen.pop(rank, ()):
            happens()


def begun(nodes, **changes):
    job = Lying(nodes, **changes)
    job.pass_time(2)
    assert job.sizes() == [nodes]
    return job


def lost_and_hidden(unseen_s):
    """Nodes 1 and 2 go on without node 0; the new node 0 and they hear nothing of each other for a while."""
    job = begun(3, unseen_s=unseen_s)
    job.kill(0)
    job.pass_time(8)
    assert job.sizes() == [2]
    for rank in (1, 2):
        job.lie(0, rank, NO_SUCH_NAME, timeouts.DNS_CACHE_S)
        job.lie(rank, 0, ANOTHER_POD, timeouts.DNS_CACHE_S)
    job.start(0)
    job.pass_time(timeouts.DNS_CACHE_S - 1)
    return job


def test_looks_over_a_longer_time_than_name_servers_remember_find_the_others():
    job = lost_and_hidden(timeouts.UNSEEN_S)
    assert not job.problems
    assert job.sizes() == [2], "nobody has disturbed them"
    job.pass_time(timeouts.UNSEEN_S)
    assert job.sizes() == [3]
    assert not job.problems


def test_a_node_that_is_never_ready_comes_to_a_new_node_0_by_itself():
    """Its name may be missing for ever: it finds node 0's."""
    job = begun(3)
    job.kill(0)
    job.pass_time(8)
    job.unready |= {1, 2}
    job.start(0)
    job.pass_time(10)
    assert job.sizes() == [3]
    assert not job.problems


def test_a_node_0_that_imports_and_cannot_find_the_others_has_them_come_at_once():
    """Else it could begin without them once it is prepared, while they train on for its sake."""
    job = begun(3)
    job.kill(0)
    job.pass_time(8)
    job.unready |= {1, 2}
    job.start(0, imports_s=timeouts.UNSEEN_S + 10)
    job.pass_time(10)
    assert {agent.coordinator for agent in job.agents.values()} == {0}
    job.pass_time(timeouts.UNSEEN_S + 10)
    assert job.sizes() == [3]
    assert not job.problems


def test_limit_names_that_are_missing_behind_a_partition_for_longer_are_taken_for_absence():
    """What docs/evidence.md says: nothing that node 0 can see tells this from pods that were never there."""
    job = begun(3)
    job.kill(0)
    job.pass_time(8)
    job.cut((0, 1, 1))
    job.unready |= {1, 2}
    job.start(0)
    job.pass_time(timeouts.UNSEEN_S - 1)
    assert not job.problems
    job.pass_time(10)
    assert job.problems


def test_a_first_start_with_fewer_waits_until_no_look_has_found_the_others():
    job = Lying(3)
    job.kill(2)
    job.pass_time(timeouts.UNSEEN_S - 1)
    assert job.sizes() == []
    job.pass_time(5)
    assert job.sizes() == [2]


def test_a_node_0_that_comes_back_waits_for_no_look_when_its_members_tell_it():
    for alone in (1, 2):  # a majority with node 0: the third is lost for good
        job = begun(3)
        job.kill(0)
        job.kill(3 - alone)
        job.lie(0, 3 - alone, NOBODY, timeouts.DNS_CACHE_S)  # no look counts it as absent
        job.start(0)
        job.pass_time(timeouts.WINDOW_S + 1)
        assert job.sizes() == [2]


# -- looks, one by one ------------------------------------------------------------------------


def looking(*looks, unseen_s=40.0, calls_at_s=None, **changes):
    """Whether node 0 begins alone after looks at these times, each with whom it did not find and how long it took.

    Node 1 is there only for a moment, at `calls_at_s`.
    """
    from trainer_launch.membership import protocol as msg

    known = CoordinatorSettings(
        job="job", min_nodes=1, max_nodes=3, max_restarts=0, candidate=0, unseen_s=unseen_s, **changes
    )
    state = begin(known, lambda *_: None, lambda _: None, lambda *_: None)
    hello = msg.Hello(msg.VERSION, "job", 0, "pod-0", "i")
    hear(state, 1, hello, 0.0)
    hear(state, 1, msg.Join("i", 0), 0.0)
    for at_s, absent, *took_s in looks:
        if at_s == calls_at_s:
            hear(state, 2, replace(hello, node_rank=1, host="pod-1"), at_s)
            hang_up(state, 2, at_s)
        look(state, Looked(frozenset(), frozenset(absent), *took_s), at_s)
    return bool(state.run.members) or may_form(state)


def every(seconds, until_s, absent=(1, 2)):
    return [(float(at_s), absent) for at_s in range(1, int(until_s) + 1, seconds)]


@pytest.mark.parametrize(
    ("looks", "begins", "settings"),
    [
        pytest.param(every(2, 42), True, {}, id="looks over the whole time count"),
        pytest.param(every(2, 40), False, {}, id="over a shorter one they do not"),
        pytest.param(every(2, 2), True, {"unseen_s": 0.0}, id="where no time is asked one look counts"),
        pytest.param(
            [*every(2, 30), (31.0, (1,)), *((at_s + 31, who) for at_s, who in every(2, 30))],
            False,
            {},
            id="a look that finds a node begins the time anew",
        ),
        pytest.param([(float(at_s), (1, 2)) for at_s in (1, 2, 90, 91)], False, {}, id="so does a gap"),
        pytest.param(
            [(10.0 * i + 1, (1, 2), 8.0) for i in range(5)], False, {}, id="slow looks count from their end"
        ),
        pytest.param([(10.0 * i + 1, (1, 2), 8.0) for i in range(6)], True, {}, id="until the last begins"),
        pytest.param([(10.0 * i, (1, 2), 10.5) for i in range(1, 20)], False, {}, id="looks too slow leave a gap"),
        pytest.param(every(2, 42), False, {"calls_at_s": 21.0}, id="a node that called since is not unseen"),
        pytest.param(every(2, 62), True, {"calls_at_s": 21.0}, id="and is after the whole time"),
        pytest.param(every(2, 60), False, {"shrink_after_s": 90.0}, id="a longer wait for nodes holds here too"),
        pytest.param(every(2, 92), True, {"shrink_after_s": 90.0}, id="and ends"),
    ],
)
def test_node_0_begins_without_others_that_no_look_has_found_for_long(looks, begins, settings):
    assert looking(*looks, **settings) == begins


# -- any history ------------------------------------------------------------------------------

RANKS = st.sampled_from([0, 0, 1, 2, 3, 4])
TIMES = st.sampled_from([0.5, 1.0, 3.5, 8.0, 8.0, 40.0])
IMPORTS = st.sampled_from([0.0, 0.0, 3.0, 15.0, 50.0])
LIES = st.sampled_from([NO_SUCH_NAME, ANOTHER_POD, NOBODY])


class AnyHistory(RuleBasedStateMachine):
    """Faults in any order; but no name is missing without end behind a partition: see the limit."""

    @initialize(nodes=st.sampled_from([2, 3, 3, 4, 5]))
    def meet(self, nodes):
        self.job = begun(nodes)

    def one(self, rank):
        return rank % self.job.nodes

    @rule(rank=RANKS)
    def pod_is_killed(self, rank):
        self.job.kill(self.one(rank))

    @rule(
        rank=RANKS,
        told_right=st.sampled_from([(), (), (1,), (2, 3)]),
        kinds=st.tuples(LIES, LIES),
        back_s=TIMES,
        imports_s=IMPORTS,
    )
    def pod_returns_elsewhere(self, rank, told_right, kinds, back_s, imports_s):
        """It has lost its memory; most others still hear of its old address, and it hears of theirs."""
        rank = self.one(rank)
        self.job.kill(rank)
        self.job.pass_time(back_s)
        for other in set(range(self.job.nodes)) - set(told_right):
            self.job.lie(other, rank, kinds[0], timeouts.DNS_CACHE_S)
            self.job.lie(rank, other, kinds[1], timeouts.DNS_CACHE_S)
        self.job.start(rank, imports_s)
        self.job.pass_time(back_s)

    @rule(rank=RANKS)
    def agent_is_killed(self, rank):
        self.job.kill_agent(self.one(rank))

    @rule(rank=RANKS, imports_s=IMPORTS)
    def pod_starts(self, rank, imports_s):
        rank = self.one(rank)
        if rank not in self.job.launchers:
            self.job.start(rank, imports_s)
        elif rank not in self.job.agents:
            self.job.start_agent(rank, imports_s)

    @rule(one=RANKS, other=RANKS, kind=LIES, seconds=st.sampled_from([5.0, 30.0]))
    def name_server_lies(self, one, other, kind, seconds):
        self.job.lie(self.one(one), self.one(other), kind, seconds)

    @precondition(lambda self: not self.job.unready)
    @rule(sides=st.lists(st.integers(0, 2), min_size=5, max_size=5))
    def network_falls_apart(self, sides):
        self.job.cut(sides[: self.job.nodes])

    @rule()
    def network_heals(self):
        self.job.cut((0,) * self.job.nodes)

    @precondition(lambda self: len(set(self.job.side.values())) == 1)
    @rule(ranks=st.sets(st.integers(1, 4)))
    def pods_are_not_ready_but_these(self, ranks):
        self.job.unready = set(range(1, self.job.nodes)) - ranks

    @rule()
    def all_pods_are_ready(self):
        self.job.unready.clear()

    @rule(rank=RANKS, seconds=TIMES)
    def launcher_is_stopped_for_a_while(self, rank, seconds):
        if self.one(rank) in self.job.launchers:
            self.job.frozen[self.one(rank)] = []
            self.job.pass_time(seconds)
            self.job.thaw(self.one(rank))

    @rule(seconds=TIMES)
    def time_passes(self, seconds):
        self.job.pass_time(seconds)

    @invariant()
    def at_most_one_generation_trains(self):
        if hasattr(self, "job"):
            self.job.check()
            assert not self.job.problems, self.job.problems[0]

    def teardown(self):
        """When all is well again, all train together."""
        if not hasattr(self, "job") or self.job.problems:
            return
        self.job.unready.clear()
        self.network_heals()
        for rank in range(self.job.nodes):
            self.pod_starts(rank, 0.0)
        self.job.pass_time(timeouts.DNS_CACHE_S + 60)
        assert self.job.sizes() == [self.job.nodes]


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=200, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
