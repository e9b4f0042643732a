"""What a program sees when it is forked from a process that has imported torch, and as `python train.py`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.conftest import quick_first, require
from tests.pytorch.forks import Forks, fresh

pytestmark = [pytest.mark.torch, pytest.mark.process]
LONG = pytest.mark.long("tests/pytorch/test_fidelity.py")

# A finder of the program's own, before all others, and one that is told when a module has been executed.
HOOKS = """
import sys, importlib.util
class Finder:
    seen, done, busy = [], [], set()
    def find_spec(self, name, path=None, target=None):
        self.seen.append(name)
        if name in self.busy: return None
        self.busy.add(name)
        spec = importlib.util.find_spec(name)
        self.busy.discard(name)
        if spec is not None and spec.loader is not None: spec.loader = Loader(spec.loader)
        return spec
class Loader:
    def __init__(self, genuine): self.genuine = genuine
    def __getattr__(self, name): return getattr(self.genuine, name)
    def create_module(self, spec): return self.genuine.create_module(spec)
    def exec_module(self, module):
        self.genuine.exec_module(module)
        Finder.done.append(module.__name__)
sys.meta_path.insert(0, Finder())
"""
# With torch 2.4 and Python 3.10 a forked worker has these as soon as torch is imported; nothing is known to ask.
EARLY = {"_posixshmem", "multiprocessing.resource_tracker", "multiprocessing.spawn", "runpy"}
LISTS = """
import sys, warnings, logging
def modules(): names = sorted(sys.modules.keys() - APART); print(len(names), *names)
def filters(): print(len(warnings.filters), *warnings.filters, sep='\\n')
def loggers():
    for name, made in sorted(logging.root.manager.loggerDict.items()):  # torch makes them in the order of a set
        if isinstance(made, logging.Logger):
            print(name, made.level, made.handlers, made.propagate, made.disabled, made.parent.name, type(made))
        else: print(name, None)
"""
THREADS = """
import sys, threading
names = ['torch', 'numpy', 'torch.nn', 'json', 'numpy.linalg', 'multiprocessing', 'torch.distributed', 'typing'] * 4
found, barrier = {}, threading.Barrier(len(names))
def load(name):
    barrier.wait()
    __import__(name)
    found.setdefault(name, set()).add(id(sys.modules[name]))
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
print('ok' if all(len(ids) == 1 for ids in found.values()) else found)
import torch, numpy
print(torch.nn.Linear(2, 2)(torch.zeros(2)).shape, sys.modules['numpy.linalg'] is numpy.linalg)
"""
PROGRAMS = {
    "the modules, filters and loggers that there are": """
import sys
print('torch' in sys.modules, 'numpy' in sys.modules, sorted(sys.modules))
LISTS
modules(); filters(); loggers()
import numpy
modules(); filters(); loggers()
import torch
modules(); filters(); loggers()
import torch.distributed.elastic.agent, multiprocessing.forkserver
modules(); filters(); loggers()
""",
    "the attributes of packages whose submodules nobody has imported": """
import torch, torch.distributed
print(hasattr(torch.distributed, 'elastic'), hasattr(torch.utils, 'data'))
from torch.distributed import elastic
print(torch.distributed.elastic is elastic, hasattr(elastic, 'agent'))
import torch.distributed.elastic.agent
print(elastic.agent.__name__, torch.utils.data.DataLoader.__name__)
""",
    "what is known of a module before it is imported": """
import importlib.util, pkgutil
for name in ('torch', 'numpy', 'torch.nn', 'json', 'math', '_weakref', 'nowhere'):
    spec = importlib.util.find_spec(name)
    if spec is None: print(name, None); continue
    print(name, spec.name, spec.origin, spec.submodule_search_locations, spec.parent)
import importlib.machinery
print(isinstance(importlib.util.find_spec('numpy').loader, importlib.machinery.SourceFileLoader))
print(importlib.util.find_spec('numpy').loader.get_filename('numpy'), len(pkgutil.get_data('numpy', '__init__.py')))
import torch, numpy, json
for module in (torch, numpy, json, torch.nn.functional):
    print(module.__spec__.origin, type(module.__loader__), type(module.__spec__.loader), module.__package__)
""",
    "a module that is loaded again": """
import importlib, sys
import json, numpy, torch
was = json.dumps
print(importlib.reload(json) is json, json.dumps is was)
print(importlib.reload(torch.version).__name__)
del sys.modules['json'], sys.modules['json.decoder']
import json as again
print(again is json, again.loads('[1]'), sys.modules['json'] is again)
""",
    "import hooks": "HOOKS"
    + """
import json
print(sorted(set(Finder.seen)), sorted(Finder.done))
Finder.seen.clear(), Finder.done.clear()
# Modules that put something else into sys.modules when they are executed are handed over as that.
replaced = ('torch.backends', 'torch._VF', 'collections.abc')
import numpy
print(sorted(name for name in Finder.done if not name.startswith(replaced)))
Finder.seen.clear(), Finder.done.clear()
import torch
print(sorted(name for name in Finder.done if name.startswith('torch') and not name.startswith(replaced)))
import torch.nn.functional as F
from torch import nn
from torch.distributed import elastic
print(F.__name__, nn.Linear, elastic.__name__, F.relu(torch.tensor([-1.0, 1.0])))
""",
    "logging that is configured before torch is imported": """
import logging.config
logging.config.dictConfig({
    'version': 1, 'disable_existing_loggers': True,
    'handlers': {'h': {'class': 'logging.StreamHandler', 'stream': 'ext://sys.stdout'}},
    'loggers': {'torch.nn': {'level': 'ERROR'}, 'mine': {'level': 'INFO', 'handlers': ['h']}},
    'root': {'level': 'INFO', 'handlers': ['h']},
})
mine = logging.getLogger('torch.distributed.distributed_c10d')
import torch, torch.distributed
LISTS
loggers()
mine.warning('one')
theirs = sys.modules['torch.distributed.distributed_c10d'].logger
theirs.warning('two')
logging.getLogger('torch.fx').warning('three')
import pickle
print(pickle.loads(pickle.dumps(logging.getLogger('torch.fx'))).name)
""",
    "warnings that are filtered before torch is imported": """
import warnings
warnings.simplefilter('error', UserWarning)
warnings.filterwarnings('ignore', message='mine')
import torch
LISTS
filters()
""",
    "a class of loggers of the program's own": """
import logging
class Mine(logging.Logger):
    pass
logging.setLoggerClass(Mine)
import torch
LISTS
loggers()
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
    "what is inspected": """
import inspect, sys
print([(f.filename, f.function, f.lineno) for f in inspect.stack()][:1])  # one more, which looks like the program's
import torch
print(inspect.getsourcefile(torch.nn.Linear), inspect.getmodule(torch.nn.Linear), len(inspect.getsource(torch.nn)))
""",
    "the interpreter's flags, and what it starts": """
import subprocess, sys, multiprocessing
print(sys.flags, sys.prefix, sys.exec_prefix, sys.path, quit, exit, help, copyright)
print(subprocess._args_from_interpreter_flags())
print([type(f).__name__ for f in sys.meta_path if 'trainer_launch' not in type(f).__module__], len(sys.path_hooks))
def work(): print(sys.flags, 'numpy' in sys.modules)
if __name__ == '__main__':
    for method in ('spawn', 'fork', 'forkserver'):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start(); process.join(); print(process.exitcode)
""",
}

REPLACED = {
    "a module that the program has replaced": """
import sys
sys.modules['numpy'] = None
import torch
try: import numpy
except ImportError as problem: print(problem)
print(torch.arange(2))
""",
    "a module that comes from elsewhere": """
import os, sys
here = os.path.dirname(os.path.abspath(__file__)) + '/vendored/'
os.makedirs(here, exist_ok=True)
open(here + 'typing_extensions.py', 'w').write('here = 1')
sys.path.insert(0, here)
import typing_extensions
print(typing_extensions.here)
""",
    "a variable whose name is computed": """
import os
os.environ['OMP_NUM_' + 'THREADS'] = '3'
import torch
print(torch.get_num_threads())
""",
    "a variable that is read from a file": """
import os
os.environ.update(line.split('=') for line in ['TORCH_SHOW_CPP_STACKTRACES=1', 'TORCH_DISTRIBUTED_DEBUG=DETAIL'])
import numpy, torch.distributed
print(torch.distributed.get_debug_level())
""",
    "an import hook that makes a module of its own": """
import importlib.machinery, importlib.util, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == 'torch.version':
            return importlib.machinery.PathFinder.find_spec(name, path)
sys.meta_path.insert(0, Finder())
import torch
print(torch.__version__)
""",
}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    made = Forks(
        tmp_path_factory.mktemp("server"),
        preload=["numpy", "multiprocessing.pool", "torch.distributed.elastic.agent"],
    )
    assert made.reason is None
    yield made
    made.close()


@pytest.mark.parametrize("name", quick_first(PROGRAMS, 6, LONG))
def test_a_forked_program_sees_what_a_fresh_one_sees(forks: Forks, tmp_path: Path, name: str) -> None:
    script = tmp_path / "train.py"
    apart = EARLY if importlib.metadata.version("torch").startswith("2.4.") else set()
    lists = LISTS.replace("APART", f"set({sorted(apart)})")
    script.write_text(PROGRAMS[name].replace("HOOKS", HOOKS).replace("LISTS", lists))
    forked, other = forks.run(tmp_path, str(script)), fresh(tmp_path, tmp_path, str(script))
    assert forked.out == other.out
    assert (forked.code, other.code) == (0, 0), forked.err + other.err


def test_threads_may_import_at_the_same_time(forks: Forks, tmp_path: Path) -> None:
    """In a new interpreter some of these imports fail: modules that import each other are found half executed."""
    script = tmp_path / "train.py"
    script.write_text(THREADS)
    ended = forks.run(tmp_path, str(script))
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert ended.out.startswith("ok"), ended.out


@pytest.mark.parametrize("name", quick_first(REPLACED, 2, LONG))
def test_a_program_for_which_a_fork_is_not_right_is_started_again_with_exec(tmp_path: Path, name: str) -> None:
    """By itself, in the same process; the fork server forks no other worker of it."""
    script = tmp_path / "train.py"
    script.write_text(f"import os, sys\nprint(sorted(os.environ), os.getcwd(), os.umask(0o22)){REPLACED[name]}")
    forks = Forks(tmp_path, preload=["numpy"], script=None)
    try:
        forked, other = forks.run(tmp_path, str(script)), fresh(tmp_path, tmp_path, str(script))
        first, _, again = forked.out.partition("\n")
        assert (forked.code, again) == (0, other.out), forked.err
        assert first == other.out.partition("\n")[0]
        said = [line for line in forked.err.splitlines() if line.startswith("[trainer-launch]")]
        assert len(said) == 1
        assert said[0].endswith("; what the program did before that runs again")
        with pytest.raises(AssertionError, match=r"the program|an import hook"):
            forks.run(tmp_path, str(script))
    finally:
        forks.close()


@pytest.mark.long("tests/pytorch/test_fidelity.py")
def test_who_asks_for_forked_workers_gets_an_error_where_a_worker_needs_a_new_interpreter(tmp_path: Path) -> None:
    """Also where the worker itself finds that out; nothing runs twice."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    computed = f"print('begun'){REPLACED['a variable whose name is computed']}print('never')"
    said = "--start-method is forkserver, but {}; set it to auto, or remove the cause"
    for source, why in (
        (computed, "the program changes OMP_NUM_THREADS before it imports torch"),
        (computed.replace("NUM_' + '", "NUM_"), "train.py:3 sets OMP_NUM_THREADS before it imports torch"),
    ):
        (tmp_path / "train.py").write_text(source)
        words = ("--nproc-per-node", "1", "--start-method", "forkserver", "--max-restarts", "0", "--", "train.py")
        done = launch("run", *words, cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert said.format(why) in done.stderr
        assert done.stdout == ("begun\n" if source == computed else "")
        method = words.index("forkserver")
        done = launch("run", *words[:method], "auto", *words[method + 1 :], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"without the fork server: {why}" in done.stderr
        assert [*dict.fromkeys(done.stdout.split())][::2] == ["begun", "never"]


def test_a_handler_whose_stream_cannot_be_set_is_left_as_it_is(tmp_path: Path) -> None:
    """torch imports dill where it is installed, and dill logs through a handler that follows sys.stderr itself."""
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    handler = "import logging\nlogging.getLogger('dill').addHandler(logging._StderrHandler())\n"
    (tmp_path / "dill.py").write_text(f"{handler}def extend(use_dill): pass\n")
    (tmp_path / "train.py").write_text("import logging, torch\nlogging.getLogger('dill').error('heard')\n")
    words = ("--nproc-per-node", "1", "--start-method", "forkserver", "--max-restarts", "0", "--", "train.py")
    done = launch("run", *words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("heard") == 1


@pytest.mark.parametrize("module", quick_first([None, "train"], 1, LONG))
def test_a_variable_that_the_source_sets_keeps_the_fork_server_from_serving(
    tmp_path: Path, module: str | None
) -> None:
    (tmp_path / "train.py").write_text("import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\n")
    forks = Forks(tmp_path, module=module)
    assert forks.reason == "train.py:2 sets OMP_NUM_THREADS before it imports torch"
    forks.close()
