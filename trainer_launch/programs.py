"""Whether what a command needs is there and may be run, found before anything is started."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import sys

from trainer_launch.command import Command, Kind
from trainer_launch.errors import NotRunnableError

_USUAL = ("python", "python3", "torchrun", "mpirun", "horovodrun", "accelerate", "deepspeed")


def check(command: Command, path: str | None) -> None:
    """Find the program as a shell would, `path` being the container's PATH.

    Raises:
        NotRunnableError: nothing is there (127), or it is a folder or not executable (126).
    """
    if command.python:
        _check_executable(command.python[0], path)
    torchrun = command.torchrun
    if torchrun is not None:
        if "no_python" in torchrun.options:
            _check_executable(torchrun.program[0], path)
        elif "module" not in torchrun.options:
            _check_script(torchrun.program[0])
    elif command.kind is Kind.SCRIPT:
        _check_script(command.program[0])
    elif command.kind is Kind.PROGRAM:
        _check_executable(command.argv[0], path)


def check_torch(engine: str) -> None:
    """See that torch's engine has its torch, where it is the one that runs the command; nothing is imported.

    Raises:
        NotRunnableError: this Python has none.
    """
    if engine != "torchrun" or importlib.util.find_spec("torch") is not None:
        return
    raise NotRunnableError(
        f"torch is not installed for {sys.executable}, which is to start this job's workers; install torch there, "
        "install trainer-launch beside the torch that the image has, or run the program alone by --engine plain",
        found=False,
    )


def is_our_python(word: str, path: str | None) -> bool:
    """Whether an interpreter as typed is the very one that runs us, of the same virtual environment."""
    found = shutil.which(word, path=path)
    if found is None:
        return False
    same_folder = os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
    return same_folder and os.path.realpath(found) == os.path.realpath(sys.executable)


def _check_executable(name: str, path: str | None) -> None:
    if shutil.which(name, path=path) is not None:
        return
    if "/" not in name:
        near = "".join(f"is {one} meant? Or " for one in difflib.get_close_matches(name, _USUAL, n=1, cutoff=0.8))
        raise NotRunnableError(
            f"{name!r} was not found in PATH ({path or 'not set'}); {near}install it in the image, or give its "
            f"full path",
            found=False,
        )
    if not os.path.exists(name):
        raise NotRunnableError(f"{name!r} does not exist; check the path and the pod's volume mounts", found=False)
    why = "it is a folder" if os.path.isdir(name) else "it may not be executed by this user; chmod +x it"
    raise NotRunnableError(f"{name!r} cannot be run: {why}", found=True)


def _check_script(name: str) -> None:
    if not os.path.exists(name):
        where = f"looked in {os.getcwd()}" if not os.path.isabs(name) else "check the path and the volume mounts"
        near = _nearest(name)
        where += f"; is {near} meant?" if near else ""
        raise NotRunnableError(f"the script {name!r} does not exist; {where}", found=False)
    if not os.access(name, os.R_OK):
        raise NotRunnableError(f"the script {name!r} may not be read by this user; chmod it", found=True)


def _nearest(name: str) -> str | None:
    """The script in the same folder whose name is most like it."""
    folder, base = os.path.split(name)
    try:
        scripts = [entry for entry in os.listdir(folder or ".") if entry.endswith(".py")]
    except OSError:
        return None
    return next((os.path.join(folder, near) for near in difflib.get_close_matches(base, scripts, n=1)), None)
