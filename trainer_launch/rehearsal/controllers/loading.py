"""Manifests from files to a job, and `--render`: its pods as snapshots in a folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_launch.model import Json
from trainer_launch.model.errors import UsageError
from trainer_launch.model.redaction import REDACTED
from trainer_launch.model.units import counted
from trainer_launch.rehearsal.controllers.documents import MAX_BYTES, read_documents
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod, Workload
from trainer_launch.rehearsal.controllers.pods import pods

MAX_FILES = 16
_log = logging.getLogger(__name__)


def read(paths: Sequence[str]) -> tuple[Field, ...]:
    """What these files hold: a job, with all that it refers to.

    Raises:
        UsageError: a file cannot be read, or what is in it does not fit.
    """
    if len(paths) > MAX_FILES:
        raise UsageError(f"-f is given {len(paths)} times; expected at most {MAX_FILES} files")
    documents: list[Field] = []
    for path in paths:
        documents += read_documents(text_of(path, "-f"), path)
    return tuple(documents)


def tell_ignored(workload: Workload) -> None:
    """Say once what of the job this machine leaves out, and what is odd about it."""
    for sentence in workload.odd:
        _log.warning("%s", sentence)
    if workload.ignored:
        _log.warning("ignored here: %s", ", ".join(workload.ignored))


def render(workload: Workload, folder: str) -> str:
    """Write a snapshot of each container of each pod; return what to print.

    Raises:
        UsageError: the folder cannot be written, or holds something already.
    """
    made = rendered(pods(workload))
    place = Path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if any(place.iterdir()):
            raise UsageError(f"--render {folder} is not empty; expected a new directory")
        for name, snapshot in made.items():
            (place / name).write_text(json.dumps(snapshot, indent=2) + "\n", encoding="utf-8")
    except OSError as problem:
        raise UsageError(f"--render {folder} cannot be written: {problem.strerror}") from None
    listed = "".join(f"  {place / name}\n" for name in made)
    count = len(workload.drafts)
    return (
        f"{workload.kind} {workload.name}: {counted(count, 'pod')}, written to\n{listed}"
        f"Read one with: trainer-launch explain --pod {place / next(iter(made))}\n"
    )


def text_of(path: str, flag: str) -> str:
    """A file that a flag names, up to a little more than it may have.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as problem:
        raise UsageError(f"{flag} {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{flag} {path} is not a UTF-8 text file") from None


# -- snapshots ---------------------------------------------------------------------------------


def rendered(pods: tuple[Pod, ...]) -> dict[str, Json]:
    """File name -> content: `<pod>.json` for the container that counts, `<pod>.<container>.json` for others."""
    made: dict[str, Json] = {}
    for pod in pods:
        for container in (*pod.init, *pod.containers):
            is_main = container is pod.main
            made[f"{pod.name}.json" if is_main else f"{pod.name}.{container.name}.json"] = snapshot_of(
                pod, container
            )
    return made


def snapshot_of(pod: Pod, container: Container) -> dict[str, Json]:
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
