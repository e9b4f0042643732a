"""A forked worker sees the same of itself as one that the launcher has started with exec."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require
from tests.pytorch.forks import PYTHON, Forks

pytestmark = [pytest.mark.torch, pytest.mark.process]

PROBE = Path(__file__).with_name("probe.py")
# Where the two may differ, and why.
ALLOWED = {
    "first/stack": "the program's frames stand on those of the fork server, which tracebacks leave out",
    "interpreter/ours": "modules of the launcher's that the fork server has loaded",
    "first/descriptors": "one, out of the way, is where stacks are written when PID 1 asks for them",
    "process/signals/SigCgt": "the signal that asks for them",
    "torch/random": "drawn anew by each worker",
    "torch/seed": "the same",
}


def probed(forks: Forks, folder: Path, way: str, *words: str) -> dict[str, Any]:
    """What a worker says."""
    worker = {
        "environment": {"RANK": "1", "PROBE_TO": f"{folder}/{way}", "OTHER": "of one's own"},
        "out": f"{folder}/out",
        "err": f"{folder}/err",
    }
    if way == "fork":
        worker["stacks"] = f"{folder}/stacks"
        forks.ask("fork", argv=[*PYTHON, *words], workers=[worker], cwd=str(folder))
        codes = forks.hear()["codes"]
    else:
        codes = [forks.ask("execute", argv=[*PYTHON, *words], worker=worker, cwd=str(folder))["code"]]
    assert codes == [0], (folder / "err").read_text()
    told: dict[str, Any] = json.loads(re.sub(r"0x[0-9a-f]+", "…", (folder / f"{way}.1").read_text()))
    told["environment"].pop("PROBE_TO")
    told["process"]["environ"] = [text for text in told["process"]["environ"] if not text.startswith("PROBE_TO")]
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


def test_a_forked_worker_sees_what_a_fresh_one_sees(tmp_path: Path) -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")
    words = (str(PROBE), "a", "b c")
    forks = Forks(tmp_path, script=words[0])
    try:
        assert forks.reason is None
        forked, fresh = (flat(probed(forks, tmp_path, way, *words)) for way in ("fork", "execute"))
    finally:
        forks.close()
    differing = {name: (forked.get(name), fresh.get(name)) for name in forked.keys() | fresh.keys()}
    differing = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    assert {name: pair for name, pair in differing.items() if not name.startswith(tuple(ALLOWED))} == {}
