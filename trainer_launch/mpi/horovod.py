"""What runs horovodrun: the agent of mpirun, with another program to start.

horovodrun finds an `ssh` of ours, which checks host keys. In an elastic job Horovod itself adds and drops hosts
while it trains; it asks a script of ours each second, which prints the hosts that the launcher can reach.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from trainer_launch.host import files, logs, network, runtime_directory
from trainer_launch.model import Member, exit_codes, hostfile
from trainer_launch.model.signal_policy import name_of
from trainer_launch.model.units import counted
from trainer_launch.mpi import agent, mpirun_command
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi.agent import SETTLE_S, Agent, Ended, Program
from trainer_launch.mpi.mpirun_messages import Said, heard_of_horovod, rank_and_text
from trainer_launch.mpi.rank_environment import but_secrets
from trainer_launch.planning.mpi import Spec
from trainer_launch.planning.mpi_options import COOLDOWN, INTERFACES, MIN_NUMBER, Typed

# Without a cooldown Horovod never takes a host back that has failed once; it doubles from the first to the second.
_COOLDOWN_S = ("2", "30")
_LAST_LINES = 400  # of all ranks together
_KEPT_LINES = 60


def main(spec: Spec, command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Run horovodrun, to its end."""
    agent.main(spec, command, env, HorovodAgent)


class HorovodAgent(Agent):
    """The agent of mpirun, with another program to run."""

    def __init__(self, spec: Spec, command: Sequence[str], env: dict[str, str]) -> None:
        super().__init__(spec, command, env)
        folder = Path(spec.task.trial.scratch, f"{runtime_directory.HOROVOD}-{os.getpid()}")
        self._bin, self._stopping, self._ready = folder / "bin", folder / "stopping", folder / "ready"
        self._bin.mkdir(parents=True, mode=0o700)
        stopping, ready = shlex.quote(str(self._stopping)), shlex.quote(str(self._ready))
        ssh = f'[ ! -e {stopping} ] || exit {exit_codes.STOPPED}\nexec {shlex.join(self._ssh(env))} "$@"'
        self._script = folder / "discover"
        for path, text in ((self._bin / "ssh", ssh), (self._script, f"exec cat {ready}")):
            path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
            path.chmod(0o700)
        if self._typed.is_elastic:  # --num-proc is for the start, --min-num-proc for later
            number = self._typed.number or 1
            least = self._typed.number_of(*MIN_NUMBER) or number
            self._settings = replace(
                self._settings, first_hosts=self._hosts_for(number), min_hosts=self._hosts_for(least), follows=True
            )

    def run(self) -> int:
        """Run the job to its end; its exit code. Ranks that have lost their ssh are ended before."""
        code = super().run()
        until_s = time.monotonic() + SETTLE_S
        while self._hosts.sweeps and (left_s := until_s - time.monotonic()) > 0:
            for key, _ in self._selector.select(left_s):
                key.data()
        return code

    def _ssh(self, env: Mapping[str, str]) -> tuple[str, ...]:
        client = self._hosts.client
        if client is None:
            port = self._hosts.port
            return (
                shutil.which("ssh", path=env.get("PATH")) or "/usr/bin/ssh",
                *(("-p", str(port)) if port else ()),
            )
        checks = "yes" if client.checks_host_keys else "no"  # horovodrun says no, but the first word stands
        return (*client.ssh, "-F", client.files.client, "-o", f"StrictHostKeyChecking={checks}")

    def _hosts_for(self, processes: int) -> int:
        slots = min((member.slots or 1 for member in self._hosts.members), default=1)
        return -(-processes // slots)

    def _take(self, event: st.Event) -> None:
        super()._take(event)
        if self._typed.is_elastic and isinstance(event, st.Ready | st.Hosts):
            self._offer()

    def _offer(self) -> None:
        """Let Horovod's next question find who is there now."""
        there = (member for member in self._state.members if member.host in self._state.ready)
        files.replace(str(self._ready), "".join(f"{m.host}:{m.slots}\n" for m in with_slots(there)).encode())

    def _launch(self, start: st.Start) -> None:
        members, everyone = with_slots(start.members), with_slots(self._hosts.members)
        asked = self._typed.number
        number = mpirun_command.ranks(asked, members, everyone) or mpirun_command.total(members) or asked or 1
        if self._typed.is_elastic:
            self._offer()
            words = elastic_options(self._typed, number, str(self._script), _interface(members))
        else:
            self._hosts.rest()
            words = static_options(number, members)
        env = horovod_env(self._hosts.env, self._spec.forward, str(self._bin))
        size = f"{counted(number, 'process')} on {counted(len(members) or 1, 'host')}"
        logs.say(f"start {start.number}: horovodrun with {size}")
        argv = (self._typed.mpirun, *self._typed.kept, *words, *self._typed.program)
        post = self._hosts.threads.post
        self._mpirun = started = Horovodrun(
            argv, env, lambda *how: post(partial(self._ended, *how)), is_elastic=self._typed.is_elastic
        )
        if self._typed.is_elastic:
            started.watch(lambda gone: post(lambda: self._doubt(gone)))

    def _doubt(self, words: Sequence[str]) -> None:
        """Hosts whose sessions have ended have to show that they are there; Horovod goes on meanwhile."""
        lost = [member.host for member in self._state.members if member.host in words]
        if lost and self._state.phase is st.Phase.RUNNING:
            self._hosts.watch(self._state.members, lost, check_keys=False)

    def _ended(self, code: int, said: Said, lines: tuple[str, ...]) -> None:
        """Horovod's way to end a rank on another host is to end its ssh, of which the rank hears nothing."""
        if code and not (self._state.asked or self._state.draining):
            self._hosts.sweep([member.host for member in self._state.running])
        super()._ended(code, said, lines)

    def _tell_ranks(self, hosts: Sequence[str]) -> None:
        self._stopping.touch()
        super()._tell_ranks(hosts)

    def _drain(self, number: int) -> None:
        self._stopping.touch()
        super()._drain(number)

    def _relay(self, number: int) -> None:
        """horovodrun hands nothing on."""
        if self._mpirun is not None:
            self._hosts.tell_ranks([member.host for member in self._state.running], name_of(number))


class Horovodrun(Program):
    """horovodrun."""

    kills_below_first = True  # its ssh sessions

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], ended: Ended, *, is_elastic: bool) -> None:
        self._is_elastic = is_elastic
        self._lines: deque[tuple[int | None, str]] = deque(maxlen=_LAST_LINES)
        super().__init__(argv, env, ended, stdin=subprocess.DEVNULL)

    def _hear(self, text: str, stream: int) -> None:
        if text:
            with self._lock:
                self._said = heard_of_horovod(self._said, text, is_elastic=self._is_elastic)
                self._lines.append(rank_and_text(text))

    def _last_lines(self) -> tuple[str, ...]:
        """Horovod's own traceback says nothing of the cause where a rank has failed."""
        return tuple(text for rank, text in self._lines if rank == self._said.rank)[-_KEPT_LINES:]


# What is written here stands behind what was typed: of an option that is given twice, the last one counts.


def static_options(number: int, members: Sequence[Member]) -> tuple[str, ...]:
    """Options for these hosts; without any it runs here."""
    hosts = (f"--hosts={hostfile.render_horovod(members)}",) if members else ()
    return (f"--num-proc={number}", *hosts, "--disable-cache")


def elastic_options(typed: Typed, number: int, script: str, interface: str | None) -> tuple[str, ...]:
    """Options to ask `script` for the hosts, each second.

    Horovod looks for a common interface by itself only where two hosts are there, so one is named.
    """
    words = [f"--num-proc={number}", f"--host-discovery-script={script}", "--disable-cache"]
    if typed.names.isdisjoint(MIN_NUMBER):
        words.append(f"--min-num-proc={number}")
    if COOLDOWN not in typed.names:
        words += [f"--{COOLDOWN}", *_COOLDOWN_S]
    if interface is not None and typed.names.isdisjoint(INTERFACES):
        words.append(f"--{INTERFACES[0]}={interface}")
    return tuple(words)


def with_slots(members: Iterable[Member]) -> tuple[Member, ...]:
    """Horovod fails without."""
    return tuple(replace(member, slots=member.slots or 1) for member in members)


def horovod_env(given: Mapping[str, str], forward: Sequence[str], bin_folder: str) -> dict[str, str]:
    """The variables of horovodrun, which hands all on in command lines: no secrets; and our ssh."""
    names = but_secrets(given, (*forward, runtime_directory.MPI_RUN))
    ours = {"PATH": f"{bin_folder}:{given.get('PATH') or '/usr/bin:/bin'}"}
    return {**{name: given[name] for name in names}, **ours, "PYTHONUNBUFFERED": "1"}  # it is heard at once


def _interface(hosts: Sequence[Member]) -> str | None:
    """Of this host the one that leads to the others: pods of one job have the same."""
    names = []
    for host in hosts:
        with contextlib.suppress(OSError):
            address = str(socket.getaddrinfo(host.host, 0, family=socket.AF_INET)[0][4][0])
            source = network.source_to(address)
            names += [interface.name for interface in network.interfaces() if source in interface.addresses]
    return next((name for name in names if name != "lo"), names[0] if names else None)
