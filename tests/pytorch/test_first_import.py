"""Which variables the guard of forked workers looks at, and what it does where a program has changed one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import quick_first
from tests.pytorch.forks import Forks, fresh
from trainer_launch.pytorch import first_import

LONG = pytest.mark.long("tests/pytorch/test_first_import.py")
READ_AT_IMPORT = (
    *(
        "OMP_NUM_THREADS",
        "GOMP_SPINCOUNT",
        "KMP_AFFINITY",
        "MKL_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "GOTOBLAS_MAIN_FREE",
    ),
    *("TORCH_DISTRIBUTED_DEBUG", "PYTORCH_JIT", "TORCH_LOGS", "TORCH_TRACE", "TORCH_CPP_LOG_LEVEL"),
    *("TORCH_SHOW_CPP_STACKTRACES", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_CUDA_ALLOC_CONF"),
    *("PYTORCH_ALLOC_CONF", "TORCHDYNAMO_DISABLE", "NPY_DISABLE_CPU_FEATURES"),
)
READ_LATER = (
    *(
        "CUDA_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
        "NCCL_DEBUG",
        "GLOO_SOCKET_IFNAME",
    ),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE", "TORCH_HOME", "MASTER_ADDR", "WANDB_MODE"),
    *("TORCHELASTIC_ERROR_FILE", "TOKENIZERS_PARALLELISM", "HF_HOME"),
)


@pytest.mark.parametrize("name", READ_AT_IMPORT)
def test_a_variable_that_is_read_when_torch_is_imported_is_known(name: str) -> None:
    assert first_import.read_at_import(name)


@pytest.mark.parametrize("name", READ_LATER)
def test_a_variable_that_is_read_later_is_none_of_those(name: str) -> None:
    assert not first_import.read_at_import(name)


def test_variables_that_differ_are_named() -> None:
    loaded = {"OMP_NUM_THREADS": "1", "TORCH_LOGS": "all", "LD_PRELOAD": "a.so", "X": "1"}
    assert first_import.changed(loaded, {"OMP_NUM_THREADS": "2", "X": "2"}) == ("OMP_NUM_THREADS", "TORCH_LOGS")


_RECORD = """
import os
kind, names = type(os.environ), set()
genuine = kind.__getitem__
def get(self, name):
    names.add(name)
    return genuine(self, name)
kind.__getitem__ = get
import collections.abc
kind.__contains__ = collections.abc.Mapping.__contains__
import torch
print(*sorted(names))
"""
_OF_OTHERS = ("HOME", "PATH", "PYTHON", "_PYTHON", "USER", "TMPDIR", "NO_COLOR", "FORCE_COLOR", "TERM")


@pytest.mark.torch
def test_every_variable_that_importing_torch_reads_is_known() -> None:
    """What its libraries read at that moment was found once, by hand, with a getenv() that logs."""
    ended = subprocess.run([sys.executable, "-c", _RECORD], capture_output=True, text=True, check=True, timeout=120)
    names = ended.stdout.split()
    assert "TORCH_LOGS" in names
    assert [n for n in names if not first_import.read_at_import(n) and not n.startswith(_OF_OTHERS)] == []


# -- in workers -----------------------------------------------------------------------------------


CHANGES = {
    "a variable whose name is computed": """
import os
os.environ['OMP_NUM_' + 'THREADS'] = '3'
import torch
print(torch.get_num_threads())
""",
    "a variable between numpy and torch": """
import os, numpy
os.environ.update(line.split('=') for line in ['TORCH_SHOW_CPP_STACKTRACES=1', 'TORCH_DISTRIBUTED_DEBUG=DETAIL'])
import torch.distributed
print(torch.distributed.get_debug_level())
""",
    "a variable that is removed": """
import os
print(os.environ.pop('OMP_NUM_THREADS'))
from torch import nn
print('OMP_NUM_THREADS' in os.environ, nn.Linear)
""",
}


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("name", quick_first(CHANGES, 1, LONG))
def test_a_worker_that_changes_a_variable_before_it_imports_torch_becomes_a_new_interpreter(
    tmp_path: Path, name: str
) -> None:
    script, env = tmp_path / "train.py", {"OMP_NUM_THREADS": "1"}
    script.write_text(f"import os, sys\nprint(sorted(os.environ), os.getcwd(), os.umask(0o22)){CHANGES[name]}")
    forks = Forks(tmp_path, env=env)
    try:
        forked, other = forks.run(tmp_path, str(script)), fresh(tmp_path, tmp_path, str(script), environment=env)
        assert forked.code == 0, forked.err
        assert forked.out.endswith(other.out)
        said = [line for line in forked.err.splitlines() if line.startswith("[trainer-launch]")]
        assert len(said) == 1
        assert said[0].endswith("; what the program did before that runs again")
        assert forks.run(tmp_path, str(script)).code == 0, "so does the next generation"
    finally:
        forks.close()


UNCHANGED = {
    "a variable that is set to the value that it has": "os.environ['OMP_NUM_THREADS'] = '1'\nimport torch",
    "a variable that is read later": "os.environ['NCCL_DEBUG'] = os.environ['TORCH_NCCL_X'] = '1'\nimport torch",
    "a variable that is set after the import": "import torch\nos.environ['OMP_NUM_THREADS'] = '2'\nimport numpy",
    "a child that changes its own": """
import multiprocessing
def work():
    os.environ['OMP_NUM_THREADS'] = '4'
    import torch
    print('child', torch.ones(1))
if __name__ == '__main__':
    child = multiprocessing.get_context('fork').Process(target=work)
    child.start()
    child.join()
    import torch
""",
    "torch that is looked for and loaded again": """
import importlib, importlib.util
spec = importlib.util.find_spec('torch')
assert 'torch' not in sys.modules and spec.origin.endswith('/torch/__init__.py'), spec
assert importlib.util.find_spec('torch.nn').name == 'torch.nn'
import numpy, torch, torch.nn.functional as F
assert type(torch.__spec__.loader) is type(torch.__loader__) is importlib.machinery.SourceFileLoader
assert importlib.reload(torch.version) is torch.version
assert F is torch.nn.functional is sys.modules['torch.nn.functional'], torch.nn
""",
}


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("server"), env={"OMP_NUM_THREADS": "1"})
    assert made.reason is None
    yield made
    made.close()


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("name", quick_first(UNCHANGED, 4, LONG))
def test_a_worker_that_changes_nothing_in_time_gets_torch_from_the_fork_server(
    forks: Forks, tmp_path: Path, name: str
) -> None:
    script = tmp_path / "train.py"
    text = f"import os, sys\nassert not {{'torch', 'numpy'}} & sys.modules.keys()\n{UNCHANGED[name]}"
    script.write_text(f"{text}\nif __name__ == '__main__': print(torch.ones(2).numpy(), torch.nn.Linear(2, 2))\n")
    ended = forks.run(tmp_path, str(script))
    assert (ended.code, ended.err) == (0, ""), ended.err
    assert ended.out.count("[1. 1.]") == 1, ended.out
    assert "Linear" in ended.out
