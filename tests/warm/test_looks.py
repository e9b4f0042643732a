"""A forked worker sees the same of itself as one that `python -u` has started, through the real launcher."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launch
from tests.conftest import require

pytestmark = [pytest.mark.torch, pytest.mark.process]

PROBE = Path(__file__).with_name("probe.py")
# Where the two may differ, and why.
ALLOWED = {
    "first/stack": "the program's frames stand on one more, which looks like theirs",
    "first/descriptors": "one, out of the way, is where stacks are written when PID 1 asks for them",
    "process/signals/SigCgt": "the signal that asks for them",
    "torch/random": "drawn anew by each worker",
    "torch/seed": "the same",
}


def probed(folder: Path, method: str, *words: str) -> dict[str, Any]:
    """What the second of two workers says."""
    run = (*("run", "--nproc-per-node", "2", "--start-method", method), "--", *words)
    ended = launch(*run, env={"PROBE_TO": str(folder / method), "PYTHONPATH": str(PROBE.parents[2])}, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    assert "without the fork server" not in ended.stderr
    text = (folder / f"{method}.1").read_text()
    told: dict[str, Any] = json.loads(
        re.sub(r"0x[0-9a-f]+|trainer-launch-\w+|torch/[^/]+_\w{8}/|127.0.0.1[:-]\d+", "…", text)
    )
    told["environment"].update(PROBE_TO="…", MASTER_PORT="…")
    told["process"]["environ"] = sorted(
        re.sub(r"(PROBE_TO|MASTER_PORT)=.*", r"\1=…", variable) for variable in told["process"]["environ"]
    )
    return told


def flat(value: object, name: str = "") -> dict[str, object]:
    """The leaves, by path."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        path: leaf
        for key, below in value.items()
        for path, leaf in flat(below, f"{name}/{key}".lstrip("/")).items()
    }


@pytest.mark.parametrize(
    "words", [(str(PROBE), "a", "b c"), ("-m", "tests.warm.probe", "a")], ids=["script", "module"]
)
def test_a_forked_worker_sees_what_a_fresh_one_sees(tmp_path: Path, words: tuple[str, ...]) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    forked, fresh = (flat(probed(tmp_path, method, *words)) for method in ("forkserver", "exec"))
    differing = {name: (forked.get(name), fresh.get(name)) for name in forked.keys() | fresh.keys()}
    differing = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    assert {name: pair for name, pair in differing.items() if not name.startswith(tuple(ALLOWED))} == {}
