"""What runs horovodrun: waits for hosts, starts it, hears how it ends, starts it again, as `mpi.machine` decides.

In an elastic job Horovod itself adds and drops hosts while it trains. It asks a script of ours each second, which
prints the list that is kept here: of the hosts that the platform or the user's own script names, those that are
reached. A host of which a rank's session has ended has to show again that it is there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer_launch.host import atomic_file, interfaces, logs, runtime_directory, sockets
from trainer_launch.model import Member
from trainer_launch.model.signal_policy import name_of
from trainer_launch.model.units import counted
from trainer_launch.mpi import forwarded_variables, horovod, mpirun_command
from trainer_launch.mpi import state as st
from trainer_launch.mpi.agent import Agent
from trainer_launch.mpi.horovod_sessions import Sessions
from trainer_launch.mpi.horovodrun import Horovodrun
from trainer_launch.planning.horovodrun_options import split_command
from trainer_launch.planning.mpi_launch_spec import Spec
from trainer_launch.planning.typed_mpirun import Typed

_LOOK_S = 0.5  # between two looks at the sessions


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
        self._sessions = Sessions(str(self._folder), self._ssh(), sys.executable, spec.grace_s)
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
        return (client.program, "-F", client.config, "-o", f"StrictHostKeyChecking={checks}")

    # -- an elastic job -----------------------------------------------------------------------

    def _elastic_settings(self) -> st.Settings:
        """As many hosts as Horovod's numbers of processes need: at first --num-proc, later --min-num-proc."""
        number = self._horovod.number("num_proc") or 1
        least = self._horovod.number("min_num_proc") or number
        return replace(
            self._settings,
            min_hosts=self._hosts_for(least),
            first_hosts=self._hosts_for(number),
            follows=True,
        )

    def _hosts_for(self, processes: int) -> int:
        slots = min((one.slots or 1 for one in self._with_slots(self._hosts.members)), default=1)
        return -(-processes // slots)

    def _with_slots(self, members: Sequence[Member]) -> tuple[Member, ...]:
        return horovod.members_of(self._horovod, members, self._spec.slots)

    def _offer(self) -> None:
        """Let Horovod's next question find who is there now."""
        there = tuple(one for one in self._state.members if one.host in self._state.ready)
        text = horovod.slots(self._with_slots(there))
        if text != self._offered or not self._ready_file.exists():
            atomic_file.replace(str(self._ready_file), text.encode())
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
            argv = horovod.elastic(run, self._horovod, str(self._script), number, nics)
        else:
            self._hosts.rest()
            argv = horovod.static(run, self._horovod, members, number, ()) if members else self._as_typed()
        allowed = forwarded_variables.but_secrets(self._env, self._spec.forward)
        env = horovod.env(self._env, allowed, self._sessions.bin)
        size = f"{counted(number, 'process')} on {counted(len(members) or 1, 'host')}"
        logs.say(f"start {start.number}: horovodrun with {size}")
        post = self._hosts.crew.post
        self._mpirun = Horovodrun(
            argv, env, is_elastic=self._is_elastic, ended=lambda *how: post(partial(self._ended, *how))
        )

    def _as_typed(self) -> tuple[str, ...]:
        """Without any hosts it runs here."""
        return (self._run_word, "--disable-cache", *horovod.typed(self._horovod))

    def _interfaces(self, hosts: Sequence[str]) -> tuple[str, ...]:
        """Of this host those that lead to the others: pods of one job have the same."""
        names: dict[str, None] = {}
        ours = {address: one for one in interfaces.interfaces() for address in one.addresses}
        for host in hosts:
            with contextlib.suppress(OSError):
                address = str(socket.getaddrinfo(host, 0, family=socket.AF_INET)[0][4][0])
                found = ours.get(interfaces.route_to(address).source)
                if found is not None and not (found.is_loopback and not sockets.is_here(host)):
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
