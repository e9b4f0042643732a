"""Whether what a command needs is there and may be run, found before anything is started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from trainer_launch.model.errors import NotRunnableError
from trainer_launch.model.suggestions import did_you_mean, nearest
from trainer_launch.planning.command import Command, Kind, is_shell, parse_command, runs_one_program

_USUAL = ("python", "python3", "torchrun", "mpirun", "horovodrun", "accelerate", "deepspeed")
_SCRIPT_BYTES = 65_536  # of a script: launchers are looked for here
_HOSTFILE = "/job/hostfile"  # from which `deepspeed` takes hosts that nobody typed
_SHEBANG = re.compile(rb"#!\s*(\S+)(?:[ \t]+(\S+))?")
_EXEC_LINE = re.compile(rb'exec\' "?([^"\n]+?)"? "\$0"')  # where a path is too long for a first line


def recognise(argv: Sequence[str], path: str | None) -> Command:
    """The command, with the script that its shell runs.

    Raises:
        UsageError: missing command, or torchrun's options do not parse.
    """
    command = parse_command(argv)
    chooses_hosts = command.is_deepspeed and os.path.isfile(_HOSTFILE)
    if chooses_hosts or (command.kind is Kind.FRONT_END and not _is_pythons(command, path)):
        command = Command(argv=command.argv, kind=Kind.PROGRAM, program=command.argv)
    return replace(command, shell=_shells_script(command.argv, path)) if command.kind is Kind.PROGRAM else command


def interpreter(program: str, path: str | None) -> str | None:
    """The program that a script's first line names; None: it is no script."""
    try:
        with open(program, "rb") as file:
            start = file.read(_SCRIPT_BYTES)
    except (OSError, ValueError):
        return None
    first, long = _SHEBANG.match(start), _EXEC_LINE.search(start)
    if first is None:
        return None
    words = [os.fsdecode(word) for word in first.groups() if word]
    if long is not None:
        return os.fsdecode(long[1])
    return shutil.which(words[1], path=path) if words[0].endswith("/env") and len(words) > 1 else words[0]


def _shells_script(argv: Sequence[str], path: str | None) -> str | None:
    """The script in a command that a shell runs; "": a shell without one; None: there is no shell."""
    shell, wrapped = None, runs_one_program(argv)
    for word in argv:
        found = shutil.which(word, path=path) or word
        if is_shell(word):
            shell = ""
        elif shell == "" and word.startswith("-") and not word.endswith("c"):
            continue
        elif os.path.isfile(found) and (shell == "" or is_shell(interpreter(found, path) or "")):
            with contextlib.suppress(OSError), open(found, encoding="utf-8", errors="replace") as file:
                shell = file.read(_SCRIPT_BYTES)
            break
        elif shell == "" or not wrapped:
            break
    return shell


def _is_pythons(front_end: Command, path: str | None) -> bool:
    """Whether Python runs a front end; one that is not installed is refused later."""
    program = shutil.which(front_end.argv[0], path=path)
    is_program = not front_end.python and front_end.argv[0] != "-m" and program is not None
    return not is_program or "python" in os.path.basename(interpreter(program or "", path) or "")


def front_end(command: Command | None, path: str | None) -> tuple[str, str]:
    """The Python that runs a front end, and the path of its program; without one empty."""
    if command is None or command.kind is not Kind.FRONT_END:
        return "", ""
    program = shutil.which(command.argv[0], path=path) or command.argv[0]
    return interpreter(program, path) or sys.executable, program


def check(command: Command, path: str | None) -> None:
    """Find the program as a shell would, `path` being the container's PATH.

    Raises:
        NotRunnableError: nothing is there (127), or it is a directory or not executable (126).
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
    elif command.kind is Kind.PROGRAM or (command.kind is Kind.FRONT_END and command.argv[0] != "-m"):
        _check_executable(command.argv[0], path)


def check_torch(engine: str) -> None:
    """See that torch's engine has its torch, where it is the one that runs the command; nothing is imported.

    Raises:
        NotRunnableError: this Python has none.
    """
    if engine not in ("torch", "torchrun") or importlib.util.find_spec("torch") is not None:
        return
    raise NotRunnableError(
        f"torch is not installed for {sys.executable}, which starts this job's workers; install torch there, "
        "or install trainer-launch beside the image's torch, or add --engine plain to run the program as it is",
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
        here = f"the working directory has it: write ./{name}" if os.path.isfile(name) else ""
        usual = did_you_mean(name, (one for one in _USUAL if shutil.which(one, path=path)))
        raise NotRunnableError(
            f"{name!r} was not found in PATH ({path or 'not set'}); "
            f"{here or usual or 'install it in the image, or give its full path'}",
            found=False,
        )
    if not os.path.exists(name):
        raise NotRunnableError(f"{name!r} does not exist; check the path and the pod's volume mounts", found=False)
    if os.path.isdir(name):
        raise NotRunnableError(
            f"{name!r} is a directory; name a program in it, or write: python {name}", found=True
        )
    raise NotRunnableError(
        f"{name!r} is not executable for this user; run chmod +x on it, or write: python {name}", found=True
    )


def _check_script(name: str) -> None:
    if not os.path.exists(name):
        where = f"looked in {os.getcwd()}" if not os.path.isabs(name) else "check the pod's volume mounts"
        raise NotRunnableError(f"the script {name!r} does not exist; {_near_script(name) or where}", found=False)
    if not os.access(name, os.R_OK):
        raise NotRunnableError(f"the script {name!r} is not readable for this user; run chmod +r on it", found=True)


def _near_script(name: str) -> str:
    """The script in the same directory that was probably meant."""
    folder, base = os.path.split(name)
    try:
        scripts = {entry.removesuffix(".py"): entry for entry in os.listdir(folder or ".") if entry.endswith(".py")}
    except OSError:
        return ""
    near = nearest(base.removesuffix(".py"), scripts)
    return f"did you mean {os.path.join(folder, scripts[near])}?" if near else ""
