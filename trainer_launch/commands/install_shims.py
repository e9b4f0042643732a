"""`install-shims`: programs called torchrun, mpirun, … that start the real ones under the launcher.

For platforms whose SDK writes the command, such as `bash -c "… torchrun train.py"`: the image's ENTRYPOINT never
runs there, but the first torchrun in PATH does.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_launch.commands.options import Parsed
from trainer_launch.contracts import flat_platforms, read_job
from trainer_launch.host import executables, runtime_directory
from trainer_launch.host.files import LiveFiles
from trainer_launch.model.errors import ContractError, LaunchError, NotRunnableError, UsageError
from trainer_launch.model.signal_policy import STOP_SIGNALS
from trainer_launch.observability import node_view
from trainer_launch.planning.command import MPI, SHIMS, CommandKind, parse_command
from trainer_launch.planning.reading import SHIM_SWITCH as SWITCH
from trainer_launch.planning.reading import is_our_python, live_pod, recognise, shims_are_off

NAMES = SHIMS
_FRONT_ENDS = ("accelerate", "fabric", "tune", "trl")
_MARK = "# A shim of trainer-launch:"
# Not with -m: a job's working directory may have modules with the names of Python's own.
_CODE = "import sys; sys.path[:] = filter(None, sys.path); {2}from trainer_launch{0} import {1}; {1}()"
# What PID 1 has no handler for is lost: a request to stop waits for the launcher, or for the program itself.
_BLOCK = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, (1, 2, 3, 15)); "
_TEXT = f"""#!/bin/sh
{_MARK} {{name}} runs under the launcher. {SWITCH}=off runs the real one.
exec '{{python}}' -c '{_CODE.format(".commands.install_shims", "run_as_shim", _BLOCK)}' {{name}} "$0" "$@"
"""
_QUESTIONS = frozenset({"-h", "--help", "-V", "--version", "--check-build", "-cb", "-info", "--info"})


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        UsageError: no directory was named, or it cannot be written, or has such a program that is no shim.
    """
    if not parsed.flags["directory"]:
        raise UsageError("missing directory; as in: trainer-launch install-shims /opt/shims")
    folder = Path(parsed.flags["directory"]).absolute()
    try:
        taken = [name for name in NAMES if (folder / name).exists() and not is_shim(folder / name)]
        if taken:
            raise UsageError(f"{folder} has a {taken[0]} that is not a shim; name an empty directory")
        write(folder)
    except OSError as problem:
        raise UsageError(f"cannot write shims to {folder}: {problem.strerror}") from None
    line = f"export PATH={shlex.quote(str(folder))}:$PATH"
    sys.stdout.write(f"{len(NAMES)} shims are in {folder}; put it first in PATH:\n{line}\n")
    return 0


def write(folder: Path) -> None:
    """Write all shims.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / name).write_text(_TEXT.format(name=name, python=sys.executable.replace("'", "'\\''")))
        (folder / name).chmod(0o755)


def is_shim(path: Path) -> bool:
    """Whether the file is a shim that this command has written."""
    return _MARK.encode() in (LiveFiles(200).read(str(path)) or b"")


def decide(words: Sequence[str], env: Mapping[str, str], engine_above: str | None) -> tuple[str, ...] | None:
    """The command line of the launcher for these words; None: the program runs unchanged. Pure.

    A launcher above that only runs a script leaves the workers to us; one with another engine is theirs already.
    """
    if shims_are_off(env) or engine_above not in (None, "plain") or flat_platforms.is_worker(env):
        return None
    if len(words) < 2 or not _QUESTIONS.isdisjoint(words[1:2]):
        return None
    if words[0] in _FRONT_ENDS and parse_command(words).kind is CommandKind.PROGRAM:
        return None  # accelerate config, tune download, tune run of a single process
    return ("run", "--", *words)


def _engine_above() -> str | None:
    folder = os.environ.get(runtime_directory.VARIABLE)
    view = None if folder is None else node_view.read(folder)
    return None if view is None else view.engine


def _real(name: str, path: str) -> str:
    """The program that the shims stand in front of.

    Raises:
        NotRunnableError: there is none.
    """
    for folder in path.split(os.pathsep):
        program = shutil.which(name, path=folder) if folder else None
        if program is not None and not is_shim(Path(program)):
            return program
    raise NotRunnableError(f"{name!r} was not found in PATH behind its shim; install it in the image", exists=False)


def _obstacle(words: Sequence[str], real: str | None, env: Mapping[str, str]) -> str | None:
    """Why the launcher cannot do what the real program does, and what to do; None: it can."""
    if words[0] in MPI:
        return None
    try:
        command = recognise(words, env.get("PATH"))
        if command.kind is CommandKind.PROGRAM:
            return "torchrun has no equivalent of its options, or the number of workers was not typed"
        options = {} if command.torchrun is None else command.torchrun.options
        # Only who says so trains alone: a pod that shows several nodes never does, so an error ends its job.
        if "standalone" in options or options.get("nnodes") in ("1", "1:1"):
            read_job(live_pod(words), env.get("TRAINER_LAUNCH_CONTRACT"))
    except (UsageError, ContractError) as problem:
        return str(problem)
    return _other_python(real, env)


def _other_python(real: str | None, env: Mapping[str, str]) -> str | None:
    """Why the launcher's Python may not have the torch of the real program."""
    own, path = importlib.util.find_spec("torch"), env.get("PATH")
    script = None if real is None else executables.interpreter(real, path)
    python = script if script and os.path.basename(script).startswith("python") else None
    advice = f"install trainer-launch with pip for {python or 'the Python of the workers'}, and the shims with that"
    if own is None or own.origin is None:
        return f"torch is not installed for the launcher's Python, {sys.executable}; {advice}"
    if real is None or (python is not None and is_our_python(python, path)):
        return None
    return f"{real} runs in another Python than the launcher, {sys.executable}; {advice}"


def _alone(words: Sequence[str], env: Mapping[str, str]) -> str:
    """An addition to a warning where the platform has several nodes, but not in variables that torchrun reads."""
    try:
        nodes = read_job(live_pod(words), env.get("TRAINER_LAUNCH_CONTRACT")).nodes
    except LaunchError:
        return ""
    if nodes is None or nodes.max == 1 or (words[0] == "torchrun" and "PET_NNODES" in env):
        return ""
    return f". Each of the {nodes} nodes trains alone unless {words[0]}'s own options name the others"


def run_as_shim() -> None:
    """Become the launcher with the program, or the program itself; arguments: its name, the shim, its own."""
    name, shim, *words = sys.argv[1:]
    line = decide((name, *words), os.environ, _engine_above())
    folder = os.path.dirname(os.path.abspath(shim))
    # What runs below finds the real programs.
    kept = [
        entry for entry in os.environ.get("PATH", "").split(os.pathsep) if os.path.abspath(entry or ".") != folder
    ]
    env = {**os.environ, "PATH": os.pathsep.join(kept)}
    real, missing = None, None
    try:
        real = _real(name, env["PATH"])
    except LaunchError as problem:
        missing = problem
    why = None if line is None else _obstacle((name, *words), real, env)
    if line is not None and why is None:
        os.execve(sys.executable, [sys.executable, "-c", _CODE.format(".cli", "main", ""), *line], env)
    if why is not None:
        lost = f"{name} runs without the launcher, so failed workers are not restarted in place"
        sys.stderr.write(f"trainer-launch: warning: {lost}: {why}{_alone((name, *words), env)}\n")
        sys.stderr.flush()
    if real is None:
        sys.stderr.write(f"trainer-launch: error: {missing}\n")
        sys.exit(1 if missing is None else missing.exit_code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    os.execve(real, [real, *words], env)
