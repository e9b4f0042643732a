"""Commands on the job's hosts: with the job's key, by the platform's kubexec.sh, or in the user's own way.

PID 1 starts them, reaps them by pid, and never waits for one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import SimpleQueue

from msgspec import Struct

from trainer_launch.contracts.names import first_label
from trainer_launch.host import process_tree, runtime_directory
from trainer_launch.host.deadline_subprocess import OUTPUT_BYTES, Ended
from trainer_launch.host.files import check_program
from trainer_launch.model import Member
from trainer_launch.model.errors import UsageError
from trainer_launch.mpi import ssh_client
from trainer_launch.mpi.ssh_client import SshClient
from trainer_launch.planning.mpi import KUBEXEC, OWN, SSH, Spec
from trainer_launch.planning.mpi_options import MCA_VARIABLES, SSH_PORT, Typed
from trainer_launch.supervisor.system import System

_SSH_PORT = 22
_AT_ONCE = 64  # commands
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


Ending = Callable[[Ended], object]


class HostAccess(Struct, frozen=True, kw_only=True):
    """How commands are run on hosts, and where their readiness shows."""

    spec: Spec
    env: Mapping[str, str]  # of a command on a host; without the job's mark, so that it is taken for no rank
    mark: str  # of this job's ranks
    client: SshClient | None  # ssh with the job's key
    own_ssh: tuple[str, ...] | None  # the user's ssh, where that is how hosts are reached
    port: int | None  # that the user named
    probed_port: int | None  # where sshd of the hosts listens; None: they are reached without one

    @property
    def is_kubexec(self) -> bool:
        """Whether hosts are reached by kubectl."""
        return self.spec.reach == KUBEXEC

    def is_own(self, host: str) -> bool:
        """Whether this is the launcher's own host."""
        own = self.spec.task.host.hostname
        return host in (own, "localhost", socket.gethostname()) or first_label(host) == own

    def log_in(self, host: str) -> tuple[str, ...]:
        """A command that does nothing on a host."""
        return self._argv(host, "true")

    def tell(self, host: str, name: str) -> tuple[str, ...]:
        """A command that lets the ranks on a host have a signal, by its name without SIG."""
        return self._argv(host, telling(self._marked, name))

    def sweep(self, host: str) -> tuple[str, ...]:
        """A command that kills what is left of the job on a host."""
        return self._argv(host, sweeping(self._marked))

    @property
    def _marked(self) -> str:
        return f"{runtime_directory.MPI_RUN}={self.mark}"

    def _argv(self, host: str, script: str) -> tuple[str, ...]:
        if self.is_own(host):
            return ("/bin/sh", "-c", script)
        word, mpi = f"exec /bin/sh -c {shlex.quote(script)}", self.spec.task.job.mpi  # for any shell behind sshd
        if self.is_kubexec and mpi is not None and mpi.launch_agent_path:
            return (mpi.launch_agent_path, host, word)
        if self.client is None:
            port = ("-p", str(self.port)) if self.port else ()
            return (*(self.own_ssh or ("ssh",)), *port, "-o", "BatchMode=yes", "--", host, word)
        return self.client.argv(host, word)


def prepared(spec: Spec, typed: Typed, env: Mapping[str, str], members: Sequence[Member] | None) -> HostAccess:
    """Find out how hosts are reached, and write what ssh needs; `members` is None where mpirun runs here alone.

    Starts children, and waits for them.

    Raises:
        LaunchError: there is no key, or no ssh.
    """
    port = spec.task.settings.ssh_port or typed.number_of(*SSH_PORT)
    client = _client(spec, env, port) if members is not None and spec.reach == SSH else None
    ssh = own_ssh(typed, env) if spec.reach == OWN else None
    probed = client.port if client is not None else None
    if ssh is not None:
        host = next((member.host for member in members or ()), "trainer-launch.invalid")
        probed = port or ssh_client.configured_port(ssh, host) or _SSH_PORT
    return HostAccess(
        spec=spec,
        env={name: value for name, value in env.items() if name != runtime_directory.MPI_RUN},
        mark=secrets.token_hex(8),
        client=client,
        own_ssh=ssh,
        port=port,
        probed_port=probed,
    )


def _client(spec: Spec, env: Mapping[str, str], port: int | None) -> SshClient:
    folder = f"{spec.task.scratch}/{runtime_directory.SSH}"
    if any(c.isspace() for c in folder):
        raise UsageError(f"mpirun cannot use the folder {folder!r}, which has a blank in its name; set TMPDIR")
    checks = not spec.task.settings.insecure_host_keys
    return ssh_client.prepared(spec.task.job, folder, port=port, check_host_keys=checks, path=env.get("PATH"))


def telling(mark: str, name: str) -> str:
    """A script that lets the ranks of a job on this host have a signal, by its name without SIG."""
    return _FIND % {"mark": mark, "what": _TELL_RANK % {"name": name}}


def sweeping(mark: str) -> str:
    """A script that kills what is left of a job on this host."""
    return _FIND % {"mark": mark, "what": 'kill -KILL "$pid"'}


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


class _Command:
    """A command that is under way."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], due_s: float, done: Ending) -> None:
        """Start it. Raises OSError, ValueError: it cannot be started."""
        self.due_s, self.done = due_s, done
        check_program(argv[0], env)
        with contextlib.ExitStack() as opened:
            files = [os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "w+b") for name in ("stdout", "stderr")]
            stdout, stderr = self._outputs = [opened.enter_context(file) for file in files]
            self.popen = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
            )
            self._opened = opened.pop_all()

    def ended(self, status: int | None) -> Ended:
        """How it ended, with its output; None: it was killed at its deadline."""
        self.popen.returncode = -1 if status is None else status  # the system has collected it, or will
        with self._opened:
            stdout, stderr = (os.pread(output.fileno(), OUTPUT_BYTES, 0) for output in self._outputs)
        return Ended(status=status, stdout=stdout, stderr=stderr, timed_out=status is None)


class HostCommands:
    """Commands on hosts: those that are under way, and those that wait for their turn.

    They are no part of the job: signals to everything below the launcher spare them.
    """

    def __init__(self, system: System, env: Mapping[str, str]) -> None:
        self._system, self._env = system, env
        self._waiting: deque[tuple[Sequence[str], float, Ending]] = deque()
        self._running: dict[int, _Command] = {}  # by pid

    def start(self, argv: Sequence[str], limit_s: float, done: Ending) -> None:
        """Start a command; `done` is called in the main loop with how it ended."""
        self._waiting.append((argv, limit_s, done))
        self._begin()

    def run(self, argv: Sequence[str], limit_s: float, post: Callable[[Callable[[], None]], None]) -> Ended:
        """In a thread: have the main loop start a command by `post`, and wait for its end."""
        ended: SimpleQueue[Ended] = SimpleQueue()
        post(lambda: self.start(argv, limit_s, ended.put))
        return ended.get()

    @property
    def due_s(self) -> float | None:
        """When to `tick` next."""
        return min((command.due_s for command in self._running.values()), default=None)

    def tick(self, now_s: float) -> None:
        """Kill what is beyond its deadline. What is stuck in the kernel is left behind."""
        for pid in [pid for pid, command in self._running.items() if now_s >= command.due_s]:
            process_tree.kill(pid, below_first=False)  # a shell would say who was killed
            self.reaped(pid, None)

    def reaped(self, pid: int, status: int | None) -> bool:
        """A child has ended; whether it was a command."""
        command = self._running.pop(pid, None)
        if command is None:
            return False
        command.done(command.ended(status))
        self._begin()
        return True

    def close(self) -> None:
        """Kill what still runs: nobody waits for it any more."""
        for pid, command in self._running.items():
            process_tree.kill(pid)
            command.ended(None)

    def _begin(self) -> None:
        while self._waiting and len(self._running) < _AT_ONCE:
            argv, limit_s, done = self._waiting.popleft()
            try:
                command = _Command(argv, self._env, self._system.now() + limit_s, done)
            except (OSError, ValueError) as problem:  # the latter: a NUL in a word
                why = problem if isinstance(problem, OSError) else OSError(str(problem))
                done(Ended(status=127, stderr=f"{argv[0]}: {why}".encode(), problem=why))
                continue
            self._system.keep(command.popen.pid)
            self._running[command.popen.pid] = command
