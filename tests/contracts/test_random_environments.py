"""Whatever a pod's variables and files hold: a job, or one short line that says what is wrong."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.nasty import COMMANDS, CONTENTS, HOSTNAMES, NAMES, PATHS, VALUES
from tests.contracts.pods import CASES, pod_of
from trainer_launch.contracts import read_job
from trainer_launch.contracts.source import PodInput
from trainer_launch.model import Cpus, Gpus, Host
from trainer_launch.model.errors import LaunchError
from trainer_launch.model.settings import load
from trainer_launch.planning import engines
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.reading import Reading
from trainer_launch.planning.task import MachineTrial

random_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(VALUES[:60]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["cluster", "task", "type", "index", "worker", "ps", "url", "0"]), inner)
    ),
    max_leaves=8,
).map(json.dumps)
values = st.sampled_from(VALUES) | st.text(max_size=12) | random_json
contents = st.sampled_from(CONTENTS) | st.text("ab-[],:=# \n0123", max_size=30)
some_env = st.dictionaries(st.sampled_from(NAMES), values, max_size=10)
some_files = st.dictionaries(st.sampled_from(PATHS), contents, max_size=3)
invented = st.builds(pod_of, some_env, some_files, st.sampled_from(HOSTNAMES), st.sampled_from(COMMANDS))


def spoilt(good: dict[str, Any], data: tuple[Any, ...]) -> PodInput:
    """A pod that a controller made, with some variables and files lost, changed or added."""
    lost, env, files, hostname = data
    kept = {name: value for at, (name, value) in enumerate(good["env"].items()) if at not in lost}
    changed = {list(good["env"])[at % len(good["env"])]: value for at, value in env.items() if good["env"]}
    command = (*good.get("command", ()), *good.get("args", ()))
    return pod_of({**kept, **changed}, {**good["files"], **files}, hostname or good["hostname"], command)


GOOD = [case["pod"] for case in CASES.values()]
few = st.integers(0, 11)
damage = st.tuples(
    st.sets(few, max_size=1),
    st.dictionaries(few, values, max_size=2),
    st.dictionaries(st.sampled_from(PATHS), contents, max_size=1),
    st.none() | st.sampled_from(HOSTNAMES),
)
pods = st.builds(spoilt, st.sampled_from(GOOD), damage) | invented
HOST = Host(
    hostname="pod",
    cpus=Cpus(affinity=8, quota=None),
    gpus=Gpus(count=2, reason="two"),
    memory_limit_bytes=None,
    shm_bytes=None,
)
many = settings(
    deadline=None,
    database=None,
    derandomize="CI" in os.environ,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.timeout(400)
@settings(many, max_examples=1_000)
@given(pods)
def test_an_environment_is_planned_or_refused_in_one_line(pod: PodInput) -> None:
    check(pod)


def check(pod: PodInput) -> None:
    typed = pod.command or ("torchrun", "train.py")
    try:
        job, command = read_job(pod), parse_command(typed)
        reading = Reading(pod=pod, command=command, job=job, host=HOST, python_is_ours=False, loopback_port=1)
        plan = engines.plan(engines.task_of(reading, load({}), MachineTrial(scratch="/scratch")))
    except LaunchError as problem:
        message = str(problem)
        assert message == " ".join(message.splitlines())
        return
    assert plan.processes or plan.workers
    assert not any("\0" in word for process in plan.processes for word in process.argv)
