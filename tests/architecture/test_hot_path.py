"""PID 1 stays small: what it never loads. Milliseconds are measured by benchmarks/startup.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "mpi4py", "yaml", "rich", "matplotlib", "pynvml", "asyncio.events", "ssl", "psutil"}


def python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], text=True, capture_output=True, timeout=30, check=True)


def test_importing_the_way_to_run_loads_nothing_heavy() -> None:
    code = "import sys, trainer_launch.cli, trainer_launch.commands.run; print(*sys.modules)"
    assert HEAVY.isdisjoint(python("-c", code).stdout.split())


@pytest.mark.process
@pytest.mark.parametrize("engine", ["auto", "plain"])
def test_a_whole_run_loads_nothing_heavy(engine: str) -> None:
    argv = ("-X", "importtime", "-m", "trainer_launch", "run", "--engine", engine, "--", "/bin/true")
    lines = [line for line in python(*argv).stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip() for line in lines}
    assert "trainer_launch.cli" in loaded
    assert HEAVY.isdisjoint(loaded)
    assert "trainer_launch.supervisor.hang_watch" not in loaded, (
        "who did not ask for a hang watch does not pay for it"
    )


def test_a_torch_job_loads_nothing_of_what_others_need() -> None:
    code = (
        "import sys, trainer_launch.cli, trainer_launch.commands.run, trainer_launch.commands.options\n"
        "import trainer_launch.pytorch.group_loop, trainer_launch.membership.server\n"
        "print(*sys.modules)"
    )
    loaded = set(python("-c", code).stdout.split())
    assert HEAVY.isdisjoint(loaded)
    others = ("preflight", "rehearsal", "supervisor.hang_watch", "mpi.agent")
    ours = tuple(f"trainer_launch.{name}" for name in others)
    assert sorted(name for name in loaded if name.startswith(ours)) == []


def test_a_module_that_is_loaded_later_is_the_module_itself() -> None:
    code = (
        "import sys\n"
        "from trainer_launch.model import lazy_module\n"
        "with lazy_module.loaded('json'):\n"
        "    import json as early\n"
        "assert 'json' not in sys.modules\n"
        "print(early.dumps([1]), early.dumps is sys.modules['json'].dumps)\n"
        "with lazy_module.loaded('csv'):\n"
        "    from csv import reader\n"
        "import csv\n"
        "print(csv.reader is reader)"
    )
    assert python("-c", code).stdout.split() == ["[1]", "True", "True"]


@pytest.mark.parametrize("agent", ["agent", "horovod_agent"])
def test_an_agent_loads_no_contract(agent: str) -> None:
    """PID 1 has read the pod already."""
    code = f"import sys, trainer_launch.mpi.{agent}; print(*sys.modules)"
    loaded = python("-c", code).stdout.split()
    assert not [name for name in loaded if name.startswith("trainer_launch.contracts")]
