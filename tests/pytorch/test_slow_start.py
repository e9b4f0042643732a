"""A node says whether it could start its workers at once: as long as it imports torch, it could not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pytorch.nodes import FakeStarter, Here
from tests.supervisor.fakes import Program
from trainer_launch.model import Verdict

ENDS = [Program(ends_s=1)]


@pytest.mark.parametrize("forks", [False, True], ids=["only its store waits", "its workers wait, too"])
def test_a_node_whose_fork_server_still_imports_says_so_and_then_that_it_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    monkeypatch.setattr(FakeStarter, "is_needed", True)
    monkeypatch.setattr(FakeStarter, "forks", forks)
    monkeypatch.setattr(FakeStarter, "begin", lambda _: False)
    has_imported = iter((True,))
    here = Here(tmp_path, rank_0=ENDS, rank_1=ENDS)
    monkeypatch.setattr(here.starter, "answer", lambda: here.system.now() >= 300 and next(has_imported, False))
    ended = here.does(300, lambda: None).run()
    assert ended.verdict is Verdict.SUCCEEDED
    assert [join.prepared for join in here.coordinator.joins] == [False, True]


def test_a_node_that_waits_for_no_import_is_ready_at_once(tmp_path: Path) -> None:
    here = Here(tmp_path, rank_0=ENDS, rank_1=ENDS)
    here.run()
    assert here.coordinator.joins[0].prepared
