"""A job's stage on this machine: scratch folders, free ports, files, and each container as a process."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from trainer_launch import programs
from trainer_launch.command import parse_command
from trainer_launch.commands.doors import Doors
from trainer_launch.commands.networking import OwnNetwork
from trainer_launch.errors import NotRunnableError, UsageError
from trainer_launch.host import net
from trainer_launch.manifest import loopback, mpi_here
from trainer_launch.manifest.baking import pods as pods_of
from trainer_launch.manifest.life import own_init
from trainer_launch.manifest.loopback import FILES, Ground
from trainer_launch.manifest.values import Container, File, Pod, Workload
from trainer_launch.model import Process
from trainer_launch.rehearsal import wiring
from trainer_launch.rehearsal.flags import RUN, own_environment
from trainer_launch.ssh import client, keys

OURS = "trainer-launch"
_FLUX = "/etc/flux-config/entrypoint.sh"
_KEYS = "keys"  # folder of the job's own pair of keys
_DOORS = "doors"  # folder of the ways into its pods
_MARK = "TRAINER_LAUNCH_TERMINATION_LOG"  # different in each container, and inherited by all that it starts


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What the pods have from outside their job."""

    launchers: Mapping[str, str]  # TRAINER_LAUNCH_* for our own launchers in them
    path: str  # where programs are looked for that a container does not say itself
    command: str | None = None  # run in place of what the containers that count would
    labels: bool = True  # whether lines are marked with their pod here; where not, who writes them may
    own_network: bool = False  # whether each pod has a network, names and /dev/shm of its own


class Stage:
    """Where the pods of one rehearsal live."""

    def __init__(self, workload: Workload, scratch: Path, setting: Setting) -> None:
        if len(workload.drafts) > loopback.MAX_PODS:
            raise UsageError(f"the job has {len(workload.drafts)} pods; a rehearsal takes {loopback.MAX_PODS}")
        self._scratch = scratch
        self._setting = setting
        self.network = OwnNetwork(scratch) if setting.own_network else None
        device, address_of = (wiring.DEVICE, wiring.address_of) if self.network else ("lo", loopback.address_of)
        made = pods_of(workload, address_of)
        machine = {"OMP_NUM_THREADS": str(_threads(made)), "GLOO_SOCKET_IFNAME": device}
        self._base = {**machine, **own_environment(os.environ), "PATH": setting.path}
        _refuse_what_cannot_run(made)
        if setting.command is not None:
            words = _words(setting.command)
            made = tuple(pod if mpi_here.is_worker(pod) else _with_command(pod, words) for pod in made)
        if any(map(mpi_here.uses_ssh, made)):
            keys.make(str(scratch / _KEYS), client.find("ssh-keygen", self._base["PATH"]))
            port = net.free_port()
            made = tuple(mpi_here.on_loopback(pod, port, str(scratch / pod.name / "tmp")) for pod in made)
        self._doors = Doors(scratch / _DOORS) if any(map(mpi_here.reached_by_kubectl, made)) else None
        if self._doors is not None:
            kubectl = self._doors.kubectl()
            made = tuple(mpi_here.by_kubectl(pod, kubectl, str(scratch / pod.name / "tmp")) for pod in made)
        self.pods = made
        self._running: frozenset[str] = frozenset()  # pods, as their controller sees them
        self._lives: dict[str, int] = {}  # by pod with a place of its own
        if self.network is None:
            self._ground = _with_ports(loopback.ground_of(workload, self.pods), self.pods)
        else:
            self._ground = Ground(pods={}, addresses={})  # names and ports are as the job has them
            for number, pod in enumerate(self.pods):
                self.network.add(pod.name, number, pod.draft.names, pod.shm_bytes)

    def check(self) -> None:
        """Find every program before anything starts.

        Raises:
            UsageError: one is not there.
        """
        seen: set[tuple[str, ...]] = set()
        for pod in self.pods:
            for container in (*own_init(pod), *pod.containers):
                process = self.process(pod, container.name, 1)
                is_new = process.argv not in seen and process.argv[0] != sys.executable
                if is_new and process.cwd is None:  # in another folder it may be there
                    seen.add(process.argv)
                    self._check(pod, container, process)

    def _check(self, pod: Pod, container: Container, process: Process) -> None:
        command = parse_command(process.argv)
        if any(word.startswith(f"{self._scratch}/") for word in (process.argv[0], *command.program[:1])):
            return  # of a volume, which is filled when the pod begins
        try:
            programs.check(command, process.env.get("PATH"))
        except NotRunnableError as problem:
            found = problem.exit_code == 126
            text = f"{problem} (container {container.name} of {pod.name}; --command runs another program here)"
            raise NotRunnableError(text, found=found) from None

    def process(self, pod: Pod, name: str, life: int) -> Process:
        """A container of a pod in one of its lives, as a process of this machine."""
        container = next(one for one in (*pod.init, *pod.containers) if one.name == name)
        here = self._localised(pod, container, life)
        env = {
            **self._base,
            **{f"TRAINER_LAUNCH_{key}": value for key, value in self._setting.launchers.items()},
            "HOSTNAME": pod.name,
            **(here.env if self.network is None else wiring.off_loopback(here.env)),
            _MARK: str(self.last_words(pod, name)),
        }
        kubectl = next((path for path in here.files if path.endswith(mpi_here.KUBECTL)), None)
        if kubectl is not None:
            env["PATH"] = os.pathsep.join([os.path.dirname(kubectl), env["PATH"]])
        label = pod.name if name == pod.draft.main else f"{pod.name}/{name}"
        if not self._setting.labels:
            label = ""  # whole lines of one container at a time
        return Process(
            name=f"{pod.name}/{name}",
            argv=_argv(here),
            env=env,
            cwd=here.workdir if here.workdir and Path(here.workdir).is_dir() else None,
            label=label,
        )

    def placed(self, pod: Pod, process: Process) -> Process:
        """The process in the pod's own place, when it has one."""
        return process if self.network is None else self.network.wrap(pod.name, process)

    def prepare(self, pod: Pod, name: str, life: int) -> None:
        """Make the folders of a container, and write its files."""
        if self.network is not None and self._lives.setdefault(pod.name, life) != life:
            self._lives[pod.name] = life
            self.network.renew(pod.name)
        container = next(one for one in (*pod.init, *pod.containers) if one.name == name)
        for mount in container.mounts:
            folder = Path(self._folder(pod, mount.volume, life) or self._scratch, mount.part)
            is_file = mount.path in container.files  # one key of a ConfigMap or Secret
            (folder.parent if is_file else folder).mkdir(parents=True, exist_ok=True)
        here = self._localised(pod, container, life)
        for path, file in here.files.items():
            place = Path(path)
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.exists():
                text = (self._scratch / _KEYS / place.name).read_text() if file.key else None
                _write(place, file if text is None else replace(file, text=text), self._running)
        if self._doors is not None:
            process = self.process(pod, name, life)
            enter = self.placed(pod, process).argv[: -len(process.argv)]
            self._doors.open(pod, name, process, enter)
        (self._scratch / pod.name / "tmp").mkdir(parents=True, exist_ok=True)
        self.last_words(pod, name).parent.mkdir(parents=True, exist_ok=True)

    def ended(self, pod: Pod, name: str) -> None:
        """A container has ended: nobody comes into it any more."""
        if self._doors is not None:
            self._doors.close(pod, name)

    def follow(self, running: frozenset[str]) -> None:
        """Rewrite what controllers do when pods come and go: scripts that tell who runs now."""
        if running == self._running:
            return
        self._running = running
        for pod in self.pods:
            for container in pod.containers:
                files = self._localised(pod, container, 1).files if _changes(container) else {}
                for path, file in files.items():
                    if file.parts and Path(path).exists():
                        _write(Path(path), file, running)

    def last_words(self, pod: Pod, name: str) -> Path:
        """Where a launcher in this container leaves its termination message."""
        return self._scratch / pod.name / f"{name}.termination-log"

    def processes_of(self, pod: Pod, name: str) -> list[psutil.Process]:
        """What still runs of a container whose first process has ended, other sessions and orphans too.

        On a cluster nothing would; here its environment tells whose it is. What came in by ssh has no more than the
        pod's name, and sshd itself writes its title over its environment.
        """
        mark, folder = str(self.last_words(pod, name)), f"{self._scratch / pod.name}/"
        found: dict[int, psutil.Process] = {}
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                env = process.environ()
                known = env.get(_MARK) or env.get("HOSTNAME")
                if known in (mark, pod.name) or (known is None and folder in " ".join(process.cmdline())):
                    below = process.children(recursive=True) if known is None else []
                    found |= {each.pid: each for each in (process, *below)}
        return list(found.values())

    def _localised(self, pod: Pod, container: Container, life: int) -> Container:
        return loopback.localised(container, self._ground, lambda volume: self._folder(pod, volume, life))

    def _folder(self, pod: Pod, volume: str, life: int) -> str | None:
        if volume == FILES:
            return str(self._scratch / pod.name / "files")
        kind = pod.draft.template.volumes.get(volume)
        if kind is None:
            return None
        if kind.startswith("claim:"):
            return str(self._scratch / "claims" / kind.removeprefix("claim:").replace("/", "_"))
        return str(self._scratch / pod.name / f"life-{life}" / volume)


def _refuse_what_cannot_run(pods: tuple[Pod, ...]) -> None:
    if any(_FLUX in container.files for pod in pods for container in pod.containers):
        raise UsageError("Flux needs its controller's own scripts, which are not here; add --render DIR")


def _changes(container: Container) -> bool:
    return any(file.parts for file in container.files.values())


def _write(place: Path, file: File, running: frozenset[str]) -> None:
    """Whole or not at all, as a reader may come at any time."""
    beside = place.with_name(f".{place.name}.new")
    beside.touch(0o600)
    beside.write_text(file.while_running(running), encoding="utf-8", errors="surrogateescape")
    beside.chmod(0o600 if file.key == "private" else file.mode)
    beside.replace(place)


def _argv(container: Container) -> tuple[str, ...]:
    """As the kubelet has it; without a command the image's ENTRYPOINT is taken to be the launcher."""
    words = (*container.command, *container.args)
    if not container.command:
        words = words if words[:1] == (OURS,) else (OURS, "run", "--", *words)
    if Path(words[0]).name == OURS:
        return (sys.executable, "-c", RUN, *words[1:])
    return words


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as problem:
        raise UsageError(f"--command {command[:60]!r} cannot be split into words: {problem}") from None
    if not words:
        raise UsageError("--command is empty; give the program and its arguments in one text")
    return words


def _with_command(pod: Pod, words: tuple[str, ...]) -> Pod:
    changed = tuple(
        replace(one, command=words, args=()) if one.name == pod.draft.main else one for one in pod.containers
    )
    return replace(pod, containers=changed)


def _with_ports(ground: Ground, pods: tuple[Pod, ...]) -> Ground:
    taken: set[int] = set()
    ports = {}
    for endpoint in sorted(loopback.endpoints(ground, pods)):
        port = net.free_port()
        while port in taken:
            port = net.free_port()
        taken.add(port)
        ports[endpoint] = port
    return replace(ground, ports=ports)


def _threads(pods: tuple[Pod, ...]) -> int:
    """A pod has CPUs of its own; here all share them, and threads that wait by spinning starve others."""
    counts = (pod.main.env.get("PET_NPROC_PER_NODE", "1") for pod in pods)
    workers = sum(min(int(text), 4096) if text.isascii() and text.isdigit() else 1 for text in counts)
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def image_path() -> str:
    """The folder of our own Python first, as in an image that this package is installed in."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
