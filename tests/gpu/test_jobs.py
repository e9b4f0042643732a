"""Jobs of two ranks on one card over NCCL: recovery, hangs, incidents, and memory that is given back."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cli.launching import launch, launched, start
from tests.gpu.conftest import IS_REHEARSED, Card, made_card, needs_card

pytestmark = [
    pytest.mark.usefixtures("what_the_tests_ran_on"),
    pytest.mark.gpu,
    pytest.mark.process,
    pytest.mark.torch,
]
Record = Callable[[str, object], None]
JOB = str(Path(__file__).with_name("job.py"))
TWO_NODES = ("local", "--nodes", "2", "--nproc-per-node", "1", "--log-level", "info")
ONE_NODE = ("run", "--nproc-per-node", "2")
FOR_EVER = "1000000000"


def finished(card: Card, *words: str) -> str:
    """The output of a job that has succeeded."""
    with card.watched():
        ended = launch(*words, env=card.env)
    output = ended.stdout + ended.stderr
    print(output)
    assert ended.returncode == 0, output
    assert output.count(" is done") == 2, output
    return output


def test_a_killed_worker_costs_seconds_and_its_memory_is_given_back(card: Card, record_property: Record) -> None:
    fault = ("--fault", "kill worker node=1 at=step:20")
    output = finished(card, *TWO_NODES, *fault, "--", JOB, "trains", "60")
    assert "rank 1 failed on node 1" in output
    assert "by signal 9" in output
    cost = re.search(r"cost ([\d.]+) s without a new step, (\d+) repeated", output)
    assert cost, output
    record_property("without a new step", f"{cost[1]} s")
    record_property("repeated steps", cost[2])
    record_property("memory", card.given_back())
    if not IS_REHEARSED:  # the dead worker's was free before its successor took its own
        assert card.most < card.before + 3 * int(card.env["TORCH_JOB_HELD_BYTES"])


class Hang(NamedTuple):
    """A job whose rank 1 hung once: what was collected before it was restarted."""

    incidents: list[dict[str, Any]]
    memory: str


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Hang:
    """NCCL spins in the collective, so neither rank 0 nor its node is idle."""
    folder = tmp_path_factory.mktemp("hang")
    card, place = made_card(folder), folder / "incidents"
    watched = ("--hang-timeout", "4", "--incident-dir", str(place))
    output = finished(card, *ONE_NODE, *watched, "--", JOB, "hangs_once", "70")
    found = [one for one in incidents(place) if one["kind"] == "hang"]
    assert found, output
    return Hang(found, card.given_back())


def incidents(place: Path) -> list[dict[str, Any]]:
    ended = launched("incidents", "list", "--json", "--incident-dir", str(place))
    found: list[dict[str, Any]] = json.loads(ended.stdout)
    return found


def test_a_rank_that_never_enters_a_collective_is_named_and_replaced(hang: Hang, record_property: Record) -> None:
    sentence = hang.incidents[0]["sentence"]
    record_property("sentence", sentence)
    record_property("memory", hang.memory)
    collective = r"all_reduce #\d+ of default_pg, .*"
    assert re.match(rf"rank 1 \(node 0\) never entered {collective}; rank 0 has waited in it", sentence)
    assert re.search(r"rank 1 is in .*job\.py:\d+ \(read_batch\)$", sentence)
    assert {tuple(one["ranks"]) for one in hang.incidents} == {(1,)}
    files = {name for one in hang.incidents for name in one["files"]}
    assert {f"flight_recorder/nccl_trace_rank_{rank}" for rank in range(2)} <= files


def test_the_incident_of_a_hang_has_the_state_of_the_cards(hang: Hang) -> None:
    needs_card("needs NVIDIA's library and a card")
    texts = [path.read_text() for one in hang.incidents for path in Path(one["folder"]).glob("host/gpus.txt")]
    assert any("== GPU 0" in text for text in texts), hang.incidents


def test_a_rank_that_evaluates_before_the_collective_is_not_accused(
    card: Card, tmp_path: Path, record_property: Record
) -> None:
    """For four times the timeout; who waits for it would otherwise be ended after three."""
    place = tmp_path / "incidents"
    watched = ("--hang-timeout", "4", "--hang-report-after", "4", "--incident-dir", str(place))
    output = finished(card, *TWO_NODES, *watched, "--", JOB, "computes", "70")
    assert "attempt=2" not in output
    assert "suspected hang" not in output
    assert incidents(place) == []
    quiet = re.search(r"no progress: (rank 1 \(node 1\) never entered all_reduce .*still making progress)", output)
    assert quiet, output
    record_property("logged", quiet[1])


def test_memory_is_given_back_after_the_end(card: Card, record_property: Record) -> None:
    finished(card, *ONE_NODE, "--", JOB, "trains", "10")
    record_property("memory", card.given_back())


def test_memory_is_given_back_after_a_stop(card: Card, record_property: Record) -> None:
    with card.watched(), start(*ONE_NODE, "--", JOB, "trains", FOR_EVER, env=card.env) as run:
        run.read_until(r"step \d+", 10)
        run.signal(signal.SIGTERM)
        run.ends_with(143)
    record_property("memory", card.given_back())
