"""Whatever a controller really sends can be planned: every case of every contract, through to its plan."""

from __future__ import annotations

import pytest

from tests.contracts.pods import CASES
from tests.contracts.test_cases import read
from tests.planning.requests import GPU_MACHINE, request
from trainer_launch.model.errors import LaunchError
from trainer_launch.planning import engines

READABLE = [pytest.param(case, id=name) for name, case in CASES.items() if "error" not in case]


@pytest.mark.parametrize("case", READABLE)
def test_any_program_can_be_run_in_every_pod(case: dict[str, object]) -> None:
    plan = engines.plan(request("sshd -De", read(case), case["pod"]["env"], host=GPU_MACHINE))  # type: ignore[index]
    assert plan.engine == "plain"


@pytest.mark.parametrize("case", READABLE)
def test_a_training_script_is_planned_or_refused_with_what_to_set(case: dict[str, object]) -> None:
    job, env = read(case), case["pod"]["env"]  # type: ignore[index]
    refused, plan = "", None
    try:
        plan = engines.plan(request("python train.py", job, env, host=GPU_MACHINE))
    except LaunchError as problem:
        refused = str(problem)
    if plan is None:
        assert "set --" in refused
    else:
        assert (plan.workers or plan.processes[0]).argv[-1] == "train.py"
        assert (
            plan.engine == ({"torchrun": plan.engine, "mpirun": "mpi"}.get(str(job.engine), "plain"))
            or job.engine is None
        )
