"""`install-shims`: programs called torchrun, mpirun, … that start the real ones under the launcher.

For platforms whose SDK writes the command, such as `bash -c "… torchrun train.py"`: the image's ENTRYPOINT never
runs there, but the first torchrun in PATH does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_launch.commands.options import Parsed
from trainer_launch.contracts import rank_process
from trainer_launch.host import runtime_directory
from trainer_launch.model.errors import LaunchError, NotRunnableError, UsageError
from trainer_launch.observability import node_view
from trainer_launch.planning.wrappers import see_through

HELP = "install a torchrun, mpirun, … that use the launcher"
ABOUT = "For platforms whose SDK writes the command, so that the image's ENTRYPOINT never runs."
USAGE = "DIR"
EXAMPLES = """examples:
  trainer-launch install-shims /opt/shims     # then put it first: ENV PATH=/opt/shims:$PATH
  TRAINER_LAUNCH_SHIM=off torchrun train.py   # the real torchrun, unchanged
"""
NAMES = ("torchrun", "mpirun", "mpiexec", "horovodrun", "accelerate", "deepspeed")
SWITCH = "TRAINER_LAUNCH_SHIM"
_MARK = "# A shim of trainer-launch:"
# Not with -m: a job's working directory may have modules with the names of Python's own.
_CODE = "import sys; sys.path[:] = filter(None, sys.path); from trainer_launch{0} import {1}; {1}()"
_TEXT = f"""#!/bin/sh
{_MARK} {{name}} runs under the launcher. {SWITCH}=off runs the real one.
exec '{{python}}' -c '{_CODE.format(".commands.install_shims", "run_as_shim")}' {{name}} "$0" "$@"
"""
_QUESTIONS = frozenset({"-h", "--help", "-V", "--version", "--check-build", "-cb", "-info", "--info"})


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only `install-shims` knows."""
    parser.add_argument("directory", nargs="?", metavar="DIR", help=argparse.SUPPRESS)


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        UsageError: no directory was named, or it cannot be written, or has such a program that is no shim.
    """
    if parsed.flags["directory"] is None:
        raise UsageError("missing directory; as in: trainer-launch install-shims /opt/shims")
    folder = Path(parsed.flags["directory"]).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [name for name in NAMES if (folder / name).exists() and not _is_shim(folder / name)]
        if taken:
            raise UsageError(f"{folder} has a {taken[0]} that is no shim; name an empty directory")
        for name in NAMES:
            (folder / name).write_text(_TEXT.format(name=name, python=sys.executable.replace("'", "'\\''")))
            (folder / name).chmod(0o755)
    except OSError as problem:
        raise UsageError(f"cannot write shims to {folder}: {problem.strerror}") from None
    sys.stdout.write(f"{len(NAMES)} shims are in {folder}; put it first in PATH:\nexport PATH={folder}:$PATH\n")
    return 0


def _is_shim(path: Path) -> bool:
    try:
        return _MARK.encode() in path.read_bytes()[:200]
    except OSError:
        return False


# -- as a shim ---------------------------------------------------------------------------------


def decide(words: Sequence[str], env: Mapping[str, str], engine_above: str | None) -> tuple[str, ...] | None:
    """The command line of the launcher for these words; None: the program runs unchanged. Pure.

    A launcher above that only runs a script leaves the workers to us; one with another engine is theirs already.
    """
    if env.get(SWITCH, "") == "off" or engine_above not in (None, "plain") or rank_process.is_worker(env):
        return None
    if len(words) < 2 or not _QUESTIONS.isdisjoint(words[1:2]):
        return None
    if words[0] in ("accelerate", "deepspeed") and see_through(words).command == tuple(words):
        return None  # its options have no equivalent
    return ("run", "--", *words)


def _engine_above() -> str | None:
    """The engine of the launcher whose process tree this is in."""
    folder = os.environ.get(runtime_directory.VARIABLE)
    view = None if folder is None else node_view.read(folder)
    return None if view is None else view.engine


def _real(name: str, path: str) -> str:
    """The program that the shims stand in front of.

    Raises:
        NotRunnableError: there is none.
    """
    for folder in path.split(os.pathsep):
        found = shutil.which(name, path=folder) if folder else None
        if found is not None and not _is_shim(Path(found)):
            return found
    raise NotRunnableError(f"{name!r} was not found in PATH behind its shim; install it in the image", found=False)


def run_as_shim() -> None:
    """Become the launcher with the program, or the program itself; arguments: its name, the shim, its own."""
    name, shim, *words = sys.argv[1:]
    line = decide((name, *words), os.environ, _engine_above())
    folder = os.path.dirname(os.path.abspath(shim))
    # What runs below finds the real programs.
    kept = [one for one in os.environ.get("PATH", "").split(os.pathsep) if os.path.abspath(one or ".") != folder]
    env = {**os.environ, "PATH": os.pathsep.join(kept)}
    if line is not None:
        os.execve(sys.executable, [sys.executable, "-c", _CODE.format(".cli", "main"), *line], env)
    try:
        real = _real(name, env["PATH"])
    except LaunchError as problem:
        sys.stderr.write(f"trainer-launch: error: {problem}\n")
        sys.exit(problem.exit_code)
    os.execve(real, [real, *words], env)
