"""Both sides of `generations()`, at the points that real workers seldom reach."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from trainer_launch.pytorch import generations
from trainer_launch.pytorch.survivors import Survivors
from trainer_launch.supervisor.system import System


def test_a_survivor_whose_end_is_not_reaped_yet_when_the_next_generation_begins_is_told_nothing() -> None:
    survivors = Survivors(create_autospec(System, instance=True))
    (worker,) = survivors.open(["rank 0"])
    os.close(worker)
    assert survivors.hear() == []
    survivors.enter("rank 0", {"RANK": "0"}, has_state=True)


@pytest.mark.parametrize(("backend", "is_done"), [("gloo", True), ("nccl", False)])
def test_only_groups_of_gloo_are_left_once_their_connections_have_ended(
    monkeypatch: pytest.MonkeyPatch, backend: str, is_done: bool
) -> None:
    """An abort of NCCL may take seconds."""
    aborted: list[str] = []
    own: Any = SimpleNamespace(name=lambda: backend, abort=lambda: aborted.append(backend))
    group = SimpleNamespace(_device_types=("cpu",), _get_backend=lambda _device: own)
    groups = SimpleNamespace(_world=SimpleNamespace(pg_map=[group]))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=SimpleNamespace(distributed_c10d=groups)))
    assert generations._GroupSockets().shut() is is_done
    assert aborted == ([] if is_done else [backend])
