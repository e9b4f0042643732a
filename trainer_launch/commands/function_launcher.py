"""The launcher of `trainer_launch.launch`: `run` for one function, started by `pytorch/function_launch.py`."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any

from msgspec.structs import replace

from trainer_launch.commands import run
from trainer_launch.contracts import read_job
from trainer_launch.host import files, logs, process_attributes, runtime_directory
from trainer_launch.host.slow_files import within
from trainer_launch.model import Outcome, Plan, codec, exit_codes
from trainer_launch.model.errors import LaunchError, UsageError
from trainer_launch.model.settings import JOB_FLAGS, Settings, flag_of, load
from trainer_launch.planning.reading import live_pod
from trainer_launch.pytorch import function_launch
from trainer_launch.pytorch.function_launch import PATIENCE_S, Elastic, LauncherReport
from trainer_launch.supervisor import inherited


def main(folder: str, program: str, parent: int, task: bytes) -> None:
    """Run the workers' program as the Elastic says that `parent` has pickled; leave a report in the folder."""
    inherited.end_on_stop()
    inherited.open_streams()
    process_attributes.die_with_parent(signal.SIGTERM)  # the workers have their grace
    if os.getppid() != parent:
        sys.exit(exit_codes.STOPPED)
    try:
        report = _report_of(_carry_out(pickle.loads(task), program))
    except LaunchError as problem:
        report = LauncherReport(refused=type(problem).__name__, message=in_callers_words(str(problem)))
    if os.getppid() == parent:
        files.replace(f"{folder}/{function_launch.REPORT}", codec.encode(report))
    else:  # it was killed: nobody is left to read, and to remove the directory
        within(folder, None, files.remove_tree, folder)
    os._exit(exit_codes.SUCCEEDED)  # as the launcher in a pod, without an end of the interpreter


def _carry_out(elastic: Elastic, program: str) -> Outcome:
    settings = settings_of(elastic, program)
    logs.set_up(settings.log_level)

    def adjust(plan: Plan) -> Plan:
        if plan.workers is None:
            raise UsageError(
                f"launch starts the workers itself, which is impossible here: {'; '.join(plan.reasons)}"
            )
        hosting = plan.hosting and replace(plan.hosting, deadline_s=elastic.deadline_s)
        return replace(plan, hosting=hosting)

    return run.to_the_end(settings, (sys.executable, program), adjust=adjust)


def settings_of(elastic: Elastic, program: str) -> Settings:
    """The settings of this pod under what the caller said explicitly.

    Raises:
        LaunchError: they do not fit, or this process is a worker itself.
    """
    given = load({})
    job = read_job(live_pod((sys.executable, program)), given.contract)
    if job.role == "rank":
        raise UsageError(
            "this process is already a worker of a torchrun job; call the function directly, without launch"
        )
    options = elastic.options()
    flags: dict[str, Any] = {
        **{name: options[option] for name, option in JOB_FLAGS.items() if option in options},
        "engine": "torch",
        "start_method": "exec" if elastic.start_method == "spawn" else "auto",
        "termination_log": os.devnull,  # the caller may go on after a failure
    }
    if job.max_restarts is None and given.max_restarts is None:
        flags.setdefault("max_restarts", "0")
    if elastic.patience_s is not None or "wait_timeout" not in given.model_fields_set:
        flags["wait_timeout"] = PATIENCE_S if elastic.patience_s is None else elastic.patience_s
    if not elastic.increase_shared_mem:
        flags["shm_size"] = "keep"
    if "log_level" not in given.model_fields_set:
        flags["log_level"] = "warning"
    if runtime_directory.VARIABLE in os.environ:  # below a launcher, which tells of the pod
        flags |= {"events": None, "metrics_port": 0}
    return load(flags)


def in_callers_words(message: str) -> str:
    """With the fields of Elastic in place of our options."""
    for name, field in JOB_FLAGS.items():
        if field in Elastic.__struct_fields__:
            message = message.replace(f"{flag_of(name)} 0", f"{field}=0").replace(flag_of(name), field)
            message = message.replace(f"--{field}", field)
    return message


def _report_of(ended: Outcome) -> LauncherReport:
    job, failure = ended.given_up, ended.failure
    return LauncherReport(
        verdict=ended.verdict,
        failure=failure and replace(failure, message=in_callers_words(failure.message)),
        given_up=job and replace(job, reason=in_callers_words(job.reason)),
    )
