"""The plan of the image's own torchrun: its argument list, spelled out, for every kind of torch job."""

from __future__ import annotations

import shlex

import pytest
from msgspec.structs import replace

from tests.contracts.pods import V2_TORCH, pod_of
from tests.planning.requests import MACHINE
from tests.planning.requests import request as any_request
from trainer_launch.contracts import read_job
from trainer_launch.model import Endpoint, Hosting, Job, NodeRange, Origin, Plan, PortRange, Rendezvous
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.flag_overrides import JOB_OPTIONS, overlay
from trainer_launch.planning.launcher_options import Option
from trainer_launch.planning.torchrun_options import OPTIONS

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


def request(line: str, job: Job, env: dict[str, str] | None = None, **changes: object) -> Request:
    return any_request(line, job, env, engine="torchrun", **changes)


def argv(line: str, job: Job, env: dict[str, str] | None = None, **changes: object) -> str:
    return without_logs(engines.plan(request(line, job, env, **changes)))


def without_logs(plan: Plan) -> str:
    """torchrun's command, without the folder that every plan gives to its logs."""
    (process,) = plan.processes
    return shlex.join(word for word in process.argv if word != LOGS)


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("train.py", True),
        ("torchrun --log-dir=/logs train.py", False),
        ("torchrun --redirects=3 train.py", False),
        ("torchrun --tee=3 train.py", False),
    ],
)
def test_torchs_folder_for_logs_goes_with_the_run_unless_logs_were_asked_for(line: str, ours: bool) -> None:
    (process,) = engines.plan(request(line, ALONE)).processes
    assert (LOGS in process.argv) is ours


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


def test_another_interpreter_than_ours_is_kept() -> None:
    assert argv("/opt/python3 train.py", ALONE, python_is_ours=False).endswith(
        "--no-python --local-addr=127.0.0.1 -- /opt/python3 train.py"
    )


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


def test_by_default_nodes_meet_at_the_coordinator_that_node_0_hosts() -> None:
    plan = engines.plan(request("train.py", FIXED, our_rendezvous=True))
    assert without_logs(plan).removeprefix(AGENT) == (
        "--nnodes=2 --nproc-per-node=4 --rdzv-backend=trainer-launch --rdzv-endpoint=job-node-0-0.job:29500 "
        "--rdzv-id=job-node-0-0.job-29500 "
        "--rdzv-conf=node_rank=1,host=here,is_host=false,patience=600,max_restarts=3 "
        "--max-restarts=1000000 --node-rank=0 -- train.py"
    )
    assert plan.hosting is None
    zero = engines.plan(request("train.py", replace(FIXED, node_rank=0, is_coordinator=True), our_rendezvous=True))
    assert zero.hosting == Hosting(
        job="job-node-0-0.job-29500",
        host="",
        port=29500,
        nodes=NodeRange(2, 2),
        max_restarts=3,
        rejoin_timeout_s=600.0,
    )


def test_what_the_coordinator_is_told_reaches_it_and_the_secret_itself_nobody() -> None:
    asked = replace(
        request("train.py", ELASTIC, our_rendezvous=True),
        shrink_after_s=5.0,
        secret_file="/s",
        port_range=PortRange(7, 9),
    )
    plan = engines.plan(asked)
    assert plan.hosting is not None
    told = plan.hosting
    assert (told.shrink_after_s, told.secret_file) == (5.0, "/s")
    (agent,) = plan.processes
    assert "ports=7-9" in shlex.join(agent.argv)
    assert "secret_file=/s" in shlex.join(agent.argv)


@pytest.mark.parametrize(
    ("home", "own", "rank", "pattern"),
    [
        ("job-worker-0", "job-worker-2", 2, "job-worker-#/0/3"),
        ("job-node-0-0.job", "job-node-0-1", 1, "job-node-0-#.job/0/3"),
        ("job-master-0", "job-worker-0", 1, "job-worker-#/-1/3"),
        ("job-worker-0", "machine-7", 2, None),
        ("10.0.0.1", "job-worker-2", 2, None),
    ],
)
def test_every_node_of_an_elastic_job_hosts_a_coordinator_if_names_tell_the_index(home, own, rank, pattern) -> None:
    job = replace(FIXED, nodes=NodeRange(1, 3), coordinator=Endpoint(home, 29500), node_rank=rank)
    machine = replace(MACHINE, hostname=own)
    plan = engines.plan(request("train.py", job, our_rendezvous=True, host=machine))
    assert (f"seats={pattern}" in shlex.join(plan.processes[0].argv)) == (pattern is not None)
    is_name = not home[0].isdigit()  # an address needs no DNS
    assert plan.wait_for == ((home,) if is_name and not pattern else ()), "node 0 may be gone for good"
    if pattern is None:
        assert plan.hosting is None
    else:
        assert plan.hosting is not None
        assert plan.hosting.seat == rank
        assert plan.hosting.seats is not None
        assert plan.hosting.seats.endpoint(0) == Endpoint(home, 29500)
        assert plan.hosting.seats.endpoint(rank).host.startswith(own)


def test_the_jobs_budget_and_range_are_the_contracts() -> None:
    hosting = engines.plan(request("train.py", ELASTIC, our_rendezvous=True)).hosting
    assert hosting is not None
    assert (hosting.max_restarts, hosting.nodes, hosting.port) == (100, NodeRange(1, 3), 23456)


def test_a_single_node_meets_its_own_launcher_on_loopback() -> None:
    plan = engines.plan(request("train.py", ALONE, our_rendezvous=True))
    assert without_logs(plan).removeprefix(AGENT) == (
        "--nnodes=1 --nproc-per-node=1 --rdzv-backend=trainer-launch --rdzv-endpoint=127.0.0.1:4242 "
        "--rdzv-id=127.0.0.1-4242 --rdzv-conf=node_rank=0,host=here,is_host=false,patience=600,max_restarts=3 "
        "--max-restarts=1000000 --node-rank=0 --local-addr=127.0.0.1 -- train.py"
    )
    assert plan.hosting is not None
    assert (plan.hosting.host, plan.hosting.port, plan.hosting.nodes) == ("127.0.0.1", 4242, NodeRange(1, 1))
    assert plan.wait_for == ()


def test_a_store_of_its_own_is_left_to_torch() -> None:
    plan = engines.plan(request("train.py", ETCD, our_rendezvous=True))
    assert plan.hosting is None
    assert "--rdzv-backend=trainer-launch" not in plan.processes[0].argv


def test_every_pet_variable_reaches_torch_and_a_typed_option_wins() -> None:
    env = {"PET_MONITOR_INTERVAL": "2", "PET_ROLE": "actor", "PET_TEE": "3", "PET_VIRTUAL_LOCAL_RANK": "true"}
    words = argv("torchrun --role=learner --max-restarts 2 train.py", FIXED, env)
    assert "--monitor-interval=2" in words
    assert "--role=learner" in words
    assert "--tee=3" in words
    assert "--virtual-local-rank" in words
    assert "--max-restarts=2" in words


_VALUES = {"text": "x", "number": "7", "decimal": "0.5", "flag": "1"}


@pytest.mark.parametrize("option", [o for o in OPTIONS.values() if o.env and o.name not in JOB_OPTIONS], ids=str)
def test_each_variable_that_torchrun_reads_is_honoured(option: Option) -> None:
    value = _VALUES.get(option.form) or option.form.split("|")[0]
    value = "SIGUSR1" if option.name == "signals_to_handle" else value
    program = "torchrun train.py"  # a script typed without it says itself whether it is a module
    words = argv(program, FIXED, {option.variable: value})
    assert f" {option.flag}{'' if option.form == 'flag' else '=' + value} " in words


def test_a_pod_of_another_replicated_job_starts_no_second_node_0() -> None:
    env = V2_TORCH | {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"}
    foreign = read_job(pod_of(env, hostname="job-checker-0-0"))
    machine = replace(MACHINE, hostname="job-checker-0-0")
    with pytest.raises(ContractError, match="this pod, job-checker-0-0, belongs to another replicated job than"):
        argv("train.py", foreign, host=machine)


def with_a_master(nodes: str, hostname: str, env: dict[str, str] | None = None) -> Job:
    """A PyTorchJob with a Master, two Workers and an elasticPolicy; PET_NNODES counts Workers only."""
    told = {
        "PET_RDZV_ENDPOINT": "e-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": nodes,
        "MASTER_ADDR": "e-master-0",
        "MASTER_PORT": "23456",
        "RANK": "0",
        "WORLD_SIZE": "3",
    }
    return read_job(pod_of(told | (env or {}), hostname=hostname))


@pytest.mark.parametrize(
    ("env", "rank"),
    [
        ({}, 2),
        ({"PET_NPROC_PER_NODE": "auto"}, 2),
        ({"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "24"}, 2),
        ({"PET_NPROC_PER_NODE": "8"}, 2),  # operators up to 1.6 count pods
    ],
)
def test_the_master_of_an_elastic_job_comes_behind_its_workers(env: dict[str, str], rank: int) -> None:
    master = engines.plan(request("train.py", with_a_master("2:3", "e-master-0", env), our_rendezvous=True))
    assert f"node_rank={rank}," in shlex.join(master.processes[0].argv)
    assert master.hosting is None
    worker = engines.plan(request("train.py", with_a_master("2:3", "e-worker-0", env), our_rendezvous=True))
    assert "node_rank=0," in shlex.join(worker.processes[0].argv)


@pytest.mark.parametrize("env", [{}, {"PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "24"}])
def test_a_master_for_whom_the_workers_leave_no_room_is_refused_with_what_to_do(env: dict[str, str]) -> None:
    full = with_a_master("2:2", "e-master-0", env)
    with pytest.raises(
        ContractError, match=r"maxReplicas by one, remove the Master, or set --nodes 2:3 in all pods"
    ):
        engines.plan(request("train.py", full, our_rendezvous=True))
    assert engines.plan(any_request("sshd -De", full)).engine == "plain"
    roomier = overlay(full, {"nnodes": "2:3"}, Origin.FLAG)
    assert "node_rank=2," in shlex.join(
        engines.plan(request("train.py", roomier, our_rendezvous=True)).processes[0].argv
    )
    engines.plan(request("train.py", with_a_master("2:2", "e-worker-1", env), our_rendezvous=True))


def test_typed_sizes_win_over_the_contract() -> None:
    words = argv("torchrun --nnodes=3 --nproc-per-node=2 --node-rank=2 train.py", FIXED)
    assert "--nnodes=3 --nproc-per-node=2" in words
    assert "--node-rank=2" in words


def test_a_typed_standalone_makes_one_node_of_any_job() -> None:
    assert "--nnodes=1 --nproc-per-node=4 --standalone" in argv("torchrun --standalone train.py", FIXED)


def test_an_empty_pet_standalone_is_repaired_in_the_workers_environment() -> None:
    (process,) = engines.plan(request("train.py", ALONE, {"PET_STANDALONE": ""})).processes
    assert process.env["PET_STANDALONE"] == "1"


def test_exec_makes_torchrun_itself_of_the_same_plan() -> None:
    ours = argv("train.py", FIXED)
    assert argv("train.py", FIXED, replace_launcher=True) == ours


def test_exec_leaves_nothing_of_ours_in_the_environment() -> None:
    (process,) = engines.plan(request("train.py", FIXED, replace_launcher=True)).processes
    assert not [name for name in process.env if name.startswith("TRAINER_LAUNCH_")]


@pytest.mark.parametrize(("given", "threads"), [(None, "1"), ("3", "3")])
def test_workers_that_share_a_node_get_one_thread_unless_told(given: str | None, threads: str) -> None:
    env = {} if given is None else {"OMP_NUM_THREADS": given}
    (process,) = engines.plan(request("train.py", FIXED, env)).processes
    assert process.env["OMP_NUM_THREADS"] == threads


def test_only_nodes_that_do_not_host_wait_for_the_hosts_name() -> None:
    assert engines.plan(request("train.py", FIXED)).wait_for == ("job-node-0-0.job",)
    for address in ("127.0.0.1", "10.1.2.3", "fd00::1"):
        meets = replace(FIXED, coordinator=Endpoint(address, 29500))
        assert engines.plan(request("train.py", meets)).wait_for == (), "an address needs no DNS"
    host = replace(FIXED, node_rank=0, is_coordinator=True)
    assert engines.plan(request("train.py", host)).wait_for == ()
    assert engines.plan(request("train.py", ALONE)).wait_for == ()


def test_several_nodes_without_a_rank_are_refused_with_what_to_set() -> None:
    with pytest.raises(ContractError, match="--node-rank"):
        argv("train.py", Job(contract="x", nodes=NodeRange(2, 2), engine="torchrun", coordinator=Endpoint("h", 1)))


def test_devices_that_are_not_there_are_refused_with_what_to_set() -> None:
    with pytest.raises(UsageError, match="--nproc-per-node"):
        argv("train.py", replace(FIXED, nproc_per_node="gpu"))


def test_a_word_that_only_torch_can_count_is_left_to_torch() -> None:
    assert "--nproc-per-node=xpu" in argv("train.py", replace(FIXED, nproc_per_node="xpu"))


def test_an_unknown_number_of_nodes_is_refused_with_what_to_set() -> None:
    with pytest.raises(ContractError, match="--nodes"):
        argv("train.py", Job(contract="x", engine="torchrun", node_rank=3))


def test_several_nodes_without_an_address_are_refused_with_what_to_set() -> None:
    with pytest.raises(ContractError, match="--master-addr"):
        argv("train.py", Job(contract="x", nodes=NodeRange(2, 2), engine="torchrun", node_rank=0))


def test_a_range_without_a_rendezvous_is_refused_with_what_to_set() -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        argv("torchrun --nnodes=1:2 train.py", FIXED)


@pytest.mark.parametrize("option", ["--nnodes=x", "--nproc-per-node=many", "--max-restarts=-1", "--rdzv-conf=a"])
def test_a_typed_option_out_of_form_is_one_error_that_names_it(option: str) -> None:
    with pytest.raises(UsageError, match=option.partition("=")[0]):
        argv(f"torchrun {option} train.py", FIXED)


def test_each_node_knows_where_to_ask_how_the_job_stands() -> None:
    one = engines.plan(request("train.py", FIXED, our_rendezvous=True))
    assert one.meeting == ("job-node-0-0.job-29500", Endpoint("job-node-0-0.job", 29500))
    zero = engines.plan(request("train.py", replace(FIXED, node_rank=0, is_coordinator=True), our_rendezvous=True))
    assert zero.meeting == ("job-node-0-0.job-29500", Endpoint("localhost", 29500)), "its own name may not resolve"
    alone = engines.plan(request("train.py", ALONE, our_rendezvous=True))
    assert alone.meeting == ("127.0.0.1-4242", Endpoint("localhost", 4242))
    assert engines.plan(request("train.py", ETCD, our_rendezvous=True)).meeting is None


def test_a_node_of_an_elastic_job_asks_node_0_and_not_its_own_standby() -> None:
    elastic = replace(FIXED, nodes=NodeRange(1, 2))
    named = replace(MACHINE, hostname="job-node-0-1")
    made = engines.plan(request("train.py", elastic, our_rendezvous=True, host=named))
    assert made.hosting is not None, "each hosts one"
    assert made.meeting == ("job-node-0-0.job-29500", Endpoint("job-node-0-0.job", 29500))


@pytest.mark.parametrize("rank", [0, 1])
def test_nodes_that_are_told_localhost_are_of_one_job_on_one_machine(rank: int) -> None:
    job = replace(FIXED, node_rank=rank, is_coordinator=rank == 0, coordinator=Endpoint("127.0.0.1", 29500))
    made = engines.plan(request("train.py", job, our_rendezvous=True))
    assert made.meeting is not None
    assert made.meeting[0] == "here-29500", "an old operator tells the others node 0's name"


@pytest.mark.parametrize(
    ("address", "name"), [("fd00::1", "fd00-1-29500"), ("job-node-0-0.job", "job-node-0-0.job-29500")]
)
def test_the_run_id_has_no_colon_because_torch_names_the_folders_of_log_dir_after_it(address, name) -> None:
    job = replace(FIXED, coordinator=Endpoint(address, 29500))
    made = engines.plan(request("train.py", job, our_rendezvous=True))
    assert f"--rdzv-id={name}" in made.processes[0].argv
