"""The plan of `--engine torchrun`: how the launcher supervises the image's torchrun."""

from __future__ import annotations

import shlex
import signal
from typing import Any

import pytest

from tests.planning.requests import request
from tests.planning.test_torchrun import ALONE, LOGS
from trainer_launch.model import Job, Plan
from trainer_launch.model.errors import UsageError
from trainer_launch.model.signal_policy import SignalAction, parse
from trainer_launch.planning import engines
from trainer_launch.planning.engines import torchrun


def plan(line: str, job: Job, env: dict[str, str] | None = None, **changes: Any) -> Plan:
    return engines.plan(request(line, job, env, engine=torchrun.NAME, our_rendezvous=True, **changes))


def words(made: Plan) -> str:
    (torchrun,) = made.processes
    return shlex.join(word for word in torchrun.argv if word != LOGS)


def test_the_first_failure_is_read_from_torchs_error_file() -> None:
    made = plan("train.py", ALONE)
    assert made.processes[0].env["TORCHELASTIC_ERROR_FILE"] == made.failure_file


@pytest.mark.parametrize(("given", "seconds"), [({}, "60"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, "90")])
def test_workers_have_the_whole_grace_to_save_unless_the_user_has_set_torchs_own(given, seconds: str) -> None:
    made = plan("train.py", ALONE, given, grace_s=59.5)
    assert made.processes[0].env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds


def test_with_exec_nothing_of_the_launcher_is_in_it() -> None:
    made = plan("train.py", ALONE, replace_launcher=True, prefix=True)
    (torchrun,) = made.processes
    assert LOGS not in torchrun.argv
    assert torchrun.env.keys().isdisjoint(("TRAINER_LAUNCH_RUN_DIR", "TORCHELASTIC_ERROR_FILE"))


@pytest.mark.parametrize(
    "given", ["TERM=checkpoint", "USR1=checkpoint", "USR1=drain", "USR1=terminate", "HUP=forward"]
)
def test_what_torchrun_cannot_do_on_a_signal_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not possible with torchrun"):
        plan("train.py", ALONE, signals=parse(given))


@pytest.mark.parametrize("given", ["USR2=forward", "TERM=terminate"])
def test_what_torchrun_does_on_a_signal_is_accepted(given: str) -> None:
    assert plan("train.py", ALONE, signals=parse(given)).signals


def test_a_signal_on_which_torchrun_ends_the_job_is_no_failure_of_it() -> None:
    made = plan("torchrun --signals-to-handle=SIGTERM,SIGUSR1 train.py", ALONE)
    assert made.signals == {signal.SIGUSR1: SignalAction.DRAIN}
