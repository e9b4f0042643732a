"""Podman for tests: networks and containers that go away again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.containers.images import podman
from tests.waiting import eventually

DEADLINE_S = 240.0
# As OpenShift starts a pod: a uid of its namespace, group 0, and the pod's fsGroup; no entry in /etc/passwd.
ANY_UID = ("--user", "1000650000:0", "--group-add", "1000", "--passwd=false")
MEMORY = "1g"  # of a container, unless an option says another


@dataclass
class Container:
    """A container that runs, or has run."""

    name: str
    folder: Path  # its termination log is in it

    def logs(self) -> str:
        """All that it has said, on both streams."""
        told = podman("logs", self.name)
        return told.stdout + told.stderr

    def facts(self) -> dict[str, Any]:
        """What podman knows of it."""
        found: list[dict[str, Any]] = json.loads(podman("inspect", self.name).stdout)
        return found[0]

    @property
    def is_running(self) -> bool:
        return bool(self.facts()["State"]["Running"])

    def address(self, network: str) -> str:
        return str(self.facts()["NetworkSettings"]["Networks"][network]["IPAddress"])

    def code(self) -> int:
        """Its exit code, once it has ended."""
        try:
            return int(podman("wait", self.name, timeout_s=DEADLINE_S).stdout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} did not end within {DEADLINE_S:g} s:\n{self.logs()[-3000:]}")

    def last_words(self) -> str:
        """What the kubelet would show: the end of the file, 4,096 bytes at most."""
        return (self.folder / "termination-log").read_bytes()[-4096:].decode()

    def until_it_says(self, text: str, within_s: float = DEADLINE_S) -> None:
        eventually(
            lambda: text in self.logs(), lambda: f"{text!r} from {self.name}:\n{self.logs()[-3000:]}", within_s, 0.2
        )

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        return podman("exec", self.name, *words, check=False)

    def remove(self) -> None:
        podman("rm", "-f", "-t", "0", self.name, check=False)


@dataclass
class Cluster:
    """A network without a way out, and the pods in it: one container each, under its name of Kubernetes."""

    network: str
    folder: Path
    bridge: str  # the network's interface on this machine
    gateway: str  # its address there, where the pods' DNS is, too: 10.89.0.1/24
    pods: dict[str, Container] = field(default_factory=dict)

    def start(
        self,
        name: str,
        image: str,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        options: Sequence[str] = (),
        entrypoint: bool = True,
    ) -> Container:
        """Start a pod's container, as the restricted profile has it; `words` are its `args`, else its `command`.

        Its termination log is a file of its own that anybody may write, mounted over the path, as the kubelet does.
        """
        folder = self.folder / f"{name}-{len(list(self.folder.glob(f'{name}-*')))}"
        folder.mkdir()
        (folder / "termination-log").touch(0o666)
        (folder / "termination-log").chmod(0o666)
        unique = f"{self.network}-{folder.name}"
        made = Container(unique, folder)
        self.pods[name] = made
        command = [] if entrypoint else ["--entrypoint", json.dumps(list(words))]
        self._keep_bridge()
        podman(
            *(
                "run",
                "-d",
                "--name",
                unique,
                "--hostname",
                name,
                "--network",
                self.network,
                "--network-alias",
                name,
            ),
            *("--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp:mode=1777", "--user", "1000:1000"),
            *("--cap-drop", "all", "--security-opt", "no-new-privileges", "--pids-limit", "400"),
            *("--memory", MEMORY),
            *("-v", f"{folder}/termination-log:/dev/termination-log"),
            *(word for key, value in env.items() for word in ("-e", f"{key}={value}")),
            *options,
            *command,
            image,
            *(words if entrypoint else ()),
        )
        return made

    @property
    def has_bridge(self) -> bool:
        return Path("/sys/class/net", self.bridge).exists()

    def _keep_bridge(self) -> None:
        """Have a bridge whose hardware address is one of its own.

        Else it has the lowest of its ports, another one with some pods that come or go; and pods that have asked
        for it before get no answer from their DNS for half a minute.
        """
        if not self.has_bridge:  # podman removes it with its last port
            _ip("link", "add", self.bridge, "address", "02:00:00:00:00:01", "type", "bridge")
            _ip("address", "add", self.gateway, "dev", self.bridge)
            _ip("link", "set", self.bridge, "up")

    def volume(self, name: str) -> str:
        """A folder of this machine that every pod may write, as `HOST:CONTAINER` wants its first half."""
        folder = self.folder / f"volume-{name}"
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o777)
        return str(folder)


@contextlib.contextmanager
def cluster(name: str, folder: Path) -> Iterator[Cluster]:
    """A network of its own for the pods of a test."""
    network = f"trainer-launch-{name}-{os.getpid()}"
    podman("network", "create", "--internal", network)
    (about,) = json.loads(podman("network", "inspect", network).stdout)
    (subnet,) = about["subnets"]
    gateway = f"{subnet['gateway']}/{subnet['subnet'].partition('/')[2]}"
    made = Cluster(network, folder, about["network_interface"], gateway)
    try:
        yield made
    finally:
        found = podman("ps", "-aq", "--filter", f"network={network}", check=False).stdout.split()
        if found:
            podman("rm", "-f", "-t", "0", *found, check=False)
        podman("network", "rm", "-f", network, check=False)
        if made.has_bridge:  # no pod of it ever started
            _ip("link", "delete", made.bridge)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True, capture_output=True)
