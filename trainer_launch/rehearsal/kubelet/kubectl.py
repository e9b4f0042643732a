"""What a rehearsed pod finds as `kubectl`: `exec` into the other pods of its job, and nothing else.

Started by path with `-I -S`: `kubectl.py FOLDER [kubectl's arguments]`. FOLDER/POD/CONTAINER.json is there while
that container runs, and tells its variables and its folder; FOLDER/POD/default names the container that is meant
when none is. As with the real one the command has the container's environment, not the caller's, and outlives it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

_KNOWN = "this rehearsal's kubectl knows only: kubectl exec POD [-c CONTAINER] [-n NAMESPACE] [-i] -- COMMAND"
_WITH_VALUE = {"-c": "container", "--container": "container", "-n": "namespace", "--namespace": "namespace"}
_INPUT = ("-i", "--stdin", "-it", "-ti", "--stdin=true")
_WITHOUT = (*_INPUT, "-t", "--tty", "--tty=true", "-q", "--quiet")


class Told(NamedTuple):
    """What is known of a container."""

    env: dict[str, str]
    cwd: str | None
    enter: list[str]  # comes before the command


class RefusedError(Exception):
    """What cannot be done, as a sentence for people."""


def main(folder: str, words: Sequence[str]) -> int:
    """Run the command in the pod; its exit code."""
    try:
        pod, chosen, has_input, command = _parsed(words)
        told = _record(folder, pod, chosen)
    except RefusedError as refused:
        return _failed(str(refused), 1)
    try:
        process = subprocess.Popen(
            [*told.enter, *command],
            env=told.env,
            cwd=told.cwd,
            stdin=None if has_input else subprocess.DEVNULL,
            start_new_session=True,  # it outlives whoever asked for it, and ends with its pod
        )
    except OSError as problem:
        text = f'error: exec: "{command[0]}": {problem.strerror}'
        return _failed(text, 127 if isinstance(problem, FileNotFoundError) else 126)
    code = process.wait()
    code = 128 - code if code < 0 else code
    return _failed(f"command terminated with exit code {code}", code) if code else 0


def _failed(text: str, code: int) -> int:
    sys.stderr.write(f"{text}\n")
    return code


def _parsed(words: Sequence[str]) -> tuple[str, str, bool, list[str]]:
    """Pod, container, whether it reads our standard input, command."""
    rest = list(words)
    if rest[:1] != ["exec"]:
        raise RefusedError(f"{_KNOWN}; not: kubectl {' '.join(words)[:200]}")
    pod, given, has_input = "", {"container": ""}, False
    rest = rest[1:]
    while rest and rest[0] != "--":
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in _WITH_VALUE and (equals or rest):
            given[_WITH_VALUE[name]] = value if equals else rest.pop(0)
        elif word in _WITHOUT:
            has_input = has_input or word in _INPUT
        elif not word.startswith("-") and not pod:
            pod = word.removeprefix("pod/")
        else:
            raise RefusedError(f"{_KNOWN}; not {word!r}")
    command = rest[1:]
    if not pod or not command:
        raise RefusedError(f"{_KNOWN}; here is no {'command' if pod else 'pod'}")
    return pod, given["container"], has_input, command


def _record(folder: str, pod: str, container: str) -> Told:
    place = os.path.join(folder, os.path.basename(pod))
    try:
        if not os.path.basename(pod).strip("."):
            raise OSError
        with open(os.path.join(place, "default"), encoding="utf-8") as file:
            default = file.read()
    except OSError:
        raise RefusedError(f'Error from server (NotFound): pods "{pod}" not found') from None
    name = os.path.basename(container) or default
    try:
        with open(os.path.join(place, f"{name}.json"), encoding="utf-8") as file:
            return Told(**json.load(file))
    except OSError:
        raise RefusedError(f'error: unable to upgrade connection: container not found ("{name}")') from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
