"""How this agent starts its workers: forked from the server, or, where that cannot be, the ordinary way."""

from __future__ import annotations

import logging
import os

from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from trainer_launch import run_folder
from trainer_launch.child.logs import PipedLogs
from trainer_launch.child.server import Server, ServerError
from trainer_launch.child.worker import Program
from trainer_launch.errors import UsageError

# Libraries read these when they are loaded, which in a forked worker was in the server.
_READ_AT_LOAD = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
_log = logging.getLogger(__name__)


class Ordinary:
    """Each worker is a new interpreter: torch's own way to start a command."""

    def __init__(self, config: LaunchConfig, command: object, arguments: list[str]) -> None:
        self._config, self._command, self._arguments = config, command, arguments

    def launch(self) -> None:
        """Run torch's agent to its end."""
        elastic_launch(self._config, self._command)(*self._arguments)

    def prepare(self, environments: dict[int, dict[str, str]]) -> None:
        """Before each start of the workers."""


class Forked(Ordinary):
    """Workers are forked from the server; when none can be had any more, they start in the other way."""

    def __init__(self, config: LaunchConfig, command: str, arguments: list[str], server: Server) -> None:
        super().__init__(config, command, arguments)
        self._server = server
        self._ordinary = False
        folder = os.environ[run_folder.VARIABLE]
        self._program = Program(is_module="-m" in arguments[1:2], folder=folder)
        self._piped = config.logs_specs if isinstance(config.logs_specs, PipedLogs) else None
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_without_traceback)

    def launch(self) -> None:
        """Run torch's agent to its end."""
        if not self._ordinary:
            try:
                self._launch_forked()
            except (ServerError, OSError) as problem:  # torch needs files and semaphores to fork, none otherwise
                tell(str(problem))
                self._ordinary = True
        if self._ordinary:
            super().launch()

    def prepare(self, environments: dict[int, dict[str, str]]) -> None:
        """Workers get a server that has imported what is on the disk now.

        Raises:
            ServerError: none can be had.
        """
        if self._ordinary:
            return
        self._program.environments = environments
        why = self._server.renew()
        if why:
            _log.info("the fork server was restarted: %s", why)
        if why and self._server.reason:
            tell(self._server.reason)

    def _launch_forked(self) -> None:
        config = self._config
        config.start_method = "forkserver"
        if self._piped:
            self._piped.instead = self._program.outputs
        try:
            elastic_launch(config, self._program)("${local_rank}", self._command, *self._arguments)
        finally:
            if self._piped:
                self._piped.instead = None


def choose(
    config: LaunchConfig, command: object, arguments: list[str], server: Server | None, no_server: str | None
) -> Ordinary:
    """The way for this job; `no_server` tells why the server could not even be started.

    Raises:
        UsageError: the workers have to be forked, but cannot be.
    """
    if server is None:
        return Ordinary(config, command, arguments)
    reason = no_server or _obstacle(server, command)
    if reason is None:
        if server.apart:
            _log.info("the fork server imported torch separately: %s", server.apart)
        assert isinstance(command, str)
        return Forked(config, command, arguments, server)
    server.close()
    if server.is_required:
        raise UsageError(f"--start-method is forkserver, but {reason}; set it to auto, or remove the cause")
    tell(reason)
    return Ordinary(config, command, arguments)


def _obstacle(server: Server, command: object) -> str | None:
    try:
        server.wait()
    except ServerError as problem:
        return str(problem)
    return server.reason or _changed(server.environment) or _not_python(command)


def tell(reason: str) -> None:
    """Say why workers start without the fork server."""
    _log.info("workers start without the fork server: %s", reason)


def _changed(before: dict[str, str]) -> str | None:
    for name in {**before, **os.environ}:
        if name.startswith(_READ_AT_LOAD) and before.get(name) != os.environ.get(name):
            return f"torch's options changed {name} after torch was imported"
    return None


def _not_python(command: object) -> str | None:
    return None if isinstance(command, str) else "the program is a function of torch's own"


def _without_traceback(record: logging.LogRecord) -> bool:
    """How a worker ended is said in one line; torch's own frames add nothing."""
    record.exc_info = None
    return True
