"""The ways to start workers and a store where the fork server fails, with servers that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from trainer_launch.model import Workers
from trainer_launch.model.errors import LaunchError, NodeError
from trainer_launch.pytorch import fork_server
from trainer_launch.pytorch.fork_server import ForkServer, ServerError, Starter
from trainer_launch.pytorch.messages import Ready
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


def test_where_preloaded_modules_crash_the_server_another_one_without_them_opens_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starter, servers = starter_of(monkeypatch, CRASH, CRASH, None)
    starter.begin()
    assert [starter.answer() for _ in range(3)] == [False, False, True]
    assert (starter.forks, servers.preloads) == (False, [("mine",), ("mine",), ()])


def test_a_server_that_crashes_without_preloaded_modules_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    starter, servers = starter_of(monkeypatch, CRASH, CRASH, preload="")
    starter.begin()
    assert not starter.answer()
    with pytest.raises(NodeError, match="the store cannot be opened: the fork server exited"):
        starter.answer()
    assert len(servers.preloads) == 2


def test_without_torch_no_other_server_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    starter, servers = starter_of(monkeypatch, "importing torch failed (OSError: libcudart.so.12)")
    starter.begin()
    with pytest.raises(LaunchError, match="the store cannot be opened: importing torch failed"):
        starter.answer()
    assert len(servers.preloads) == 1
