"""Which variables torch reads when it is loaded, and which programs set one too late for a forked worker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trainer_launch.pytorch import load_time_variables

READ_AT_LOAD = (
    *("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_AFFINITY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
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


def found(folder: Path, *words: str, **environment: str) -> str | None:
    return load_time_variables.set_by(words or ("train.py",), str(folder), environment)


@pytest.mark.parametrize("name", READ_AT_LOAD)
def test_a_variable_that_is_read_when_torch_is_loaded_is_known(name: str) -> None:
    assert load_time_variables.read_at_load(name)


@pytest.mark.parametrize("name", READ_LATER)
def test_a_variable_that_is_read_later_is_none_of_those(name: str) -> None:
    assert not load_time_variables.read_at_load(name)


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ['OMP_NUM_THREADS'] = '2'",
        "environ['OMP_NUM_THREADS'] = str(n)",
        "os.environ.setdefault('OMP_NUM_THREADS', '2')",
        "os.environ.update({'A': 'b', 'OMP_NUM_THREADS': '2'})",
        "os.environ.update(OMP_NUM_THREADS='2')",
        "os.environ.update(dict(OMP_NUM_THREADS='2'))",
        "os.environ |= {'OMP_NUM_THREADS': '2'}",
        "os.putenv('OMP_NUM_THREADS', '2')",
        "os.environb[b'OMP_NUM_THREADS'] = b'2'",
        "if x: os.environ['OMP_NUM_THREADS'] = '2'",
        "try:\n import y\nexcept ImportError: os.environ['OMP_NUM_THREADS'] = '2'",
        "a = b = os.environ['OMP_NUM_THREADS'] = '2'",
        "class A: os.environ['OMP_NUM_THREADS'] = '2'",
        "if __name__ == '__main__': os.environ['OMP_NUM_THREADS'] = '2'",
    ],
)
def test_each_way_to_set_a_variable_before_torch_is_imported_is_seen(tmp_path: Path, statement: str) -> None:
    (tmp_path / "train.py").write_text(f"{statement}\nimport torch\n")
    line = statement.count("\n") + 1
    assert found(tmp_path) == f"train.py:{line} sets OMP_NUM_THREADS before it imports torch"


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nos.environ['OMP_NUM_THREADS'] = '2'",
        "from torch import nn\nos.environ['OMP_NUM_THREADS'] = '2'",
        "import torch.nn as nn\nos.environ['OMP_NUM_THREADS'] = '2'",
        "if os.environ.get('OMP_NUM_THREADS') == '2': pass\nimport torch",
        "print(os.environ['OMP_NUM_THREADS'])\nimport torch",
        "options = {'OMP_NUM_THREADS': '2'}\nimport torch",
        "os.environ['NCCL_DEBUG'] = 'INFO'\nimport torch",
        "os.environ['TORCH_NCCL_BLOCKING_WAIT'] = '1'\nimport torch",
        "def never(): os.environ['OMP_NUM_THREADS'] = '2'\nimport torch",
        "os.environ.pop('OMP_NUM_THREADS', None)\nimport torch",
        "this is not Python",
    ],
)
def test_what_sets_none_in_time_is_left_alone(tmp_path: Path, source: str) -> None:
    (tmp_path / "train.py").write_text(source)
    assert found(tmp_path) is None


def test_a_variable_that_keeps_its_value_is_no_reason(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "os.environ['OMP_NUM_THREADS'] = '2'\nos.environ.setdefault('MKL_NUM_THREADS', '4')\nimport torch\n"
    )
    assert found(tmp_path, OMP_NUM_THREADS="2", MKL_NUM_THREADS="1") is None
    assert found(tmp_path, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1") is not None


def test_a_variable_that_is_taken_away_is_one(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("del os.environ['TORCH_LOGS']\nimport torch\n")
    assert found(tmp_path, TORCH_LOGS="all") == "train.py:1 sets TORCH_LOGS before it imports torch"


def test_modules_of_the_program_that_are_imported_first_count(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("from . import threads\n")
    (tmp_path / "pkg/threads.py").write_text("import pkg\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    (tmp_path / "train.py").write_text("from pkg.model import Model\nimport torch\n")
    assert found(tmp_path) == "pkg/threads.py:2 sets OMP_NUM_THREADS before it imports torch"
    assert found(tmp_path, "-m", "train") == "pkg/threads.py:2 sets OMP_NUM_THREADS before it imports torch"


def test_a_module_of_the_program_that_imports_torch_first_ends_the_search(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\n")
    (tmp_path / "train.py").write_text("import model\nimport os\nos.environ['OMP_NUM_THREADS'] = '2'\n")
    assert found(tmp_path) is None


def test_what_a_module_does_only_as_the_main_one_does_not_count_when_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("if __name__ == '__main__': os.environ['OMP_NUM_THREADS'] = '2'\n")
    (tmp_path / "train.py").write_text("import tool\nimport torch\n")
    assert found(tmp_path) is None
    assert found(tmp_path, "tool.py") is not None


def test_a_package_that_is_run_is_searched_like_a_script(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/__main__.py").write_text("from .threads import x\nimport torch\n")
    (tmp_path / "pkg/threads.py").write_text("os.environ['OMP_NUM_THREADS'] = '2'\n")
    assert found(tmp_path, "-m", "pkg") == "pkg/threads.py:1 sets OMP_NUM_THREADS before it imports torch"


def test_a_module_is_found_where_python_would_find_it_and_nothing_is_imported(tmp_path: Path) -> None:
    """Beside the working directory: by PYTHONPATH, with the modules beside it; among what is installed, alone."""
    for place in ("src", "installed"):
        package = tmp_path / place / f"of_{place}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('imported')\n")
        (package / "train.py").write_text("from . import threads\nimport beside, torch\n")
        (package / "threads.py").write_text("os.environ['OMP_NUM_THREADS'] = '2'\n")
        (tmp_path / place / "tool.py").write_text("import beside\nimport torch\n")
        (tmp_path / place / "beside.py").write_text("os.environ['TORCH_LOGS'] = 'all'\n")
    (tmp_path / "cwd").mkdir()
    path = (f"{tmp_path}/src", f"{tmp_path}/installed")

    def of_module(name: str) -> str | None:
        return load_time_variables.set_by(("-m", name), f"{tmp_path}/cwd", {"PYTHONPATH": path[0]}, path)

    sets = ":1 sets OMP_NUM_THREADS before it imports torch"
    assert of_module("of_src.train") == f"{tmp_path}/src/of_src/threads.py{sets}"
    assert of_module("of_installed.train") == f"{tmp_path}/installed/of_installed/threads.py{sets}"
    assert of_module("tool") == f"{tmp_path}/src/beside.py:1 sets TORCH_LOGS before it imports torch"
    assert of_module("nowhere") is None
    (tmp_path / "src/tool.py").unlink()
    (tmp_path / "src/beside.py").unlink()
    assert of_module("tool") is None


def test_variables_that_differ_are_told_by_when_they_are_read() -> None:
    loaded = {"OMP_NUM_THREADS": "1", "LD_PRELOAD": "a.so", "TORCH_LOGS": "all", "X": "1"}
    now = {"OMP_NUM_THREADS": "2", "LD_PRELOAD": "b.so", "X": "2", "TZ": "UTC"}
    assert load_time_variables.changed(loaded, now) == ("OMP_NUM_THREADS", "TORCH_LOGS")
    assert load_time_variables.changed_before_exec(loaded, now) == (
        *("LD_PRELOAD", "OMP_NUM_THREADS", "TORCH_LOGS", "TZ"),
    )


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
    assert [n for n in names if not load_time_variables.read_at_load(n) and not n.startswith(_OF_OTHERS)] == []
