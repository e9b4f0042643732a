"""The folders of the workers' error files and logs, named as torchrun names them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile

from trainer_launch.model import Workers
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import torchrun_logs


class LogFolders:
    """LOG_DIR/JOB_xxxxxxxx/attempt_N/LOCAL_RANK of one run.

    A generation after a membership change has the N of the one before: its output is appended there.
    """

    def __init__(self, workers: Workers, job: str) -> None:
        self._workers = workers
        self._job = job
        self._of_this_run: str | None = None
        self._last = ""  # the attempt before

    def begin(self, restarts: int) -> str:
        """Make the folders of a generation, without the error files of the one before; return their folder.

        It is "" with --log-dir /dev/null: torchrun makes no folder then, and the workers have no error file.

        Raises:
            UsageError: a folder cannot be made.
        """
        logs = self._workers.logs
        if logs.get("log_dir") == torchrun_logs.NOWHERE:
            return ""
        try:
            attempt = f"{self._of_the_run()}/attempt_{restarts}"
            if self._last != attempt and not torchrun_logs.writes_files(logs):
                shutil.rmtree(self._last, ignore_errors=True)  # nobody reads it again
            self._last = attempt
            for local_rank in range(self._workers.count):
                os.makedirs(f"{attempt}/{local_rank}", exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{attempt}/{local_rank}/error.json")
            for path in torchrun_logs.copies(logs, attempt):
                with open(path, "ab"):
                    pass
        except OSError as problem:
            name = f"--log-dir {logs['log_dir']}" if "log_dir" in logs else "the folder of the workers' error files"
            raise UsageError(
                f"{name}: cannot create {problem.filename}: {problem.strerror}; "
                f"set --log-dir to a writable directory"
            ) from problem
        return attempt

    def _of_the_run(self) -> str:
        if self._of_this_run is None:
            base = self._base()
            os.makedirs(base, exist_ok=True)
            self._of_this_run = tempfile.mkdtemp(prefix=f"{self._job}_", dir=base)
        return self._of_this_run

    def _base(self) -> str:
        """Where the user wants the logs, else a new folder as torchrun's; the run's own if nobody wants logs."""
        logs = self._workers.logs
        if "log_dir" in logs:
            return os.path.abspath(logs["log_dir"])
        return (
            tempfile.mkdtemp(prefix="torchelastic_") if torchrun_logs.writes_files(logs) else self._workers.errors
        )
