"""Pods as the snapshots that `explain --pod` reads, one for each container, and the files that hold them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.model import Json
from trainer_launch.model.redaction import REDACTED
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod


def rendered(pods: tuple[Pod, ...]) -> dict[str, Json]:
    """File name -> content: `<pod>.json` for the container that counts, `<pod>.<container>.json` for others."""
    made: dict[str, Json] = {}
    for pod in pods:
        for container in (*pod.init, *pod.containers):
            is_main = container is pod.main
            made[f"{pod.name}.json" if is_main else f"{pod.name}.{container.name}.json"] = snapshot(pod, container)
    return made


def snapshot(pod: Pod, container: Container) -> dict[str, Json]:
    """What one container sees; without keys, Secrets, and what the platform writes itself."""

    def shown(text: str) -> str:
        return REDACTED if text in container.hidden else text

    return {
        "env": {name: shown(value) for name, value in container.env.items()},
        "files": {path: REDACTED if file.is_secret else file.text for path, file in container.files.items()},
        "hostname": pod.name,
        "namespace": pod.namespace,
        "command": [shown(word) for word in container.command],
        "args": [shown(word) for word in container.args],
        "pod": _about(pod, container),
    }


def _about(pod: Pod, container: Container) -> Mapping[str, Json]:
    draft = pod.draft
    return {
        "role": draft.role,
        "container": container.name,
        "init": container in pod.init,
        "restart_policy": draft.restart,
        "labels": {**draft.template.labels, **draft.labels},
        "modes": {path: f"{file.mode:04o}" for path, file in container.files.items()},
    }
