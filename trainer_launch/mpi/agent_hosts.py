"""The job's hosts as the agent deals with them: whether they are there, and what is run on them."""

from __future__ import annotations

import os
import secrets
import selectors
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess, logs, runtime_directory
from trainer_launch.model import Member
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.units import printable
from trainer_launch.mpi import mpirun_command
from trainer_launch.mpi.host_list import HostList
from trainer_launch.mpi.host_readiness import Done, HostStage, Probes, Readiness, Threads
from trainer_launch.mpi.mpirun_command import Dialect, recognised
from trainer_launch.mpi.ssh_client import SshClient, configured_port, prepared
from trainer_launch.planning.mpi import KUBEXEC, OWN, SSH, Spec
from trainer_launch.planning.mpi_options import MCA_VARIABLES, SSH_PORT, Typed, is_mpirun

_SSH_PORT = 22
_THREADS = 64
_LOOK_S = 2.0  # between two looks at the list of hosts
_VERSION_S = 20.0
_LOG_IN_S = 10.0
_ASK_S = 1.5  # for a host that was well a moment ago to show its banner
_SWEEP_S = 10.0
_TELL_S = 8.0
# A rank, or a process of one, bears the job's mark and its number; ranks of other jobs have another mark, and what
# runs below them may have several numbers. Small images lack pgrep and ps, and /proc shows an environment to its
# owner and to root only, which is just right.
_FIND = """
nl='
'
marked() {
  vars="$nl$(tr '\\0' '\\n' <"/proc/$1/environ")$nl"
  case $vars in *"$nl%(mark)s$nl"*) ;; *) return 1 ;; esac
  case $vars in *"$nl"OMPI_COMM_WORLD_RANK=*|*"$nl"PMI_RANK=*|*"$nl"HOROVOD_RANK=*) ;; *) return 1 ;; esac
}
for folder in /proc/[0-9]*; do
  pid=${folder#/proc/}
  if [ "$pid" != $$ ] && marked "$pid"; then
    %(what)s
  fi
done 2>/dev/null
true
"""
# Each rank alone, as its data loaders have to live while it saves; where it is a shell, also what that waits for.
_TELL_RANK = """above=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$pid/status")
    case "$(cat "/proc/$above/comm")" in sh|bash|dash|ash|zsh|env|timeout) shell=yes ;; *) shell=no ;; esac
    if [ $shell = yes ] || ! marked "$above"; then kill -%(name)s "$pid"; fi"""
# Options and MCA parameters; variables of the same meaning, as Open MPI's are made of the parameters' names.
_PROGRAMS = ("plm_rsh_agent", "plm_ssh_agent", "launcher-exec", "bootstrap-exec")
_PROGRAM_VARIABLES = ("HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")
_KINDS = ("plm", "launcher", "bootstrap")
_KIND_VARIABLES = ("HYDRA_LAUNCHER", "I_MPI_HYDRA_BOOTSTRAP")
_ARGS = ("plm_rsh_args", "plm_ssh_args")


class _Question(Struct, frozen=True):
    hosts: tuple[str, ...]
    until_s: float
    answer: Callable[[Mapping[str, str]], None]


class RemoteHosts:
    """Everything about the other hosts; what it finds is fetched by `take_…` in the one main loop."""

    def __init__(self, spec: Spec, typed: Typed, env: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        """Read the list. Raises LaunchError: it makes no sense, or there is no key, or no ssh."""
        self._spec, self._typed = spec, typed
        self._list = HostList(spec, typed)
        self.has_list = self._list.exists
        self.members = self._list.members
        self.port = spec.task.settings.ssh_port or typed.number_of(*SSH_PORT)
        self._mark = secrets.token_hex(8)
        self.env = {**env, runtime_directory.MPI_RUN: self._mark}
        self.threads = Threads(_THREADS)
        is_mpi = is_mpirun(typed.mpirun)
        self._version = _ask_version(typed.mpirun, self.env) if is_mpi else None  # meanwhile all else goes on
        self.client = self._prepared() if self.has_list and spec.reach == SSH else None  # ssh with the job's key
        self._own = own_ssh(typed, env) if spec.reach == OWN else None
        self._probes = Probes(self.threads, self._probed_port(), self._log_in, over_ssh=spec.reach != KUBEXEC)
        selector.register(self.threads.fd, selectors.EVENT_READ, self.threads.settle)
        self._looking = False
        self._look_at_s = None if self._list.is_fixed else time.monotonic() + _LOOK_S
        self._news: tuple[Member, ...] | None = None
        self._told_trouble = ""
        self._asking: _Question | None = None
        self.ask_s = _ASK_S + (_LOG_IN_S if spec.reach == KUBEXEC else 0.0)
        self.sweeps = 0  # that go on

    def _probed_port(self) -> int | None:
        """Where sshd of the hosts listens; None: they are reached without one."""
        if self.client is not None:
            return self.client.port
        if self._own is None:
            return None
        host = next((member.host for member in self.members), "trainer-launch.invalid")
        return self.port or configured_port(self._own, host) or _SSH_PORT

    def _prepared(self) -> SshClient:
        scratch, settings = self._spec.task.trial.scratch, self._spec.task.settings
        folder = f"{scratch}/{runtime_directory.SSH}-{os.getpid()}"  # one that was killed has left its own
        if any(c.isspace() for c in folder):
            raise UsageError(f"mpirun takes no folder with a blank in its name, and {folder!r} has one; set TMPDIR")
        return prepared(
            self._spec.task.job,
            folder,
            port=self.port,
            check_host_keys=not settings.insecure_host_keys,
            path=self.env.get("PATH"),
        )

    @property
    def has_own(self) -> bool:
        """Whether ranks run here, too: Open MPI 4 gives those the first numbers, wherever the list has it."""
        return any(self._is_own(member.host) for member in self.members)

    def _is_own(self, host: str) -> bool:
        own = self._spec.task.host.hostname
        return host in (own, "localhost", socket.gethostname()) or host.partition(".")[0] == own

    # -- what was seen ------------------------------------------------------------------------

    @property
    def readiness(self) -> dict[str, Readiness]:
        """How far each host is."""
        return self._probes.readiness

    @property
    def due_s(self) -> float | None:
        """When to `tick` next."""
        asked_s = self._asking.until_s if self._asking else None
        times = (self._probes.due_s, None if self._looking else self._look_at_s, asked_s)
        return min((at_s for at_s in times if at_s is not None), default=None)

    def tick(self, now_s: float) -> None:
        """Do what is due."""
        self._probes.tick(now_s)
        if self._look_at_s is not None and not self._looking and now_s >= self._look_at_s:
            self._looking = True
            self.threads.submit(lambda: partial(self._looked, self._list.look()))
        if self._asking is not None:
            self._answer(self._asking, now_s)

    def take_changed(self) -> bool:
        """Whether something was seen since the last call."""
        changed, self._probes.changed = self._probes.changed, False
        return changed and self._asking is None

    def take_members(self) -> tuple[Member, ...] | None:
        """The new list of hosts, if there is one."""
        news, self._news = self._news, None
        return news

    def _looked(self, members: tuple[Member, ...]) -> None:
        self._looking, self._look_at_s = False, time.monotonic() + _LOOK_S
        if self._list.trouble != self._told_trouble:
            self._told_trouble = self._list.trouble
            if self._told_trouble:
                logs.warn(f"{self._told_trouble}; keeping the current list of hosts")
        if members != self.members:
            self.members = self._news = self._list.members = members

    # -- what is asked of them ----------------------------------------------------------------

    def watch(self, hosts: Iterable[Member], afresh: Iterable[str], *, check_keys: bool) -> None:
        """Look whether these hosts are there."""
        self._probes.watch([m.host for m in hosts], afresh, check_keys=check_keys)

    def ask(self, hosts: Sequence[str], limit_s: float, answer: Callable[[Mapping[str, str]], None]) -> None:
        """Find out who of these is there, now; `answer` gets who is not, and why."""
        self._probes.watch([m.host for m in self.members] or hosts, hosts)
        self._asking = _Question(tuple(hosts), time.monotonic() + limit_s, answer)

    def _answer(self, question: _Question, now_s: float) -> None:
        reached = self.readiness
        readiness = {host: reached.get(host, Readiness()) for host in question.hosts}
        if now_s < question.until_s and any(host.stage < HostStage.KEY for host in readiness.values()):
            return
        self._asking = None
        question.answer({host: str(now) for host, now in readiness.items() if self._is_gone(now.stage)})

    def _is_gone(self, stage: HostStage) -> bool:
        """By ssh who shows no banner; by kubectl who is refused, as an API server may be slow for who is well."""
        return stage is HostStage.KEY if self._spec.reach == KUBEXEC else stage < HostStage.KEY

    def rest(self) -> None:
        """The job runs."""
        self._probes.rest()

    def tell_ranks(self, hosts: Collection[str], name: str) -> None:
        """Let the ranks on these hosts have a signal; without any hosts they are here."""
        script = telling(self._marked(), name)
        self._everywhere(hosts or (self._spec.task.host.hostname,), script, _TELL_S, lambda: None)

    def sweep(self, hosts: Collection[str]) -> None:
        """Kill what is left on these hosts."""
        self.sweeps += len(hosts)
        self._everywhere(hosts, sweeping(self._marked()), _SWEEP_S, self._swept)

    def _swept(self) -> None:
        self.sweeps -= 1

    def _marked(self) -> str:
        return f"{runtime_directory.MPI_RUN}={self._mark}"

    def _everywhere(self, hosts: Collection[str], script: str, limit_s: float, done: Done) -> None:
        for host in hosts:
            self.threads.submit(partial(self._run, host, script, limit_s, done))

    def _run(self, host: str, script: str, limit_s: float, done: Done) -> Done:
        """In a thread."""
        run(self._argv(host, script), self.env, limit_s)
        return done

    def _log_in(self, host: str) -> str | None:
        """In a thread: why a host does not let us in."""
        return run(self._argv(host, "true"), self.env, _LOG_IN_S)

    def _argv(self, host: str, script: str) -> tuple[str, ...]:
        if self._is_own(host):
            return ("/bin/sh", "-c", script)
        mpi = self._spec.task.job.mpi
        if self._spec.reach == KUBEXEC and mpi is not None and mpi.launch_agent_path:
            return (mpi.launch_agent_path, host, word(script))
        if self.client is None:
            port = ("-p", str(self.port)) if self.port else ()
            return (*(self._own or ("ssh",)), *port, "-o", "BatchMode=yes", "--", host, word(script))
        return self.client.argv(host, word(script))

    # -- mpirun -------------------------------------------------------------------------------

    def command(self, hosts: Sequence[Member]) -> mpirun_command.MpirunCommand:
        """The command for these hosts; their list is written.

        Raises:
            LaunchError: mpirun is of no kind that we know, or nothing may be written.
        """
        path = f"{self._spec.task.trial.scratch}/{runtime_directory.HOSTFILE}"
        job_hosts = mpirun_command.JobHosts(
            hosts=tuple(hosts),
            everyone=self.members,
            hostfile=path,
            ssh_config=self.client.files.client if self.client else None,
            is_root=os.geteuid() == 0,
        )
        made = mpirun_command.command(self._typed, self._dialect, self.env, self._spec.forward, job_hosts)
        if hosts:
            try:
                with open(path, "w", encoding="utf-8") as file:
                    file.write(made.hostfile)
            except OSError as problem:
                raise NodeError(f"the list of hosts cannot be written: {problem.strerror}") from None
        return made if self.client is None else replace(made, env=self.client.account.added_to(made.env))

    @cached_property
    def _dialect(self) -> Dialect:
        if self._version is None:
            raise UsageError(f"{self._typed.mpirun} is no mpirun")
        self._version.stop(_VERSION_S)
        dialect = recognised(self._version.end().out)
        if dialect is None:
            raise UsageError(
                f"{self._typed.mpirun} --version says neither Open MPI nor MPICH nor Intel MPI; "
                f"set --engine plain to run it as it is"
            )
        return dialect


def _ask_version(mpirun: str, env: Mapping[str, str]) -> deadline_subprocess.Child:
    streams = deadline_subprocess.Streams(stderr=subprocess.STDOUT)
    try:
        return deadline_subprocess.Child((mpirun, "--version"), env, streams)
    except OSError as problem:
        raise UsageError(f"{mpirun!r} cannot be run ({problem.strerror}); install an MPI in this image") from None


def telling(mark: str, name: str) -> str:
    """A script that lets the ranks of a job on this host have a signal, by its name without SIG."""
    return _FIND % {"mark": mark, "what": _TELL_RANK % {"name": name}}


def sweeping(mark: str) -> str:
    """A script that kills what is left of a job on this host."""
    return _FIND % {"mark": mark, "what": 'kill -KILL "$pid"'}


def word(script: str) -> str:
    """A script as one command for whatever shell is behind sshd."""
    return f"exec /bin/sh -c {shlex.quote(script)}"


def run(argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> str | None:
    """Run to the end; why it failed, in ssh's own words or the shell's; None: it went well. Blocks."""
    ended = deadline_subprocess.run(argv, env, limit_s)
    return None if ended.code == 0 else printable(ended.why())


def own_ssh(typed: Typed, env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The ssh that mpirun calls, with its options; None: hosts are reached without one."""
    program = _setting(typed, env, _PROGRAMS, _PROGRAM_VARIABLES).partition(":")[0].split()  # tried in turn
    kind = _setting(typed, env, _KINDS, _KIND_VARIABLES)
    if program:
        is_ssh = program[0].rpartition("/")[2] == "ssh"
    else:  # Open MPI's own component for ssh bears the name of rsh
        is_component = kind == _setting(typed, env, ("plm",), ())
        is_ssh = kind in ("", "ssh") or (is_component and (kind == "rsh" or kind.startswith("^")))
    return (*(program or ("ssh",)), *_setting(typed, env, _ARGS, ()).split()) if is_ssh else None


def _setting(typed: Typed, env: Mapping[str, str], names: Iterable[str], variables: Iterable[str]) -> str:
    """The first of these settings that has a value: what was typed goes before what is set."""
    listed = tuple(names)
    values = [typed.values.get(name) for name in listed]
    values += [env.get(f"{prefix}{name}") for prefix in MCA_VARIABLES for name in listed]
    values += [env.get(name) for name in variables]
    return next((value for value in values if value), "")
