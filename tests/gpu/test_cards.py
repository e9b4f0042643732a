"""Preflight on real cards: checks of GPUs, what NVIDIA's library says, and a pair of nodes over NCCL."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.conftest import require
from tests.gpu.conftest import IS_REHEARSED, Card, needs_card
from tests.ports import free_port
from tests.preflight.gpu import machine, node
from trainer_launch.host import incident_facts
from trainer_launch.host.machine import count
from trainer_launch.preflight import gpu_collect as collect
from trainer_launch.preflight import registry, thresholds
from trainer_launch.preflight.check import Where
from trainer_launch.preflight.gpu_collect import Gpu, GpuFacts, GpuTest, LoadEnding

pytestmark = [
    pytest.mark.usefixtures("what_the_tests_ran_on"),
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.torch,
]
Record = Callable[[str, object], None]
DEADLINE_S = 200.0
RUNS = 5
OF_GPUS = [one.id for one in registry.at(Where.GPU)]
JUDGED = ("gemm", "hbm", "pcie", "allreduce")


def findings(report: Path) -> dict[str, dict[str, Any]]:
    found = json.loads(report.read_text())["findings"]
    return {f"{one['check']} {one['subject']}".strip(): one for one in found}


def job_env(rank: int, nodes: int, workers: int, port: int) -> dict[str, str]:
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": str(workers),
        "PET_NODE_RANK": str(rank),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "JOB_COMPLETION_INDEX": str(rank),
    }


def test_checks_of_gpus_pass_and_tell_their_figures(tmp_path: Path, record_property: Record) -> None:
    """In a rehearsal the cards and their load are simulated."""
    report = tmp_path / "report.json"
    launcher: tuple[str, ...] = LAUNCHER
    env: dict[str, str] = {}
    n_gpus = count(os.environ).count
    if IS_REHEARSED:
        launcher, n_gpus = (sys.executable, str(node.__file__)), 1
        told = machine.environment(tmp_path, gpus=n_gpus)
        env = {name: told[name] for name in ("FAKE_NVML", "PYTHONPATH")} | {"FAKE_GPUS": str(n_gpus)}
    require(n_gpus, "needs an NVIDIA GPU")
    words = ("--gpu-burn", "10s", "--only", ",".join((*OF_GPUS, *JUDGED)))
    done = subprocess.run(
        (*launcher, "preflight", *words, "--report", str(report)),
        env=clean_env({**env, **job_env(0, 1, n_gpus, free_port())}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    found = findings(report)
    for name, one in found.items():
        record_property(f"{name}: {one['status']}", one["text"])
    for row in thresholds.load_table(str(report)).rows.values():
        record_property(f"{row.measure}, {row.model}", compared(row))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = {one["check"] for one in found.values() if one["status"] == "pass"}
    assert {"gpu-count", "gpu-load", "gpu-memory"} <= passed, done.stdout


def compared(measured: thresholds.Reference) -> str:
    """A figure beside its reference."""
    known = thresholds.load_table(None).rows.get((measured.model.lower(), measured.measure))
    if known is None:
        return f"{measured.value:.4g} {measured.unit}; no reference"
    share, kind = measured.value / known.value, thresholds.kind_of(measured.measure)
    least = kind.share if kind is not None else 0.0
    return (
        f"{measured.value:.4g} {measured.unit}, {share:.0%} of the reference {known.value:g} (least: {least:.0%})"
    )


# What nvidia-smi -q -x prints below <gpu>, and what our fact should print as there; "" where it cannot be said.
FACTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "name": ("product_name", str),
    "uuid": ("uuid", str),
    "mig": ("mig_mode/current_mig", lambda value: "Enabled" if value else "Disabled"),
    "recovery": ("gpu_recovery_action", lambda value: "" if value else "None"),
    "memory_total": ("fb_memory_usage/total", lambda value: f"{value >> 20} MiB"),
    "remapped": ("remapped_rows/remapped_row_unc", lambda value: str(value[1])),
}


def test_what_is_read_of_gpus_equals_what_nvidia_smi_prints(record_property: Record) -> None:
    needs_card("needs NVIDIA's library and a card")
    require(shutil.which("nvidia-smi"), "needs nvidia-smi")
    printed = subprocess.run(("nvidia-smi", "-q", "-x"), capture_output=True, text=True, timeout=60, check=True)
    smi = ElementTree.fromstring(printed.stdout)
    facts = collect.asked(os.environ, collect.FACTS_S, None)
    assert facts.trouble == ""
    assert len(facts.gpus) == int(smi.findtext("attached_gpus") or 0)
    assert facts.driver == smi.findtext("driver_version")
    everything = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    assert count(everything).count == len(facts.gpus)
    for gpu, said in zip(facts.gpus, smi.findall("gpu"), strict=True):
        compared_facts = compare(gpu, said)
        for kind, names in compared_facts.items():
            record_property(f"GPU {gpu.index}, {kind}", ", ".join(names) or "nothing")
        assert {"name", "uuid", "memory_total"} <= set(compared_facts["equal"])
        assert not compared_facts["different"]
    assert incident_facts.gpus().count("== GPU ") == len(facts.gpus)


def compare(gpu: Gpu, said: ElementTree.Element) -> dict[str, list[str]]:
    """Facts that both tell alike, tell differently, and that one of them does not tell."""
    found: dict[str, list[str]] = {"equal": [], "different": [], "not told": []}
    for name, (path, printed) in FACTS.items():
        theirs = (said.findtext(path) or "N/A").strip()
        ours = printed(gpu.facts[name]) if name in gpu.facts else ""
        if not ours or theirs in ("N/A", "[N/A]", "Unknown Error"):
            found["not told"].append(name)
        elif ours == theirs:
            found["equal"].append(name)
        else:
            found["different"].append(f"{name} ({ours}, nvidia-smi: {theirs})")
    errors = [one for one in said.findall("ecc_errors/volatile/*") if "_uncorrectable" in one.tag]
    counts = [int(text) for one in errors if (text := one.text or "").isdigit()]
    if "ecc_uncorrected" in gpu.facts and counts:
        is_equal = gpu.facts["ecc_uncorrected"] == sum(counts)
        found["equal" if is_equal else "different"].append("ecc_uncorrected")
    return found


def test_two_nodes_test_their_pair_over_nccl(card: Card, tmp_path: Path, record_property: Record) -> None:
    """Both on one card and over sockets: a figure of no network."""
    port, words = free_port(), ("--policy", "gpu-load=off", "--only", "pairs")
    started = [
        subprocess.Popen(
            (*LAUNCHER, "preflight", *words, "--report", str(tmp_path / f"{rank}.json")),
            env=clean_env({**card.env, **job_env(rank, 2, 1, port), "NCCL_HOSTID": f"node-{rank}"}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [one.communicate(timeout=DEADLINE_S)[0] for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    assert [one.returncode for one in started] == [0, 0], said
    found = findings(tmp_path / "0.json")
    assert found["pairs"]["status"] == "pass", found
    record_property("pairs", found["pairs"]["text"])


def test_figures_scatter_by_less_than_their_thresholds_allow(record_property: Record) -> None:
    """Each run is a new process, as in a preflight."""
    figures: dict[tuple[int, str, str], list[float]] = {}
    for one in [test for _ in range(RUNS) for test in loaded()]:
        assert one.ending is LoadEnding.DONE, one.why
        for name, value, unit in one.figures:
            figures.setdefault((one.gpu, name, unit), []).append(value)
    assert figures
    for (gpu, name, unit), values in figures.items():
        spread = (max(values) - min(values)) / statistics.median(values)
        record_property(f"{name} on GPU {gpu}", f"{statistics.median(values):.4g} {unit}, spread {spread:.1%}")
        kind = thresholds.kind_of(name)
        assert kind is not None
        if not IS_REHEARSED:
            assert spread < 1 - kind.share, f"{name}: {values}"


def loaded() -> tuple[GpuTest, ...]:
    """All cards, or this machine's CPU, under the load of a preflight."""
    if IS_REHEARSED:
        argv, env = (sys.executable, collect.BENCH, "--device", "cpu"), {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        return collect.loaded(GpuFacts(trouble="no GPU"), ((0, ""),), env, argv, 60.0).tests
    n_gpus = count(os.environ).count
    require(n_gpus, "needs an NVIDIA GPU")
    return collect.collect(os.environ, sys.executable, "standard", n_gpus).tests
