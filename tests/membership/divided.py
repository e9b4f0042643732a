"""A pure job of several nodes, each with a seat of its own, in a network that falls apart and heals.

Agents do what `Client` and the rendezvous do; seats are pure states; lines between them take no time, but a cut one
ends its connection.
"""

from __future__ import annotations

from msgspec.structs import replace

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.election import remember, wanted_candidates
from trainer_launch.membership.membership import begin, hang_up, hear, look, tick
from trainer_launch.membership.protocol import Claim
from trainer_launch.membership.state import CoordinatorSettings, Looked, status
from trainer_launch.membership.timeouts import TAKEOVER_REFUSED_S, TAKEOVER_S

STEP_S = 0.25
SILENCE_S = 3.0  # until a connection over a cut line is noticed
STOPS_S = 2.0  # how long an agent without a coordinator lets its workers run
JOB = "job"


class Agent:
    """One node's agent: at most one connection, the claims it has taken, and whether its workers run.

    Until `prepared_s` torch is imported.
    """

    def __init__(self, rank, name, now_s, prepared_s):
        self.rank, self.incarnation = rank, name
        self.claims: tuple[Claim, ...] = ()
        self.generation = 0
        self.coordinator: int | None = None
        self.peer = 0
        self.broken = False  # a line was lost, so no later one comes through
        self.is_welcome = False  # an attempt that was refused is none
        self.heard_s = now_s
        self.away_s = now_s
        self.last = 0
        self.training: tuple[int, int] | None = None  # generation and seat
        self.prepared_s, self.is_prepared = prepared_s, prepared_s <= now_s
        self.is_formed = False  # in a generation whose workers have not started
        self.opens = 0  # the generation whose store it opens once it is prepared

    def hello(self):
        hello = msg.Hello(msg.VERSION, JOB, self.rank, f"pod-{self.rank}", self.incarnation)
        return replace(hello, generation=self.generation, claims=self.claims)


class Divided:
    """The whole job; `members[(generation, seat)]` are the incarnations that such a generation told to start."""

    def __init__(self, nodes, least=1, unseen_s=0.0, spares=0):
        self.nodes, self.least, self.spares = nodes, least, spares
        self.unseen_s = unseen_s  # names never lie here: test_job_model.py has a network in which they do
        self.now_s = 100.0
        self.launchers = {}
        self.replies = {}  # of each launcher: peers and what they are sent, None: the end
        self.agents = {}
        self.side = dict.fromkeys(range(nodes), 0)  # nodes of one side reach each other
        self.members = {}
        self.counter = 0
        self.problems = []
        for rank in range(nodes):
            self.start(rank)

    # -- what happens to nodes ------------------------------------------------------------------

    def start(self, rank, imports_s=0.0):
        """A pod, which then imports torch for so long."""
        settings = CoordinatorSettings(
            job=JOB,
            min_nodes=self.least,
            max_nodes=self.nodes - self.spares,
            spares=self.spares,
            max_restarts=99,
            candidate=rank,
            rejoin_timeout_s=1e6,
            unseen_s=self.unseen_s,
        )
        replies = self.replies[rank] = []
        self.launchers[rank] = begin(
            settings,
            lambda peer, message: replies.append((peer, message)),
            lambda peer: replies.append((peer, None)),
            lambda *_: None,
        )
        self.start_agent(rank, imports_s)

    def start_agent(self, rank, imports_s=0.0):
        self.counter += 1
        self.agents[rank] = Agent(rank, f"a{self.counter}", self.now_s, self.now_s + imports_s)

    def kill(self, rank):
        """The pod: its agent and its seat."""
        self.kill_agent(rank)
        self.launchers.pop(rank, None)
        for agent in self.agents.values():
            if agent.coordinator == rank and self.side[agent.rank] == self.side[rank]:
                self.hang_up(agent)

    def kill_agent(self, rank):
        agent = self.agents.pop(rank, None)
        if agent is not None and agent.coordinator is not None and self.reach(rank, agent.coordinator):
            self.play(agent.coordinator, hang_up, agent.peer, ended=True)

    def cut(self, sides):
        self.side = dict(enumerate(sides))

    def reach(self, one, other):
        return other in self.launchers and self.side[one] == self.side[other]

    # -- lines ----------------------------------------------------------------------------------

    def play(self, seat, happens, *args, **kwargs):
        if seat not in self.launchers:
            return
        happens(self.launchers[seat], *args, now_s=self.clock_s(seat), **kwargs)
        replies, self.replies[seat][:] = [*self.replies[seat]], []
        for peer, message in replies:
            agent = next((a for a in self.agents.values() if (a.coordinator, a.peer) == (seat, peer)), None)
            if message is None:
                if agent is not None and self.reach(agent.rank, seat):
                    self.hang_up(agent)
                self.play(seat, hang_up, peer, ended=False)  # also when no word reaches the agent
            elif agent is not None and self.goes_through(agent):
                self.hear(agent, message)

    def say(self, agent, message):
        if agent.coordinator is not None and self.goes_through(agent):
            self.play(agent.coordinator, hear, agent.peer, message)

    def goes_through(self, agent):
        agent.broken = agent.broken or not self.reach(agent.rank, agent.coordinator)
        return not agent.broken

    def hang_up(self, agent):
        seat, peer = agent.coordinator, agent.peer
        agent.away_s = self.now_s if agent.is_welcome else agent.away_s
        agent.coordinator, agent.broken, agent.is_formed, agent.is_welcome = None, False, False, False
        if self.reach(agent.rank, seat):
            self.play(seat, hang_up, peer, ended=False)

    def hear(self, agent, message):
        agent.heard_s = self.now_s
        seat = agent.coordinator
        agent.is_welcome = agent.is_welcome or isinstance(message, msg.Welcome)
        if isinstance(message, msg.Formed) and message.claim is not None:
            agent.generation, agent.training = message.generation, None
            agent.claims = remember(agent.claims, message.claim)
            self.say(agent, msg.Took(message.generation))
            agent.is_formed, agent.opens = True, message.generation if message.is_store_host else 0
            self.open_store(agent)
        elif isinstance(message, msg.Go) and agent.claims and agent.claims[-1].generation == message.generation:
            agent.claims = remember((), replace(agent.claims[-1], sure=True))
            run = self.launchers[seat].run
            self.members[message.generation, seat] = tuple(run.members)
            agent.training, agent.is_formed = (message.generation, seat), False
            self.check()
        elif isinstance(message, msg.Restart):
            agent.training, agent.is_formed = None, False
            self.join(agent)

    def join(self, agent):
        self.say(agent, msg.Join(agent.incarnation, agent.generation, prepared=agent.is_prepared))

    def open_store(self, agent):
        if agent.is_prepared and agent.is_formed and agent.opens:
            self.say(agent, msg.Store(agent.opens, "h", 1))

    def prepare(self, agent):
        """Torch is imported."""
        agent.is_prepared = True
        if agent.is_formed:
            self.open_store(agent)
        elif agent.coordinator is not None and agent.training is None:
            self.join(agent)

    # -- time -----------------------------------------------------------------------------------

    def pass_time(self, seconds):
        for _ in range(int(seconds / STEP_S)):
            self.now_s += STEP_S
            for agent in list(self.agents.values()):
                if self.agents.get(agent.rank) is agent:
                    self.live(agent)
            for seat in list(self.launchers):
                self.scout(seat)
                self.play(seat, tick)

    def live(self, agent):
        if not agent.is_prepared and self.now_s >= agent.prepared_s:
            self.prepare(agent)
        if agent.coordinator is not None and not self.goes_through(agent):
            if self.now_s - agent.heard_s > SILENCE_S:
                self.hang_up(agent)
        elif agent.coordinator is not None:
            agent.heard_s = self.now_s
            self.say(agent, msg.Renew())
        if agent.coordinator is None:
            if self.now_s - agent.away_s > STOPS_S:
                agent.training = None
            self.look_for_a_coordinator(agent)

    def look_for_a_coordinator(self, agent):
        ranks = [0, agent.last]
        waits = agent.training is None and agent.generation > 0
        takeover_s = TAKEOVER_REFUSED_S if waits and self.refuses(agent.rank, 0) else TAKEOVER_S
        if self.now_s - agent.away_s > takeover_s:
            ranks = list(range(self.nodes))
        for rank in ranks:
            if agent.coordinator is None and self.finds(agent.rank, rank) and self.reach(agent.rank, rank):
                self.counter += 1
                agent.coordinator, agent.peer, agent.heard_s = rank, self.counter, self.now_s
                self.say(agent, agent.hello())
                if agent.coordinator is not None:
                    agent.last = rank
                    if agent.training is None:
                        self.join(agent)

    def scout(self, seat):
        wanted = wanted_candidates(self.launchers[seat])
        if wanted:
            there = frozenset(rank for rank in wanted if self.finds(seat, rank) and self.reach(seat, rank))
            absent = frozenset(rank for rank in wanted - there if self.seems_absent(seat, rank))
            lowest = [self.launchers[rank] for rank in sorted(there)[:1]]
            ready = all(status(state, self.now_s).ready for state in lowest)
            self.play(seat, look, Looked(there, absent, ready=ready))

    def clock_s(self, _rank):
        """A node's own clock."""
        return self.now_s

    def finds(self, _one, _other):
        """Whether a name leads to where the other one is."""
        return True

    def refuses(self, one, other):
        """Whether a kernel answers at the other one's address, and no launcher."""
        return self.side[one] == self.side[other] and other not in self.launchers

    def seems_absent(self, one, other):
        """Whether no such name, or a kernel that refuses, is what one hears of the other."""
        return self.side[one] == self.side[other]

    # -- what must hold -------------------------------------------------------------------------

    def trains(self):
        """The generations all of whose members were told to start and have not stopped."""
        by_generation: dict[tuple[int, int], set[int]] = {}
        for agent in self.agents.values():
            if agent.training is not None:
                by_generation.setdefault(agent.training, set()).add(agent.rank)
        return [run for run, ranks in by_generation.items() if ranks == set(self.members[run])]

    def check(self):
        if len(self.trains()) > 1:
            self.problems.append((self.now_s, self.trains(), self.members))

    def sizes(self):
        return [len(self.members[run]) for run in self.trains()]


def settled(nodes, least=1):
    """A job that trains with all nodes."""
    job = Divided(nodes, least)
    job.pass_time(2)
    assert job.sizes() == [nodes]
    return job
