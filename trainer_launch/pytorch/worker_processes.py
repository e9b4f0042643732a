"""The workers of a generation as processes, and what is known of each by its name. Pure."""

from __future__ import annotations

from trainer_launch.host import runtime_directory
from trainer_launch.membership import protocol as say
from trainer_launch.model import Membership, Process, Workers
from trainer_launch.planning import torchrun_logs
from trainer_launch.pytorch import worker_environment
from trainer_launch.supervisor.worker_samples import Place

_NAME = "rank "


def of(
    workers: Workers, membership: Membership, formed: say.Formed, go: say.Go, attempt_folder: str
) -> tuple[Process, ...]:
    """One process for each worker, by local rank."""
    added = worker_environment.environments(workers, membership, formed, go, attempt_folder)
    ranks = {local_rank: formed.first_rank + local_rank for local_rank in range(workers.count)}
    streams = torchrun_logs.destinations(workers.logs, workers.env, workers.role, ranks, attempt_folder)
    return tuple(
        Process(
            name=f"{_NAME}{rank}",
            argv=worker_environment.arguments(workers.argv, local_rank),
            env={**workers.env, **added[local_rank]},
            cwd=workers.cwd,
            label=None if workers.node_label is None else f"{workers.node_label}:{rank}",
            streams=streams.get(local_rank, {}),
            member=local_rank,
        )
        for local_rank, rank in ranks.items()
    )


def places(workers: Workers, formed: say.Formed, attempt_folder: str, *, are_forked: bool) -> dict[str, Place]:
    """The workers of a generation by the names of their processes."""
    return {
        f"{_NAME}{formed.first_rank + local_rank}": Place(
            formed.first_rank + local_rank,
            local_rank,
            stacks_file(workers.run_dir, local_rank) if are_forked else None,
            worker_environment.error_file(attempt_folder, local_rank),
        )
        for local_rank in range(workers.count)
    }


def stacks_file(run_dir: str, local_rank: int) -> str:
    """Where a forked worker writes its stacks when it is asked."""
    return f"{run_dir}/{runtime_directory.STACKS}{local_rank}"


def rank_of(name: str) -> int | None:
    """The rank of the worker that a process is."""
    number = name.removeprefix(_NAME)
    return int(number) if name.startswith(_NAME) and number.isdecimal() else None
