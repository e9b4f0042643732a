"""A torch job's fork server, started before the pod has been read: torch and the launcher load side by side.

Its command line and environment are a guess from the launcher's own. `take` hands it over only where the plan asks
for exactly that server; else it is ended, and nothing has happened.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from trainer_launch.model.errors import LaunchError
from trainer_launch.planning.command import Command, Kind, parse_command
from trainer_launch.supervisor import inherited

if TYPE_CHECKING:
    from trainer_launch.pytorch.fork_server import ForkServer, ServerSettings

_log = logging.getLogger(__name__)
_PREFIX = "TRAINER_LAUNCH_"
_ENGINES = (None, "auto", "torch")
# Any of these variables says that the pod belongs to a torch job; so do those of the v1 operator together.
_OF_TORCH = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")
_OF_OPERATOR = {"MASTER_ADDR", "RANK", "WORLD_SIZE"}


class Guess(Struct, frozen=True):
    """What a server would be started with."""

    settings: ServerSettings
    env: Mapping[str, str]


_begun: list[tuple[Guess, ForkServer]] = []


def begin(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Start a server if this command line of `run` looks like a torch job's."""
    found = guess(argv, env, os.getcwd())
    if found is None:
        return
    from trainer_launch.pytorch.fork_server import ForkServer, ServerError

    inherited.hear(())  # workers get the signal mask and what is ignored from the server
    try:
        _begun.append((found, ForkServer(found.settings, found.env)))
    except ServerError:
        return  # the next one will say why


def take(settings: ServerSettings, env: Mapping[str, str]) -> ForkServer | None:
    """The server that was begun, if it is what these ask for."""
    from trainer_launch.pytorch.load_time_variables import changed_before_exec

    if not _begun or _begun[0][0].settings != settings or changed_before_exec(_begun[0][0].env, env):
        end()
        return None
    _log.debug("the fork server was started before the plan was made")
    return _begun.pop()[1]


def end() -> None:
    """End the server that nobody has taken."""
    while _begun:
        server = _begun.pop()[1]
        server.close()
        server.popen.wait()


# -- the guess --------------------------------------------------------------------------------


def guess(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Guess | None:
    """What the plan of such a command line would ask for; None where it may be no torch job's. Pure."""
    own, rest = _split(argv)
    if rest is None or _value(own, env, "engine") not in _ENGINES:
        return None
    try:
        command = parse_command(rest)
    except LaunchError:
        return None
    program, is_module = _program(command)
    workers = _workers(own, env, command)
    if program is None or _value(own, env, "start_method") == "exec" or not _is_torchs(own, env, command):
        return None
    from trainer_launch.pytorch.fork_server import ServerSettings  # programs of no torch job do without

    settings = ServerSettings(
        python=sys.executable,
        script=None if is_module else program,
        module=program if is_module else None,
        preload=tuple(name.strip() for name in (_value(own, env, "preload") or "").split(",") if name.strip()),
        cwd=cwd,
    )
    threads = {} if workers == "1" else {"OMP_NUM_THREADS": "1"}
    return Guess(settings, {**threads, **env})


def _split(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """The launcher's own words, and the command's; without `--` a command is seen only at the beginning."""
    if "--" in argv:
        at = argv.index("--")
        return argv[:at], argv[at + 1 :]
    return ((), argv) if argv and not argv[0].startswith("-") else (argv, None)


def _value(own: Sequence[str], env: Mapping[str, str], name: str) -> str | None:
    flag = "--" + name.replace("_", "-")
    said = env.get(_PREFIX + name.upper()) or None
    for at, word in enumerate(own):
        if word == flag and at + 1 < len(own):
            said = own[at + 1]
        elif word.startswith(flag + "="):
            said = word.partition("=")[2]
    return said


def _program(command: Command) -> tuple[str | None, bool]:
    """The script or module, and whether it is a module; None for what is not forked."""
    if len(command.python) > 1:
        return None, False
    typed = command.torchrun
    words, options = (typed.program, typed.options) if typed is not None else (command.program, {})
    if not {"no_python", "run_path"}.isdisjoint(options) or not words:
        return None, False
    is_module = command.kind is Kind.MODULE or "module" in options
    return (words[0] if is_module or words[0].endswith(".py") else None), is_module


def _workers(own: Sequence[str], env: Mapping[str, str], command: Command) -> str:
    typed = command.torchrun.options.get("nproc_per_node") if command.torchrun is not None else None
    return _value(own, env, "nproc_per_node") or typed or env.get("PET_NPROC_PER_NODE") or "1"


def _is_torchs(own: Sequence[str], env: Mapping[str, str], command: Command) -> bool:
    """Whether something speaks of torch's workers: programs of other frameworks are not kept from their CPUs."""
    asked = (_value(own, env, name) for name in ("nodes", "nproc_per_node"))
    is_told = not env.keys().isdisjoint(_OF_TORCH) or env.keys() >= _OF_OPERATOR
    return is_told or command.torchrun is not None or any(asked)
