"""This node's workers of the present generation, and how those that have ended did so."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from trainer_launch.diagnosis.collectives import Life, RankState
from trainer_launch.diagnosis.recorder_questions import Recorders
from trainer_launch.diagnosis.stall import SHOW_RANKS_S
from trainer_launch.diagnosis.worker_samples import WorkerPlace
from trainer_launch.membership.protocol import Formed
from trainer_launch.model import Death, Membership, Plan, Workers
from trainer_launch.model.errors import InternalError
from trainer_launch.pytorch.survivors import Survivors
from trainer_launch.supervisor.failure import how
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.system import System

_AT_END_S = 0.01  # to read what workers have written at their ends


class WorkerGroup:
    """The workers of this node, for itself and for diagnosis."""

    def __init__(self, plan: Plan, system: System, processes: Processes) -> None:
        if plan.workers is None or plan.membership is None:
            raise InternalError("a worker group needs a plan with workers and a membership")
        self.plan, self.system, self.processes = plan, system, processes
        self.workers: Workers = plan.workers
        self.membership: Membership = plan.membership
        self.incarnation = uuid.uuid4().hex  # this process, among all that were or will be this node
        self.recorders = Recorders()
        self.survivors = Survivors(system)
        self.kept_places: dict[str, int] = {}  # the local ranks of workers that wait for the next generation
        self.generation = 0  # the last one that this node was in
        self.places: Mapping[str, WorkerPlace] = {}  # by the names of the processes
        self.deaths: list[Death] = []  # in their order
        self.node_rank = self.membership.node_rank or 0  # a generation tells who came without one
        self.unasked: set[str] = set()  # that ended with 0, without handlers of signals that ask for it
        self.leave_generation()

    def leave_generation(self) -> None:
        """The next store will probably be node 0's."""
        self.hosts_store = self.membership.node_rank == 0

    def enter_generation(self, formed: Formed) -> None:
        """A generation was formed with this node in it; none of its workers has been started yet."""
        self.generation, self.hosts_store, self.deaths = formed.generation, formed.is_store_host, []
        if formed.node_rank is not None:
            self.node_rank = formed.node_rank
        self.unasked = set()

    @property
    def keeps_state(self) -> bool:
        """Whether a worker leaves its groups in place of being stopped."""
        return bool(self.survivors.able)

    def keep(self, name: str) -> None:
        """A worker has left its process groups, and waits for the next generation."""
        self.processes.keep(name)
        self.kept_places[name] = self.places[name].local_rank

    def left_unasked(self) -> set[str]:
        """Workers that no signal can have told to leave: they had no handler of one, at the end of their programs.

        Python removes handlers after that; where a worker has told nothing, it has left by `os._exit`.
        """
        self.recorders.answers(0, time.monotonic() + _AT_END_S)
        reports = self.recorders.at_end
        silent = self.unasked & self.recorders.names - reports.keys()
        return silent | {name for name, report in reports.items() if not report.handles}

    def ended(self) -> list[RankState]:
        """The ranks of this generation that have no process any more, with what each reported at its end."""
        as_of_s = self.system.now() - SHOW_RANKS_S / 2  # what other nodes tell may be as old
        return [self._ended(death, as_of_s) for death in self.deaths]

    def _ended(self, death: Death, as_of_s: float) -> RankState:
        has_finished, report = death.exit_code == 0, self.recorders.at_end.get(f"rank {death.rank}")
        return RankState(
            rank=death.rank or 0,
            node=self.node_rank,
            life=Life.FINISHED if has_finished else Life.DEAD,
            how=how(death),
            groups=report.groups if report is not None else {},
            quiet_s=max(0.0, as_of_s - death.at_s) if has_finished else None,
        )
