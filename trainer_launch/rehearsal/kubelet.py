"""A job's pods on this machine: scratch folders, free ports, files, and each container as a process."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

import psutil
from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import machine, network, process_tree, runtime_directory
from trainer_launch.host.files import replace as replace_file
from trainer_launch.model import Process
from trainer_launch.model.errors import NotRunnableError, UsageError
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.mpi import ssh_client
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.reading import check_command, recognise
from trainer_launch.rehearsal import pod_isolation
from trainer_launch.rehearsal.controllers import local_jobs, v1
from trainer_launch.rehearsal.controllers.local_jobs import FILES, OURS, RUN, LocalNetwork, own_environment
from trainer_launch.rehearsal.controllers.pod_lifecycle import own_init
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod, PodFile, Workload
from trainer_launch.rehearsal.controllers.pod_values import pods as pods_of
from trainer_launch.rehearsal.pod_isolation import OwnNetwork

_KEYS = "keys"  # folder of the job's own pair of keys
MARK = "TRAINER_LAUNCH_TERMINATION_LOG"  # different in each container, and inherited by all that it starts


class Setting(Struct, frozen=True, kw_only=True):
    """The surroundings of the pods, from outside their job."""

    launchers: Mapping[str, str]  # TRAINER_LAUNCH_* for our own launchers in them
    path: str  # where programs are looked for that a container does not say itself
    command: str | None = None  # run in place of what the containers that count would
    labels: bool = True  # whether lines are marked with their pod here; where not, the writer may
    own_network: bool = False  # whether each pod has a network, names and /dev/shm of its own


class Kubelet:
    """Where the pods of one rehearsal live."""

    def __init__(self, workload: Workload, scratch: Path, setting: Setting) -> None:
        self._scratch = scratch
        self._setting = setting
        self.network = OwnNetwork(scratch) if setting.own_network else None
        self._device = "lo" if self.network is None else pod_isolation.DEVICE
        self._lives: dict[str, int] = {}  # by pod with a place of its own
        if len(workload.drafts) > local_jobs.MAX_PODS:
            raise UsageError(
                f"the job has {len(workload.drafts)} pods; a rehearsal runs at most {local_jobs.MAX_PODS}"
            )
        address_of = local_jobs.address_of if self.network is None else pod_isolation.address_of
        self.pods = self._equipped(pods_of(workload, address_of))
        self._local = self._network_of(workload)
        machine = {"OMP_NUM_THREADS": str(threads(self.pods)), "GLOO_SOCKET_IFNAME": self._device}
        self._base = {**machine, **own_environment(os.environ), "PATH": setting.path}
        # Paddle's launcher takes the address of this machine's name, unless it has POD_IP.
        self._tells_address = workload.kind == "PaddleJob"

    def _network_of(self, workload: Workload) -> LocalNetwork:
        """Where everything of the job is on this machine: names, ports, claims."""
        local = LocalNetwork(pods={}, addresses={})  # with networks of their own, names and ports are the job's
        if self.network is None:
            if v1.MEETING_PORT in workload.ports:
                first = next(pod for pod in self.pods if pod.name == workload.ports[v1.MEETING_PORT])
                self.pods = tuple(local_jobs.with_meeting(pod, first.address) for pod in self.pods)
            local = local_jobs.local_network_of(workload, self.pods)
            ports: dict[local_jobs.Endpoint, int] = {}
            free = iter(partial(network.free_port, network.later_ports()), 0)
            for endpoint in sorted(local_jobs.endpoints(local, self.pods)):
                ports[endpoint] = next(port for port in free if port not in ports.values())
            local = replace(local, ports=ports)
        else:
            for number, pod in enumerate(self.pods):
                has_own = any(mount.path == "/dev/shm" for mount in pod.main.mounts)
                self.network.add(pod.name, number, pod.draft.names, 0 if has_own else None)
        mounts: dict[str, str] = {}  # the folder of each path at which some pod of the job mounts a claim
        for pod in self.pods:
            shared = {name for name, kind in pod.draft.template.volumes.items() if kind.startswith("claim:")}
            folder_of = {name: self._folder(pod, name, 1) for name in shared}.get
            for container in pod.containers:
                mounts = {**local_jobs.mounted(container, folder_of), **mounts}
        return replace(local, shared_mounts=mounts)

    def _equipped(self, made: tuple[Pod, ...]) -> tuple[Pod, ...]:
        """The pods with another command, and with keys and ports for ssh, as asked for."""
        if self._setting.command is not None:
            words = words_of(self._setting.command)
            is_pythons = parse_command(words).is_worker and not parse_command(words).python
            typed = {"command": (), "args": words} if is_pythons else {"command": words, "args": ()}
            made = tuple(pod if local_jobs.is_worker(pod) else _with_main(pod, typed) for pod in made)
        if any(map(local_jobs.uses_ssh, made)):
            ssh_client.make_key(str(self._scratch / _KEYS), ssh_client.find("ssh-keygen", self._setting.path))
            port, device = network.free_port(network.later_ports()), self._device
            scratch = {pod.name: str(self._scratch / pod.name / "tmp") for pod in made}
            made = tuple(local_jobs.with_ssh(pod, port, scratch[pod.name], device) for pod in made)
        return made

    def check(self) -> None:
        """Find every program before anything starts. Raises UsageError: one is not there."""
        checked: set[tuple[str, ...]] = set()
        for pod in self.pods:
            for container in (*own_init(pod), *pod.containers):
                process = self.process(pod, container.name, 1)
                if process.argv not in checked:
                    checked.add(process.argv)
                    check(pod, self._localised(pod, container, 1), process, str(self._scratch))

    def process(self, pod: Pod, name: str, life: int) -> Process:
        """A container of a pod in one of its lives, as a process of this machine."""
        container = pod.container(name)
        here = self._localised(pod, container, life)
        words = ("true",) if here.platforms else words_in(here)
        env = {
            **self._base,
            **{f"TRAINER_LAUNCH_{key}": value for key, value in self._setting.launchers.items()},
            "HOSTNAME": pod.name,
            **({"POD_IP": pod.address} if self._tells_address else {}),
            **({} if self.network is None else {"TMPDIR": str(self._scratch / pod.name / "tmp")}),
            **here.env,
            MARK: str(self.termination_message(pod, name)),
            runtime_directory.VARIABLE: self.runtime_directory_of(pod),
        }
        cwd = here.workdir if here.workdir and Path(here.workdir).is_dir() else None
        label = pod.name if name == pod.draft.main else f"{pod.name}/{name}"
        if not self._setting.labels:
            label = ""  # whole lines of one container at a time
        return Process(
            name=f"{pod.name}/{name}",
            argv=(sys.executable, "-c", RUN, *words[1:]) if Path(words[0]).name == OURS else words,
            env=env,
            cwd=cwd,
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
        container = pod.container(name)
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
                _write(place, file if text is None else replace(file, text=text))
        (self._scratch / pod.name / "tmp").mkdir(parents=True, exist_ok=True)
        Path(self.runtime_directory_of(pod)).mkdir(exist_ok=True)
        self.termination_message(pod, name).parent.mkdir(parents=True, exist_ok=True)

    def termination_message(self, pod: Pod, name: str) -> Path:
        """Where a launcher in this container leaves its termination message."""
        return self._scratch / pod.name / f"{name}.termination-log"

    def runtime_directory_of(self, pod: Pod) -> str:
        """Where `report()` of a program without a launcher writes; a launcher has a folder of its own."""
        return str(self._scratch / pod.name / "run")

    def processes_of(self, pod: Pod, name: str) -> list[psutil.Process]:
        """The processes of a container, other sessions and orphans too, also after its first process has ended.

        A process has its container in its environment, or in that of a process above it. A session by ssh has no
        more than the pod's name, and sshd itself writes its title over its environment.
        """
        processes: dict[int, tuple[psutil.Process, int, str | None, bool]] = {}
        folder, mark = f"{self._scratch / pod.name}/", str(self.termination_message(pod, name))
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                env = process_tree.environment(process.pid) or {}
                own = env.get(MARK)
                is_here = own is None and (env.get("HOSTNAME") == pod.name or folder in " ".join(process.cmdline()))
                processes[process.pid] = process, process.ppid(), own, is_here
        # Sessions come to sshd, or where none runs to the main container.
        words = ((each.name, words_in(each)) for each in (*pod.init, *pod.containers))
        sshd = next((container for container, argv in words if argv[:2] == (OURS, "sshd")), pod.draft.main)
        unmarked = str(self.termination_message(pod, sshd))

        def container_of(pid: int) -> str | None:
            """The mark of the process, or of the nearest above it; of an orphan of this pod its sshd's."""
            is_here = False
            while pid in processes:
                _, pid, own, is_named = processes[pid]
                is_here = is_here or is_named
                if own is not None:
                    return own
            return unmarked if is_here else None

        return [process for pid, (process, *_) in processes.items() if container_of(pid) == mark]

    def temporary_folders(self, pods: Collection[Pod]) -> tuple[str, ...]:
        """The folders for temporary files of these pods, if not our own."""
        own = (pod.main.env.get("TMPDIR") for pod in pods)
        return (*(str(self._scratch / pod.name / "tmp") for pod in pods), *dict.fromkeys(filter(None, own)))

    def _localised(self, pod: Pod, container: Container, life: int) -> Container:
        return local_jobs.localised(container, self._local, lambda volume: self._folder(pod, volume, life))

    def _folder(self, pod: Pod, volume: str, life: int) -> str | None:
        files = str(self._scratch / pod.name / "files")
        if volume == FILES:
            return files
        if volume.startswith("/"):  # a folder of the image, which this machine may have too
            return None if os.access(volume, os.W_OK) else files + volume
        kind = pod.draft.template.volumes.get(volume)
        if kind is None:
            return None
        if kind.startswith("claim:"):
            return str(self._scratch / "claims" / kind.removeprefix("claim:").replace("/", "_"))
        return str(self._scratch / pod.name / f"life-{life}" / volume)


def _write(place: Path, file: PodFile) -> None:
    """Whole or not at all, as a reader may come at any time."""
    data = file.text.encode(errors="surrogateescape")
    replace_file(str(place), data, 0o600 if file.key == "private" else file.mode)


def words_in(container: Container) -> tuple[str, ...]:
    """As the kubelet has it; without a command the image's ENTRYPOINT is taken to be the launcher."""
    words = (*container.command, *container.args)
    return words if container.command or words[:1] == (OURS,) else (OURS, "run", "--", *words)


def program_of(container: Container) -> tuple[str, ...]:
    """The program of the container, behind our launcher if that comes first; () where only the launcher knows."""
    words = words_in(container)
    if Path(words[0]).name != OURS:
        return words
    return words[words.index("--") + 1 :] if words[1:2] == ("run",) and "--" in words else ()


def words_of(command: str) -> tuple[str, ...]:
    """--command as words. Raises UsageError: it cannot be split, or there are none."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as problem:
        raise UsageError(f"--command {command[:60]!r} cannot be split into words: {problem}") from None
    if not words:
        raise UsageError("--command is empty; give the program and its arguments in one text")
    return words


def _with_main(pod: Pod, typed: Mapping[str, tuple[str, ...]]) -> Pod:
    """The pod with another command and other arguments of the container that counts."""
    containers = (replace(each, **typed) if each.name == pod.draft.main else each for each in pod.containers)
    return replace(pod, containers=tuple(containers))


def threads(pods: tuple[Pod, ...]) -> int:
    """A pod has CPUs of its own; here all share them, and threads that wait by spinning starve others."""
    counts = (pod.main.env.get("PET_NPROC_PER_NODE", "1") for pod in pods)
    numbers = (parse_number(text, 0, MAX_COUNT) for text in counts)
    workers = sum(1 if number is None else min(number, 4096) for number in numbers)
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def image_path() -> str:
    """Our own Python is the first one, as in an image that this package is installed in; shims stay before it."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    names = ("python", "python3", "trainer-launch")
    with_python = (at for at, each in enumerate(folders) if any(os.path.exists(f"{each}/{name}") for name in names))
    at = next(with_python, 0)
    return os.pathsep.join([*folders[:at], os.path.dirname(sys.executable), *folders[at:]])


def check(pod: Pod, container: Container, process: Process, scratch: str) -> None:
    """Find the program of a container, which is given as this machine has it.

    Raises:
        UsageError: it is not there.
    """
    words = program_of(container)
    is_ours = process.argv[0] == sys.executable
    if (is_ours or "torchrun" in words) and process.env.get("PET_NPROC_PER_NODE") == "gpu":
        gpus = machine.count(process.env)
        if not gpus.cuda:  # as many workers as GPUs cannot be: each of seven tries would fail
            raise UsageError(
                f"PET_NPROC_PER_NODE is gpu, but this machine has no GPU ({gpus.reason}); "
                "add --nproc-per-node 1 to rehearse with one worker per node"
            )
    may_be_made = is_ours and pod.init  # by an init container
    if process.cwd is not None or not words or may_be_made:
        return
    path = process.env.get("PATH")
    command = recognise(words, path) if is_ours else parse_command(words)
    if any(word.startswith(f"{scratch}/") for word in (words[0], *command.program[:1])):
        return  # of a volume, which is filled when the pod begins
    try:
        check_command(command, path)
    except NotRunnableError as problem:
        exists = problem.exit_code == 126
        is_init = any(each.name == container.name for each in pod.init)
        advice = f"--skip-init {container.name} leaves it out" if is_init else "--command runs another program here"
        text = f"container {container.name} of {pod.name}: {problem} ({advice})"
        raise NotRunnableError(text, exists=exists) from None
