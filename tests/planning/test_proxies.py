"""A proxy for HTTP is not for the job's own hosts: gRPC of TensorFlow and JAX would go through it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.planning.requests import MACHINE, request
from trainer_launch.model import Endpoint, Job, Member, NodeRange
from trainer_launch.planning import engines

PROXY = {"http_proxy": "http://proxy.corp:3128"}
HOSTS = tuple(f"job-worker-{index}.ns.svc" for index in range(2))


def job(hosts: tuple[str, ...] = HOSTS, **changes: Any) -> Job:
    size = len(hosts)
    given: dict[str, Any] = {"nodes": NodeRange(size, size), "node_rank": 0, "engine": "plain", **changes}
    return Job(contract="x", members=tuple(map(Member, hosts)), coordinator=Endpoint(hosts[0], 2222), **given)


def started(env: Mapping[str, str], job: Job, line: str = "/bin/train") -> Mapping[str, str]:
    plan = engines.plan(request(line, job, env))
    return plan.processes[0].env if plan.workers is None else plan.workers.env


@pytest.mark.parametrize("engine", ["plain", "torchrun"])
def test_workers_reach_the_jobs_hosts_past_a_proxy(engine: str) -> None:
    env = started(PROXY, job(engine=engine), "train.py")
    for name in ("no_proxy", "NO_PROXY"):
        assert set(env[name].split(",")) == {"localhost", "127.0.0.1", MACHINE.hostname, *HOSTS}
    assert "no_grpc_proxy" not in env


def test_what_the_user_excludes_stays_and_comes_first() -> None:
    env = started({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "minio, 10.0.0.0/8", "no_grpc_proxy": "db"}, job())
    assert env["no_proxy"] == env["NO_PROXY"] == env["no_grpc_proxy"]
    assert env["no_proxy"].startswith("minio,10.0.0.0/8,db,localhost,")


@pytest.mark.parametrize(
    "env", [{}, {"http_proxy": ""}, {"no_proxy": "minio"}, {**PROXY, "no_proxy": "*"}], ids=str
)
def test_without_a_proxy_or_where_none_is_used_nothing_changes(env: dict[str, str]) -> None:
    made = started(env, job())
    assert {name: made.get(name) for name in ("no_proxy", "NO_PROXY")} == {
        "no_proxy": env.get("no_proxy"),
        "NO_PROXY": None,
    }


def test_a_job_of_one_node_has_no_hosts_to_exclude() -> None:
    assert "no_proxy" not in started(PROXY, job(HOSTS[:1]))


def test_the_names_of_a_very_large_job_are_its_domain() -> None:
    env = started(PROXY, job(tuple(f"job-worker-{index}.ns.svc" for index in range(4096))))
    assert env["no_proxy"].endswith("job-worker-0.ns.svc,.ns.svc")
