"""The plan of `--engine torchrun`: the image's own torchrun with all options spelled out, and its rendezvous."""

from __future__ import annotations

import shlex

import pytest
from msgspec.structs import replace

from tests.contracts.pods import V2_TORCH, pod_of
from tests.planning.requests import MACHINE
from tests.planning.requests import request as any_request
from trainer_launch.contracts import read_job
from trainer_launch.model import Endpoint, Job, NodeRange, Plan, Rendezvous
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.task import Task

ALONE = Job(contract="unknown", nodes=NodeRange(1, 1), engine="torchrun")
FIXED = Job(
    contract="trainer-v2-torch",
    nodes=NodeRange(2, 2),
    node_rank=1,
    is_coordinator=False,
    nproc_per_node=4,
    coordinator=Endpoint("job-node-0-0.job", 29500),
    rendezvous=Rendezvous(kind="static"),
    engine="torchrun",
)
ELASTIC = Job(
    contract="pytorchjob-v1-elastic",
    nodes=NodeRange(1, 3),
    hostname_index=0,
    nproc_per_node=1,
    max_restarts=100,
    rendezvous=Rendezvous(kind="dynamic", backend="c10d", endpoint=Endpoint("job-worker-0", 23456), written="x"),
    engine="torchrun",
)
ETCD = replace(ELASTIC, rendezvous=Rendezvous(kind="dynamic", backend="etcd-v2", endpoint=Endpoint("etcd", 2379)))
LOGS = "--log-dir=/scratch/torch"
AGENT = "/venv/bin/python -m torch.distributed.run "


def request(line: str, job: Job, env: dict[str, str] | None = None, **changes: object) -> Task:
    return any_request(line, job, env, engine="torchrun", **changes)


def argv(line: str, job: Job, env: dict[str, str] | None = None, **changes: object) -> str:
    return without_logs(engines.plan(request(line, job, env, **changes)))


def without_logs(plan: Plan) -> str:
    """torchrun's command, without the folder that every plan gives to its logs."""
    (process,) = plan.processes
    return shlex.join(word for word in process.argv if word != LOGS)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train.py --lr 1", "train.py --lr 1"),
        ("python train.py --lr 1", "train.py --lr 1"),
        ("-m pkg.mod x", "--module pkg.mod x"),
        ("python -m pkg.mod x", "--module pkg.mod x"),
        ("python -X dev train.py x", "--no-python python -X dev train.py x"),
        ("torchrun train.py x", "train.py x"),
        ("torchrun -m pkg.mod x", "--module pkg.mod x"),
        ("torchrun --no-python ./binary x", "--no-python ./binary x"),
    ],
)
def test_one_node_meets_nobody_and_starts_what_was_typed(line: str, words: str) -> None:
    forms = ("--module", "--no-python")
    form = [word for word in shlex.split(words) if word in forms]
    program = [word for word in shlex.split(words) if word not in forms]
    expected = ["--nnodes=1", "--nproc-per-node=1", "--standalone", *form, "--local-addr=127.0.0.1", "--", *program]
    assert argv(line, ALONE) == AGENT + shlex.join(expected)


@pytest.mark.parametrize("start", ["", "torchrun ", "torchrun -- "])
def test_an_option_of_the_script_that_begins_one_of_torchruns_stays_the_scripts(start: str) -> None:
    assert argv(f"{start}train.py --n=3 -- x", ALONE).endswith("-- train.py --n=3 -- x")


def test_a_fixed_job_is_spelled_out_from_the_contract() -> None:
    assert argv("train.py", FIXED) == AGENT + (
        "--nnodes=2 --nproc-per-node=4 --rdzv-backend=static --node-rank=1 "
        "--master-addr=job-node-0-0.job --master-port=29500 -- train.py"
    )


def test_an_elastic_job_keeps_its_range_and_knows_who_hosts_the_store() -> None:
    assert argv("train.py", ELASTIC) == AGENT + (
        "--nnodes=1:3 --nproc-per-node=1 --rdzv-backend=c10d --rdzv-endpoint=job-worker-0:23456 "
        "--rdzv-conf=is_host=true --max-restarts=100 -- train.py"
    )


def test_a_pod_of_another_replicated_job_starts_no_second_node_0() -> None:
    env = V2_TORCH | {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"}
    foreign = read_job(pod_of(env, hostname="job-checker-0-0"))
    machine = replace(MACHINE, hostname="job-checker-0-0")
    with pytest.raises(ContractError, match="this pod, job-checker-0-0, belongs to another replicated job than"):
        argv("train.py", foreign, host=machine)


TWO = Job(contract="x", nodes=NodeRange(2, 2), engine="torchrun")


@pytest.mark.parametrize(
    ("line", "job", "missing"),
    [
        ("train.py", replace(TWO, coordinator=Endpoint("h", 1)), "--node-rank"),
        ("train.py", replace(FIXED, nproc_per_node="gpu"), "--nproc-per-node"),
        ("train.py", Job(contract="x", engine="torchrun", node_rank=3), "--nodes"),
        ("train.py", replace(TWO, node_rank=0), "--master-addr"),
        ("torchrun --nnodes=1:2 train.py", FIXED, "--rdzv-endpoint"),
    ],
)
def test_what_a_job_lacks_is_refused_with_what_to_set(line: str, job: Job, missing: str) -> None:
    with pytest.raises((ContractError, UsageError), match=missing):
        argv(line, job)


@pytest.mark.parametrize("option", ["--nnodes=x", "--nproc-per-node=many", "--max-restarts=-1", "--rdzv-conf=a"])
def test_a_typed_option_out_of_form_is_one_error_that_names_it(option: str) -> None:
    with pytest.raises(UsageError, match=option.partition("=")[0]):
        argv(f"torchrun {option} train.py", FIXED)


@pytest.mark.parametrize(("given", "seconds"), [({}, "60"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, "90")])
def test_workers_have_the_whole_grace_to_save_unless_the_user_has_set_torchs_own(given, seconds: str) -> None:
    made = engines.plan(request("train.py", ALONE, given, grace=59.5))
    assert made.processes[0].env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds


@pytest.mark.parametrize(
    "given", ["TERM=checkpoint", "USR1=checkpoint", "USR1=drain", "USR1=terminate", "HUP=forward"]
)
def test_what_torchrun_cannot_do_on_a_signal_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not possible with torchrun"):
        engines.plan(request("train.py", ALONE, signals=given))


def test_a_template_for_lines_reaches_every_version_of_torchrun_by_its_own_variable() -> None:
    words = "torchrun --tee 3 --log-line-prefix-template=[${rank}] --event-log-handler x train.py"
    process = engines.plan(request(words, ALONE)).processes[0]
    assert "template" not in " ".join(process.argv)
    assert process.env["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] == "[${rank}]"
