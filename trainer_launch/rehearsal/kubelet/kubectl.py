"""What a rehearsed pod finds as `kubectl`: `exec` into the other pods of its job, and nothing else.

Started by path with `-I -S`: `kubectl.py FOLDER [kubectl's arguments]`. FOLDER/POD/CONTAINER.json is there while
that container runs, and tells its variables and its folder; FOLDER/POD/default names the container that is meant
when none is. As with the real one the command has the container's environment, not the caller's, and outlives it.
"""

from __future__ import annotations

import getopt
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_KNOWN = "this rehearsal's kubectl knows only: kubectl exec POD [-c CONTAINER] [-n NAMESPACE] [-i] -- COMMAND"


def main(folder: str, words: Sequence[str]) -> int:
    """Run the command in the pod; its exit code. Raises SystemExit: with one sentence for what cannot be done."""
    pod, container, has_input, command = _parsed(list(words))
    told = _record(folder, pod, container)
    try:
        process = subprocess.Popen(
            [*told["enter"], *command],
            env=told["env"],
            cwd=told["cwd"],
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


def _parsed(words: list[str]) -> tuple[str, str, bool, list[str]]:
    """Pod, container, whether it reads our standard input, command."""
    if words[:1] != ["exec"]:
        sys.exit(f"{_KNOWN}; not: kubectl {' '.join(words)[:200]}")
    end = words.index("--") if "--" in words else len(words)
    typed, command = [word.removesuffix("=true") for word in words[1:end]], words[end + 1 :]
    try:
        pairs, pods = getopt.gnu_getopt(typed, "c:n:itq", ("container=", "namespace=", "stdin", "tty", "quiet"))
    except getopt.GetoptError as problem:
        sys.exit(f"{_KNOWN}; {problem}")
    if len(pods) != 1 or not command:
        sys.exit(f"{_KNOWN}; here is {'no command' if len(pods) == 1 else f'not one pod: {pods}'}")
    given = dict(pairs)
    container = given.get("-c", "").removeprefix("=") or given.get("--container", "")
    return pods[0].removeprefix("pod/"), container, "-i" in given or "--stdin" in given, command


def _record(folder: str, pod: str, container: str) -> dict[str, Any]:
    """Of the container: `env`, `cwd`, and `enter`, which comes before the command."""
    place = os.path.join(folder, os.path.basename(pod))
    try:
        if not os.path.basename(pod).strip("."):
            raise OSError
        with open(os.path.join(place, "default"), encoding="utf-8") as file:
            default = file.read()
    except OSError:
        sys.exit(f'Error from server (NotFound): pods "{pod}" not found')
    name = os.path.basename(container) or default
    try:
        with open(os.path.join(place, f"{name}.json"), encoding="utf-8") as file:
            told: dict[str, Any] = json.load(file)
            return told
    except OSError:
        sys.exit(f'error: unable to upgrade connection: container not found ("{name}")')


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
