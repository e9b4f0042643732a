"""Which torch jobs' workers are forked from a warm process, and why the others' are not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planning.requests import given, request
from trainer_launch.model import Job, NodeRange
from trainer_launch.planning import engines
from trainer_launch.planning.task import Task

JOB = Job(contract="unknown", nodes=NodeRange(1, 1), engine="torchrun")


def asked(line: str, **changes: Any) -> Task:
    return request(line, JOB, changes.pop("env", None), **{"start_method": "auto", **changes})


def test_a_script_and_a_module_are_forked() -> None:
    script = given(engines.plan(asked("train.py --lr 1", preload="numpy,a.b")).workers)
    assert (script.forks, script.script, script.preload) == (True, "train.py", ("numpy", "a.b"))
    module = given(engines.plan(asked("torchrun -m pkg.train")).workers)
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
    plan = engines.plan(asked(line, **changes))
    assert plan.workers is None or not plan.workers.forks
    assert reason in " ".join(plan.reasons)
