"""The worker group's plan: the workers' command and environment, and how this node becomes a member of the job."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.contracts.pods import pod_of
from tests.planning.requests import MACHINE, given, request
from tests.planning.test_torchrun import ALONE, FIXED
from trainer_launch.model import (
    Gpus,
    Job,
    Membership,
    NodeRange,
    Plan,
    Workers,
)
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import load
from trainer_launch.planning import engines
from trainer_launch.planning.reading import Reading, read
from trainer_launch.planning.task import Task


def plan(line: str, job: object = ALONE, **changes: object) -> Plan:
    return engines.plan(request(line, job, **changes))  # type: ignore[arg-type]


def workers(line: str, job: object = ALONE, **changes: object) -> Workers:
    return given(plan(line, job, **changes).workers)


def member(line: str, job: object, **changes: object) -> Membership:
    return given(plan(line, job, **changes).membership)


@pytest.mark.parametrize(
    ("line", "argv"),
    [
        ("train.py --lr 1", "/venv/bin/python -u train.py --lr 1"),
        ("python train.py --lr 1", "/venv/bin/python -u train.py --lr 1"),
        ("-m pkg.mod x", "/venv/bin/python -u -m pkg.mod x"),
        ("python -m pkg.mod x", "/venv/bin/python -u -m pkg.mod x"),
        ("python -X dev train.py x", "python -X dev train.py x"),
        ("torchrun train.py x", "/venv/bin/python -u train.py x"),
        ("torchrun -m pkg.mod x", "/venv/bin/python -u -m pkg.mod x"),
        ("torchrun --no-python ./binary x", "./binary x"),
        ("torchrun -- train.py --n=3 -- x", "/venv/bin/python -u train.py --n=3 -- x"),
    ],
)
def test_a_worker_is_started_as_torchrun_starts_it(line: str, argv: str) -> None:
    assert " ".join(workers(line).argv) == argv


def test_a_typed_address_is_where_the_others_reach_the_store() -> None:
    assert member("torchrun --local-addr=10.0.0.7 train.py", FIXED).address == "10.0.0.7"


@pytest.mark.parametrize(("given", "unbuffered"), [(None, "1"), ("", "")])
def test_workers_whose_output_is_watched_do_not_buffer_it_unless_told(given: str | None, unbuffered: str) -> None:
    env = {} if given is None else {"PYTHONUNBUFFERED": given}
    assert workers("train.py", FIXED, env=env, hang_timeout="60").env["PYTHONUNBUFFERED"] == unbuffered
    assert workers("train.py", FIXED, env=env).env.get("PYTHONUNBUFFERED") == given


@pytest.mark.parametrize(
    ("line", "told", "gpus", "warns"),
    [
        ("train.py", None, 4, True),
        ("torchrun train.py", None, 4, True),
        ("train.py", None, 1, False),  # CUDA_VISIBLE_DEVICES leaves one
        ("train.py", 1, 4, False),
        ("torchrun --nproc-per-node 1 train.py", None, 4, False),
        ("train.py", 4, 4, False),
    ],
)
def test_one_worker_beside_several_gpus_is_a_warning_unless_it_was_asked_for(
    line: str, told: int | None, gpus: int, warns: bool
) -> None:
    host = replace(MACHINE, gpus=Gpus(count=gpus, reason=f"{gpus} in /dev"))
    found = plan(line, replace(FIXED, nproc_per_node=told), host=host).warnings
    assert [text.partition("; ")[0] for text in found] == [
        "1 worker starts in a pod with 4 accelerators (4 in /dev), and torch uses 1 of them"
    ] * warns


def test_a_job_without_labels_says_so_and_a_node_with_one_tells_it() -> None:
    assert member("train.py", FIXED, label="rack-1").label == "rack-1"
    (warning,) = plan("train.py", FIXED, label="").warnings
    assert "this node has no topology label, so its ranks come last" in warning
    assert plan("train.py", ALONE, label="").warnings == ()


@pytest.mark.parametrize(
    ("line", "changes", "why"),
    [
        ("train.py", {"engine": "torchrun", "label": "a"}, r"--topology-label needs .* \(--engine selects it"),
        ("train.py", {"engine": "plain", "label": ""}, "--topology-label needs torch workers"),
    ],
)
def test_workers_that_others_start_cannot_be_placed(line: str, changes: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        plan(line, **changes)


def reading(files: dict[str, str], **env: str) -> Reading:
    return read(pod_of({"PET_NNODES": "1", **env}, files, "here", ("train.py",)), load({}))


@pytest.mark.parametrize(
    ("source", "label"),
    [
        ("RACK", "b/r-1"),
        ("/etc/rack", "a/r-2"),
        ("/etc/none", ""),
        ("NONE", ""),
        ("/etc/odd", None),
        ("LONG", None),
    ],
)
def test_a_topology_label_is_read_from_a_file_or_a_variable(source: str, label: str | None) -> None:
    found = reading({"/etc/rack": "/a/r-2\n", "/etc/odd": "a\x00b"}, RACK="b/r-1", LONG="a" * 254)
    settings = load({"topology_label": source})
    if label is None:
        with pytest.raises(UsageError, match=f"{source} holds .*: expected a topology label such as block-a"):
            engines.task_of(found, settings)
        return
    assert engines.task_of(found, settings).label == label
    assert engines.task_of(found, load({})).label is None


WARM = Job(contract="unknown", nodes=NodeRange(1, 1), engine="torchrun")


def warm(line: str, **changes: Any) -> Task:
    return request(line, WARM, changes.pop("env", None), **{"start_method": "auto", **changes})


def test_a_script_and_a_module_are_forked() -> None:
    script = given(engines.plan(warm("train.py --lr 1", preload="numpy,a.b")).workers)
    assert (script.forks, script.script, script.preload) == (True, "train.py", ("numpy", "a.b"))
    module = given(engines.plan(warm("torchrun -m pkg.train")).workers)
    assert (module.forks, module.script) == (True, None)


@pytest.mark.parametrize(
    ("line", "changes", "reason"),
    [
        ("train.py", {"start_method": "exec"}, "--start-method is exec"),
        ("python -X dev train.py", {}, "is not a script or module of the launcher's own Python"),
        ("torchrun --no-python ./binary", {}, "is not a script or module of the launcher's own Python"),
        (
            "/opt/python3 train.py",
            {"python_is_ours": False},
            "is not a script or module of the launcher's own Python",
        ),
        ("torchrun --run-path train.py", {}, "with --run-path torchrun itself runs the script"),
        ("train.py --name w${local_rank}", {}, "an argument contains $"),
        ("torchrun folder", {}, "'folder' is not a .py file"),
        ("train.py", {"env": {"PYTHON_EXEC": "/opt/python3"}}, "PYTHON_EXEC names another Python"),
    ],
)
def test_others_start_the_ordinary_way_and_the_plan_says_why(
    line: str, changes: dict[str, object], reason: str
) -> None:
    plan = engines.plan(warm(line, **changes))
    assert plan.workers is None or not plan.workers.forks
    assert reason in " ".join(plan.reasons)
