"""Which programs a manifest starts, and which of them the images that it names have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.kubernetes import published
from trainer_launch.planning import mpi_options

ENTRYPOINT = ("trainer-launch", "run", "--")  # of docker/Dockerfile
# On Debian's Python, which has no `python`. tests/containers/test_image.py looks into the images themselves.
LAUNCHER = frozenset(("trainer-launch", "python3", "sh", "sleep"))
MPI = LAUNCHER | {"mpirun", "ssh", "sshd"}
IMAGES: Mapping[str, frozenset[str]] = {
    "trainer-launch/torch": LAUNCHER,
    "trainer-launch/tensorflow": LAUNCHER,
    "trainer-launch/mpi": MPI,
    "my-training-image": MPI | {"horovodrun"},  # the reader's own, with the example's framework
}


def missing(document: Mapping[str, Any]) -> Iterator[str]:
    """What a document starts that its image lacks."""
    for pod in published.pods(document):
        for container in pod.containers:
            yield from _missing(container["image"], container.get("command"), container.get("args", ()))
    trainer = document.get("spec", {}).get("trainer", {})
    if "args" in trainer or "command" in trainer:
        runtime = _runtime(document["spec"]["runtimeRef"]["name"])
        yield from _missing(runtime["image"], trainer.get("command") or runtime.get("command"), trainer["args"])


def _missing(image: str, command: Sequence[str] | None, args: Sequence[str]) -> Iterator[str]:
    words = (*(command or ENTRYPOINT), *args)
    yield from (f"{image} has no {one}" for one in started(words) if one not in IMAGES[image])


def _runtime(name: str) -> Mapping[str, Any]:
    """The last container of a runtime: the trainer's, or the launcher's of MPI."""
    found = [one for path in published.ALL for one in published.documents(path) if one["metadata"]["name"] == name]
    last = [container for one in found for pod in published.pods(one) for container in pod.spec["containers"]]
    runtime: Mapping[str, Any] = last[-1]
    return runtime


def started(words: Sequence[str]) -> Iterator[str]:
    """The programs of a command line, one inside the other; a script of Python is the launcher's to start."""
    if not words or words[0].endswith(".py"):
        return
    yield words[0]
    if words[0] == "trainer-launch":
        if "sshd" in words[1:2]:
            yield "sshd"
        yield from started(words[words.index("--") + 1 :] if "--" in words else ())
    elif mpi_options.is_mpirun(words[0]) or words[0] == "horovodrun":
        yield from started(mpi_options.parse(words).program)
