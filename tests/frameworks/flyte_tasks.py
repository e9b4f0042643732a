"""Prints what flytekit would hand to Flyte: of the tasks in the module that is named, and of one with an MPIJob.

Run by the Python of the environment `flyte`; a line of JSON for each task: name, type, pod, container, custom.
"""

from __future__ import annotations

import importlib
import json
import sys

import flytekit  # type: ignore[import-not-found]
from flytekit.configuration import Image, ImageConfig, SerializationSettings  # type: ignore[import-not-found]
from flytekitplugins.kfmpi import Launcher, MPIJob, Worker  # type: ignore[import-not-found]

OURS = ["trainer-launch", "sshd"]


@flytekit.task(
    container_image="my-image",
    task_config=MPIJob(launcher=Launcher(replicas=1), worker=Worker(command=OURS, replicas=2)),
)
def over_mpi() -> int:
    return 1


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    image = ImageConfig(Image("default", "my-image", "1"))
    settings = SerializationSettings(image_config=image, project="p", domain="d", version="1")
    for task in (module.on_one_node, module.on_three_nodes, over_mpi):
        pod, container = task.get_k8s_pod(settings), task.get_container(settings)
        told = {
            "name": task.name.rpartition(".")[2],
            "type": task.task_type,
            "pod": pod.pod_spec if pod else None,
            "container": [container.command, container.args] if container else None,
            "custom": task.get_custom(settings),
        }
        print(json.dumps(told))


if __name__ == "__main__":
    main()
