"""Several hosts on one machine: each its own network, host name, /etc/hosts and process namespace, on one switch.

Needs root and iproute2. Everything is made here and taken down here; no packet leaves the machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.cli.launching import clean_env
from tests.conftest import require

SUBNET = "10.77.0"
_NETNS = Path("/etc/netns")
_numbers = itertools.count()  # several sets of hosts may exist at once


class Host:
    """One host; programs started in it run as its process 1."""

    def __init__(self, namespace: str, name: str, address: str, plug: tuple[str, str], tmp: str) -> None:
        self.namespace, self.name, self.address = namespace, name, address
        self._tmp = tmp  # for temporary files, as most programs end by being killed here
        self._plug = plug  # the switch, and its port that leads here
        self._hosts_file = _NETNS / namespace / "hosts"
        self.started: list[subprocess.Popen[str]] = []

    def knows(self, names: Mapping[str, str]) -> None:
        """Write /etc/hosts in place: it is mounted into programs that run already."""
        self._hosts_file.parent.mkdir(parents=True, exist_ok=True)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in names.items())]
        self._hosts_file.write_text("\n".join(lines) + "\n")

    def moves_to(self, address: str) -> None:
        """Give the host another address, as a pod has after it was made again."""
        ip("-n", self.namespace, "addr", "flush", "dev", "eth0")
        ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        self.address = address

    def unplug(self, device: str = "eth0") -> None:
        """Let nothing reach the others, nor theirs this host: no packet is refused, all are lost."""
        switch, port = self._plug
        ip("-n", switch, "link", "set", f"{port}-{device}", "nomaster")

    def plug(self, device: str = "eth0") -> None:
        """Undo `unplug`."""
        switch, port = self._plug
        ip("-n", switch, "link", "set", f"{port}-{device}", "master", f"br-{device}")

    def wire(self, device: str, address: str) -> None:
        """Give the host a device on the network of all devices of this name."""
        switch, port = self._plug
        port, bridge = f"{port}-{device}", f"br-{device}"
        if subprocess.run(("ip", "-n", switch, "link", "show", bridge), capture_output=True).returncode != 0:
            ip("-n", switch, "link", "add", bridge, "type", "bridge")
            ip("-n", switch, "link", "set", bridge, "up")
        ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", device, "netns", self.namespace)
        ip("-n", switch, "link", "set", port, "master", bridge, "up")
        ip("-n", self.namespace, "addr", "add", f"{address}/24", "dev", device)
        ip("-n", self.namespace, "link", "set", device, "up")

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program as process 1 of this host."""
        inside = ("sh", "-c", 'hostname "$0" && exec "$@"', self.name, *argv)
        isolated = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", *inside)
        started = subprocess.Popen(
            ("ip", "netns", "exec", self.namespace, *isolated),
            env=clean_env({"HOSTNAME": self.name, "TMPDIR": self._tmp, **env}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.started.append(started)
        return started

    def process_1(self, started: subprocess.Popen[str]) -> psutil.Process:
        """The program that was started: the child of `unshare`."""
        return psutil.Process(started.pid).children()[0]

    def kill(self, started: subprocess.Popen[str]) -> None:
        """Kill process 1; the kernel kills the others with it."""
        self.process_1(started).kill()


def missing() -> str | None:
    """What these hosts need and this machine does not give."""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare"):
        return None
    return "needs root, iproute2, util-linux"


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[list[Host]]:
    """Make one host for each name, all knowing each other; end what runs there and remove them afterwards."""
    require(missing() is None, str(missing()))
    mark = f"tl{os.getpid()}-{next(_numbers)}"
    switch = f"{mark}-switch"
    with contextlib.ExitStack() as undo:
        tmp = undo.enter_context(tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True))
        os.chmod(tmp, 0o1777)  # as /tmp is
        made = [
            Host(f"{mark}-{n}", name, f"{SUBNET}.{n + 2}", (switch, f"port{n}"), tmp)
            for n, name in enumerate(names)
        ]
        undo.callback(_collect, made)
        _namespace(switch, undo)
        for host in made:
            _namespace(host.namespace, undo)
            host.wire("eth0", host.address)
            ip("-n", host.namespace, "link", "set", "lo", "up")
            host.knows({other.name: other.address for other in made})
            undo.callback(shutil.rmtree, _NETNS / host.namespace, ignore_errors=True)
        yield made


def _collect(made: Sequence[Host]) -> None:
    """Nothing that was started stays as a zombie, or with an open pipe."""
    for host in made:
        for started in host.started:
            with contextlib.suppress(ValueError, subprocess.TimeoutExpired):  # it was read to its end already
                started.communicate(timeout=10)


def _namespace(name: str, undo: contextlib.ExitStack) -> None:
    ip("netns", "add", name)
    undo.callback(ip, "netns", "delete", name)
    undo.callback(_end_all_in, name)


def _end_all_in(namespace: str) -> None:
    pids = subprocess.run(("ip", "netns", "pids", namespace), capture_output=True, text=True, check=True).stdout
    for pid in map(int, pids.split()):
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def ip(*words: str) -> None:
    """Run iproute2's ip."""
    subprocess.run(("ip", *words), check=True, capture_output=True)
