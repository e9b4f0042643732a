"""The ways to start workers and a store where the fork server fails, with servers that are not there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from trainer_launch.model import Workers, exit_codes
from trainer_launch.model.errors import NodeError
from trainer_launch.pytorch import fork_server, forked_process
from trainer_launch.pytorch.fork_server import ForkServer, ServerError, Starter
from trainer_launch.pytorch.forked_process import BeforeImports, Worker
from trainer_launch.pytorch.messages import ForkedWorker, ForkWorkers, Ready
from trainer_launch.supervisor.failure import Evidence
from trainer_launch.supervisor.system import System

CRASH = "the fork server exited"


class Servers:
    """Makes servers; each has the next of these answers: why it is unfit, None, or that it has crashed."""

    def __init__(self, answers: Iterator[str | None]) -> None:
        self._answers = answers
        self.preloads: list[tuple[str, ...]] = []  # of each server

    def __call__(self, workers: Workers) -> Any:
        self.preloads.append(workers.preload if workers.forks else ())
        server = create_autospec(ForkServer, instance=True)
        server.pid = server.fd = len(self.preloads)
        answer = next(self._answers)
        server.answer.side_effect = ServerError(answer) if answer == CRASH else None
        server.answer.return_value = Ready(answer)
        return server


def starter_of(
    monkeypatch: pytest.MonkeyPatch, *answers: str | None, preload: str = "mine"
) -> tuple[Starter, Servers]:
    servers = Servers(iter(answers))
    monkeypatch.setattr(fork_server, "ForkServer", servers)
    workers = Workers(count=1, argv=(), env={}, forks=True, preload=(preload,) if preload else ())
    system = create_autospec(System, instance=True)
    system.look.return_value = Evidence()
    group: Any = SimpleNamespace(workers=workers, system=system, hosts_store=True)
    return Starter(group), servers


def test_a_preloaded_module_whose_name_begins_with_torch_costs_only_the_fork_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reason = "importing torchvision failed (ModuleNotFoundError: No module named 'torchvision')"
    starter, servers = starter_of(monkeypatch, reason, preload="torchvision")
    starter.begin()
    assert starter.answer(), "the same server opens stores"
    assert (starter.forks, servers.preloads) == (False, [("torchvision",)])


def test_a_server_that_crashes_without_preloaded_modules_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    starter, servers = starter_of(monkeypatch, CRASH, CRASH, preload="")
    starter.begin()
    assert not starter.answer()
    with pytest.raises(NodeError, match="the store cannot be opened: the fork server exited"):
        starter.answer()
    assert len(servers.preloads) == 2


def test_a_forked_worker_names_the_working_directory_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[str] = []
    monkeypatch.setattr(forked_process, "_write", written.append)
    request = ForkWorkers(argv=("/bin/python", "-u", "train.py"), cwd=f"{tmp_path}/gone", workers=())
    mine = ForkedWorker(local_rank=0, environment={})
    worker = Worker(create_autospec(BeforeImports), request, mine, (), -1)
    monkeypatch.setattr(worker, "_become", lambda: os.chdir(request.cwd))
    monkeypatch.setattr(forked_process, "wait_for_go", lambda *_: None)
    monkeypatch.setattr(signal, "pthread_sigmask", lambda *_: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as ended:
        worker()
    assert ended.value.code == exit_codes.NOT_FOUND
    assert written == [f"cannot run '/bin/python': No such file or directory: '{request.cwd}'"]
