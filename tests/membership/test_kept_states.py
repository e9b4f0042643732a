"""In every history the newest state that is left goes on, and where none is left the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import JobPhase
from trainer_launch.pytorch.shared_state import chain_of

PODS = st.integers(0, 3)
EVENTS = st.one_of(
    st.tuples(st.just("start"), PODS),
    st.tuples(st.just("start"), PODS),
    st.tuples(st.sampled_from(["kill", "kill", "die waiting", "lose", "cut", "return", "return"]), PODS),
    st.tuples(st.just("steps"), st.integers(1, 9)),
    st.tuples(st.just("steps"), st.integers(1, 9)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("time"), st.sampled_from([0.1, 0.6, 4.0])),
    st.tuples(st.just("stall"), st.just(40.0)),
)


@dataclass
class Worker:
    """A process, which has the state of a step, or none."""

    step: int = 0
    has_state: bool = False
    is_whole: bool = False  # the oracle's: its state is that of the job in the last generation


@dataclass
class Node:
    """A launcher with a worker, as pytorch/node.py treats it."""

    rank: int
    peer: int
    incarnation: str
    generation: int = 0
    phase: str = "joining"
    worker: Worker | None = None
    n_read: int = 0
    is_cut_off: bool = False


@dataclass
class Play:
    """Pods that start, fail and are cut off; what each generation trains from is checked."""

    world: World
    nodes: dict[int, Node] = field(default_factory=dict)
    shared: int = 0  # the last generation whose ranks have shared
    checkpoint: int = 0
    n_starts: int = 0

    def do(self, what: str, value) -> None:
        node = self.nodes.get(value) if what not in ("steps", "time", "stall", "save") else None
        if what == "time":
            for _ in range(max(1, round(value / 0.5))):
                self.world.pass_time(min(value, 0.5))
                self.settle()
        elif what == "stall":  # no node hears anything meanwhile
            self.world.pass_time(value)
        elif what == "steps":
            self.train(value)
        elif what == "save":
            running = workers_of(self.running() if self.shared else [])
            self.checkpoint = max([self.checkpoint, *(worker.step for worker in running)])
        elif what == "start" and node is None:
            self.start(value)
        elif node is not None:
            self.disturb(what, node)
        self.settle()

    def start(self, rank: int) -> None:
        self.n_starts += 1
        incarnation = f"pod-{rank}-{self.n_starts}"
        peer = self.world.call(rank, incarnation=incarnation)
        self.nodes[rank] = Node(rank, peer, incarnation)
        self.join(self.nodes[rank])

    def disturb(self, what: str, node: Node) -> None:
        if what == "lose":
            del self.nodes[node.rank]
            if not node.is_cut_off:
                self.world.gone(node.peer)
        elif what == "cut" and not node.is_cut_off:
            node.is_cut_off, node.phase = True, "joining"
            self.world.gone(node.peer, ended=False)
        elif what == "return" and node.is_cut_off:
            node.is_cut_off, node.n_read = False, 0
            node.peer = self.world.call(node.rank, incarnation=node.incarnation, generation=node.generation)
            self.join(node)
        elif what == "kill" and node.phase == "running":
            for ahead in workers_of(self.running()[: node.rank] if self.shared == node.generation else []):
                ahead.step += 1  # the step in flight was done there
            node.worker = None
            self.world.fail(node.peer, node.rank)
            node.phase = "joining"
            self.join(node)
        elif what == "die waiting" and node.phase == "joining" and node.worker is not None:
            node.worker = None
            if not node.is_cut_off:
                self.join(node)

    def join(self, node: Node) -> None:
        kept = node.worker is not None and node.worker.has_state
        self.world.join(node.peer, after=node.generation, kept=int(kept))

    def settle(self) -> None:
        """Let all nodes hear what the coordinator has sent, and do it."""
        is_changed = True
        while is_changed:
            is_changed = False
            for node in [*self.nodes.values()]:
                messages = self.world.told.get(node.peer, [])[node.n_read :]
                node.n_read += len(messages)
                for message in messages if not node.is_cut_off else ():
                    is_changed = True
                    self.hear(node, message)

    def hear(self, node: Node, message) -> None:
        match message:
            case msg.Restart():
                node.phase = "joining"
                self.join(node)
            case msg.Formed() if node.phase == "joining":
                if node.worker is not None and message.generation != node.generation + 1:
                    node.worker.has_state = False
                node.phase, node.generation = "formed", message.generation
                if message.group_rank == 0:
                    self.check_formed(message)
                if message.is_store_host:
                    self.world.open_store()
            case msg.Go(generation=node.generation) if node.phase == "formed":
                node.phase, node.worker = "running", node.worker or Worker()

    def check_formed(self, formed: msg.Formed) -> None:
        """The coordinator counts the states that are there, and none that others have trained beyond."""
        workers = {rank: node.worker for rank, node in self.nodes.items() if node.worker is not None}
        members = self.world.state.run.members
        assert formed.kept == sum(worker.is_whole for rank, worker in workers.items() if rank in members)
        for rank in workers.keys() - members:
            workers[rank].is_whole = False  # nobody is kept across a generation without it

    def running(self) -> list[Node]:
        """The nodes of a generation that runs, by their ranks."""
        run = self.world.state.run
        if self.world.phase is not JobPhase.RUNNING:
            return []
        members = [self.nodes[rank] for rank in run.members if rank in self.nodes]
        is_all = len(members) == len(run.members)
        return members if is_all and all(node.phase == "running" for node in members) else []

    def train(self, steps: int) -> None:
        members = self.running()
        if members and self.shared != members[0].generation:
            self.share(members)
        for worker in workers_of(members):
            worker.step += steps

    def share(self, members: list[Node]) -> None:
        """As `Generation.share` does it; the script has read the checkpoint where no state was kept."""
        workers = workers_of(members)
        [kept] = {self.world.last(node.peer, msg.Formed).kept for node in members}
        holders = [worker for worker in workers if worker.is_whole]
        assert [worker.has_state for worker in workers] == [worker.is_whole for worker in workers]
        assert len(holders) == kept
        newest = max((worker.step for worker in holders), default=self.checkpoint)
        if not kept:
            for worker in workers:
                worker.step = self.checkpoint
        giver = workers[chain_of([(worker.has_state, worker.step) for worker in workers], kept)[0]]
        assert giver.step == newest, "the newest state goes on, or the checkpoint"
        assert not kept or giver in holders
        for worker in workers:
            worker.step, worker.has_state, worker.is_whole = newest, True, True
        self.shared = members[0].generation


def workers_of(nodes: list[Node]) -> list[Worker]:
    return [node.worker for node in nodes if node.worker is not None]


HISTORIES = given(st.sampled_from([(1, 1), (3, 3), (1, 3), (2, 4)]), st.lists(EVENTS, min_size=20, max_size=80))


@settings(max_examples=100, deadline=None)
@HISTORIES
def test_the_newest_state_that_is_left_goes_on(nodes, script):
    check(nodes, script)


@pytest.mark.long("tests/membership/test_kept_states.py")
@settings(max_examples=1000, deadline=None)
@HISTORIES
def test_the_newest_state_that_is_left_goes_on_in_a_thousand_histories(nodes, script):
    check(nodes, script)


def check(nodes, script):
    play = Play(World(*nodes, max_restarts=999, rejoin_timeout_s=3600.0))
    for rank in range(nodes[1]):
        play.do("start", rank)
    play.do("time", 4.0)
    for what, value in script:
        play.do(what, value)
        if play.world.is_over:
            break
