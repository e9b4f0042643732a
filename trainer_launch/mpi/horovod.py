"""horovodrun's command line, its variables, and what it says of the end of its job. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer_launch.model import Member, exit_codes, hostfile
from trainer_launch.mpi.mpirun_messages import Said
from trainer_launch.planning.horovodrun_options import HorovodCommand, render

# Without a cooldown Horovod never takes a host back that has failed once; it doubles from the first to the second.
COOLDOWN_S = ("2", "30")
_OURS = ("num_proc", "hosts", "hostfile", "host_discovery_script", "disable_cache", "slots", "ssh_port")
_THIS_PODS = ("HOSTNAME", "K_MPI_JOB_ROLE")  # of no meaning on other hosts
_SSH_FAILED = 255  # ssh's own code, and that of a program that says -1
_SIGNALLED = range(129, 193)  # as the shell has it
_MAX_CHARS = 400


def members_of(command: HorovodCommand, given: Sequence[Member], slots: int | None) -> tuple[Member, ...]:
    """The hosts of now, each with slots."""
    per_host = command.number("slots") or slots
    return tuple(replace(one, slots=one.slots or per_host or 1) for one in given)


def static(
    run: Sequence[str], command: HorovodCommand, members: Sequence[Member], number: int, nics: Sequence[str]
) -> tuple[str, ...]:
    """The command for these hosts: ours first, then what was typed."""
    ours = [f"--num-proc={number}", f"--hosts={hostfile.render_horovod(members)}", "--disable-cache"]
    return (*run, *ours, *_nics(command, nics), *render(command, without=_OURS), *command.program)


def elastic(
    run: Sequence[str], command: HorovodCommand, script: str, number: int, nics: Sequence[str]
) -> tuple[str, ...]:
    """The command that asks `script` for its hosts, each second.

    Horovod looks for a common interface by itself only where two hosts are there, so one is named.
    """
    ours = [f"--num-proc={number}", f"--host-discovery-script={script}", "--disable-cache"]
    if not command.has("min_num_proc"):
        ours.append(f"--min-num-proc={number}")
    if not command.has("cooldown_range"):
        ours += ["--blacklist-cooldown-range", *COOLDOWN_S]
    return (*run, *ours, *_nics(command, nics), *render(command, without=_OURS), *command.program)


def typed(command: HorovodCommand) -> tuple[str, ...]:
    """The command as it was typed, but for what we always say ourselves."""
    return (*render(command, without=("disable_cache",)), *command.program)


def _nics(command: HorovodCommand, nics: Sequence[str]) -> tuple[str, ...]:
    typed = command.has("nics") or command.has("nic")
    return () if typed or not nics else (f"--network-interfaces={','.join(nics)}",)


def slots(members: Sequence[Member]) -> str:
    """What a discovery script prints of these hosts."""
    return "".join(f"{one.host}:{one.slots or 1}\n" for one in members)


def env(given: Mapping[str, str], allowed: Sequence[str], bin_folder: str) -> dict[str, str]:
    """The variables of horovodrun, which hands all on in command lines: only `allowed` ones, and our ssh."""
    told = {name: given[name] for name in allowed if name in given and not _is_this_pods(name)}
    told["PATH"] = f"{bin_folder}:{given.get('PATH') or '/usr/bin:/bin'}"
    told["PYTHONUNBUFFERED"] = "1"  # so that what it says of its ranks is heard at once
    return told


def _is_this_pods(name: str) -> bool:
    return name in _THIS_PODS or name.startswith("TRAINER_LAUNCH_")


# -- what it says -----------------------------------------------------------------------------

_EXIT = re.compile(r"^Process (\d{1,6}) exit with status code (\d{1,3})\.")
_NAMED = re.compile(r"^Process name: (?:(?P<host>[^\s\[]{1,253})\[\d+\]|(?P<rank>\d{1,6}))\s*$")
_NO_SSH = re.compile(r"^ssh not successful for host (\S{1,253}):")
_TOO_LATE = re.compile(r"Timed out waiting for .{1,300}")
_GONE = re.compile(
    r"^\[(?P<rank>\d{1,6})\]<stderr>:(?:Timeout, server \S+ not responding|Connection to \S+ closed by remote host"
    r"|client_loop: send disconnect|Read from remote host \S+:|ssh: |Connection (?:closed|reset) by )"
)


def heard(said: Said, line: str, *, is_elastic: bool) -> Said:
    """Take one line of its output in; of an elastic job, which survives failures, the last one counts."""
    line = line[:_MAX_CHARS]
    gone = _GONE.search(line)
    if gone:
        return said if said.words else replace(said, unreached="", words=line.partition(":")[2].strip())
    found = _EXIT.search(line)
    if found:
        return _ended(said, int(found[1]), int(found[2]), is_elastic=is_elastic)
    found = _NAMED.search(line)
    if found and found["host"]:
        return replace(said, host=found["host"])
    found = _NO_SSH.search(line)
    if found:
        return said if said.words else replace(said, unreached=found[1], words="ssh is refused")
    found = None if line.startswith("[") else _TOO_LATE.search(line)
    if found and not said.words:
        return replace(said, unreached="", words=found[0])
    return said


def _ended(said: Said, rank: int, code: int, *, is_elastic: bool) -> Said:
    if exit_codes.failing(code) is None:
        return said  # Horovod says it of failures only: it is a rank's own line
    if code == _SSH_FAILED and said.words:
        return said  # it was not the rank
    if said.rank is not None and not is_elastic:
        return said  # the others are ended by horovodrun, because of the first
    if is_elastic and said.rank is not None and code in (_SSH_FAILED, 143):
        return said
    number = code - 128 if code in _SIGNALLED else None
    return replace(said, rank=rank, exit_code=None if number else code, signal=number, words="", unreached=None)
