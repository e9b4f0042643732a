"""A node whose operating system, coordinator and fork server are not there, for whole jobs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from tests.supervisor.fakes import FakeSystem, Program
from trainer_launch.diagnosis.group_incidents import GroupIncidents
from trainer_launch.diagnosis.stragglers import StragglerSamples
from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import Client, Connected, Disconnected
from trainer_launch.model import Death, Endpoint, Membership, Outcome, Plan, Workers
from trainer_launch.model.errors import NodeError
from trainer_launch.pytorch.fork_server import Starter
from trainer_launch.pytorch.node import TorchNode
from trainer_launch.pytorch.worker_group import WorkerGroup
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_observer import RunObserver

WORKERS = Workers(count=2, argv=("python", "-u", "train.py"), env={}, run_dir="/nowhere")
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
PEER_LOST = "RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1"


class Coordinator:
    """The client's other side: forms a generation for each Join, and restarts it for each failure."""

    def __init__(self, system: FakeSystem) -> None:
        self._system = system
        self._news: deque[Any] = deque()
        self.said: list[say.FromNode] = []
        self.connection = "no address for node-0 yet"
        self.generation = 0
        self._is_away = True
        self._wish: say.Join | None = None  # that waits for a connection
        self.forms = True  # a generation when this node joins
        self.ends = True  # the job, when this node is done
        self.give_up: say.GiveUp | None = None  # in place of a restart

    def tell(self, news: Any) -> None:
        """To the node."""
        self._news.append(news)
        self._system.poke()
        if isinstance(news, Connected | Disconnected):
            self._is_away = isinstance(news, Disconnected)
            if not self._is_away and self._wish is not None:
                self._form()

    def send(self, message: say.FromNode) -> None:
        self.said.append(message)
        match message:
            case say.Join(prepared=True) if self.forms:
                self._wish = message
                if not self._is_away:
                    self._form()
            case say.Store(generation, host, port):
                self.tell(say.Go(generation, host, port))
            case say.Failed(rank=rank):
                self.tell(self.give_up or say.Restart(self.generation, f"rank {rank} failed"))
            case say.Done() if self.ends:
                self.tell(say.Finished())

    def _form(self) -> None:
        self._wish = None
        self.generation += 1
        self.tell(say.Formed(self.generation, 0, 1, 0, True, None, 0, 2, 0, 2))

    def receive(self, _timeout_s: float) -> Any:
        return self._news.popleft() if self._news else None

    def own_address(self, _given: str | None, _name: str) -> str:
        return "node-0"

    def close(self) -> None:
        pass

    @property
    def failures(self) -> list[say.Failed]:
        return [message for message in self.said if isinstance(message, say.Failed)]

    @property
    def joins(self) -> list[say.Join]:
        return [message for message in self.said if isinstance(message, say.Join)]


class FakeStarter:
    """Starts workers as programs of the fake system; what a test puts into these lists is raised."""

    STORE, SERVER = 7, 8  # their pids

    def __init__(self, group: WorkerGroup, system: FakeSystem) -> None:
        self._group, self._system = group, system
        self.problems: list[NodeError] = []  # at once
        self.refusals: list[NodeError] = []  # when workers are to be started
        self.retry_at_s: float | None = None
        self.ready_at_s = 0.0
        self._is_lost = False

    @property
    def is_ready(self) -> bool:
        return not self._is_lost and self.retry_at_s is None and self._system.now() >= self.ready_at_s

    def prepare(self) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self._is_lost = False

    def retry(self, _now_s: float) -> None:
        self.retry_at_s = None

    def answer(self) -> None:
        if self.problems:
            self._is_lost = True
            raise self.problems.pop(0)

    def is_server(self, pid: int) -> bool:
        return pid == self.SERVER

    def lose_store(self, pid: int) -> bool:
        return pid == self.STORE

    def server_ended(self, _status: int) -> None:
        self.answer()

    def open_store(self, _ports: object) -> int:
        return 1234

    def close(self) -> None:
        pass

    close_store = close

    def start(self, processes: Sequence[Any], store_port: int) -> list[Death]:
        self._group.start(processes, store_port, are_forked=False)
        return self._group.processes.start(processes)


class KnownIncidents(GroupIncidents):
    """Incidents that are not collected; the test says which workers wait for nobody when a generation ends."""

    free: frozenset[str] = frozenset()
    collected: list[str]

    def failed(self, sentence: str, *, was_killed: bool, timed_out: int | None = None) -> frozenset[str]:
        self.collected.append(sentence)
        return self.free & self._group.processes.pids().keys()


class Here:
    """One node, and all around it. `programs` are the lives of its workers, by name.

    Workers in `free` wait for nobody when a generation ends.
    """

    def __init__(
        self,
        tmp_path: Path,
        plan: Plan = PLAN,
        watch: Any = None,
        missing: tuple[str, ...] = (),
        free: tuple[str, ...] = (),
        **programs: Sequence[Program],
    ) -> None:
        assert plan.workers is not None
        plan = replace(plan, workers=replace(plan.workers, errors=str(tmp_path)))
        lives = {name.replace("_", " "): each for name, each in programs.items()}
        self.system = FakeSystem(lives, missing=missing)
        self.coordinator = Coordinator(self.system)
        client = cast(Client, self.coordinator)
        group = WorkerGroup(Processes(plan, self.system, RunObserver()))
        self.starter = FakeStarter(group, self.system)
        samples = StragglerSamples(group.recorders, "", lambda body: None)
        self.incidents = incidents = KnownIncidents(group, client.send, None)
        incidents.free, incidents.collected = frozenset(free), []
        self.node = TorchNode(group, client, cast(Starter, self.starter), incidents, samples, watch)
        self.coordinator.tell(Connected())

    def hears(self, at_s: float, *news: Any) -> Here:
        """The coordinator says this then."""

        def tells() -> None:
            for each in news:
                self.coordinator.tell(each)

        return self.does(at_s, tells)

    def loses_coordinator(self, at_s: float) -> Here:
        return self.hears(at_s, Disconnected("reset"))

    def does(self, at_s: float, what: Callable[[], object]) -> Here:
        def happens() -> None:
            what()

        self.system.at(at_s, happens)
        return self

    def run(self) -> Outcome:
        return self.node.run()

    def fails(self) -> say.Failed:
        """Run, and return the one failure that the coordinator is told."""
        self.run()
        (failed,) = self.coordinator.failures
        return failed
