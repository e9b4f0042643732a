"""What runs horovodrun: waits for hosts, starts it, hears how it ends, starts it again (`job_state_machine`).

In an elastic job Horovod itself adds and drops hosts while it trains. It asks a script of ours each second, which
prints the list that is kept here: of the hosts that the platform or the user's own script names, those that are
reached. A host of which a rank's session has ended has to show again that it is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from trainer_launch.host import files, logs, network, process_tree, runtime_directory
from trainer_launch.model import Member, exit_codes, hostfile
from trainer_launch.model.signal_policy import name_of
from trainer_launch.model.units import counted
from trainer_launch.mpi import agent, horovod_ssh, mpirun_command
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi.agent import Agent, Ended, Program
from trainer_launch.mpi.mpirun_messages import Said
from trainer_launch.planning.mpi import JobSettings, Spec
from trainer_launch.planning.mpi_options import HorovodCommand, Typed, render, split_command

_LOOK_S = 0.5  # between two looks at the sessions


def main(spec: Spec, command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run horovodrun, to its end."""
    agent.main(spec, command, env, HorovodAgent)


class HorovodAgent(Agent):
    """The agent of mpirun, with another program to run."""

    def __init__(self, spec: Spec, command: Sequence[str], env: dict[str, str]) -> None:
        self._horovod = split_command(command[1:])
        self._run_word = command[0]
        self._is_elastic = self._horovod.is_elastic
        super().__init__(spec, command, env)
        self._env = env
        self._number = self._horovod.number("num_proc")
        self._settings = self._elastic_settings() if self._is_elastic else self._settings
        self._folder = Path(spec.scratch, f"{runtime_directory.HOROVOD}-{os.getpid()}")
        self._sessions = Sessions(str(self._folder), self._ssh(), sys.executable, spec.settings.grace_s)
        self._ready_file = self._folder / "ready"
        self._script = self._folder / "discover"
        self._script.write_text(f"#!/bin/sh\nexec cat '{self._ready_file}'\n", encoding="utf-8")
        self._script.chmod(0o700)
        self._look_at_s = time.monotonic()
        self._offered = ""

    def _parsed(self, command: Sequence[str]) -> Typed:
        words = self._horovod
        return Typed(
            mpirun=command[0], number=words.number("num_proc"), hosts=words.value("hosts"), program=words.program
        )

    def _ssh(self) -> tuple[str, ...]:
        client = self._hosts.client
        if client is None:
            found = shutil.which("ssh", path=self._env.get("PATH"))
            port = ("-p", str(self._spec.ssh_port)) if self._spec.ssh_port else ()
            return (os.path.abspath(found) if found else "/usr/bin/ssh", *port)
        checks = "yes" if client.checks_host_keys else "no"  # horovodrun says no, but the first word stands
        return (*client.ssh, "-F", client.files.client, "-o", f"StrictHostKeyChecking={checks}")

    # -- an elastic job -----------------------------------------------------------------------

    def _elastic_settings(self) -> JobSettings:
        """As many hosts as Horovod's numbers of processes need: at first --num-proc, later --min-num-proc."""
        number = self._horovod.number("num_proc") or 1
        least = self._horovod.number("min_num_proc") or number
        return replace(
            self._settings, min_hosts=self._hosts_for(least), first_hosts=self._hosts_for(number), follows=True
        )

    def _hosts_for(self, processes: int) -> int:
        slots = min((one.slots or 1 for one in self._with_slots(self._hosts.members)), default=1)
        return -(-processes // slots)

    def _with_slots(self, members: Sequence[Member]) -> tuple[Member, ...]:
        return members_of(self._horovod, members, self._spec.slots)

    def _offer(self) -> None:
        """Let Horovod's next question find who is there now."""
        there = tuple(one for one in self._state.members if one.host in self._state.ready)
        text = horovod_slots(self._with_slots(there))
        if text != self._offered or not self._ready_file.exists():
            files.replace(str(self._ready_file), text.encode())
            self._offered = text

    def _take(self, event: st.Event) -> None:
        super()._take(event)
        if self._is_elastic and isinstance(event, st.Ready | st.Hosts):
            self._offer()

    def _more_due_s(self) -> float | None:
        return self._look_at_s if self._runs_elastic() else None

    def _do_more(self, now_s: float) -> None:
        """Hosts whose sessions have ended have to show that they are there."""
        if self._runs_elastic() and now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_S
            lost = self._sessions.lost()
            if lost:
                self._hosts.watch(self._state.members, lost, check_keys=False)

    def _runs_elastic(self) -> bool:
        return self._is_elastic and self._state.phase is st.Phase.RUNNING

    # -- horovodrun ---------------------------------------------------------------------------

    def _launch(self, start: st.Start) -> None:
        members = self._with_slots(start.members)
        everyone = self._with_slots(self._hosts.members)
        number = (
            mpirun_command.ranks(self._number, members, everyone)
            or mpirun_command.total(members)
            or self._number
            or 1
        )
        run = (self._run_word,)
        if self._is_elastic:
            self._offer()
            nics = self._interfaces([one.host for one in members])
            argv = elastic(run, self._horovod, str(self._script), number, nics)
        else:
            self._hosts.rest()
            here = (*run, "--disable-cache", *typed(self._horovod))
            argv = static(run, self._horovod, members, number, ()) if members else here
        allowed = mpirun_command.but_secrets(self._env, self._spec.forward)
        env = horovod_env(self._env, allowed, self._sessions.bin)
        size = f"{counted(number, 'process')} on {counted(len(members) or 1, 'host')}"
        logs.say(f"start {start.number}: horovodrun with {size}")
        post = self._hosts.threads.post
        self._mpirun = Horovodrun(
            argv, env, lambda *how: post(partial(self._ended, *how)), is_elastic=self._is_elastic
        )

    def _interfaces(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Of this host those that lead to the others: pods of one job have the same."""
        names: dict[str, None] = {}
        ours = {address: one for one in network.interfaces() for address in one.addresses}
        for host in hosts:
            with contextlib.suppress(OSError):
                address = str(socket.getaddrinfo(host, 0, family=socket.AF_INET)[0][4][0])
                found = ours.get(network.source_to(address))
                if found is not None and not (found.is_loopback and not network.is_here(host)):
                    names.setdefault(found.name)
        outer = tuple(name for name in names if name != "lo")
        return outer[:1] or tuple(names)[:1]

    # -- signals ------------------------------------------------------------------------------

    def _tell_ranks(self, hosts: Sequence[str]) -> None:
        self._sessions.stop()
        self._tell("TERM")

    def _relay(self, number: int) -> None:
        self._tell(name_of(number))

    def _drain(self, number: int) -> None:
        self._sessions.stop()
        self._relay(number)

    def _tell(self, name: str) -> None:
        if self._mpirun is not None:
            self._sessions.tell(name, self._mpirun.pid)


# -- ssh sessions ------------------------------------------------------------------------------


_RANK = "HOROVOD_RANK"


class Sessions:
    """A folder with an `ssh` for the front of PATH, and a pipe for each session that it was used for."""

    def __init__(self, folder: str, ssh: Sequence[str], python: str, grace_s: float) -> None:
        """Make the folder; `ssh` is the job's own, with its options, by its full path."""
        self._folder = Path(folder)
        self.bin = str(self._folder / "bin")
        for name in ("", "bin", horovod_ssh.PIPES):
            (self._folder / name).mkdir(mode=0o700)
        (self._folder / horovod_ssh.TOLD).write_text(
            json.dumps({"ssh": list(ssh), "grace_s": grace_s}), encoding="utf-8"
        )
        script = shlex.join((python, "-I", "-S", horovod_ssh.__file__, folder))
        program = self._folder / "bin" / "ssh"
        program.write_text(f'#!/bin/sh\nexec {script} "$@"\n', encoding="utf-8")
        program.chmod(0o700)

    def stop(self) -> None:
        """Let no session begin any more."""
        (self._folder / horovod_ssh.STOPPING).touch()

    def tell(self, name: str, below: int) -> int:
        """Let all ranks have a signal, by its name without SIG; also those on this host, below process `below`."""
        told = 0
        for pipe in self._pipes():
            with contextlib.suppress(OSError):  # its ssh has just ended
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.write(descriptor, f"{name}\n".encode())
                    told += 1
                finally:
                    os.close(descriptor)
        return told + sum(1 for pid in _ranks_here(below) if _signalled(pid, name))

    def lost(self) -> tuple[str, ...]:
        """Hosts of which a rank's session has ended since the last call."""
        gone: dict[str, None] = {}
        for pipe in self._pipes():
            host, local_rank, pid = pipe.name.rsplit(".", 2)
            if not Path("/proc", pid).exists():
                with contextlib.suppress(FileNotFoundError):
                    pipe.unlink()
                if local_rank != "-":
                    gone[host] = None
        return tuple(gone)

    def _pipes(self) -> Iterable[Path]:
        return sorted((self._folder / horovod_ssh.PIPES).iterdir())


def _ranks_here(below: int) -> list[int]:
    """Ranks that horovodrun has started without ssh: the first process of each that bears a rank."""
    found: list[int] = []
    ranks: set[int] = set()
    for entry in process_tree.descendants(below):  # parents first
        if _RANK in (process_tree.environment(entry.pid) or ()):
            ranks.add(entry.pid)
            if entry.parent not in ranks:
                found.append(entry.pid)
    return found


def _signalled(pid: int, name: str) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError, KeyError):
        os.kill(pid, signal.Signals[f"SIG{name}"])
        return True
    return False


# -- horovodrun --------------------------------------------------------------------------------


_LAST_LINES = 400  # of all ranks together
_KEPT_LINES = 60
_OF_RANK = re.compile(r"^\[(\d{1,6})\]<(?:stdout|stderr)>:(.*)", re.DOTALL)


class Horovodrun(Program):
    """horovodrun."""

    kills_below_first = True  # its ssh sessions

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], ended: Ended, *, is_elastic: bool) -> None:
        self._is_elastic = is_elastic
        self._lines: deque[tuple[int | None, str]] = deque(maxlen=_LAST_LINES)  # rank, what it said
        super().__init__(argv, env, ended, stdin=subprocess.DEVNULL)

    def _hear(self, text: str, stream: int) -> None:
        if not text:
            return
        of_rank = _OF_RANK.match(text)
        with self._lock:
            self._said = heard(self._said, text, is_elastic=self._is_elastic)
            self._lines.append((int(of_rank[1]), of_rank[2]) if of_rank else (None, text))

    def _last_lines(self) -> tuple[str, ...]:
        """Horovod's own traceback says nothing of the cause where a rank has failed."""
        return tuple(text for rank, text in self._lines if rank == self._said.rank)[-_KEPT_LINES:]


# -- horovodrun's command line and messages ----------------------------------------------------


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


def horovod_slots(members: Sequence[Member]) -> str:
    """What a discovery script prints of these hosts."""
    return "".join(f"{one.host}:{one.slots or 1}\n" for one in members)


def horovod_env(given: Mapping[str, str], allowed: Sequence[str], bin_folder: str) -> dict[str, str]:
    """The variables of horovodrun, which hands all on in command lines: only `allowed` ones, and our ssh."""
    ours = {name for name in allowed if name in _THIS_PODS or name.startswith("TRAINER_LAUNCH_")}
    told = {name: given[name] for name in allowed if name in given and name not in ours}
    told["PATH"] = f"{bin_folder}:{given.get('PATH') or '/usr/bin:/bin'}"
    told["PYTHONUNBUFFERED"] = "1"  # so that what it says of its ranks is heard at once
    return told


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
