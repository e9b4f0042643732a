"""A node 0 whose device fails serves the coordinator on, so that the job goes on without its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.launching import script
from tests.pods import job, wait_until
from tests.survival.jobs import DEADLINE_S, ELASTIC, FIXED, LONG, MARKS, Contract, trainer_v2

pytestmark = [*MARKS, LONG, pytest.mark.usefixtures("names")]

# The worker of node 0 fails whenever the file `faulty` is there; all others wait for the file `enough`.
FAILS = """
import os, pathlib, time
folder = pathlib.Path(__file__).parent
if os.environ["POD_OF_TEST"] == "0" and (folder / "faulty").exists():
    (folder / "tries").open("a").write("x")
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
while not (folder / "enough").exists():
    time.sleep(0.1)
"""
SPARE = Contract(
    FIXED.names,
    lambda node: trainer_v2(node) | {"TRAINER_LAUNCH_SPARES": "1"},
)


@pytest.mark.parametrize("contract", [ELASTIC, SPARE], ids=["elastic", "spare"])
def test_the_others_go_on_without_a_node_0_whose_device_failed(tmp_path: Path, contract: Contract) -> None:
    (tmp_path / "faulty").touch()
    env_of = lambda node: contract.env_of(node) | {"POD_OF_TEST": str(node)}  # noqa: E731
    with job(contract.names, script(tmp_path, FAILS), env_of) as running:
        goes_on = "generation 2: 2 nodes, 1 restart so far"
        is_there = lambda: all(goes_on in "".join(pod.lines) for pod in running.pods[1:])  # noqa: E731
        wait_until(is_there, "the others to go on", running.pods, DEADLINE_S)
        (tmp_path / "enough").touch()
        wait_until(lambda: all(pod.succeeded for pod in running.pods), "the job's end", running.pods, DEADLINE_S)
        assert [pod.starts for pod in running.pods] == [1, 1, 1]
        assert "node 0" in "".join(running.pods[0].lines).partition("is quarantined")[0]


def test_a_job_that_needs_node_0_ends_when_its_budget_is_used_up(tmp_path: Path) -> None:
    (tmp_path / "faulty").touch()
    env_of = lambda node: FIXED.env_of(node) | {"POD_OF_TEST": str(node)}  # noqa: E731
    with job(FIXED.names, script(tmp_path, FAILS), env_of, "--max-restarts", "2") as running:
        wait_until(lambda: running.pods[0].codes, "the end of node 0", running.pods, DEADLINE_S)
        assert running.pods[0].codes[0] == 138
        assert "reason=DeviceError rank=0" in running.pods[0].last_words[0]
        assert len((tmp_path / "tries").read_text()) == 3
