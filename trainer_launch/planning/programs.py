"""Whether what a command needs is there and may be run, found before anything is started."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from trainer_launch.host.files import text
from trainer_launch.model import Plan
from trainer_launch.model.errors import NotRunnableError, UsageError
from trainer_launch.model.suggestions import did_you_mean, nearest
from trainer_launch.planning.command import Command, Kind, is_shell, parse_command, runs_one_program
from trainer_launch.planning.wrappers import Typed

_USUAL = ("python", "python3", "torchrun", "mpirun", "horovodrun", "accelerate", "deepspeed")
_SCRIPT_BYTES = 65_536  # of a script: launchers are looked for here
_SOURCE_BYTES = 1_048_576  # a longer program needs its .py
_ZIP = b"PK"
_SHEBANG = re.compile(rb"#!\s*(\S+)(?:[ \t]+(\S+))?")
_EXEC_LINE = re.compile(rb'exec\' "?([^"\n]+?)"? "\$0"')  # where a path is too long for a first line


def recognise(argv: Sequence[str], path: str | None) -> Command:
    """The command, where what no program is and Python can run counts as a script, as with torchrun and python.

    Raises:
        UsageError: missing command, or torchrun's options do not parse.
    """
    command = parse_command(argv)
    if command.kind is Kind.PROGRAM and _is_pythons(command.argv[0], path):
        return replace(command, kind=Kind.SCRIPT)
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


def defaults_file(typed: Typed, env: Mapping[str, str]) -> str | None:
    """The file that `accelerate launch` or `deepspeed` would take more options from, if it is there."""
    path = typed.defaults(env)
    return path if path is not None and os.path.isfile(path) else None


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
    elif command.kind is Kind.PROGRAM:
        _check_executable(command.argv[0], path)


def check_libc(maps: str = "/proc/self/maps") -> None:
    """See that the C library is one that torch is built for, by the files that a process has mapped.

    Raises:
        UsageError: it is musl.
    """
    musl = re.search(r"/\S*(?:/ld-musl-|/libc\.musl-|-musl/libc\.so)\S*", text(maps))
    if musl is not None:
        raise UsageError(
            f"the C library of this image is musl ({musl[0]}), as in Alpine, and PyTorch has no builds for it; "
            "use an image with glibc, such as debian:stable-slim or python:3.12-slim"
        )


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


def check_plug_in(plan: Plan) -> None:
    """See that torchrun will find our rendezvous, where it is told to use it.

    Raises:
        NotRunnableError: this package is importable, but not installed; or torch is too old.
    """
    if plan.engine != "torchrun" or plan.meeting is None:
        return
    from importlib import metadata  # not loaded by who does not need it

    if not metadata.entry_points(group="torchrun.handlers", name="trainer-launch"):
        raise NotRunnableError(
            f"torchrun cannot load the rendezvous backend trainer-launch: {sys.executable} has no entry point of "
            f"that name; install trainer-launch there with pip, or add --rendezvous torch",
            found=False,
        )
    if not loads_plug_ins():
        raise NotRunnableError(
            f"torchrun of torch {metadata.version('torch')} loads no rendezvous backends of other packages, and so "
            "not trainer-launch; leave --engine torchrun out, or add --rendezvous torch",
            found=False,
        )


def loads_plug_ins() -> bool:
    """Whether the installed torchrun looks for rendezvous backends of other packages: torch 2.4's does not."""
    spec = importlib.util.find_spec("torch")
    folders = (spec.submodule_search_locations if spec else None) or ()
    return any("torchrun.handlers" in text(f"{one}/distributed/elastic/rendezvous/registry.py") for one in folders)


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
        raise NotRunnableError(f"{name!r} is a directory without __main__.py; name a program in it", found=True)
    raise NotRunnableError(f"{name!r} is not executable for this user; run chmod +x on it", found=True)


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


# -- what only Python can run -----------------------------------------------------------------


def _is_pythons(name: str, path: str | None) -> bool:
    """Whether it is no program, but what `python` can run: a directory, an archive, a file of Python."""
    if shutil.which(name, path=path) is not None:
        return False
    if os.path.isdir(name):
        return os.path.isfile(os.path.join(name, "__main__.py"))
    try:
        with open(name, "rb") as file:
            start = file.read(_SOURCE_BYTES)
    except (OSError, ValueError):
        return False
    return _has_main(name) if start.startswith(_ZIP) else _is_source(start)


def _has_main(archive: str) -> bool:
    import zipfile  # only who runs an archive pays for it

    try:
        with zipfile.ZipFile(archive) as opened:
            return "__main__.py" in opened.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


def _is_source(text: bytes) -> bool:
    """Whether it is Python, so that a script of another language or a list of users is not taken for it."""
    first = text.partition(b"\n")[0]
    if first.startswith(b"#!"):
        return b"python" in first
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(text, "program", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return bool(text.strip())
