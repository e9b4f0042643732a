"""The pods of a rehearsal: what a Trainer v2 pod gets, and nothing of the shell's own platform."""

from __future__ import annotations

import pytest

from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.flag_jobs import elastic_job, mpi_job, torch_job
from trainer_launch.rehearsal.controllers.local_jobs import MAX_PODS, address_of, own_environment
from trainer_launch.rehearsal.controllers.pod_values import pods as pods


def test_pods_differ_in_rank_name_and_address_only() -> None:
    zero, one = pods(torch_job(2, "4", ("train.py",), 25.0), address_of)
    assert (zero.address, one.address) == ("127.0.0.2", "127.0.0.3")
    env, other = zero.main.env, one.main.env
    assert {name for name in env if env[name] != other[name]} == {
        "PET_NODE_RANK",
        "JOB_COMPLETION_INDEX",
        "TRAINER_LAUNCH_NODE_LABEL",
    }
    assert (other["PET_NNODES"], other["PET_NODE_RANK"], other["PET_NPROC_PER_NODE"]) == ("2", "1", "4")
    assert other["PET_MASTER_ADDR"] in zero.draft.names


def test_words_are_the_shells_as_they_were_typed() -> None:
    typed = ("sh", "-c", "echo $$ $(PET_NNODES) $(hostname) $HOME $${x}")
    (pod,) = pods(torch_job(1, "1", typed, 25.0), address_of)
    assert pod.main.command[-3:] == typed
    launcher = pods(mpi_job(1, 1, typed, 25.0), address_of)[-1]
    assert launcher.main.command[-3:] == typed


def test_a_torchrun_command_that_names_a_clusters_host_meets_at_the_first_pod() -> None:
    typed = ("torchrun", "--nnodes=2", "--rdzv_backend=c10d", "--rdzv_endpoint=head:29400", "train.py")
    zero, one = pods(torch_job(2, "1", typed, 25.0), address_of)
    assert one.main.command == ("trainer-launch", "run", "--master-addr", "local-node-0-0.local", "--", *typed)
    assert "local-node-0-0.local" in zero.draft.names
    elastic = pods(elastic_job(NodeRange(1, 2), "1", typed, 25.0), address_of)
    assert elastic[1].main.command[2:4] == ("--master-addr", "local-worker-0")
    assert "local-worker-0" in elastic[0].draft.names


@pytest.mark.parametrize(
    "name",
    [
        "PET_RDZV_ENDPOINT",
        "TF_CONFIG",
        "RANK",
        "OMPI_COMM_WORLD_RANK",
        "TORCHELASTIC_RUN_ID",
        "TRAINER_LAUNCH_NODES",
    ],
)
def test_what_another_platform_left_in_the_shell_does_not_reach_a_pod(name: str) -> None:
    assert own_environment({name: "left over", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("nodes", [0, -1, MAX_PODS + 1])
def test_more_pods_than_a_laptop_has_room_for_are_refused(nodes: int) -> None:
    with pytest.raises(UsageError, match="--nodes"):
        torch_job(nodes, "1", ("true",), 25.0)
    with pytest.raises(UsageError, match="--nodes"):
        mpi_job(nodes, 1, ("true",), 25.0)
