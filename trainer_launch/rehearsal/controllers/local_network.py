"""A job's pods on one machine: names become loopback addresses, ports free ones, and paths folders. Pure.

Names, ports and paths are found wherever they stand: in variables, TF_CONFIG too, in arguments, and in files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from trainer_launch.model.value_parsers import parse_number
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod, Workload

MAX_PODS = 200
_HOST = re.compile(r"(?<![\w.-])([A-Za-z0-9][A-Za-z0-9.-]*)(?::([0-9]{1,5})(?![0-9]))?(?![\w-])")
_PATH = re.compile(r"(?<![\w./$-])(/[\w.@%+~/-]*)")
_ENDS = (".cluster.local",)  # what a name may have behind it in any cluster
_FIRST_PORT = 1024  # a smaller number behind a host is one of slots, or a port that needs no other number here
_KEEP = ("/dev/shm", "/tmp", "/")  # mounts that this machine has itself

Endpoint = tuple[str, int]  # pod, port


def address_of(number: int) -> str:
    """The loopback address of a pod: 127.0.0.2 for the first."""
    return f"127.0.{number // 250}.{number % 250 + 2}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Where everything of a job is on this machine."""

    pods: Mapping[str, str]  # name or address, as the job writes it -> pod
    addresses: Mapping[str, str]  # pod -> address
    ports: Mapping[Endpoint, int] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)  # variable with a port -> pod


def ground_of(workload: Workload, pods: tuple[Pod, ...]) -> Ground:
    """All names of all pods; no ports yet."""
    names = {name: pod.name for pod in pods for name in (*pod.draft.names, pod.address)}
    return Ground(pods=names, addresses={pod.name: pod.address for pod in pods}, variables=dict(workload.ports))


def endpoints(ground: Ground, pods: Iterable[Pod]) -> set[Endpoint]:
    """Every port of a pod that something in the job names: who listens there needs one of its own."""
    found: set[Endpoint] = set()
    for pod in pods:
        for container in (*pod.init, *pod.containers):
            for text in _texts(container):
                for match in _HOST.finditer(text):
                    owner = _owner(ground, match)
                    if owner is not None and match[2] and int(match[2]) >= _FIRST_PORT:
                        found.add((owner, int(match[2])))
            for name, owner in ground.variables.items():
                value = container.env.get(name, "")
                port = parse_number(value, 1, 65535)
                if port is not None:
                    found.add((owner, port))
    return found


def localised(container: Container, ground: Ground, folder_of: Callable[[str], str | None]) -> Container:
    """The container with this machine's addresses, ports and paths in it; `folder_of` tells where a volume is."""
    places = _places(container, folder_of)

    def text(value: str) -> str:
        return _paths(_hosts(value, ground), places)

    env = {name: text(value) for name, value in container.env.items()}
    for name, owner in ground.variables.items():
        value = container.env.get(name, "")
        port = parse_number(value, 1, 65535)
        if port is not None:
            env[name] = str(ground.ports.get((owner, port), value))
    return replace(
        container,
        env=env,
        command=tuple(map(text, container.command)),
        args=tuple(map(text, container.args)),
        workdir=None if container.workdir is None else _path(container.workdir, places),
        files={
            _path(path, places): replace(
                file, text=text(file.text), parts=tuple((pod, text(part)) for pod, part in file.parts)
            )
            for path, file in container.files.items()
        },
    )


FILES = "/files"  # stands for the folder of what the platform itself puts into a container


def _places(container: Container, folder_of: Callable[[str], str | None]) -> Mapping[str, str]:
    """Path in the container -> path here; the longest that fits counts."""
    places = {}
    for mount in container.mounts:
        folder = folder_of(mount.volume)
        if folder is not None and mount.path not in _KEEP:
            places[mount.path] = f"{folder}/{mount.part}".rstrip("/")
    root = folder_of(FILES)
    if root is not None:
        own = [path for path, file in container.files.items() if not (file.is_mounted and _within(path, places))]
        places |= {path: f"{root}{path}" for path in own}
        keys = {path.rpartition("/")[0] for path, file in container.files.items() if file.key}
        places |= {folder: f"{root}{folder}" for folder in keys}
    return places


def _within(path: str, places: Mapping[str, str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _texts(container: Container) -> Iterator[str]:
    yield from container.env.values()
    yield from container.command
    yield from container.args
    for file in container.files.values():
        yield file.text


def _owner(ground: Ground, found: re.Match[str]) -> str | None:
    """Whose name it is; none behind a single slash, where it is a part of a path."""
    before = found.string[max(0, found.start() - 2) : found.start()]
    if before.endswith("/") and before != "//":
        return None
    name = found[1].rstrip(".")
    for end in _ENDS:
        name = name.removesuffix(end)
    return ground.pods.get(name)


def _hosts(text: str, ground: Ground) -> str:
    def replaced(found: re.Match[str]) -> str:
        owner = _owner(ground, found)
        if owner is None:
            return found[0]
        port = found[2]
        if port is None:
            return ground.addresses[owner]
        return f"{ground.addresses[owner]}:{ground.ports.get((owner, int(port)), int(port))}"

    return _HOST.sub(replaced, text)


def _paths(text: str, places: Mapping[str, str]) -> str:
    return _PATH.sub(lambda found: _path(found[1], places), text) if places else text


def _path(path: str, places: Mapping[str, str]) -> str:
    """The place of a whole path, which may have signs that a path in a text ends at."""
    for known in sorted(places, key=len, reverse=True):
        if path == known or path.startswith(f"{known}/"):
            return places[known] + path[len(known) :]
    return path
