"""A PyTorchJob of Workers alone on one machine: told where to meet, which on a cluster its pods' names tell. Pure.

The operator names no master in such a job. A launcher goes to `JOB-worker-0` then, which only a cluster
knows.
"""

from __future__ import annotations

from dataclasses import replace

from trainer_launch.rehearsal.controllers.pod_values import Container, Pod

ADDRESS, PORT = "TRAINER_LAUNCH_MASTER_ADDR", "TRAINER_LAUNCH_MASTER_PORT"
_PORT = "29500"  # any: the rehearsal puts a free one in its place
_TOLD = ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", ADDRESS)


def on_loopback(pod: Pod, first: str) -> Pod:
    """The pod whose launchers meet at `first`, a pod's name, where neither the operator nor the job says where."""
    return replace(pod, containers=tuple(_changed(one, first) for one in pod.containers))


def _changed(container: Container, first: str) -> Container:
    if "PET_NNODES" not in container.env or any(name in container.env for name in _TOLD):
        return container
    return replace(container, env={**container.env, ADDRESS: first, PORT: _PORT})
