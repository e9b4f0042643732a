"""An elastic job that is at work without node 0, as a preflight sees it from a pod that is made again."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cli.launching import LAUNCHER
from tests.pods import hosts
from tests.preflight.cluster.job import PLACES
from tests.preflight.world import JOB as JOB_HERE
from tests.preflight.world import subject
from tests.survival.jobs import ELASTIC
from trainer_launch.membership.server import Coordinator as Coordinator
from trainer_launch.membership.state import CoordinatorSettings as Coordinating
from trainer_launch.model import Endpoint, NodeRange
from trainer_launch.model.findings import Status
from trainer_launch.model.settings import Settings
from trainer_launch.preflight.cluster import node_side
from trainer_launch.preflight.cluster.node_side import look_out
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings

JOB = "job"


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_side, "_SEAT_PAUSE_S", 0.05)


@pytest.fixture
def standby() -> Iterator[Endpoint]:
    settings = Coordinating(job=JOB, min_nodes=1, max_nodes=3, max_restarts=3, candidate=1)
    server = Coordinator(settings, Endpoint("127.0.0.1", 0), log=lambda text, level: None)
    port = server.start()
    try:
        yield Endpoint("127.0.0.1", port)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("nodes", "hosts_asked"),
    [((1, 4), ["job-node-0-1.job", "job-node-0-3.job"]), ((4, 4), [])],
)
def test_seats_are_asked_only_where_the_job_may_do_without_node_0(
    nodes: tuple[int, int], hosts_asked: list[str]
) -> None:
    settings = ClusterSettings(
        job=JOB, min_nodes=nodes[0], max_nodes=nodes[1], deadline_s=60.0, places=PLACES, salt="s"
    )
    assert [place.host for place in node_side.seats_of(settings, own_rank=2)] == hosts_asked


IN_POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
ONE_NODE = {"nodes": NodeRange(1, 1), "node_rank": 0}


@pytest.mark.parametrize(
    ("contract", "env", "topology", "flags", "status"),
    [
        pytest.param("unknown", IN_POD, ONE_NODE, {}, Status.WARN, id="an init container without envInjection"),
        pytest.param(
            "trainer-v2-plainml", IN_POD, {"nodes": None}, {}, Status.WARN, id="without a number of nodes"
        ),
        pytest.param("unknown", IN_POD, ONE_NODE, {"nodes": "1"}, None, id="one node, as the user says"),
        pytest.param("trainer-v2-torch", IN_POD, ONE_NODE, {}, None, id="one node, as the platform says"),
        pytest.param("unknown", {}, ONE_NODE, {}, None, id="no pod"),
        pytest.param("pytorchjob-v1", IN_POD, {}, {}, Status.UNKNOWN, id="where init containers have no names"),
        pytest.param("pytorchjob-v1-elastic", IN_POD, {"node_rank": None}, {}, Status.UNKNOWN, id="nor a rank"),
        pytest.param("trainer-v2-torch", IN_POD, {}, {"level": "container"}, Status.SKIPPED, id="as was asked for"),
    ],
)
def test_who_is_checked_alone_for_want_of_variables_is_warned(
    contract: str,
    env: Mapping[str, str],
    topology: Mapping[str, Any],
    flags: Mapping[str, Any],
    status: Status | None,
) -> None:
    made = subject(job=replace(JOB_HERE, contract=contract), env=env, topology=topology)
    settings = Settings(flags)
    obstacle = node_side.obstacle(made, settings, (), ())
    assert obstacle is not None
    findings = node_side.alone(made, settings, obstacle)
    assert [finding.status for finding in findings] == ([] if status is None else [status])
    assert all(("envInjection" in finding.action) is (contract == "unknown") for finding in findings)


def test_a_standby_of_a_job_that_has_not_begun_is_none_at_work(standby: Endpoint) -> None:
    found = threading.Event()
    looking = look_out([standby], JOB, None, lambda host: found.set())
    assert not found.wait(0.5)
    looking.set()


@pytest.mark.process
def test_pods_made_again_with_a_preflight_pass_soon_while_the_others_are_at_work_without_node_0(
    tmp_path: Path,
) -> None:
    """Node 2, for which node 0 has no name any more, and then node 0 itself."""
    deadline_s, report = 100, tmp_path / "report.json"
    words = (
        "preflight",
        "--level",
        "quick",
        "--policy",
        "cpu=off",
        "--wait-timeout",
        str(deadline_s),
        "--report",
        str(report),
    )
    with hosts(*ELASTIC.names) as pods:
        seat = (sys.executable, str(Path(__file__).with_name("running_node.py")), "job-worker-0-23456", "23456")
        at_work = pods[1].start(seat, {})
        assert at_work.stdout is not None
        assert at_work.stdout.readline() == "at work\n"
        pods[2].knows({pod.name: pod.address for pod in pods[1:]})
        began_s = time.monotonic()
        for node in (2, 0):
            started = pods[node].start((*LAUNCHER, *words), ELASTIC.env_of(node))
            said, _ = started.communicate(timeout=deadline_s)
            assert started.returncode == 0, said
            assert "the job is already running (job-worker-1 is at work)" in report.read_text()
        assert time.monotonic() - began_s < deadline_s / 2
