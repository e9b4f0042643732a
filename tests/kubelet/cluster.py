"""A real cluster of one node, in namespaces of its own: whatever happens to the tests, all of it goes away."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.conftest import require
from tests.containers import images
from tests.containers.images import podman
from tests.setting_up import made
from tests.waiting import eventually

DEADLINE_S = 240.0  # of anything that a pod does
UP_S = 300.0
BUILD_S = 7200
PAUSE = f"{images.NAME}/pause:1"
_CGROUPS = Path("/sys/fs/cgroup")
_HERE = Path(__file__).parent
_PROGRAMS = {
    "etcd": "etcd-server", "containerd": "containerd", "ctr": "containerd", "runc": "runc", "ip": "iproute2",
    "dnsmasq": "dnsmasq-base", "conntrack": "conntrack", "socat": "socat", "iptables": "iptables",
    "openssl": "openssl", "catatonit": "catatonit", "podman": "podman",
}  # fmt: skip
# Kubernetes names folders outside of the ones that it is told; here they are empty, and nobody else's.
_ITS_OWN = ("/run", "/var/log", "/var/lib/kubelet", "/var/lib/cni")
_ENTER = """
state=$1; shift
for folder in {folders}; do mount -t tmpfs tmpfs "$folder"; done
exec "$@"
""".format(folders=" ".join(_ITS_OWN))


@functools.cache
def programs() -> Path:
    """Where Kubernetes' programs are; skips the test where they cannot be built, in CI it fails."""
    require(os.getuid() == 0, "needs root (make test-kubelet)")
    require((_CGROUPS / "memory").is_dir(), "needs cgroup v1: the kubelet of Debian 12 has no full support of v2")
    lacking = {package for name, package in _PROGRAMS.items() if shutil.which(name, path=_path()) is None}
    require(not lacking, f"needs {' '.join(sorted(lacking))}")
    require(Path("/usr/lib/cni/bridge").exists(), "needs containernetworking-plugins")
    return Path(made("kubernetes.sh", within_s=BUILD_S))


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass(frozen=True)
class Cluster:
    """The API server, and the way to its node."""

    state: Path
    node: int  # the process whose namespaces are the node's

    def kubectl(
        self, *words: str, given: str | None = None, check: bool = True, within_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl to its end."""
        line = [str(programs() / "kubectl"), "--kubeconfig", str(self.state / "kubeconfig"), *words]
        ended = self.on_node(*line, given=given, within_s=within_s)
        assert not check or ended.returncode == 0, f"kubectl {' '.join(words)}: {ended.stderr}"
        return ended

    def on_node(
        self, *words: str, given: str | None = None, within_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in the network and among the processes of the node."""
        enter = ["nsenter", f"--target={self.node}", "--net", "--pid", "--"]
        return subprocess.run(
            [*enter, *words], input=given, stdin=None if given else subprocess.DEVNULL, capture_output=True,
            text=True, timeout=within_s, cwd="/",
        )  # fmt: skip

    def get(self, *words: str) -> Any:
        """What the API server says of something."""
        return json.loads(self.kubectl("get", *words, "-o", "json").stdout)

    def apply(self, objects: Sequence[dict[str, Any]]) -> None:
        listed = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "-f", "-", given=json.dumps(listed))

    def ctr(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Ask containerd itself, of Kubernetes' containers and images."""
        socket = str(self.state / "run" / "containerd.sock")
        return self.on_node("ctr", "-a", socket, "-n", "k8s.io", *words, within_s=600)

    def load(self, image: str) -> None:
        """Bring an image of podman's to the node, unless it is there; that of an older tree is not wanted again."""
        present = self.ctr("images", "ls", "-q").stdout.split()
        if image in present:
            return
        name = image.rpartition(":")[0]
        for older in (one for one in present if one.startswith(f"{name}:")):
            self.ctr("images", "rm", older)
        archive = self.state / "image.tar"
        podman("save", "-o", str(archive), image)
        ended = self.ctr("images", "import", str(archive))
        assert ended.returncode == 0, ended.stderr
        archive.unlink()

    @contextlib.contextmanager
    def namespace(self, name: str) -> Iterator[str]:
        """A namespace for the objects of a test; they go away with it."""
        self.kubectl("create", "namespace", name)
        self.eventually(
            lambda: self.kubectl("get", "serviceaccount", "default", "-n", name, check=False).returncode == 0,
            "the default service account",
        )
        try:
            yield name
        finally:
            self.kubectl("delete", "jobs", "--all", "-n", name, "--cascade=orphan")
            self.kubectl("delete", "pods", "--all", "-n", name, "--grace-period=0", "--force", "--wait=false")
            self.kubectl("delete", "namespace", name, "--wait=true", within_s=DEADLINE_S)
            self.kubectl("delete", "persistentvolume", name, "--ignore-not-found", "--wait=false")

    @contextlib.contextmanager
    def lagging_dns(self) -> Iterator[None]:
        """DNS answers, but learns nothing."""
        pid = (self.state / "pid" / "dns").read_text().strip()
        self.on_node("kill", "-STOP", pid)
        try:
            yield
        finally:
            self.on_node("kill", "-CONT", pid)

    @contextlib.contextmanager
    def without_node(self) -> Iterator[None]:
        """No pod is scheduled."""
        self.kubectl("cordon", "node")
        try:
            yield
        finally:
            self.kubectl("uncordon", "node")

    def said(self) -> str:
        """The last lines of each of its programs."""
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in (self.state / "log").iterdir()
        )

    def said_of(self, namespace: str) -> str:
        """The last lines in which the kubelet speaks of a namespace."""
        text = (self.state / "log" / "kubelet").read_text(errors="replace")
        return "\n".join([line for line in text.splitlines() if namespace in line][-30:])

    def eventually(
        self, condition: Callable[[], Any], what: str | Callable[[], str], within_s: float = DEADLINE_S
    ) -> Any:
        return eventually(condition, what, within_s, 0.3)


def _make_pause(folder: Path) -> None:
    """The image of the container that holds a pod's network."""
    if podman("image", "exists", PAUSE, check=False).returncode == 0:
        return
    rootfs = folder / "pause.tar"
    catatonit = Path(str(shutil.which("catatonit")))
    subprocess.run(["tar", "-C", catatonit.parent, "-cf", rootfs, catatonit.name], check=True)
    change = 'ENTRYPOINT ["/catatonit", "-P"]'
    podman("import", "--change", change, str(rootfs), PAUSE)


@contextlib.contextmanager
def running() -> Iterator[Cluster]:
    """A cluster, for as long as this is open; one at a time on this machine."""
    found = programs()
    images.bases()
    home = found.parents[1]
    with (home / "running").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = Path(tempfile.mkdtemp(prefix="trainer-launch-kubelet-"))
        missing = [folder for folder in _ITS_OWN if not Path(folder).exists()]
        for folder in missing:
            Path(folder).mkdir()
        process = _start(found, state, home / "images")
        try:
            yield _ready(process, state)
        finally:
            for init in psutil.Process(process.pid).children():
                init.kill()  # it ends when the kernel has killed everything in its namespaces
            process.wait()
            _clean_up(state, missing)


def _start(found: Path, state: Path, kept: Path) -> subprocess.Popen[bytes]:
    (state / "log").mkdir()
    line = [_HERE / "control_plane.sh", found, state, kept]
    # Who kills pytest, even by SIGKILL, kills all of it.
    within = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--net", "--pid", "--fork", "--kill-child"]
    within += ["--mount-proc", "bash", "-euc", _ENTER, "enter", str(state)]
    with (state / "log" / "script").open("wb") as log:
        return subprocess.Popen(
            [*within, *line], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "PATH": _path()}
        )


def _ready(process: subprocess.Popen[bytes], state: Path) -> Cluster:
    def told() -> str:
        return Cluster(state, 0).said()

    def has_containerd() -> bool:
        assert process.poll() is None, f"the control plane has ended:\n{told()}"
        return (state / "run" / "containerd.sock").exists()

    def is_up() -> bool:
        assert process.poll() is None, f"the control plane has ended:\n{told()}"
        return (state / "ready").exists()

    eventually(has_containerd, told, UP_S, 0.1)
    (init,) = psutil.Process(process.pid).children()
    made = Cluster(state, init.pid)
    _make_pause(state)
    made.load(PAUSE)
    eventually(is_up, told, UP_S, 0.1)
    return made


def _clean_up(state: Path, made: Sequence[str]) -> None:
    """What outlives the namespaces: cgroups, and folders."""
    for hierarchy in _CGROUPS.iterdir():
        own = hierarchy / "trainer-launch-kubelet"
        for group, _, _ in os.walk(own, topdown=False):
            eventually(functools.partial(_removed, group), f"{group} is empty", 60, 0.1)
    for folder in made:
        Path(folder).rmdir()
    shutil.rmtree(state)


def _removed(group: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        try:
            os.rmdir(group)
        except OSError:
            return False
    return True
