"""Torch is imported once for agent and workers, unless the program's folder would have had a say in it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.cli.launching import launch, script
from tests.conftest import require
from tests.warm.forks import Forks

pytestmark = [pytest.mark.torch, pytest.mark.process]

FORKED = "import sys; print('__mark__' in sys.modules)"
WITNESS = """
import os, sys

class Witness:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch._C":
            with open(os.environ["IMPORTS"], "a") as file:
                file.write(f"{os.getpid()}\\n")

sys.meta_path.insert(0, Witness)
"""


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")


def test_a_pod_imports_torch_once_however_many_workers_it_has(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITNESS)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {"PYTHONPATH": path, "IMPORTS": str(tmp_path / "imports")}
    (tmp_path / "job").mkdir()
    train = script(tmp_path / "job", "import torch; torch.ones(1)")
    ended = launch("run", "--nproc-per-node", "3", "--", train, env=env)
    assert ended.returncode == 0, ended.stderr
    assert len((tmp_path / "imports").read_text().splitlines()) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path


def asked(folder: Path) -> tuple[str | None, str]:
    """Why the server has imported torch for itself; whether a worker is a fork of who started the server."""
    forks = Forks(folder)
    try:
        assert forks.reason is None
        return forks.apart, forks.run(folder / "run", script(folder, FORKED)).out.strip()
    finally:
        forks.close()


def test_the_server_is_a_fork_of_the_agent(folder: Path) -> None:
    (folder / "utils.py").write_text("a module that torch does not know")
    (folder / "torch").mkdir()  # without __init__.py the real one comes first
    assert asked(folder) == (None, "True")


@pytest.mark.parametrize("name", ["tqdm.py", "numpy/__init__.py"])
def test_a_module_of_the_programs_folder_that_torch_would_take_is_not_passed_over(folder: Path, name: str) -> None:
    """torch looks for tqdm and goes on without; a numpy of one's own has to be the one that workers see."""
    (folder / name).parent.mkdir(exist_ok=True)
    real = importlib.util.find_spec("numpy")
    assert real
    assert real.origin
    text = f"__path__ = [{os.path.dirname(real.origin)!r}]\nexec(open({real.origin!r}).read())\n"
    (folder / name).write_text(text if name.startswith("numpy") else "")
    module = name.partition(".")[0].partition("/")[0]
    assert asked(folder) == (f"torch imports {module}, and {folder / name} hides it", "False")


def test_a_plug_in_for_torch_in_the_programs_folder_is_not_passed_over(folder: Path) -> None:
    info = folder / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nplug = plug:load\n")
    (folder / "plug.py").write_text("def load():\n    pass\n")
    assert asked(folder) == (f"{folder} contains a plug-in for torch", "False")


def test_what_the_import_leaves_running_keeps_the_agent_from_being_forked(tmp_path: Path) -> None:
    """A plug-in may start a thread, in the agent as in everybody who imports torch; workers then start alone."""
    info = tmp_path / "plug-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nplug = plug:load\n")
    text = "import threading, time\ndef load():\n"
    text += "    threading.Thread(target=time.sleep, args=(99,), daemon=True, name='busy').start()\n"
    (tmp_path / "plug.py").write_text(text)
    (tmp_path / "job").mkdir()
    train = script(tmp_path / "job", "print('trained\\n', end='')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    ended = launch("run", "--nproc-per-node", "2", "--", train, env={"PYTHONPATH": path})
    assert (ended.returncode, ended.stdout) == (0, "trained\n" * 2), ended.stderr
    assert "an import started threads, which a fork does not copy (busy)" in ended.stderr
