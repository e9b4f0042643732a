"""A node's workers of the present generation, and how those that have ended did so."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import AFTER_ERROR, Life, RankState
from trainer_launch.diagnosis.group_incidents import aborted
from trainer_launch.diagnosis.stall import SHOW_RANKS_S
from trainer_launch.diagnosis.worker_samples import Recorders, WorkerPlace
from trainer_launch.host import runtime_directory
from trainer_launch.host.slow_files import within
from trainer_launch.membership import timeouts
from trainer_launch.membership.protocol import Formed
from trainer_launch.model import Death, Membership, Process, Workers
from trainer_launch.model.errors import InternalError
from trainer_launch.model.redaction import presentable
from trainer_launch.pytorch import worker_ends
from trainer_launch.pytorch.generations import Survivors
from trainer_launch.supervisor import error_lines, failure
from trainer_launch.supervisor.failure import Evidence, how
from trainer_launch.supervisor.processes import Processes

_AT_END_S = 0.01  # to read what workers have written at their ends
_SEEN_S = 0.05  # from an end to when PID 1 sees it; a program's own end takes longer after its error
_HANDLED_S = 0.2  # the same, with room for a machine that is busy
_ERROR_CHARS = 300


class WorkerGroup:
    """The workers of this node, for itself and for diagnosis."""

    def __init__(self, processes: Processes) -> None:
        plan = processes.plan
        if plan.workers is None or plan.membership is None:
            raise InternalError("a worker group needs a plan with workers and a membership")
        self.processes, self.system = processes, processes.system
        self.workers: Workers = plan.workers
        self.membership: Membership = plan.membership
        self.incarnation = uuid.uuid4().hex  # this process, among all that were or will be this node
        self.recorders = Recorders()
        self.survivors = Survivors(processes.system)
        self.generation = 0  # the last one that this node was in
        self.places: Mapping[str, WorkerPlace] = {}  # by the names of the processes
        self.store_port: int | None = None
        self._started_s = 0.0
        self.deaths: list[Death] = []  # in their order
        self.node_rank = self.membership.node_rank or 0  # a generation tells who came without one
        self.unasked: set[str] = set()  # that ended with 0, without handlers of signals that ask for it
        self.leave_generation()

    def leave_generation(self) -> None:
        """Forget the store: the next one will probably be node 0's."""
        self.hosts_store = self.membership.node_rank == 0

    def enter_generation(self, formed: Formed) -> None:
        """A generation was formed with this node in it; none of its workers has been started yet."""
        if formed.generation != self.generation + 1:
            self.survivors.holders.clear()  # others have trained since then
        self.generation, self.hosts_store, self.deaths = formed.generation, formed.is_store_host, []
        if formed.node_rank is not None:
            self.node_rank = formed.node_rank
        self.unasked = set()

    def start(self, processes: Sequence[Process], store_port: int, *, are_forked: bool) -> None:
        """The generation's workers are started now, in the order of local ranks."""
        stacks = f"{self.workers.run_dir}/{runtime_directory.STACKS}"
        self.places = {
            process.name: WorkerPlace(
                rank=int(process.env["RANK"]),
                local_rank=local_rank,
                stacks=f"{stacks}{local_rank}" if are_forked else None,
                error_file=process.env["TORCHELASTIC_ERROR_FILE"],
            )
            for local_rank, process in enumerate(processes)
        }
        self.store_port, self._started_s = store_port, self.system.now()

    @property
    def keeps_state(self) -> bool:
        """Whether a worker leaves its groups in place of being stopped."""
        return bool(self.processes.kept) or not self.survivors.able.isdisjoint(self.processes.pids())

    @property
    def kept_states(self) -> int:
        """How many workers that wait have the state of the last generation."""
        return sum(process.name in self.survivors.holders for process in self.processes.kept.values())

    def explained(self, death: Death, *, was_stopped: bool, is_asked: bool) -> Death:
        """Add to a worker's death the text of its error file, and what its last output proves.

        `was_stopped`: the launcher stops the workers; `is_asked`: because of a request, which explains the death.
        """
        self.system.catch_up(death.process)
        lines, place = self.system.last_lines, self.places.get(death.process)
        if place is not None:
            death = replace(death, rank=place.rank, local_rank=place.local_rank)
            death = self._with_error(death, place.error_file, was_stopped=was_stopped)
        if death.signal == signal.SIGABRT:
            death = aborted(death, lambda: lines(death.process))
        death = worker_ends.with_last_words(death, lines(death.process))
        if death.exit_code == 0 or is_asked:
            return death
        started = self.workers.argv if death.at_s < self._started_s + timeouts.START_S else ()
        evidence = Evidence(last_lines=lines(death.process))
        return failure.with_symptom(death, evidence, self.store_port, started)

    def _with_error(self, death: Death, path: str | None, *, was_stopped: bool) -> Death:
        """Add the error file, which was written when the worker failed: the worker may end much later.

        One with no more than an exit code may come from handling the loss of a peer, whose end is seen after that.
        """
        content = error_lines.read_own_error(path)
        if path is None or not content:
            return death
        with contextlib.suppress(OSError):
            age_s = time.time() - within(path, time.time(), os.path.getmtime, path)
            age_s = min(age_s, timeouts.STOPPING_S) - (0.0 if error_lines.message_in(content) else _HANDLED_S)
            death = replace(death, at_s=min(death.at_s, self.system.now() - age_s))
        return failure.with_error_file(death, content, was_ended=was_stopped)

    def dying(self) -> list[Death]:
        """Return how workers that still live will have ended, by the errors that they have written."""
        alive = [(name, self.places.get(name)) for name in self.processes.pids()]
        ended = Death(signal=signal.SIGTERM, at_s=math.inf)
        plain = [(replace(ended, process=name), place.error_file) for name, place in alive if place]
        deaths = [self._with_error(death, path, was_stopped=True) for death, path in plain]
        return [death for death in deaths if death.message is not None or death.signal is None]

    def own_errors(self, death: Death | None = None) -> frozenset[str]:
        """Name the workers that still live and failed for a reason of their own, before this death.

        Nobody is killed because another worker has failed.
        """
        is_killed = death is not None and death.signal in (signal.SIGKILL, signal.SIGTERM)
        dying = () if is_killed else self.dying()
        until_s = math.inf
        if death is not None and not worker_ends.is_victim(death) and (place := self.places.get(death.process)):
            written = self._with_error(replace(death, at_s=math.inf), place.error_file, was_stopped=False)
            until_s = death.at_s - _SEEN_S if written.at_s == math.inf else written.at_s
        return frozenset(each.process for each in dying if not worker_ends.is_victim(each) and each.at_s < until_s)

    def left_unasked(self) -> set[str]:
        """Workers that no signal can have told to leave: they had no handler of one, at the end of their programs.

        Nor did an error that they had printed.
        Python removes handlers after that; where a worker has told nothing, it has left by `os._exit`.
        """
        self.recorders.answers(0, time.monotonic() + _AT_END_S)
        reports = self.recorders.at_end
        silent = self.unasked & self.recorders.names - reports.keys()
        failed = {death.process for death in self.deaths if death.exit_code == 0 and self._printed_last(death)}
        return (silent | {name for name, report in reports.items() if not report.handles}) - failed

    def _printed_last(self, death: Death) -> str:
        return presentable(error_lines.printed_last(self.system.last_lines(death.process)))[:_ERROR_CHARS]

    def ended(self) -> list[RankState]:
        """The ranks of this generation that have no process any more, with what each reported at its end."""
        as_of_s = self.system.now() - SHOW_RANKS_S / 2  # what other nodes tell may be as old
        return [self._ended(death, as_of_s) for death in self.deaths]

    def _ended(self, death: Death, as_of_s: float) -> RankState:
        has_finished, report = death.exit_code == 0, self.recorders.at_end.get(f"rank {death.rank}")
        error = self._printed_last(death) if has_finished else ""
        return RankState(
            rank=death.rank or 0,
            node=self.node_rank,
            life=Life.FINISHED if has_finished else Life.DEAD,
            how=AFTER_ERROR + error if error else how(death),
            groups=report.groups if report is not None else {},
            quiet_s=max(0.0, as_of_s - death.at_s) if has_finished else None,
        )
