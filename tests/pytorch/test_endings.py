"""A forked program ends in every way as one that `python -u` has started: code, signal, all that it wrote."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.pytorch.forks import Forks, fresh

pytestmark = [pytest.mark.torch, pytest.mark.process]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("run"))
    try:
        assert made.reason is None
        yield made
    finally:
        made.close()


# A text of C's own: Python's would be gone by then.
AT_EXIT = """
import ctypes
c = ctypes.CDLL(None)
c.strdup.restype = ctypes.c_void_p
c.__cxa_atexit(c.puts, ctypes.c_void_p(c.strdup(b"from C")), None)
"""
ENDINGS = {
    "at its end": "print('bye')",
    "sys.exit(42)": "import sys; sys.exit(42)",
    "sys.exit(-1)": "import sys; sys.exit(-1)",
    "sys.exit of a text": "import sys; sys.exit('no more')",
    "an exception": "def f():\n    raise ValueError('no luck')\nf()",
    "an exception without a text": "class A(Exception):\n    def __str__(self):\n        raise KeyError\nraise A",
    "a chain of exceptions": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e",
    "a syntax error": "print('never')\ndef f(:\n    pass\n",
    "another encoding": "# coding: latin-1\nprint('\xff')",
    "a KeyboardInterrupt": "raise KeyboardInterrupt",
    "SIGINT": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nimport time\ntime.sleep(9)",
    "os._exit(0)": "import os\nprint('bye')\nos._exit(0)",
    "os._exit(3)": "import os\nos._exit(3)",
    "SIGTERM": "import os\nos.kill(os.getpid(), 15)",
    "SIGSEGV": "import os, resource\nresource.setrlimit(resource.RLIMIT_CORE, (0, 0))\nos.kill(os.getpid(), 11)",
    "an excepthook of its own": "import sys\nsys.excepthook = lambda *a: print('mine', a[0], a[1])\n1 / 0",
    "an excepthook that reads the traceback": "import sys, traceback\n"
    "def hook(kind, value, trace):\n"
    "    print([(frame.filename, frame.name) for frame in traceback.extract_tb(trace)])\n"
    "sys.excepthook = hook\ndef fails():\n    raise SystemError('no luck')\nfails()",
    "a configuration of logging": "import logging, sys\n"
    "logging.basicConfig(stream=sys.stdout, level='INFO', format='%(name)s %(message)s')\n"
    "import torch\nlogging.getLogger('torch.mine').info('heard')",
    "modules that import each other": "import circle.a\nprint(circle.a.x, circle.b.again is circle.a)",
    "atexit": "import atexit\natexit.register(print, 'first')\natexit.register(print, 'second')\n1 / 0",
    "a thread that is waited for": "import threading\ndef work():\n    threading.main_thread().join()\n"
    "    print('worked')\nthreading.Thread(target=work).start()\nprint('main is done')",
    "a daemon thread": "import threading, time\n"
    "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    "a handler from before multiprocessing": "import atexit, time\natexit.register(print, 'last')\n"
    "import multiprocessing as mp\ndef work():\n    time.sleep(0.2)\n    print('child')\n"
    "mp.get_context('fork').Process(target=work).start()",
    "a destructor": "class A:\n    def __del__(self):\n        print('gone')\na = A()",
    "children of multiprocessing": "import multiprocessing as mp\nctx = mp.get_context('fork')\n"
    "p = ctx.Process(target=print, args=('child',))\np.start()",
    "text left in C's buffer": "import ctypes\nctypes.CDLL(None).printf(b'from C\\n')",
    "weakref.finalize": "import weakref\nclass A:\n    pass\na = A()\nweakref.finalize(a, print, 'finalised')",
    "an atexit that exits": "import atexit, sys\natexit.register(sys.exit, 3)",
    "C's atexit": AT_EXIT,
    "atexit after a KeyboardInterrupt": "import atexit\natexit.register(print, 'bye')\nraise KeyboardInterrupt",
    "a stdout that is gone": "import os\nf = open(1, 'w', closefd=False)\nf.write('x')\nos.close(1)",
}


CIRCLE = {
    "__init__": "from . import a\nfrom .a import b",
    "a": "from . import b\nfrom .b import x\nimport torch.nn as nn\nfrom torch.utils import data",
    "b": "import circle.a\nfrom circle import a as again\nx = 1",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_program_ends_alike(forks: Forks, tmp_path: Path, ending: str) -> None:
    for name, text in CIRCLE.items():
        path = tmp_path / "circle" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    script = tmp_path / "train.py"
    script.write_bytes(ENDINGS[ending].encode("latin-1" if "\xff" in ENDINGS[ending] else "utf-8"))
    forked, expected = forks.run(tmp_path, str(script)), fresh(tmp_path, tmp_path, str(script))
    assert (forked.code, forked.out, alike(forked.err)) == (expected.code, expected.out, alike(expected.err))


def alike(text: str) -> str:
    """Without addresses and thread numbers."""
    return re.sub(r"0x[0-9a-f]+", "0x", text)


def test_a_module_ends_alike(forks: Forks, tmp_path: Path) -> None:
    """tests.pytorch.failing is found by PYTHONPATH, in both."""
    forked = forks.run(tmp_path, "-m", "tests.pytorch.failing", "x")
    expected = fresh(tmp_path, tmp_path, "-m", "tests.pytorch.failing", "x")
    assert (forked.code, forked.out, forked.err) == (expected.code, expected.out, expected.err)
    assert "ValueError" in forked.err


@pytest.mark.parametrize("words", [("-m", "no.such.module"), ("gone.py",)])
def test_what_is_not_there_is_told_alike(forks: Forks, tmp_path: Path, words: tuple[str, ...]) -> None:
    forked, expected = forks.run(tmp_path, *words), fresh(tmp_path, tmp_path, *words)
    assert forked.code == expected.code
    assert forked.err.partition("file")[0] == expected.err.partition("file")[0]


def test_what_was_not_caught_is_in_torchs_error_file(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('no luck')")
    assert forks.run(tmp_path, str(script)).error == "ValueError: no luck"


def test_the_text_that_a_program_exits_with_is_in_torchs_error_file(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit('no data in /mnt')")
    assert forks.run(tmp_path, str(script)).error == "no data in /mnt"


def test_a_file_that_nobody_closed_is_written(forks: Forks, tmp_path: Path) -> None:
    script, text = tmp_path / "train.py", tmp_path / "text"
    script.write_text(f"f = open({str(text)!r}, 'w')\nf.write('one')\n")
    forks.run(tmp_path, str(script))
    assert text.read_text() == "one"
    script.write_text(f"import os\nos.kept = open({str(text)!r}, 'w')\nos.kept.write('two')\n1 / 0\n")
    forks.run(tmp_path, str(script))
    assert text.read_text() == "two"


LOADERS = """
import os, sys
import torch, torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor([index, int(os.environ["RANK"])])

def spawned(index, path):
    open(path, "w").write(__name__)

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader])
    torch.multiprocessing.spawn(spawned, (sys.argv[1],), nprocs=1)
    print(open(sys.argv[1]).read())
"""


def test_torchs_data_loaders_and_its_spawn_work(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADERS)
    ended = forks.run(tmp_path, str(script), str(tmp_path / "note"))
    assert ended.code == 0, ended.err
    batches = "[[[0, 0], [1, 0]], [[2, 0], [3, 0]]]"
    assert ended.out.splitlines() == [f"fork {batches}", f"spawn {batches}", "__mp_main__"]


COMPILED = """
import torch

@torch.compile
def curve(x):
    return torch.sin(x) * 2 + torch.cos(x)

x = torch.arange(8.0, requires_grad=True)
curve(x).sum().backward()
print(torch.allclose(x.grad, 2 * torch.cos(x) - torch.sin(x)))
"""


@pytest.mark.long("tests/pytorch/test_endings.py")
def test_torch_compile_works(forks: Forks, tmp_path: Path) -> None:
    require(shutil.which("g++"), "torch.compile makes C++ for a CPU, which needs g++")
    if " " in (importlib.util.find_spec("torch").origin or ""):  # type: ignore[union-attr]
        pytest.skip("torch.compile itself breaks where torch lies below a folder with a blank in its name")
    script, cache = tmp_path / "train.py", tmp_path / "cache"
    script.write_text(COMPILED)
    ended = forks.run(tmp_path, str(script), environment={"TORCHINDUCTOR_CACHE_DIR": str(cache)})
    assert ended.code == 0, ended.err
    assert ended.out == "True\n"
    assert list(cache.rglob("*.so")), "it was compiled"


def test_every_worker_has_randomness_of_its_own(forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())"
    )
    first, second = (forks.run(tmp_path, str(script)).out.split() for _ in range(2))
    assert len(first) == 3
    assert not set(first) & set(second)
