"""What a restart logs on each node: three lines, with the exception of the rank that failed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.launching import Started, ends_of, script
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process]

# The last rank fails once; the others wait for it, and end slowly when they are stopped.
TRAIN = """
import os, pathlib, signal, sys, time

def leave(*_):
    time.sleep(0.7)
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
failed, is_last = pathlib.Path(__file__).with_name("failed"), os.environ["RANK"] == "{last}"
if not failed.exists():
    failed.with_name("began-" + os.environ["RANK"]).touch()
    if is_last:
        while len(list(failed.parent.glob("began-*"))) <= {last}:  # all have begun
            time.sleep(0.01)
        failed.touch()
        raise ValueError("torn batch in shard 7")
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_restart_logs_three_lines_on_each_node_and_names_the_exception(tmp_path: Path, nodes: int) -> None:
    train, port = script(tmp_path, TRAIN.replace("{last}", str(2 * nodes - 1))), free_port()
    launchers = []
    for node in range(nodes):
        env = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "2", "PET_MASTER_PORT": str(port)}
        env |= {"PET_NODE_RANK": str(node), "PET_MASTER_ADDR": "127.0.0.2", "TMPDIR": str(tmp_path)}
        launchers.append(Started(("run", "--", train), env, tmp_path))
    outputs = ends_of(launchers)
    failing = "rank 1" if nodes == 1 else "rank 3"
    for node, (code, output) in enumerate(outputs):
        assert code == 0, output
        first, incident, again = restart_lines(output)
        if node == nodes - 1:
            assert first == f"{failing} ended with exit code 1: ValueError: torn batch in shard 7"
        else:
            failure = (
                rf"generation 1 is over: {failing} failed on node 1 \(.*\) with exit code 1: ValueError: torn batch"
            )
            assert re.match(failure, first), first
        assert incident.startswith("collected in ")
        formed = (
            rf"generation 2: {nodes} nodes?, 1 restart so far; this is node {node}, store at \S+:\d+; started 2"
        )
        assert re.match(formed, again), again


def restart_lines(output: str) -> list[str]:
    """The launcher's own, from the start of the first workers to that of the second."""
    said = [line for line in output.splitlines() if line.startswith("[trainer-launch] ")]
    starts = [number for number, line in enumerate(said) if "; started 2 workers" in line]
    first, second = starts
    return [line.removeprefix("[trainer-launch] ") for line in said[first + 1 : second + 1]]
