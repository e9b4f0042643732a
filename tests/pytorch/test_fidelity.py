"""What a program sees when it is forked from a process that has imported torch, and as `python train.py`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import quick_first, require
from tests.pytorch.forks import Forks, fresh

pytestmark = [pytest.mark.torch, pytest.mark.process]
LONG = pytest.mark.long("tests/pytorch/test_fidelity.py")

PROGRAMS = {
    "the interpreter's flags, and what it starts": """
import subprocess, sys, multiprocessing
print(sys.flags, sys.prefix, sys.exec_prefix, sys.path, quit, exit, help, copyright)
print(subprocess._args_from_interpreter_flags())
def work(): print(sys.flags, 'numpy' in sys.modules)
if __name__ == '__main__':
    for method in ('spawn', 'fork', 'forkserver'):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start(); process.join(); print(process.exitcode)
""",
    "pickling": """
import pickle
data = b'ccollections\\nOrderedDict\\n.'
print(pickle.loads(data))
import torch
print(pickle.loads(pickle.dumps(torch.nn.ReLU())), pickle.loads(pickle.dumps(torch.arange(3))))
""",
    "relative and circular imports": """
import os, sys
here = os.path.dirname(os.path.abspath(__file__)) + '/mine'
os.makedirs(here, exist_ok=True)
open(here + '/__init__.py', 'w').write('from . import a\\nfrom .a import b')
source = 'from . import b\\nfrom .b import x\\nimport torch.nn as nn\\nfrom torch.utils import data'
open(here + '/a.py', 'w').write(source)
open(here + '/b.py', 'w').write('import mine.a\\nfrom mine import a as again\\nx = 1')
import mine
print(mine.a.x, mine.b.again is mine.a, mine.a.data.__name__)
""",
    "a tracker of tracebacks": """
import sys, traceback
def hook(kind, value, trace): print([(frame.filename, frame.name) for frame in traceback.extract_tb(trace)])
sys.excepthook = hook
def fails(): raise SystemError('no luck')
try: fails()
except SystemError as problem: print([frame.name for frame in traceback.extract_tb(problem.__traceback__)])
""",
    "a configuration of logging": """
import logging, sys
logging.basicConfig(stream=sys.stdout, level='INFO', format='%(name)s %(message)s')
logging.getLogger('mine').info('heard')
import torch
logging.getLogger('torch.mine').info('heard too')
""",
}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    made = Forks(tmp_path_factory.mktemp("server"), preload=["multiprocessing.pool"])
    assert made.reason is None
    yield made
    made.close()


@pytest.mark.parametrize("name", quick_first(PROGRAMS, 2, LONG))
def test_a_forked_program_sees_what_a_fresh_one_sees(forks: Forks, tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAMS[name])
    forked, other = forks.run(tmp_path, str(script)), fresh(tmp_path, tmp_path, str(script))
    assert forked.out == other.out
    assert (forked.code, other.code) == (0, 0), forked.err + other.err


def test_what_is_preloaded_stays_imported(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint('multiprocessing.pool' in sys.modules, 'torch' in sys.modules)")
    assert forks.run(tmp_path, str(script)).out == "True False\n"


def test_workers_of_a_server_share_a_hash_seed(forks: Forks, tmp_path: Path) -> None:
    """As the documentation says; PYTHONHASHSEED chooses it."""
    script = tmp_path / "train.py"
    script.write_text("print(hash('a'))")
    assert len({forks.run(tmp_path, str(script)).out for _ in range(2)}) == 1
