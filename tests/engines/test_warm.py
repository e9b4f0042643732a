"""Which torch jobs' workers are forked from a warm process, and why the others' are not."""

from __future__ import annotations

import json

import pytest

from tests.engines.requests import request
from trainer_launch import engines
from trainer_launch.engines.request import Request
from trainer_launch.errors import UsageError
from trainer_launch.model import Job, NodeRange, Plan

JOB = Job(contract="unknown", nodes=NodeRange(1, 1), engine="torchrun")


def asked(line: str, **changes: object) -> Request:
    return request(line, JOB, changes.pop("env", None), **{"start_method": "auto", **changes})  # type: ignore[arg-type]


def told(plan: Plan) -> dict[str, object] | None:
    (process,) = plan.processes
    text = process.env.get("TRAINER_LAUNCH_WARM")
    return json.loads(text) if text else None


def test_a_script_and_a_module_are_forked() -> None:
    script = told(engines.plan(asked("train.py --lr 1", preload=("numpy", "a.b"))))
    assert script == {"script": "train.py", "preload": ["numpy", "a.b"], "required": False}
    module = told(engines.plan(asked("torchrun -m pkg.train", start_method="forkserver")))
    assert module == {"script": None, "preload": [], "required": True}


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
        ("torchrun --run-path train.py", {}, "with --run-path torch runs the program itself"),
        ("torchrun --numa-binding=node train.py", {}, "--numa-binding starts them with numactl"),
        ("torchrun folder", {}, "'folder' is not a .py file"),
        ("train.py", {"env": {"PYTHON_EXEC": "/opt/python3"}}, "PYTHON_EXEC names another Python"),
        ("train.py", {"replace_launcher": True}, "with --exec torchrun itself starts them"),
    ],
)
def test_others_start_the_ordinary_way_and_the_plan_says_why(
    line: str, changes: dict[str, object], reason: str
) -> None:
    plan = engines.plan(asked(line, **changes))
    assert told(plan) is None
    assert reason in plan.reasons[-1]
    if changes.get("start_method") != "exec":
        with pytest.raises(UsageError, match="--start-method is forkserver, but"):
            engines.plan(asked(line, **{**changes, "start_method": "forkserver"}))
