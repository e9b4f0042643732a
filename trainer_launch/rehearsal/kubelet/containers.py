"""A container on this machine: the words that start it, the programs and CPUs that it finds."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from trainer_launch.host import gpu
from trainer_launch.model import Process
from trainer_launch.model.errors import NotRunnableError, UsageError
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.planning import programs
from trainer_launch.planning.command import Kind, parse_command
from trainer_launch.rehearsal.controllers.flags import RUN
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod

OURS = "trainer-launch"
_log = logging.getLogger(__name__)


def argv_of(container: Container) -> tuple[str, ...]:
    """As the kubelet has it; without a command the image's ENTRYPOINT is taken to be the launcher."""
    words = (*container.command, *container.args)
    if not container.command:
        words = words if words[:1] == (OURS,) else (OURS, "run", "--", *words)
    if Path(words[0]).name == OURS:
        return (sys.executable, "-c", RUN, *words[1:])
    return words


def program_of(container: Container) -> tuple[str, ...]:
    """What runs in the container, behind our launcher if it starts with that; () where only the launcher knows."""
    words = (*container.command, *container.args)
    if container.command and Path(words[0]).name != OURS:
        return words
    if not container.command and words[:1] != (OURS,):
        return words
    return words[words.index("--") + 1 :] if words[1:2] == ("run",) and "--" in words else ()


def home_of(container: Container, folders: Iterable[str]) -> str | None:
    """The folder that it runs in, None for this one; `folders` are those of the manifests."""
    if container.workdir and Path(container.workdir).is_dir():
        return container.workdir
    beside = _beside(container, folders)
    return None if beside is None else beside[0]


def _beside(container: Container, folders: Iterable[str]) -> tuple[str, str] | None:
    """One of these folders, and a file that the command names and that lies there but not here."""
    words = (name for word in program_of(container) for name in word.split())
    missing = [name for name in words if "." in name and not os.path.isabs(name) and not os.path.exists(name)]
    found = ((folder, name) for folder in folders for name in missing if os.path.isfile(os.path.join(folder, name)))
    return next(found, None)


def words_of(command: str) -> tuple[str, ...]:
    """--command as words.

    Raises:
        UsageError: it cannot be split, or there are none.
    """
    try:
        words = tuple(shlex.split(command))
    except ValueError as problem:
        raise UsageError(f"--command {command[:60]!r} cannot be split into words: {problem}") from None
    if not words:
        raise UsageError("--command is empty; give the program and its arguments in one text")
    return words


def with_command(pod: Pod, words: tuple[str, ...]) -> Pod:
    """Another command for the container that counts; the launcher runs a script or a module."""
    is_pythons = parse_command(words).is_worker and not parse_command(words).python
    command, args = ((), words) if is_pythons else (words, ())
    changed = tuple(
        replace(one, command=command, args=args) if one.name == pod.draft.main else one for one in pod.containers
    )
    return replace(pod, containers=changed)


def threads(pods: tuple[Pod, ...]) -> int:
    """A pod has CPUs of its own; here all share them, and threads that wait by spinning starve others."""
    counts = (pod.main.env.get("PET_NPROC_PER_NODE", "1") for pod in pods)
    numbers = (parse_number(text, 0, MAX_COUNT) for text in counts)
    workers = sum(1 if number is None else min(number, 4096) for number in numbers)
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def image_path() -> str:
    """The folder of our own Python first, as in an image that this package is installed in."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def check(pod: Pod, container: Container, process: Process, scratch: str, folders: Iterable[str]) -> None:
    """Find the program of a container, which is given as this machine has it.

    Raises:
        UsageError: it is not there.
    """
    beside = _beside(container, folders)
    if beside is not None and beside[0] == process.cwd:
        _log.warning(
            "%s is not in this directory; the container %s runs in %s", beside[1], container.name, beside[0]
        )
    words = program_of(container)
    is_ours = process.argv[0] == sys.executable
    if is_ours or "torchrun" in words:
        _check_gpus(process)
    may_be_made = is_ours and pod.init  # by an init container
    if process.cwd is not None or not words or may_be_made:
        return
    path = process.env.get("PATH")
    command = programs.recognise(words, path) if is_ours else parse_command(words)
    if any(word.startswith(f"{scratch}/") for word in (words[0], *command.program[:1])):
        return  # of a volume, which is filled when the pod begins
    try:
        if command.kind is Kind.SCRIPT and not command.python and not is_ours:
            _check_itself(words[0], path)
        programs.check(command, path)
    except NotRunnableError as problem:
        found = problem.exit_code == 126
        text = f"container {container.name} of {pod.name}: {problem} (--command runs another program here)"
        raise NotRunnableError(text, found=found) from None


def _check_itself(script: str, path: str | None) -> None:
    if shutil.which(script, path=path) is None:
        raise NotRunnableError(
            f"{script!r} is not an executable in PATH; start it with 'python {script}' "
            f"or 'trainer-launch run -- {script}'",
            found=os.path.exists(script),
        )


def _check_gpus(process: Process) -> None:
    """As many workers as GPUs cannot be where there is none; seven tries would each say so."""
    asks = process.env.get("PET_NPROC_PER_NODE") == "gpu"
    gpus = gpu.count(process.env) if asks else None
    if gpus is not None and not gpus.count:
        raise UsageError(
            f"PET_NPROC_PER_NODE is gpu, but this machine has no GPU ({gpus.reason}); "
            "add --nproc-per-node 1 to rehearse with one worker per node"
        )
