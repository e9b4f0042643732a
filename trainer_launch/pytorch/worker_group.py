"""This node's workers of the present generation: what each is, and how those that have ended did so."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping

from trainer_launch.diagnosis.collectives import Life, RankState, Recorded
from trainer_launch.diagnosis.recorder_questions import Recorders
from trainer_launch.diagnosis.stall import SHOW_RANKS_S
from trainer_launch.diagnosis.worker_samples import WorkerPlace
from trainer_launch.membership.protocol import Formed
from trainer_launch.model import Death, Membership, Plan, Workers
from trainer_launch.model.errors import InternalError
from trainer_launch.supervisor.failure import how
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.system import System


class WorkerGroup:
    """What the node keeps of its workers, and whoever diagnoses them reads."""

    def __init__(self, plan: Plan, system: System, processes: Processes) -> None:
        if plan.workers is None or plan.membership is None:
            raise InternalError("a worker group needs a plan with workers and a membership")
        self.plan, self.system, self.processes = plan, system, processes
        self.workers: Workers = plan.workers
        self.membership: Membership = plan.membership
        self.incarnation = uuid.uuid4().hex  # this process, among all that were or will be this node
        self.recorders = Recorders()
        self.generation = 0  # the last one that this node was in
        self.places: Mapping[str, WorkerPlace] = {}  # by the names of the processes
        self.deaths: list[Death] = []  # in their order
        self._ended_s: dict[int | None, float] = {}  # when, in seconds since the epoch, by rank
        self.is_first = False  # of the nodes of that generation: it speaks for the job
        self.leave_generation()

    @property
    def node_rank(self) -> int:
        """This node's."""
        return self.membership.node_rank

    def leave_generation(self) -> None:
        """The next store will probably be node 0's."""
        self.hosts_store = self.node_rank == 0

    def enter_generation(self, formed: Formed) -> None:
        """A generation was formed with this node in it; none of its workers has been started yet."""
        self.generation, self.hosts_store, self.deaths = formed.generation, formed.is_store_host, []
        self.is_first = formed.group_rank == 0

    def note(self, death: Death) -> None:
        """A worker has ended, or could not be started."""
        self.deaths.append(death)
        self._ended_s[death.rank] = time.time()

    def ended(self) -> list[RankState]:
        """The ranks of this generation that have no process any more."""
        reports, node = self.recorders.at_end, self.node_rank
        seen_s = time.time() - SHOW_RANKS_S / 2  # what other nodes tell may be as old
        return [
            rank_state(
                death,
                node,
                reports.get(f"rank {death.rank}"),
                max(0.0, seen_s - self._ended_s.get(death.rank, seen_s)),
            )
            for death in self.deaths
        ]


def rank_state(
    death: Death, node_rank: int | None, report: Recorded | None = None, quiet_s: float | None = None
) -> RankState:
    """An ended worker, as an incident has it, with what it reported at its end, which was so many seconds ago."""
    life, quiet_s = (Life.FINISHED, quiet_s) if death.exit_code == 0 else (Life.DEAD, None)
    groups = report.groups if report is not None else {}
    return RankState(
        rank=death.rank or 0, node=node_rank, life=life, how=how(death), groups=groups, quiet_s=quiet_s
    )
