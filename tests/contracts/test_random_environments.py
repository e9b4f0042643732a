"""Whatever a pod's variables and files hold: a job, or one short line that says what is wrong."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contracts.pods import pod_of
from trainer_launch.contracts import CONTRACTS, read_job
from trainer_launch.contracts.flat import flat
from trainer_launch.contracts.source import Pod
from trainer_launch.errors import LaunchError
from trainer_launch.snapshot import pod_from_snapshot, snapshot_of

NAMES = """
PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK PET_MASTER_ADDR PET_MASTER_PORT PET_RDZV_ENDPOINT PET_RDZV_BACKEND
PET_RDZV_ID PET_RDZV_CONF PET_MAX_RESTARTS PET_STANDALONE PET_N_PROC_PER_NODE JOB_COMPLETION_INDEX MASTER_ADDR
MASTER_PORT WORLD_SIZE RANK WORKER_ADDRS WORKER_PORT PYTHONUNBUFFERED JAX_NUM_PROCESSES JAX_PROCESS_ID
JAX_COORDINATOR_ADDRESS DMLC_TRACKER_URI DMLC_TRACKER_PORT DMLC_TASK_ID DMLC_NUM_WORKER TF_CONFIG MX_CONFIG DMLC_ROLE
DMLC_PS_ROOT_URI DMLC_PS_ROOT_PORT DMLC_NUM_SERVER DMLC_WORKER_ID PADDLE_MASTER PADDLE_JOB_ID PADDLE_NNODES
PADDLE_SERVER_NUM PADDLE_TRAINER_NUM POD_IP_DUMMY COORDINATOR_ADDRESS COORDINATOR_PORT NUM_PROCESSES PROCESS_ID
K_MPI_JOB_ROLE OMPI_MCA_orte_default_hostfile OMPI_MCA_orte_set_default_slots OMPI_MCA_plm_rsh_agent
I_MPI_HYDRA_HOST_FILE I_MPI_PERHOST HYDRA_HOST_FILE I_MPI_HYDRA_BOOTSTRAP I_MPI_HYDRA_BOOTSTRAP_EXEC
NVIDIA_VISIBLE_DEVICES FLYTE_INTERNAL_EXECUTION_ID _F_NM _F_WN LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE
TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE HOME
TRAINER_LAUNCH_SSH_DIR KUBEFLOW_TRAINER_SERVER_URL KUBEFLOW_TRAINER_SERVER_CA_CERT KUBEFLOW_TRAINER_SERVER_TOKEN
""".split()
PATHS = """
/etc/mpi/hostfile /etc/mpi/discover_hosts.sh /etc/mpi/kubexec.sh /etc/flux-config/entrypoint.sh
/mnt/flux/config/etc/flux/system/hostlist /root/.ssh/id_rsa /root/.ssh/authorized_keys
""".split()
TF = {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "worker", "index": 1}}
VALUES = [
    *(
        "",
        " ",
        "0",
        "1",
        "2",
        "3",
        "8",
        "-1",
        "65535",
        "65536",
        "29500",
        "1000000",
        "1000001",
        "9" * 30,
        "007",
        "1.0",
    ),
    *("1:3", "2:2", "3:1", "1:2:3", ":", "auto", "gpu", "cpu", "xpu", "many", "true", "c10d", "static", "etcd"),
    *(
        "job-node-0-0.job",
        "job-master-0",
        "job-worker-0",
        "localhost",
        "10.0.0.1",
        "fd00::1",
        "[fd00::1]:1",
        "a:b:c",
    ),
    *(
        "job-node-0-0.job:29500",
        "job-worker-0:23456",
        "$(POD_IP)",
        "x" * 300,
        "é",
        "\udcff",
        "\0",
        "a\nb",
        "\u2028",
    ),
    *("/etc/mpi/hostfile", "/etc/mpi/kubexec.sh", "/root/.ssh", "/", "a,b", "a,,b", "k=v,k2=v2", "k=", "launcher"),
    *(
        "worker",
        "boss",
        "{}",
        "[]",
        "null",
        "{",
        "NaN",
        '{"a":1,"a":2}',
        "[" * 5000,
        "x" * 131_073,
        "🦆" * 200,
        "'" * 99,
    ),
    *(json.dumps(TF), json.dumps({**TF, "task": {"type": "ps", "index": 9}}), json.dumps({**TF, "cluster": {}})),
    json.dumps({"cluster": {"worker": {"1": "a:1"}, "ps": None}, "task": {"type": "worker", "index": 1}}),
    "https://s.svc:10443/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/j/status",
]
CONTENTS = [
    *(
        "",
        "\n",
        "# only\n",
        "a slots=2\nb slots=2\n",
        "a:2\nb:2\n",
        "a\nb\na\n",
        "a slots=1\na slots=2\n",
        "a b c\n",
    ),
    *(
        "#!/bin/sh\necho a:1\n\necho b:1",
        "echo\n",
        "job-node-0-[0-1]\n",
        "n[0-99999]",
        "[",
        "\udcff",
        "\0",
        "x" * 9999,
    ),
]
HOSTNAMES = [
    *("", "job-node-0-0", "job-node-0-1", "job-other-0-1", "job-worker-0", "job-worker-99", "job-master-0"),
    *("job-launcher", "a-worker-0-b-worker-1", "job-node-0-0.job", "-", "0-0-0", "x" * 500, "é\n", "\udcff"),
]
COMMANDS = [(), ("tune", "run"), ("tune", "run", "--rdzv_endpoint=a:1"), ("--rdzv-endpoint",), ("\udcff" * 9,)]

random_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(VALUES[:60]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["cluster", "task", "type", "index", "worker", "ps", "url", "0"]), inner)
    ),
    max_leaves=8,
).map(json.dumps)
values = st.sampled_from(VALUES) | st.text(max_size=12) | random_json
pods = st.builds(
    pod_of,
    st.dictionaries(st.sampled_from(NAMES), values, max_size=14),
    st.dictionaries(st.sampled_from(PATHS), st.sampled_from(CONTENTS) | st.text("ab-[],:=# \n0123", max_size=30)),
    st.sampled_from(HOSTNAMES),
    st.sampled_from(COMMANDS),
)
contracts = st.none() | st.sampled_from([contract.NAME for contract in CONTRACTS]) | st.text(max_size=20)

many = settings(
    max_examples=5_000,
    deadline=None,
    database=None,
    derandomize="CI" in os.environ,
    suppress_health_check=list(HealthCheck),
)


def check(pod: Pod, contract: str | None) -> None:
    try:
        job = read_job(pod, contract)
    except LaunchError as problem:
        message = str(problem)
        assert 0 < len(message) <= 600  # noqa: PT017
        assert len(message.splitlines()) == 1  # noqa: PT017
        message.encode()
        return
    assert job.nodes is None or 1 <= job.nodes.min <= job.nodes.max
    assert job.members is None or len(job.members) <= 65_536
    json.dumps(flat(job), allow_nan=False)
    assert all("\n" not in warning for warning in job.warnings)


@pytest.mark.timeout(300)
@many
@given(pods)
def test_any_environment_is_read_or_refused_in_one_line(pod: Pod) -> None:
    check(pod, None)


@pytest.mark.timeout(300)
@many
@given(pods, contracts)
def test_any_contract_reads_any_environment_or_refuses_it(pod: Pod, contract: str | None) -> None:
    check(pod, contract)


@pytest.mark.timeout(300)
@settings(many, max_examples=300)
@given(pods)
def test_a_job_read_again_from_its_snapshot_is_the_same(pod: Pod) -> None:
    try:
        job = read_job(pod)
    except LaunchError:
        return
    again = read_job(pod_from_snapshot(json.loads(json.dumps(snapshot_of(pod, job)))))
    assert flat(again) == flat(job)
