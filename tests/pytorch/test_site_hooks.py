"""What Python runs before a program, in forked workers: as in a new interpreter, and once in each of them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.pytorch.forks import Forks, fresh

pytestmark = [pytest.mark.torch, pytest.mark.process]

CUSTOMIZE = """
import atexit, os, sys
os.environ['CUSTOMIZED'] = str(os.getpid())
if 'RANK' in os.environ:
    print('site', sys.argv[1:], 'torch' in sys.modules, 'json' in sys.modules)
    atexit.register(print, 'end')
"""
PROGRAM = """
import os, sys
print(os.environ['CUSTOMIZED'] == str(os.getpid()), sorted(sys.modules), sys.path)
print(sys.flags, sys.prefix, hash('a') if 'PYTHONHASHSEED' in os.environ else None)
"""


@pytest.fixture
def forks(tmp_path: Path) -> Iterator[Forks]:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(CUSTOMIZE)
    (tmp_path / "train.py").write_text(PROGRAM)
    made = Forks(tmp_path, env=environment(tmp_path))
    assert made.reason is None
    yield made
    made.close()


def environment(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{folder}/site:{os.getcwd()}", "PYTHONHASHSEED": "7"}


def test_sitecustomize_runs_in_each_worker(forks: Forks, tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    other = fresh(tmp_path, tmp_path, script, environment=environment(tmp_path))
    assert other.out.startswith("site")
    for _ in range(2):
        forked = forks.run(tmp_path, script)
        assert (forked.code, forked.out) == (0, other.out), forked.err


def test_workers_of_a_server_share_a_hash_seed(tmp_path: Path) -> None:
    """As the documentation says; PYTHONHASHSEED chooses it."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    (tmp_path / "train.py").write_text("print(hash('a'))")
    forks = Forks(tmp_path)
    said = {forks.run(tmp_path, "train.py").out for _ in range(2)}
    forks.close()
    assert len(said) == 1
