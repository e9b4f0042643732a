"""Images from the project's Dockerfile, built once for each state of this tree."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.setting_up import made

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
CONF = Path(__file__).with_name("containers.conf")
MAKING_S = 1800  # of everything, on a slow machine or line
BUILD_S = 600
KEPT = 3  # of each image
NAME = "localhost/trainer-launch-test"
# What docker/Dockerfile copies: another state of it is another revision.
_SOURCES = (
    "docker/Dockerfile",
    "docker/sshd_config",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "constraints.txt",
    "trainer_launch",
)


@dataclass(frozen=True)
class Bases:
    """What images are built from."""

    debian: str
    torch: str
    wheels: str  # a folder
    storage: str  # podman's configuration of where all this is


@functools.cache
def bases() -> Bases:
    """Debian, Debian with torch, and the wheels; skips the test where they cannot be made, in CI it fails."""
    return Bases(*made("images.sh", within_s=MAKING_S).splitlines())


def environment() -> dict[str, str]:
    """What podman is started with."""
    return {**os.environ, "CONTAINERS_CONF": str(CONF), "CONTAINERS_STORAGE_CONF": bases().storage}


@functools.cache
def revision() -> str:
    """A name for the state of what images are built from."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        top = ROOT / name
        for path in sorted(top.rglob("*")) if top.is_dir() else [top]:
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def image(target: str, base: str | None = None) -> str:
    """The image of a target of docker/Dockerfile, built from this tree."""
    return _image(target, base or bases().torch)


@functools.cache
def _image(target: str, base: str) -> str:
    tail, _, key = base.rpartition("/")[2].partition(":")
    name = f"{NAME}/{target}-on-{tail}"
    tag = f"{name}:{revision()}-{key}"
    with _lock():
        if podman("image", "exists", tag, check=False).returncode != 0:
            build(tag, DOCKERFILE, {"BASE_IMAGE": base, "REVISION": revision()}, target=target)
            podman("rmi", *podman("images", "-q", name).stdout.split()[KEPT:], check=False)  # the newest come first
    return tag


@functools.cache
def launcher_wheels() -> str:
    """A folder with the wheel of this tree, and all that it needs; torch is not among them."""
    image("torch")  # first, as podman 4 mounts no stage that it has built before
    tag = image("wheels")
    folder = tempfile.mkdtemp(prefix="trainer-launch-wheels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.chmod(folder, 0o755)
    podman("run", "--rm", "--network", "none", "-v", f"{folder}:/out", tag, "cp", "-r", "/wheels/.", "/out")
    return folder


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    """One builds at a time; what builds leave unnamed is removed when the bases are next asked for."""
    with Path(bases().storage).with_name("lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def podman(*words: str, timeout_s: float = BUILD_S, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman to its end."""
    ended = subprocess.run(
        ["podman", *words],
        env=environment(),
        cwd=_own_folder(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if check and ended.returncode != 0:
        pytest.fail(f"podman {' '.join(words)}: {ended.stderr}")
    return ended


@functools.cache
def _own_folder() -> str:
    """Where podman may leave files: it tells of a kill for memory by one in its working directory."""
    folder = tempfile.mkdtemp(prefix="trainer-launch-podman-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def build(
    name: str,
    dockerfile: Path,
    arguments: Mapping[str, str],
    *,
    target: str = "",
    wheels: str = "",
    more: Sequence[str] = (),
) -> None:
    """Build an image from this tree.

    Debian's packages come from where this machine has its own; of Python's everything is in the wheelhouse.
    """
    apt = [word for path in ("/etc/apt", "/usr/share/keyrings") for word in ("-v", f"{path}:{path}:ro")]
    line = ["build", "-q", *(("--network", "host", *apt) if target == "mpi" else ("--network", "none"))]
    line += ["-v", f"{wheels or bases().wheels}:/wheelhouse:ro", "-t", name, "-f", str(dockerfile), *more]
    line += ["--target", target] if target else []
    line += [word for key, value in arguments.items() for word in ("--build-arg", f"{key}={value}")]
    ended = podman(*line, str(ROOT), check=False)
    assert ended.returncode == 0, f"{name} cannot be built:\n{(ended.stdout + ended.stderr)[-3000:]}"
