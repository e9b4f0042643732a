"""The input of a plan: the live pod or a snapshot, its job, its command, and this machine.

Whether the command's program is there and may be run is checked here, before anything is started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.contracts import read_job
from trainer_launch.contracts.names import first_label
from trainer_launch.contracts.source import MAX_FILE_BYTES, PodInput
from trainer_launch.host import executables, network, shm
from trainer_launch.host.files import JOB_SECRET, LiveFiles
from trainer_launch.host.machine import probe
from trainer_launch.host.network import Interface
from trainer_launch.host.slow_files import in_time
from trainer_launch.model import Endpoint, Fact, Host, Job, Origin, Topology
from trainer_launch.model.errors import NotRunnableError, UsageError
from trainer_launch.model.settings import Settings, job_options, parse_switch
from trainer_launch.planning import interfaces
from trainer_launch.planning.command import (
    Command,
    CommandKind,
    is_shell,
    parse_command,
    runs_single_program,
    see_through,
    starts_launchers,
    unexpanded,
)
from trainer_launch.planning.interfaces import NodeNetwork
from trainer_launch.planning.job import overlay, with_minimum, with_spares

SHIM_SWITCH = "TRAINER_LAUNCH_SHIM"
_SECRET_FILE, _SSH_KEY = "secret_file", "id_rsa"
_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SCRIPT_BYTES = 65_536  # of a script: launchers are looked for here
_SPLIT = "it is one word with spaces in it: make each argument a word of its own"
_HOSTFILE = "/job/hostfile"  # from which `deepspeed` takes hosts that nobody typed
_ANYWHERE = ("192.0.2.1", "2001:db8::1")  # of documentation: the default route leads there


def live_pod(argv: Sequence[str]) -> PodInput:
    """The input injected into this container."""
    env = dict(os.environ)
    return PodInput(
        env=env,
        files=LiveFiles(MAX_FILE_BYTES + 1),
        hostname=env.get("HOSTNAME") or os.uname().nodename,
        command=tuple(argv),
        namespace=_namespace(),
    )


class Reading(Struct, frozen=True, kw_only=True):
    """A pod, read once: its job, its command if it has one, and this machine."""

    pod: PodInput
    command: Command | None
    job: Job
    host: Host

    @property
    def calls_others(self) -> bool:
        """Whether the command is a shell or a wrapper, whose torchrun may be a shim."""
        are_off = shims_are_off(self.pod.env)
        return self.command is not None and not are_off and starts_launchers(self.command)


def shims_are_off(env: Mapping[str, str]) -> bool:
    """Whether the user wants the real programs."""
    return parse_switch(env.get(SHIM_SWITCH, "")) is False


def read(pod: PodInput, settings: Settings) -> Reading:
    """Read the pod, and look at this machine.

    Raises:
        LaunchError: the command or the contract does not fit.
    """
    pod = replace(pod, command=see_through(pod.command).command)
    command = recognise(pod.command, pod.env.get("PATH")) if pod.command else None
    return Reading(pod=pod, command=command, job=_job(pod, settings, command), host=probe(pod.env))


def _job(pod: PodInput, settings: Settings, command: Command | None) -> Job:
    """The job as the platform describes it, under torchrun's typed options, under our own flags."""
    if settings.ssh_dir is not None:
        pod = replace(pod, env={**pod.env, "TRAINER_LAUNCH_SSH_DIR": settings.ssh_dir})
    platform = job = read_job(pod, settings.contract)
    if command is not None and command.torchrun is not None:
        job = overlay(job, command.torchrun.options, Origin.COMMAND)
    job = overlay(job, job_options(settings), Origin.FLAG)
    job = with_minimum(with_spares(job, settings.spares, platform.nodes), settings.min_nodes)
    job = _with_secret(job, pod, settings.secret_file)
    long = shm.too_long_for_sockets(pod.env)
    warnings = (
        unexpanded(pod.command, pod.env),
        long and f"{long}; set TMPDIR to a shorter one, such as /tmp",
    )
    return replace(job, warnings=(*job.warnings, *filter(None, warnings)))


def _with_secret(job: Job, pod: PodInput, given: str | None) -> Job:
    """The job with the path of its secret: the given one, what is mounted by convention, or the job's ssh key."""
    if given == "":  # the nodes would meet without the secret
        raise UsageError("invalid value '' for --secret-file: expected the path of a file; is a variable empty?")
    key = f"{job.ssh_dir}/{_SSH_KEY}"
    mounted = (path for path in (JOB_SECRET, key) if path.startswith("/") and pod.files.exists(path))
    path = given or next(mounted, None)
    if path is None:
        return job
    fact = Fact(name=path, value="present", origin=Origin.FLAG if given else Origin.FILE, field=_SECRET_FILE)
    return replace(job, secret_file=path, facts=(*job.facts, fact))


def _namespace() -> str | None:
    try:
        return _NAMESPACE.read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return None


def recognise(argv: Sequence[str], path: str | None) -> Command:
    """The command, with the script that its shell runs.

    Raises:
        UsageError: missing command, or torchrun's options do not parse.
    """
    command = parse_command(argv)
    chooses_hosts = command.is_deepspeed and os.path.isfile(_HOSTFILE)
    if chooses_hosts or (command.kind is CommandKind.FRONT_END and not _is_pythons(command, path)):
        argv = command.argv
        command = Command(argv=argv, kind=CommandKind.PROGRAM, program=argv, is_deepspeed=chooses_hosts)
    return (
        replace(command, shell=_shells_script(command.argv, path))
        if command.kind is CommandKind.PROGRAM
        else command
    )


def has_name(hostname: str, host: str) -> bool:
    """Whether this machine, which is called `hostname`, is the one that `host` names.

    Raises:
        UsageError: it names several.
    """
    here, elsewhere = network.here_and_elsewhere(host)
    if here and elsewhere:
        raise UsageError(
            f"the rendezvous endpoint {host} names several machines ({', '.join(sorted((*here, *elsewhere)))}), "
            f"and this is one of them; name the machine that is to be node 0, or set --node-rank in each pod"
        )
    return bool(here) or first_label(host) == first_label(hostname)


def look_at_network(topology: Topology, host: Host, env: Mapping[str, str]) -> NodeNetwork:
    """The network that torch workers use; the own name and the way to node 0 only where they matter."""
    meets, cards = topology.coordinator, host.gpus
    are_several = topology.pods != 1 or (topology.local_world_size or 1) > 1
    node = NodeNetwork(
        hostname=host.hostname,
        env=env,
        has_remote_peers=interfaces.has_remote_peers(topology),
        needs_gloo=are_several and not cards.count,
        needs_nccl=are_several and cards.cuda > 0,
    )
    if not (node.has_remote_peers or interfaces.GLOO in env or interfaces.NCCL in env):
        return node
    node = replace(node, interfaces=network.interfaces())
    if node.has_remote_peers and not interfaces.chooses_for_gloo(env):
        addresses, why_none = _addresses(host.hostname)
        node = replace(node, addresses=addresses, why_none=why_none)
    if next(interfaces.problems(node), None) is None:
        return node
    is_home = meets is not None and network.is_here(meets.host)
    if is_home and not node.usable:
        return replace(node, has_remote_peers=False)  # who meets here without any network is here
    return replace(node, is_home=is_home, route=route_to(meets, node.interfaces) if node.usable[1:] else "")


def _addresses(name: str) -> tuple[tuple[str, ...], str]:
    """The addresses of a name, and why it has none."""
    try:
        nothing: tuple[str, ...] = ()
        addresses = in_time(f"the lookup of {name}", nothing, network.lookup, name, wait_s=network.LOOKUP_S)
    except OSError as problem:
        return (), problem.strerror or str(problem)
    return addresses, "" if addresses else f"no answer within {network.LOOKUP_S:g} s"


def route_to(meets: Endpoint | None, among: Sequence[Interface]) -> str:
    """The interface on the route to node 0; the default route's, where node 0 is here or has no address yet."""
    addresses = () if meets is None else _addresses(meets.host)[0]
    others = [address for address in addresses if not ip_address(address).is_loopback]
    ways = (network.interface_to(address, among) for address in (*others[:1], *_ANYWHERE))
    return next((way for way in ways if way), "")


def _shells_script(argv: Sequence[str], path: str | None) -> str | None:
    """The script in a command that a shell runs; "": a shell without one; None: there is no shell."""
    shell, wrapped = None, runs_single_program(argv)
    for word in argv:
        file = shutil.which(word, path=path) or word
        if is_shell(word):
            shell = ""
        elif shell == "" and word.startswith("-") and not word.endswith("c"):
            continue
        elif os.path.isfile(file) and (shell == "" or is_shell(executables.interpreter(file, path) or "")):
            with contextlib.suppress(OSError), open(file, encoding="utf-8", errors="replace") as script:
                shell = script.read(_SCRIPT_BYTES)
            break
        elif shell == "" or not wrapped:
            break
    return shell


def _is_pythons(front_end: Command, path: str | None) -> bool:
    """Whether Python runs a front end; one that is not installed is refused later."""
    program = shutil.which(front_end.argv[0], path=path)
    is_program = not front_end.python and front_end.argv[0] != "-m" and program is not None
    return not is_program or "python" in os.path.basename(executables.interpreter(program or "", path) or "")


def front_end(command: Command, path: str | None) -> tuple[str, str]:
    """The Python that runs a front end, and the path of its program; without one empty."""
    if command.kind is not CommandKind.FRONT_END:
        return "", ""
    program = shutil.which(command.argv[0], path=path) or command.argv[0]
    return executables.interpreter(program, path) or sys.executable, program


def check_command(command: Command, path: str | None) -> None:
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
    elif command.kind is CommandKind.SCRIPT:
        _check_script(command.program[0])
    elif command.kind is CommandKind.PROGRAM or (command.kind is CommandKind.FRONT_END and command.argv[0] != "-m"):
        _check_executable(command.argv[0], path)


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
        exists=False,
    )


def is_our_python(word: str, path: str | None) -> bool:
    """Whether an interpreter as typed is the very one that runs us, of the same virtual environment."""
    program = shutil.which(word, path=path)
    if program is None:
        return False
    same_folder = os.path.dirname(os.path.abspath(program)) == os.path.dirname(sys.executable)
    return same_folder and os.path.realpath(program) == os.path.realpath(sys.executable)


def _check_executable(name: str, path: str | None) -> None:
    program = shutil.which(name, path=path)
    obstacle = executables.obstacle(program or name, path)
    if obstacle is not None and (program is not None or "/" in name):
        raise NotRunnableError(f"{program or name!r} cannot be executed: {obstacle}", exists=True)
    if program is not None:
        return
    if "/" not in name:
        is_here = os.path.isfile(name)
        advice = f"the working directory has it: write ./{name}" if is_here else "install it, or give its full path"
        advice = _SPLIT if " " in name.strip() else advice
        raise NotRunnableError(f"{name!r} was not found in PATH ({path or 'not set'}); {advice}", exists=False)
    if not os.path.exists(name):
        raise NotRunnableError(f"{name!r} does not exist; check the path and the pod's volume mounts", exists=False)
    if os.path.isdir(name):
        raise NotRunnableError(
            f"{name!r} is a directory; name a program in it, or write: python {name}", exists=True
        )
    raise NotRunnableError(
        f"{name!r} is not executable for this user; run chmod +x on it, or write: python {name}", exists=True
    )


def _check_script(name: str) -> None:
    if not os.path.exists(name):
        where = f"looked in {os.getcwd()}" if not os.path.isabs(name) else "check the pod's volume mounts"
        where = _SPLIT if " " in name.strip() else where
        raise NotRunnableError(f"the script {name!r} does not exist; {where}", exists=False)
    if not os.access(name, os.R_OK):
        raise NotRunnableError(
            f"the script {name!r} is not readable for this user; run chmod +r on it", exists=True
        )
