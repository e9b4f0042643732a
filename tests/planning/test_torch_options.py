"""Which jobs the worker group runs itself, and which it leaves to the image's own torchrun."""

from __future__ import annotations

import signal

import pytest
from msgspec.structs import replace

from tests.planning.requests import given, request
from trainer_launch.model import Job, NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.planning import engines, torch
from trainer_launch.planning.job import JOB_OPTIONS
from trainer_launch.planning.torchrun_options import OPTIONS

ALONE = Job(contract="unknown", nodes=NodeRange(1, 1), nproc_per_node=2, engine="torchrun")


def why(line: str, job: Job = ALONE, env: dict[str, str] | None = None, **changes: object) -> str | None:
    task = request(line, job, env, **changes)
    reason = torch.handed_over(task)
    if reason is None:
        torch.plan(task, "")
    return reason


@pytest.mark.parametrize(
    "words",
    [
        "--role learner",
        "--local-addr 10.0.0.1",
        "--virtual-local-rank",
        "--signals-to-handle SIGTERM,SIGUSR1",
        "--shutdown-timeout 60",
        "--monitor-interval 5",
        "--start-method fork",
        "--event-log-handler null",
        "--log-dir /logs --redirects 3 --tee 0:3,1:1",
        "--local-ranks-filter 0",
        "--no-python",
        "-m",
        "--max-restarts 3 --standalone",
    ],
)
def test_the_worker_group_implements(words: str) -> None:
    assert why(f"torchrun {words} train.py") is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--logs-specs mine", "--logs-specs loads a class into torchrun"),
        ("--numa-binding node", "--numa-binding node has torchrun bind the workers that it starts"),
        ("--event-log-handler console", "--event-log-handler console records events of torchrun's agent"),
        (
            "--tee 1 --duplicate-stdout-filters a",
            "--duplicate-stdout-filters has torchrun look into each line of output",
        ),
        ("--run-path", "with --run-path torchrun itself runs the script in processes that it forks or spawns"),
        ("--brand-new=1", "--brand-new is an option of a newer torchrun"),
    ],
)
def test_only_torchrun_itself_can_do(words: str, reason: str) -> None:
    assert why(f"torchrun {words} train.py") == reason


@pytest.mark.parametrize("option", [o for o in OPTIONS.values() if o.env and o.name not in JOB_OPTIONS], ids=str)
def test_a_variable_decides_as_its_option_does(option) -> None:
    values = dict.fromkeys(("text", "streams", "ranks"), "0") | {"number": "7", "decimal": "0.5", "flag": "1"}
    value = values.get(option.form, option.form.split("|")[0])
    value = "SIGUSR1" if option.name == "signals_to_handle" else value
    typed = why(f"torchrun {option.flag} {'' if option.form == 'flag' else value} train.py")
    assert why("torchrun train.py", env={option.variable: value}) == typed


def test_devices_that_torch_alone_can_count_are_torchruns() -> None:
    assert why("train.py", replace(ALONE, nproc_per_node="xpu")) == "only torch can count xpu devices"


@pytest.mark.parametrize(
    ("env", "by"),
    [
        (
            {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"},
            "TORCHELASTIC_ENABLE_FILE_TIMER is set: torchrun serves the timers",
        ),
        ({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"}, None),
        ({"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "60"}, "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT is set"),
    ],
)
def test_services_of_torchs_agent_are_torchruns(env: dict[str, str], by: str | None) -> None:
    found = why("train.py", env=env)
    assert found is None if by is None else (found or "").startswith(by)


def test_too_few_visible_devices_are_an_error_before_anything_starts() -> None:
    with pytest.raises(UsageError, match=r"each of the 2 workers .* CUDA_VISIBLE_DEVICES=3 names 1; set --nproc"):
        why("torchrun --virtual-local-rank train.py", env={"CUDA_VISIBLE_DEVICES": "3"})
    assert why("torchrun --virtual-local-rank train.py", env={"CUDA_VISIBLE_DEVICES": "3,4"}) is None


def test_signals_to_handle_end_the_job_with_the_signal_itself() -> None:
    options = {"signals_to_handle": "SIGTERM, SIGUSR1,USR2"}
    assert torch.signals_of(options, {signal.SIGUSR2: SignalAction.CHECKPOINT}) == {
        signal.SIGUSR1: SignalAction.DRAIN,
        signal.SIGUSR2: SignalAction.CHECKPOINT,
    }
    for words, handled in (("--signals-to-handle=USR2", "USR2"), ("", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")):
        workers = given(engines.plan(request(f"torchrun {words} train.py", ALONE)).workers)
        assert workers.env["TORCHELASTIC_SIGNALS_TO_HANDLE"] == handled


def test_workers_of_the_deepspeed_command_get_its_variables() -> None:
    workers = given(engines.plan(request("deepspeed --num_gpus 2 train.py", ALONE)).workers)
    assert (workers.count, workers.of_deepspeed) == (2, True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tee", "4", "invalid value '4' for {}: expected 0"),
        ("redirects", "0:1,2", "invalid value '0:1,2' for {}: expected 0"),
        ("local_ranks_filter", "a", "invalid value 'a' for {}: expected local ranks"),
        ("signals_to_handle", "SIGKILL", "{} names SIGKILL, which the launcher cannot pass on"),
        ("signals_to_handle", "SIGNONE", "{} names the unknown signal 'SIGNONE'"),
    ],
)
def test_a_value_that_torchrun_would_refuse_is_refused_and_named_as_it_was_given(
    name: str, value: str, message: str
) -> None:
    option = OPTIONS[name]
    with pytest.raises(UsageError, match=message.format(option.flag)):
        why(f"torchrun {option.flag} {value} train.py")
    with pytest.raises(UsageError, match=message.format(option.variable)):
        why("torchrun train.py", env={option.variable: value})


@pytest.mark.parametrize(
    ("words", "env"),
    [("torchrun --rdzv-backend=trainer-launch", {}), ("", {"PET_RDZV_BACKEND": "trainer-launch"})],
)
def test_the_removed_backend_names_its_successor(words: str, env: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"was removed in 0\.3; remove it: .* meet at the launcher's coordinator"):
        why(f"{words} train.py".strip(), env=env)
