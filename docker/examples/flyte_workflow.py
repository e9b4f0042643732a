"""Flyte tasks whose workers the launcher starts and restarts: on one node, and on the pods of a PyTorchJob.

`fit` comes from a module of yours, train.py. The image's ENTRYPOINT is `trainer-launch run --`.
"""

from flytekit import PodTemplate, task  # type: ignore[import-not-found]
from flytekit.core.base_task import IgnoreOutputs  # type: ignore[import-not-found]
from flytekitplugins.kfpytorch import Master, PyTorch, RestartPolicy, Worker  # type: ignore[import-not-found]
from kubernetes.client import (  # type: ignore[import-not-found]
    V1Container,
    V1EmptyDirVolumeSource,
    V1PodSpec,
    V1Volume,
    V1VolumeMount,
)
from train import fit  # type: ignore[import-not-found]

from trainer_launch import Elastic, launch

SHM = V1Volume(name="shm", empty_dir=V1EmptyDirVolumeSource(medium="Memory", size_limit="8Gi"))
CHECK = V1Container(
    name="preflight", image="my-image", command=["trainer-launch", "preflight", "--level", "container"]
)
MAIN = V1Container(name="primary", volume_mounts=[V1VolumeMount(name="shm", mount_path="/dev/shm")])
POD = V1PodSpec(
    containers=[MAIN], init_containers=[CHECK], volumes=[SHM], termination_grace_period_seconds=60
)  # longer than the launcher's grace, 25 s


@task(container_image="my-image", pod_template=PodTemplate(pod_spec=POD, primary_container_name="primary"))
def on_one_node(lr: float) -> float:
    losses: dict[int, float] = launch(fit, Elastic(nnodes=1, nproc_per_node=2, max_restarts=3), lr)
    return losses[0]


# Each of the three pods calls `launch`; they meet at the master. Without a restart policy a lost pod stays lost.
AGAIN = RestartPolicy.FAILURE
JOB = PyTorch(master=Master(restart_policy=AGAIN), worker=Worker(replicas=2, restart_policy=AGAIN))


@task(container_image="my-image", task_config=JOB)
def on_three_nodes(lr: float) -> float:
    losses: dict[int, float] = launch(fit, Elastic(nproc_per_node=1, max_restarts=3), lr)
    if 0 not in losses:
        raise IgnoreOutputs  # all pods would upload to one place: only rank 0's pod does
    return losses[0]
