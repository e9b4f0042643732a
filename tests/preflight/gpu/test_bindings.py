"""The children that ask, with NVIDIA's own bindings, which call a library that is played in C."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import require
from tests.preflight.gpu.machine import FAKES
from trainer_launch.preflight import gpu_collect as collect
from trainer_launch.preflight.gpu_collect import parse_facts

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has libnvidia-ml.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    require(compiler and importlib.util.find_spec("pynvml"), "needs a C compiler and nvidia-ml-py")
    folder = tmp_path_factory.mktemp("library of nvidia")
    made = folder / "libnvidia-ml.so.1"
    subprocess.run((str(compiler), "-shared", "-fPIC", "-w", "-o", str(made), str(FAKES / "nvml.c")), check=True)
    return folder


def asked(argv: Sequence[str], library: Path) -> bytes:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=True)
    return ended.stdout


def test_facts_come_through_nvidias_own_bindings(library: Path) -> None:
    facts = parse_facts(asked(collect.FACTS, library))
    assert (facts.trouble, facts.driver) == ("", "550.54.15")
    (gpu,) = facts.gpus
    assert gpu.facts == {
        "name": "NVIDIA H200", "uuid": "GPU-11aa",
        "ecc_uncorrected": 110, "remapped": [1, 2, 1, 0],
        "power_limit": [500_000, 700_000], "memory_total": 150_754_820_096, "memory_used": 4_194_304,
        "nvlinks": [1] * 17 + [0], "mig_parts": 1, "sram_threshold": True, "spent_banks": 2,
        "fabric": {"state": 3, "status": 0, "health": 0xAA, "cluster": "ab" + 30 * "0", "clique": 7},
    }  # fmt: skip


def test_what_the_driver_lacks_and_what_the_card_lacks_are_told_apart(library: Path) -> None:
    (gpu,) = parse_facts(asked(collect.FACTS, library)).gpus
    assert gpu.unknown == {"mig": "the driver is too old for it"}
    assert not {"recovery", "retired_pending"} & set(gpu.facts)
    assert not gpu.lost


def test_what_happens_under_load_comes_through_nvidias_own_bindings(library: Path) -> None:
    seen = parse_facts(asked(collect.WATCH, library))
    assert seen.trouble == ""
    (gpu,) = seen.gpus
    assert {name: value for name, value in gpu.facts.items() if name != "load clock_reasons"} == {
        "load xids": [79], "load pcie_lanes": [8, 16], "load pcie_generation": [5, 5], "load nvlink_errors": 0,
    }  # fmt: skip
    assert gpu.facts["load clock_reasons"]["times"]["4"] >= 1
