"""A job's pods on this machine: loopback addresses, free ports, paths, and our sshd. Pure."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host import runtime_directory
from trainer_launch.host.files import JOB_SECRET
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import parse_number
from trainer_launch.planning.mpi_options import is_horovodrun, is_mpirun, parse
from trainer_launch.rehearsal.controllers import pod_values, v1
from trainer_launch.rehearsal.controllers.pod_values import HOSTFILE, Container, Pod, Workload, expanded

# Our own command line. Not -m: it would look for our modules, and for Python's own, in the user's folder first.
RUN = "import sys; '' in sys.path and sys.path.remove(''); from trainer_launch.cli import main; main()"
MAX_PODS = 200
OURS = "trainer-launch"
# The variables that a pod gets of the shell: of programs, libraries, caches and proxies. Nothing of a platform, and
# none of our own options.
_OF_SHELL = frozenset(
    {
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TERM", "NO_COLOR", "TMPDIR",
        "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "CC", "CXX", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
        "XLA_FLAGS", "JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "SSL_CERT_FILE", "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    }
)  # fmt: skip
_OF_SHELL_PREFIXES = (
    *("LC_", "PYTHON", "CONDA_", "XDG_", "CUDA_", "NCCL_", "GLOO_", "TORCH_", "HF_", "TRANSFORMERS_", "WANDB_"),
    *("MLFLOW_", "AWS_", "GOOGLE_", "COVERAGE_", "COV_"),
)
_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "FTP_PROXY"})  # in either case

# More ranks than CPUs are fine here, which let each other run, none is bound to one, and the network may be down:
# Open MPI 5 takes loopback by itself where there is nothing else, and refuses a setting for it.
_ON_A_LAPTOP = {
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}
_DEVICES = ("OMPI_MCA_oob_tcp_if_include", "OMPI_MCA_btl_tcp_if_include")
_LAUNCHERS = ("OMPI_MCA_", "I_MPI_", "HYDRA_")  # variables that only who runs mpirun gets
# A file of the home that the launcher's words name is each rank's own, as on a cluster.
_OWN_HOME = 'exec "${@//"$0"/"${0%/*/*}/$HOSTNAME/files"}"'
_MEETING = ("PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "TRAINER_LAUNCH_MASTER_ADDR")
_SIZES = ("PET_NNODES", "NNODES")
_PORT = "29500"  # any: a free one comes in its place
_HOST = re.compile(r"(?<![\w.-])([A-Za-z0-9][A-Za-z0-9.-]*)(?::([0-9]{1,5})(?![0-9]))?(?![\w-])")  # NAME[:PORT]
# The key of a value, or the word before it; all members of a list have the same.
_KEY = re.compile(r"""([\w.-]*\w)["']?(?:\s*[=:]\s*|\s+)["'\[({]*(?:["']?[^\s=,"']+["']?\s*,\s*["']?)*$""")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # of a key: masterAddr, MASTER_ADDR, --master-addr
_HOST_WORD = re.compile(
    r"h|ps|rdzv|rendezvous|(addr|address|host|hostname|ip|url|uri|endpoint|server|master|coordinator|scheduler|"
    r"tracker|leader|head|chief|worker|node|peer|member|seed|broker|target)(s|es)?"
)
# Programs whose arguments are hosts, and a loop over hosts.
_HOST_COMMAND = re.compile(
    r"(?:^|[\s;&|(`/])(?:ssh|scp|rsync|ping|nc|ncat|telnet|nslookup|dig|host|getent|curl|wget|for\s+\w+\s+in)\s[^;&|]*$"
)
_PATH = re.compile(r"(?<![\w./$-])(/[\w.@%+~/-]*)")
_FIRST_PORT = 1024  # a smaller number behind a host is that of slots, or a port that needs no other number here
_KEEP = ("/dev/shm", "/tmp", "/")  # mounts that this machine has itself
FILES = "/files"  # stands for the folder of the files that the platform itself puts into a container

Endpoint = tuple[str, int]  # pod, port


def own_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Of the shell's variables those that a pod gets."""
    return {
        name: value
        for name, value in env.items()
        if name in _OF_SHELL or name.upper() in _PROXIES or name.startswith(_OF_SHELL_PREFIXES)
    }


def uses_ssh(pod: Pod) -> bool:
    """Whether a key of the job is mounted in this pod."""
    return any(container.uses_ssh for container in pod.containers)


def is_worker(pod: Pod) -> bool:
    """Whether the pod only serves: its program is sshd."""
    return uses_ssh(pod) and not any(HOSTFILE in container.files for container in pod.containers)


def with_ssh(pod: Pod, port: int, scratch: str, device: str = "lo") -> Pod:
    """The pod with our sshd and launcher in it; `scratch` is a folder of its own for temporary files.

    Its launcher reaches the others by the network device `device`.
    """
    if not uses_ssh(pod):
        return pod
    containers = tuple(_changed(container, pod, port, scratch, device) for container in pod.containers)
    hosts = " ".join(container.files[HOSTFILE].text for container in pod.containers if HOSTFILE in container.files)
    if set(pod.draft.names).isdisjoint(re.split(r"[\s:]", hosts)):
        return replace(pod, containers=containers)
    # A launcher that is a node too is reached like the others: here it has an address like theirs.
    main = pod.main
    env = {name: value for name, value in main.env.items() if not name.startswith(_LAUNCHERS)}
    env |= {"K_MPI_JOB_ROLE": "worker"} if "K_MPI_JOB_ROLE" in env else {}
    sshd = replace(
        main,
        name="sshd",
        env={**env, **_env(pod, main, port, scratch), **_apart(scratch)},
        command=(OURS,),
        args=("sshd",),
        files={path: file for path, file in main.files.items() if file.key},
        sidecar=True,
    )
    return replace(pod, containers=containers, init=(*pod.init, sshd))


def _changed(container: Container, pod: Pod, port: int, scratch: str, device: str) -> Container:
    if _key_folder(container) is None:
        return container
    is_launcher = HOSTFILE in container.files
    words = _with_own_homes((*container.command, *container.args), _home(container), scratch)
    name = words[0].rpartition("/")[2] if words else ""
    if name == "sshd":
        words = (OURS, "sshd")
    elif name == OURS and words[1:2] == ("sshd",):
        words = (OURS, *words[1:], "--ssh-port", str(port))  # of an option given twice the last one counts
    elif name and (is_mpirun(name) or is_horovodrun(words)):
        words = (OURS, "run", "--", *words)
    devices = dict.fromkeys(_DEVICES, device)
    env = {
        **container.env,
        **_env(pod, container, port, scratch),
        **({**_ON_A_LAPTOP, **devices} if is_launcher else _apart(scratch)),
    }
    return replace(container, env=env, command=words[:1], args=words[1:])


def _with_own_homes(words: tuple[str, ...], home: str, scratch: str) -> tuple[str, ...]:
    """The words of an mpirun; else all its ranks would write to the same file, and read it half written."""
    at = next((at for at, word in enumerate(words) if is_mpirun(word)), None)
    if home and at is not None:
        with contextlib.suppress(UsageError):  # mpirun itself refuses them
            program = parse(words[at:]).program
            if any(f"{home}/" in word for word in program):
                agent = ("bash", "-c", _OWN_HOME, f"{scratch.removesuffix('/tmp')}/files")
                return (*words[: -len(program)], *agent, *program)
    return words


def _env(pod: Pod, container: Container, port: int, scratch: str) -> Mapping[str, str]:
    """The variables by which our sshd, and its clients, find its place: the pod's own address."""
    ssh = {"TRAINER_LAUNCH_SSH_DIR": _key_folder(container) or "", "TRAINER_LAUNCH_SSH_PORT": str(port)}
    return {**ssh, runtime_directory.LISTEN_AT: pod.address, "TMPDIR": scratch}


def _apart(scratch: str) -> Mapping[str, str]:
    """Open MPI takes pods of one machine for machines that share no memory, and its files would meet."""
    return {f"OMPI_MCA_btl_{btl}_backing_directory": scratch for btl in ("vader", "sm")}


def _key_folder(container: Container) -> str | None:
    return next((path.rpartition("/")[0] for path, file in container.files.items() if file.key == "private"), None)


def _home(container: Container) -> str:
    """Of the image's user, whose `.ssh` the keys are in; "": they are elsewhere."""
    folder, name = (_key_folder(container) or "").rpartition("/")[::2]
    return folder if name == ".ssh" else ""


def with_meeting(pod: Pod, first: str) -> Pod:
    """The pod whose launchers meet at the address `first`, where neither the operator nor the job says where."""
    meeting = {"TRAINER_LAUNCH_MASTER_ADDR": first, v1.MEETING_PORT: _PORT}

    def changed(container: Container) -> Container:
        is_node = any(name in container.env for name in _SIZES)
        has_address = any(name in container.env for name in _MEETING)
        return replace(container, env={**container.env, **meeting}) if is_node and not has_address else container

    return replace(pod, containers=tuple(map(changed, pod.containers)))


def address_of(number: int) -> str:
    """The loopback address of a pod: 127.0.0.2 for the first."""
    return pod_values.address_of(number, "127.0")


class LocalNetwork(Struct, frozen=True, kw_only=True):
    """Where everything of a job is on this machine."""

    pods: Mapping[str, str]  # name or address, as the job writes it -> pod
    addresses: Mapping[str, str]  # pod -> address
    ports: Mapping[Endpoint, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # variable with a port -> pod
    shared_mounts: Mapping[str, str] = field(default_factory=dict)  # where a pod mounts a claim -> its folder here


def local_network_of(workload: Workload, pods: tuple[Pod, ...]) -> LocalNetwork:
    """All names of all pods; no ports yet."""
    names = {name: pod.name for pod in pods for name in (*pod.draft.names, pod.address)}
    return LocalNetwork(
        pods=names, addresses={pod.name: pod.address for pod in pods}, variables=dict(workload.ports)
    )


def endpoints(local: LocalNetwork, pods: Iterable[Pod]) -> set[Endpoint]:
    """Every port of a pod that the job names anywhere: a server at it needs a port of its own here."""
    named: set[Endpoint] = set()
    for pod in pods:
        for container in (*pod.init, *pod.containers):
            files = (file.text for file in container.files.values())
            for text in (*container.env.values(), *container.command, *container.args, *files):
                for match in _HOST.finditer(text):
                    owner = _owner(local, match)
                    if owner is not None and match[2] and int(match[2]) >= _FIRST_PORT:
                        named.add((owner, int(match[2])))
            named.update(_ports_in_variables(container, local).values())
    return named


def _ports_in_variables(container: Container, local: LocalNetwork) -> dict[str, Endpoint]:
    """The endpoint of each variable of the container that is the port of some pod."""
    values = {name: parse_number(container.env.get(name, ""), 1, 65535) for name in local.variables}
    return {name: (local.variables[name], port) for name, port in values.items() if port is not None}


def localised(container: Container, local: LocalNetwork, folder_of: Callable[[str], str | None]) -> Container:
    """The container with this machine's addresses, ports and paths in it.

    `folder_of` gives the place of a volume, or of a folder of the image. The arguments of mpirun's ranks stand in
    the launcher, which need not mount the claims that they mount.
    """
    places = {**local.shared_mounts, **_places(container, folder_of)}

    def text(value: str, before: str = "") -> str:
        return _paths(_hosts(value, local, before), places)

    ports = {name: str(local.ports.get(at, at[1])) for name, at in _ports_in_variables(container, local).items()}

    def word(value: str, before: str) -> str:
        typed = container.typed.get(value)  # $(MASTER_PORT) is here what that variable is here
        return text(value if typed is None else expanded(typed, {**container.env, **ports}), before)

    env = {name: text(value, f"{name}=") for name, value in container.env.items()} | ports
    typed_words = (*container.command, *container.args)
    words = tuple(word(value, _option_before(typed_words[:at])) for at, value in enumerate(typed_words))
    if JOB_SECRET in container.files:  # where the launcher would look by itself
        env.setdefault("TRAINER_LAUNCH_SECRET_FILE", _path(JOB_SECRET, places))
    return replace(
        container,
        env=env,
        command=words[: len(container.command)],
        args=words[len(container.command) :],
        workdir=None if container.workdir is None else _path(container.workdir, places),
        files={_path(path, places): replace(file, text=text(file.text)) for path, file in container.files.items()},
    )


def _places(container: Container, folder_of: Callable[[str], str | None]) -> Mapping[str, str]:
    """Path in the container -> path here; the longest that fits counts."""
    places = mounted(container, folder_of)
    root = folder_of(FILES)
    if root is not None:
        in_volumes = {
            path
            for path, file in container.files.items()
            if file.is_mounted and any(path == place or path.startswith(f"{place}/") for place in places)
        }
        places |= {path: f"{root}{path}" for path in container.files if path not in in_volumes}
        keys = {path.rpartition("/")[0] for path, file in container.files.items() if file.key}
        places |= {folder: f"{root}{folder}" for folder in keys}
        home = _home(container)
        if home and (folder := folder_of(home)) is not None:
            places[home] = folder
    return places


def mounted(container: Container, folder_of: Callable[[str], str | None]) -> dict[str, str]:
    """The mount path of each volume that has a folder here -> that folder; a path of this machine's own stays."""
    folders = {mount: folder_of(mount.volume) for mount in container.mounts if mount.path not in _KEEP}
    return {
        mount.path: f"{folder}/{mount.part}".rstrip("/") for mount, folder in folders.items() if folder is not None
    }


def _owner(local: LocalNetwork, match: re.Match[str], before: str = "") -> str | None:
    """The pod that a text names as an address; `before` stands in front of the text.

    None: it is another name, a word, or behind a single slash a part of a path.
    """
    name = match[1].rstrip(".").removesuffix(".cluster.local")
    owner, ahead = local.pods.get(name), before + match.string[: match.start()]
    if owner is None or (ahead.endswith("/") and not ahead.endswith("//")):
        return None
    is_plain = "." in name or match[2] or ahead.endswith(("//", "@"))
    return owner if is_plain or _expects_host(ahead.rpartition("\n")[2], local.pods) else None


def _expects_host(ahead: str, pods: Mapping[str, str]) -> bool:
    """Whether a pod's short name is an address behind this part of a line: `--master=`, not `--run-name=`.

    A name without a key in front of it is an address: a line of a hostfile, an argument.
    """
    key = _KEY.search(ahead)
    while key is not None and key[1] in pods:  # all names of a list have the key of the first
        key = _KEY.search(ahead[: key.start(1)])
    if key is None or _HOST_COMMAND.search(ahead):
        return True
    words = [word.lower() for word in _WORDS.findall(key[1])]
    return key[1] != "HOSTNAME" and words[-1:] != ["name"] and any(map(_HOST_WORD.fullmatch, words))


def _option_before(words: Sequence[str]) -> str:
    """The word in front of the next: an option that may have the next for a value, or nothing."""
    if any(_HOST_COMMAND.match(f"{word} ") for word in words) or not words:
        return ""
    return f"{words[-1]} " if words[-1].startswith("-") and "=" not in words[-1] else ""


def _hosts(text: str, local: LocalNetwork, before: str) -> str:
    def replaced(match: re.Match[str]) -> str:
        owner = _owner(local, match, before)
        if owner is None:
            return match[0]
        port = match[2]
        if port is None:
            return local.addresses[owner]
        return f"{local.addresses[owner]}:{local.ports.get((owner, int(port)), int(port))}"

    return _HOST.sub(replaced, text)


def _paths(text: str, places: Mapping[str, str]) -> str:
    return _PATH.sub(lambda match: _path(match[1], places), text) if places else text


def _path(path: str, places: Mapping[str, str]) -> str:
    """The place of a whole path, which may have signs that a path in a text ends at."""
    for start in sorted(places, key=len, reverse=True):
        if path == start or path.startswith(f"{start}/"):
            return places[start] + path[len(start) :]
    return path
