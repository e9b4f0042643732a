"""The processes of a generation's workers: their names, environments, log folders and error files."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Sequence
from functools import cached_property
from string import Template

from trainer_launch.host import runtime_directory
from trainer_launch.host.files import remove_tree
from trainer_launch.host.slow_files import within
from trainer_launch.membership.protocol import Formed, Go
from trainer_launch.model import Membership, Process, Workers
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.planning import torchrun_options
from trainer_launch.planning.torchrun_options import DEVICES, visible_devices

_NAME = "rank "
_ASYNC = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_LONGEST = 240  # characters: a file's name has at most 255
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # what is wrong with this node's disk, not with the path


def worker_processes(
    workers: Workers, membership: Membership, formed: Formed, go: Go, attempt_folder: str
) -> tuple[Process, ...]:
    """Make a process for each worker, by local rank.

    `attempt_folder` holds one folder for each worker, for its error file; "" leaves workers without error files.
    """
    node = workers.node_label if formed.node_rank is None else formed.node_rank
    ranks = {local_rank: formed.first_rank + local_rank for local_rank in range(workers.count)}
    streams = torchrun_options.destinations(workers.logs, workers.env, workers.role, ranks, attempt_folder)
    env = {**workers.env, **_of_the_group(workers, membership, formed, go)}
    return tuple(
        Process(
            name=f"{_NAME}{rank}",
            argv=arguments(workers.argv, local_rank),
            env={
                **env,
                "RANK": str(rank),
                "ROLE_RANK": str(formed.first_role_rank + local_rank),
                "TORCHELASTIC_ERROR_FILE": f"{attempt_folder}/{local_rank}/error.json" if attempt_folder else "",
                **_device(workers, local_rank),
            },
            cwd=workers.cwd,
            label=None if workers.node_label is None else f"{node}:{rank}",
            streams=streams.get(local_rank, {}),
        )
        for local_rank, rank in ranks.items()
    )


def arguments(argv: Sequence[str], local_rank: int) -> tuple[str, ...]:
    """The command of one worker: torchrun replaces ${local_rank} in arguments, and $$ by $."""
    program, *words = argv
    return (program, *(Template(word).safe_substitute(local_rank=str(local_rank)) for word in words))


def _of_the_group(workers: Workers, membership: Membership, formed: Formed, go: Go) -> dict[str, str]:
    sizes = {"LOCAL_SIZE": workers.count, "CROSS_RANK": formed.group_rank, "CROSS_SIZE": formed.size}
    return {
        **({name: str(value) for name, value in sizes.items()} if workers.of_deepspeed else {}),
        "GROUP_RANK": str(formed.group_rank),
        "ROLE_NAME": workers.role,
        "LOCAL_WORLD_SIZE": str(workers.count),
        "WORLD_SIZE": str(formed.world_size),
        "GROUP_WORLD_SIZE": str(formed.size),
        "ROLE_WORLD_SIZE": str(formed.role_world_size),
        "MASTER_ADDR": go.host,
        "MASTER_PORT": str(go.port),
        "TORCHELASTIC_RESTART_COUNT": str(formed.restarts),
        runtime_directory.GENERATION: str(formed.generation),
        runtime_directory.KEPT: str(formed.kept),
        "TORCHELASTIC_MAX_RESTARTS": str(membership.max_restarts),
        "TORCHELASTIC_RUN_ID": membership.job,
        # Served by the store process, so that no worker's end takes it away; or by rank 0, as with torchrun.
        "TORCHELASTIC_USE_AGENT_STORE": str(not workers.serve_store),
        _ASYNC: workers.env.get(_ASYNC, "1"),
    }


def _device(workers: Workers, local_rank: int) -> dict[str, str]:
    """LOCAL_RANK; with --virtual-local-rank each worker sees one device, as number 0."""
    if not workers.virtual_local_rank:
        return {"LOCAL_RANK": str(local_rank)}
    visible = visible_devices(workers.env)
    return {"LOCAL_RANK": "0", DEVICES: str(local_rank) if visible is None else visible[local_rank]}


class LogFolders:
    """LOG_DIR/JOB_xxxxxxxx/attempt_N/LOCAL_RANK of one run.

    A generation after a membership change has the N of the one before: its output is appended there.
    """

    def __init__(self, workers: Workers, job: str) -> None:
        self._workers = workers
        self._job = job
        self.folder = ""  # of the last generation; "": the workers have no error files

    def begin(self, restarts: int) -> None:
        """Make the folders of a generation, without the error files of the one before.

        With --log-dir /dev/null torchrun makes no folder, and the workers have no error file.

        Raises:
            UsageError: a folder cannot be made.
            NodeError: the disk is full or fails, or its server does not answer.
        """
        logs = self._workers.logs
        place = os.path.abspath(logs.get("log_dir") or self._workers.errors)
        if logs.get("log_dir") == torchrun_options.NOWHERE:
            return
        if not within(place, False, self._begin, restarts):
            raise NodeError(f"the file server of {place} does not answer; run on another node")

    def _begin(self, restarts: int) -> bool:
        logs = self._workers.logs
        try:
            attempt = f"{self._of_the_run}/attempt_{restarts}"
            if self.folder != attempt and not torchrun_options.writes_files(logs):
                remove_tree(self.folder)  # nobody reads it again
            self.folder = attempt
            for local_rank in range(self._workers.count):
                os.makedirs(f"{attempt}/{local_rank}", exist_ok=True)
                with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # the latter has no error to tell
                    os.unlink(f"{attempt}/{local_rank}/error.json")
        except OSError as problem:
            name = f"--log-dir {logs['log_dir']}" if "log_dir" in logs else "the folder of the workers' error files"
            text = f"{name}: cannot create {problem.filename}: {problem.strerror}"
            if problem.errno in _OF_THE_DISK:
                raise NodeError(f"{text}; free space there, or run on another node") from problem
            raise UsageError(f"{text}; set --log-dir to a writable directory") from problem
        return True

    @cached_property
    def _of_the_run(self) -> str:
        """The run's folder: where the user wants logs, else as torchrun has it, or in the run's own folder."""
        logs = self._workers.logs
        if "log_dir" in logs:
            base = os.path.abspath(logs["log_dir"])
        elif torchrun_options.writes_files(logs):
            base = tempfile.mkdtemp(prefix="torchelastic_")
        else:
            base = self._workers.errors
        os.makedirs(base, exist_ok=True)
        name = self._job.replace("/", "-")[:_LONGEST]
        return tempfile.mkdtemp(prefix=f"{name}_", dir=base)
