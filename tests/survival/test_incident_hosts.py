"""Incidents of a job on three hosts: every node tells of the same cause, and no innocent is named."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER
from tests.incidents.running import JOB
from tests.pods import Job, pods_of, wait_until
from tests.survival.jobs import DEADLINE_S, ELASTIC, FIXED, MARKS, Contract, pytorchjob_elastic
from trainer_launch.membership.timeouts import UNSEEN_S

pytestmark = [*MARKS, pytest.mark.usefixtures("names")]
REPORT = ("--hang-report-after", "2")
GATEWAY = "169.254.2.1"
DATA = "net1"  # the second network of some: the workers' collectives
LONG = pytest.mark.long("tests/survival/test_incident_hosts.py")
GROWING = Contract(ELASTIC.names, partial(pytorchjob_elastic, nodes="2:3"))
UNDELIVERED = (
    r"all known ranks entered all_reduce #\d+ of default_pg, \[\[1\]\] Float, and ranks? [-,\d]+ ha(?:s|ve) waited "
    r"in it for \d+ s: the network or a device does not deliver it"
)
HANG = re.compile(r"suspected hang: (.*?)(?:; collected in \S+)?$", re.MULTILINE)


class Gate:
    """What `incident_job` waits for."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        self._fd = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def open(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._fd)


@contextlib.contextmanager
def situation(
    act: str, folder: Path, *options: str, data: bool = False, at_first: int = 3, contract: Contract = FIXED
) -> Iterator[tuple[Job, Gate]]:
    """One worker on each of three hosts; what has ended stays so. With `data`, the ranks have their own network."""
    gate = Gate(folder)
    watched = ("--incident-dir", str(folder / "incidents"), "--log-level", "info", "--grace", "3", *options)
    argv = (*LAUNCHER, "run", "--prefix", *watched, "--", str(JOB), act)
    more = {"GATE": str(gate.path), "OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": DATA} if data else {})}
    env_of = lambda node: contract.env_of(node) | more  # noqa: E731
    with contextlib.closing(gate), pods_of(contract.names, argv, env_of, folder, at_first=0, restart_s=600) as job:
        for number in range(3 if data else 0):
            DataDevice(job, number).connect()
        for _ in range(at_first):
            job.start_next()
        yield job, gate


def said(job: Job, node: int) -> str:
    return "".join(job.pods[node].lines)


class DataDevice:
    """A second device of a pod, on a network of its own that the same router serves."""

    def __init__(self, job: Job, number: int) -> None:
        self._inside, self._address, self._port = (
            job.hosts[number].enter("net"),
            f"10.200.0.{number + 2}",
            f"data{number}",
        )
        network = job.hosts[number].network
        assert network is not None
        self._router, self._route = network.router, f"route replace {self._address}/32 dev {self._port}"

    def connect(self) -> None:
        namespace = next(word for word in self._inside if word.startswith("--net=")).removeprefix("--net=")
        cable = f"link add {self._port} type veth peer name {DATA} netns {namespace}"
        ip(self._router, cable, f"addr add {GATEWAY}/32 dev {self._port}", f"link set {self._port} up", self._route)
        way = f"route add 10.200.0.0/24 via {GATEWAY} src {self._address}"
        link = f"route add {GATEWAY} dev {DATA} scope link"
        ip(self._inside, f"addr add {self._address}/32 dev {DATA}", f"link set {DATA} up", link, way)

    def unplug(self) -> None:
        ip(self._router, f"rule add from {self._address} blackhole", f"route replace blackhole {self._address}/32")

    def plug(self) -> None:
        gone = f"route del blackhole {self._address}/32"
        ip(self._router, f"rule del from {self._address} blackhole", gone, self._route)


def ip(enter: tuple[str, ...], *commands: str) -> None:
    subprocess.run((*enter, "ip", "-batch", "-"), input="\n".join(commands), text=True, check=True)


def trained(job: Job) -> None:
    """Until all ranks are in the act."""
    is_there = lambda: all(" step 4\n" in said(job, node) for node in range(len(job.pods)))  # noqa: E731
    wait_until(is_there, "5 steps", job.pods, DEADLINE_S + UNSEEN_S)


def over(job: Job) -> list[str]:
    """The termination messages."""
    wait_until(lambda: all(pod.codes for pod in job.pods), "all pods to end", job.pods, DEADLINE_S)
    return [pod.last_words[0] for pod in job.pods]


def hang_of(job: Job) -> str:
    """What node 0, which serves the coordinator, says of it."""
    wait_until(lambda: HANG.search(said(job, 0)), "a suspected hang", job.pods, DEADLINE_S)
    (sentence,) = HANG.findall(said(job, 0))
    return str(sentence)


@LONG
def test_a_data_network_that_loses_all_packets_of_a_host_is_named_and_no_rank(tmp_path: Path) -> None:
    """The launchers still reach each other."""
    with situation("trains", tmp_path, *REPORT, data=True) as (job, gate):
        trained(job)
        DataDevice(job, 2).unplug()
        assert re.fullmatch(UNDELIVERED, hang_of(job))
        DataDevice(job, 2).plug()
        gate.open()
        words = over(job)
    assert all(one.startswith("reason=Succeeded exit=0 attempt=1 ") for one in words), words


@LONG
def test_a_data_network_that_loses_all_packets_ends_a_job_that_is_told_so(tmp_path: Path) -> None:
    with situation("trains", tmp_path, "--hang-timeout", "4", "--max-restarts", "0", data=True) as (job, _):
        trained(job)
        DataDevice(job, 2).unplug()
        words = over(job)
    assert [pod.codes for pod in job.pods] == [[138]] * 3
    assert all(re.search(UNDELIVERED, one) and " retryable=true " in one for one in words), words
    assert sum(one.startswith("reason=Hung ") for one in words) >= 1, words


@LONG
def test_a_host_without_network_is_lost_and_no_rank_is_named(tmp_path: Path) -> None:
    with situation("trains", tmp_path, *REPORT, "--wait-timeout", "6") as (job, _):
        trained(job)
        job.hosts[2].unplug()
        words = over(job)
    for node in (0, 1):
        assert words[node].startswith(f"reason=PeerLost node={node} ")
        assert f" | waited 6 s for node 2 ({FIXED.names[2]})\n" in words[node]
    assert re.match(r"reason=PeerLost node=2 .* \| the coordinator at \S+ did not answer for \d+ s: .*\n", words[2])
    assert all(" exit=138 " in one and " retryable=true " in one and "rank=" not in one for one in words), words
    found = [json.loads(path.read_text()) for path in (tmp_path / "incidents").glob("*/incident.json")]
    assert found
    assert [one["sentence"] for one in found if "never entered" in one["sentence"]] == []
    assert [one["sentence"] for one in found if "did not enter" in one["sentence"]] == []


@pytest.mark.parametrize(
    ("data", "pause_s"),
    [(True, 2.0), pytest.param(False, 1.0, marks=pytest.mark.long("tests/survival/test_incident_hosts.py"))],
    ids=["between ranks", "of all"],
)
def test_a_network_that_pauses_for_a_moment_accuses_and_ends_nobody(
    data: bool, pause_s: float, tmp_path: Path
) -> None:
    with situation("trains", tmp_path, "--hang-report-after", "10", "--hang-timeout", "15", data=data) as (
        job,
        gate,
    ):
        trained(job)
        device, heals_s = DataDevice(job, 2) if data else job.hosts[2], time.monotonic() + pause_s
        device.unplug()
        wait_until(lambda: time.monotonic() >= heals_s, "the pause to end", job.pods, DEADLINE_S)
        device.plug()
        gate.open()
        words = over(job)
    assert all(one.startswith("reason=Succeeded exit=0 attempt=1 ") for one in words), words
    assert not any(HANG.search(said(job, node)) or "no progress" in said(job, node) for node in range(3))


@LONG
def test_a_newcomer_that_joins_is_no_incident(tmp_path: Path) -> None:
    report = ("--hang-report-after", "5", "--hang-timeout", "10")
    with situation("trains", tmp_path, *report, at_first=2, contract=GROWING) as (job, gate):
        trained(job)
        job.start_next()
        trained(job)
        gate.open()
        words = over(job)
    assert all(one.startswith("reason=Succeeded exit=0 ") for one in words), words
    assert [found.group() for node in range(3) for found in HANG.finditer(said(job, node))] == []
