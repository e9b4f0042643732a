"""PID 1 stays small: the modules that it loads for `run` are a closed list, `pid1_modules.txt`.

Whoever reviews the launcher has to trust these. A module more is one line more there; contracts and engines are in
their registries, and are not listed again. Milliseconds are measured by benchmarks/startup.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.package import OURS, contract_files, module_of
from tests.conftest import require

LISTED = Path(__file__).with_name("pid1_modules.txt")
HEAVY = {"torch", "numpy", "mpi4py", "yaml", "matplotlib", "pynvml", "asyncio.events", "ssl", "psutil"}
OTHERS = {"_distutils_hack", "sitecustomize"}  # of the environment, not of ours
DEPENDENCIES = {"msgspec", "typing_extensions"}  # msgspec looks for the second, and needs it not
SECTIONS = ("any program", "torch workers", "mpirun")
UPDATE = "TESTS_UPDATE"  # set it to write the list anew


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], text=True, capture_output=True, timeout=30, check=True)


def loaded_by_run(*words: str) -> set[str]:
    """What PID 1 loads for `run` with these words, from its start to its end."""
    argv = ("-X", "importtime", "-m", "trainer_launch", "run", *words)
    lines = [line for line in python(*argv).stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines} - {"imported package"}


def listed(section: str) -> set[str]:
    """A section of the list."""
    text = LISTED.read_text(encoding="utf-8").partition(f"[{section}]\n")[2].partition("\n\n")[0]
    return set(text.split())


def ours(loaded: set[str]) -> set[str]:
    """The modules of the package in it, without contracts."""
    return {name for name in loaded if f"{name}.".startswith(f"{OURS}.")} - set(map(module_of, contract_files()))


def strangers(loaded: set[str]) -> set[str]:
    """What is neither of the package nor of Python."""
    tops = {name.partition(".")[0] for name in loaded if ".".join(name.split()) == name}
    known = {*sys.stdlib_module_names, *OTHERS, *DEPENDENCIES, OURS}
    return {name for name in tops if name not in known and not name.startswith(("_sysconfigdata", "org"))}


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("print('trained')\n")
    return str(path)


@pytest.mark.process
def test_a_run_of_any_program_loads_what_is_listed_and_nothing_else() -> None:
    loaded = loaded_by_run("--engine", "plain", "--grace", "30", "--", "/bin/true")
    assert HEAVY.isdisjoint(loaded)
    assert strangers(loaded) == set()
    write_if_asked("any program", ours(loaded))
    assert sorted(ours(loaded) ^ listed("any program")) == [], f"see {LISTED.name}; {UPDATE}=1 writes it anew"


@pytest.mark.torch
@pytest.mark.process
def test_a_run_of_torch_workers_loads_what_is_listed_besides_and_nothing_else(script: str) -> None:
    """Also with no torch: it is the fork server and the workers that import it."""
    loaded = loaded_by_run("--nproc-per-node", "1", "--", script)
    assert HEAVY.isdisjoint(loaded)
    assert strangers(loaded) == set()
    more = ours(loaded) - listed("any program")
    write_if_asked("torch workers", more)
    assert sorted(more ^ listed("torch workers")) == [], f"see {LISTED.name}; {UPDATE}=1 writes it anew"


@pytest.mark.process
def test_a_run_of_mpirun_loads_what_is_listed_besides_and_nothing_else() -> None:
    require(shutil.which("mpirun"), "mpirun is not installed")
    own = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    loaded = loaded_by_run("--", "mpirun", *own, "-np", "1", "true")
    assert HEAVY.isdisjoint(loaded)
    assert strangers(loaded) == set()
    more = ours(loaded) - listed("any program")
    write_if_asked("mpirun", more)
    assert sorted(more ^ listed("mpirun")) == [], f"see {LISTED.name}; {UPDATE}=1 writes it anew"


def write_if_asked(section: str, modules: set[str]) -> None:
    """Write one section of the list anew."""
    if os.environ.get(UPDATE):
        sections = {name: listed(name) for name in SECTIONS} | {section: modules}
        blocks = ["\n".join((f"[{name}]", *sorted(names))) + "\n" for name, names in sections.items()]
        LISTED.write_text("\n".join(blocks), encoding="utf-8")
