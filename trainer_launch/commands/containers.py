"""A container on this machine: the words that start it, the programs and CPUs that it finds."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from trainer_launch import programs
from trainer_launch.command import parse_command
from trainer_launch.errors import NotRunnableError, UsageError
from trainer_launch.grammar import MAX_COUNT, parse_number
from trainer_launch.manifest.flags import RUN
from trainer_launch.manifest.values import Container, Pod
from trainer_launch.model import Process

OURS = "trainer-launch"


def argv_of(container: Container) -> tuple[str, ...]:
    """As the kubelet has it; without a command the image's ENTRYPOINT is taken to be the launcher."""
    words = (*container.command, *container.args)
    if not container.command:
        words = words if words[:1] == (OURS,) else (OURS, "run", "--", *words)
    if Path(words[0]).name == OURS:
        return (sys.executable, "-c", RUN, *words[1:])
    return words


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
    """Another command in the place of the one of the container that counts."""
    changed = tuple(
        replace(one, command=words, args=()) if one.name == pod.draft.main else one for one in pod.containers
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


def check(pod: Pod, container: Container, process: Process, scratch: str) -> None:
    """Find the program of a container.

    Raises:
        UsageError: it is not there.
    """
    command = parse_command(process.argv)
    if any(word.startswith(f"{scratch}/") for word in (process.argv[0], *command.program[:1])):
        return  # of a volume, which is filled when the pod begins
    try:
        programs.check(command, process.env.get("PATH"))
    except NotRunnableError as problem:
        found = problem.exit_code == 126
        text = f"{problem} (container {container.name} of {pod.name}; --command runs another program here)"
        raise NotRunnableError(text, found=found) from None
