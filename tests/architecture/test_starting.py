"""Each row of docs/starting.md has a test that starts such a job and kills something in it."""

# ruff: noqa: E501 - names of tests are sentences

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.package import ROOT

PAGE = ROOT / "docs" / "starting.md"
_PLATFORMS = "cli/test_platforms.py::test_a_job_of_two_nodes_goes_on_in_place_after_a_killed_worker"
_SURVIVAL = "survival/test_survival.py::test_a_fault_costs_seconds_and_no_other_pod"
_IN_PLACE = "rehearsal/test_plain_jobs.py::test_a_retryable_exit_code_or_a_lost_pod_restarts_the_others_in_place"
_SCRIPTS = "cli/test_shims.py::test_a_script_that_calls_torchrun_recovers_in_place_from_a_killed_worker"
_SHARDED = "examples/test_faults.py::test_a_sharded_model_goes_on_after_a_killed_worker_and_a_lost_pod"
_TRAINERS = "frameworks/test_trainers.py::test_a_job_goes_on_after_a_killed_worker_and_a_lost_pod"
TESTS = {
    "TrainJob, torch runtime": _SURVIVAL,
    "TrainJob with a preflight init container": "examples/test_faults.py::test_the_checked_torch_job_loses_a_pod_and_resumes",
    "TrainJob of the SDK's `CustomTrainerContainer`": "frameworks/test_kubeflow_sdk.py::test_an_image_that_has_the_whole_training_runs_its_own_command",
    "TrainJob of the SDK's `CustomTrainer`": "frameworks/test_kubeflow_sdk.py::test_the_example_of_the_sdk",
    "the same in a container": "containers/test_shims.py::test_a_killed_worker_is_restarted_in_place",
    "TrainJob of the SDK's `CustomTrainer`, MPI runtime": "frameworks/test_kubeflow_sdk.py::test_a_function_over_mpi_that_the_sdk_submits",
    "PyTorchJob of fixed size": "examples/test_manifests.py::test_a_torch_job_trains_loses_a_pod_resumes_and_succeeds",
    "PyTorchJob with `elasticPolicy`": "survival/test_survival.py::test_an_elastic_job_goes_on_without_a_node_that_is_lost_for_good",
    "PyTorchJob that an HPA scales": "rehearsal/test_torch_faults.py::test_an_elastic_job_is_scaled_up_and_down_and_goes_on",
    "PyTorchJob of the SDK's `create_job(train_func=…)`": "frameworks/test_kubeflow_sdk.py::test_a_function_that_the_sdk_of_v1_submits",
    "PyTorchJob, script with Accelerate": "frameworks/test_accelerate.py::test_a_script_of_accelerate_gets_over_the_loss_of_a_pod_while_the_other_stays",
    "PyTorchJob, `accelerate launch` with options or a configuration file": "frameworks/test_accelerate.py::test_accelerate_launch_as_it_is_gets_over_the_loss_of_a_pod",
    "Fabric, `fabric run`": "frameworks/test_front_ends.py::test_fabric_run_trains_with_the_ranks_of_the_job",
    "TRL, `trl sft` and others": "frameworks/test_front_ends.py::test_trl_sft_trains_with_the_ranks_of_the_job",
    "PyTorchJob, script with DeepSpeed": "frameworks/test_deepspeed.py::test_a_script_of_deepspeed_gets_over_the_loss_of_a_pod_while_the_other_stays",
    "PyTorchJob, script with FSDP2": _SHARDED,
    "PyTorchJob, script in the style of Megatron-LM": _SHARDED,
    "PyTorchJob, Trainer of Transformers": _TRAINERS,
    "PyTorchJob, Lightning": _TRAINERS,
    "torchtune, `tune run` with torchrun's options": _TRAINERS,
    "TrainJob, `torchtune-…` runtime": "frameworks/test_trainers.py::test_a_trainjob_of_a_torchtune_runtime_goes_on_too",
    "Flyte's `Elastic` on several nodes": "examples/test_faults.py::test_flytes_elastic_on_several_nodes_loses_one_and_resumes",
    "TFJob, mirrored workers": "frameworks/test_tensorflow.py::test_a_mirrored_worker_that_is_killed_ends_the_others_and_all_start_again_in_place",
    "TFJob, parameter servers": "frameworks/test_tensorflow.py::test_a_lost_parameter_server_ends_the_chief_which_goes_on_from_the_checkpoint_when_it_is_back",
    "JAXJob": "frameworks/test_jax.py::test_a_process_that_is_killed_ends_the_other_and_both_start_again_in_place",
    "TrainJob, JAX": "frameworks/test_jax.py::test_a_pod_that_is_lost_is_made_anew_and_both_go_on_from_the_checkpoint",
    "XGBoostJob": "frameworks/test_xgboost.py::test_an_xgboostjob_gets_over_the_loss_of_a_worker",
    "TrainJob, XGBoost": "frameworks/test_xgboost.py::test_a_trainjob_gets_over_the_loss_of_the_pod_that_has_the_tracker",
    "PaddleJob": "frameworks/test_paddle.py::test_a_paddlejob_gets_over_the_loss_of_a_worker",
    "MXJob": "rehearsal/test_mxjob.py::test_a_killed_worker_is_restarted_in_its_pod_and_the_end_of_the_scheduler_is_that_of_the_job",
    "TrainJob, PlainML": "examples/test_faults.py::test_one_of_ten_plain_nodes_is_lost_and_goes_on_where_it_was",
    "TrainJob, MPI, launcher as node": "examples/test_faults.py::test_mpi_with_the_launcher_as_node_loses_a_node_starts_again_and_resumes",
    "TrainJob, MPI, MPICH": "examples/test_faults.py::test_a_trainjob_of_mpich_loses_a_node_starts_again_and_resumes",
    "TrainJob, `deepspeed-distributed`": "examples/test_faults.py::test_a_trainjob_of_a_published_runtime_loses_a_node_starts_again_and_resumes",
    "TrainJob, `deepspeed-distributed`, script with DeepSpeed": "frameworks/test_deepspeed.py::test_over_mpirun_a_script_of_deepspeed_goes_on_from_its_checkpoint_after_a_killed_rank",
    "MPIJob, Open MPI 4": "hosts/test_mpi_jobs.py::test_a_killed_host_is_waited_for_and_the_job_goes_on",
    "MPIJob, Open MPI 5": "hosts/test_open_mpi_5.py::test_a_killed_host_is_gone_on_without",
    "MPIJob, MPICH": "hosts/test_hydra_jobs.py::test_a_killed_host_is_gone_on_without",
    "MPIJob v1, `kubectl exec`": "examples/test_mpi_manifests.py::test_mpijob_v1_loses_a_whole_pod_that_is_made_anew",
    "horovodrun on a fixed list of hosts": "frameworks/test_horovod_jobs.py::test_a_static_job_waits_for_a_killed_host_and_starts_again",
    "horovodrun with a discovery script": "frameworks/test_horovod_jobs.py::test_an_elastic_job_goes_on_without_a_killed_host_and_grows_by_new_ones_until_it_is_stopped",
    "JobSet": "rehearsal/test_plain_jobs.py::test_a_jobset_whose_worker_is_killed_recovers_in_place",
    "JobSet that restarts in place": _IN_PLACE,
    "Indexed Job": "rehearsal/test_plain_jobs.py::test_an_indexed_job_whose_pod_is_killed_gets_it_back",
    "Indexed Job with `restartPolicyRules`": _IN_PLACE,
    "LeaderWorkerSet": f"{_PLATFORMS}[leaderworkerset]",
    "Volcano, plug-in `svc`": f"{_PLATFORMS}[volcano]",
    "Slurm": f"{_PLATFORMS}[slurm]",
    "SkyPilot": f"{_PLATFORMS}[skypilot]",
    "dstack": f"{_PLATFORMS}[dstack]",
    "SageMaker": f"{_PLATFORMS}[sagemaker]",
    "Azure ML": f"{_PLATFORMS}[azureml]",
    "Vertex AI": f"{_PLATFORMS}[vertex_ai]",
    "a script that calls torchrun": _SCRIPTS,
    "a login shell": "cli/test_shims.py::test_a_login_shell_keeps_its_profile_and_the_launcher",
    "a shell that an SDK writes": "cli/test_shims.py::test_what_an_sdk_writes_recovers_in_place_from_a_killed_worker",
    "`uv run`, `conda run`, `poetry run`": "cli/test_shims.py::test_a_wrapper_with_the_launchers_own_python_recovers_in_place",
    "the image's own torchrun": "survival/test_torchrun_engine.py::test_a_fault_restarts_no_other_pod",
    "plain torchrun with our rendezvous": "pytorch/torchrun/test_plain_torchrun.py::test_a_worker_killed_on_the_other_node_is_started_again_with_all_others",
    "a function, from Python": "pytorch/launch/test_launch.py::test_failures_are_told_and_a_crash_is_repaired_when_asked",
    "a laptop": "rehearsal/test_torch_faults.py::test_a_killed_worker_costs_a_few_steps_and_no_pod",
}
_ROW = re.compile(r"^\| (.+?) \| .+ \|$", re.MULTILINE)


def rows() -> list[str]:
    """How jobs start, as the page has it."""
    return [row for row in _ROW.findall(PAGE.read_text(encoding="utf-8")) if row != "how it starts"]


def test_each_row_has_a_test_and_no_test_lacks_its_row() -> None:
    assert rows() == [*TESTS]
    assert len(TESTS) >= 30


@pytest.mark.parametrize("test", sorted({*TESTS.values()}))
def test_the_test_of_a_row_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    text = (ROOT / "tests" / path).read_text(encoding="utf-8")
    function, _, case = name.partition("[")
    names = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    assert function in names
    assert not case or case.rstrip("]") in names, "a case is called as the function that makes its variables"
