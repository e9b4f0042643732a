"""What the launcher adds to an image and to the start of a container. As root, with podman.

The images are those of `make test-containers`, built from this tree. A container runs as a pod of the restricted
profile does: read-only, user 1000, no capabilities. Times of processes come from /proc, whose clock ticks each
10 ms; a container's PID 1 counts from where the runtime forked it: what the runtime still does is in every figure.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.measuring import Case, Failed, Section, Setup
from benchmarks.tables import OURS
from tests.containers import images, podman

TARGETS = ("torch", "preflight", "mpi")
FIRST, WHOLE = "from PID 1 to its first child", "podman run, in all"
ADDED, LAYER = "image `{}`: added to its base", "the launcher's own layer"
WHEELS = "wheels of the launcher and what it needs"
SIZES = {**{ADDED.format(target): "MB" for target in TARGETS}, LAYER: "MB", WHEELS: "MB"}
LIMIT_S = 60.0
# The first child of PID 1, as any process of the container sees it: seconds after PID 1 itself.
FIRST_CHILD = """
import os
def stat(pid): return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
begun = [int(stat(pid)[19]) for pid in os.listdir("/proc") if pid.isdigit() and stat(pid)[1] == "1"]
print("FIRST", (min(begun) - int(stat(1)[19])) / os.sysconf("SC_CLK_TCK") if begun else 0.0, flush=True)
"""
PROFILE = ("--rm", "--network", "none", "--read-only", "--user", "1000:1000", "--cap-drop", "all", "--memory", "1g")
TORCH = {
    "PET_NNODES": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "localhost",
    "PET_MASTER_PORT": "29500",
}
ELASTIC, TINI, BARE = f"{OURS}, torch elastic", "catatonit", "no init"
PYTHON = ("--entrypoint", "python3")
# Who is PID 1: podman's options, and the words before the program.
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    OURS: (("-e", "TRAINER_LAUNCH_ENGINE=plain"), ("python3",)),
    ELASTIC: (tuple(word for name, value in TORCH.items() for word in ("-e", f"{name}={value}")), ()),
    TINI: ((*PYTHON, "--init"), ()),
    BARE: (PYTHON, ()),
}


def start(way: str, folder: Path, image: str) -> Mapping[str, float]:
    """Two containers: one whose program looks for the first child, one whose program does nothing."""
    options, words = WAYS[way]
    code = ("-v", f"{folder}:/code:ro", "-w", "/code")
    said = _podman("run", *PROFILE, *code, *options, image, *words, "first.py")
    before_s = time.monotonic()
    _podman("run", *PROFILE, *code, *options, image, *words, "pass.py")
    whole_s = time.monotonic() - before_s
    return {FIRST: float(said.partition("FIRST ")[2].split()[0]), WHOLE: whole_s}


def sizes() -> Mapping[str, float]:
    """What each target adds to its base, and what of that is the launcher's own."""
    base = _size(images.bases().torch)
    found = {ADDED.format(target): (_size(images.image(target)) - base) / 1e6 for target in TARGETS}
    wheels = Path(images.launcher_wheels()).iterdir()
    layer = _launchers_layer(images.image(TARGETS[0]))
    return {**found, LAYER: layer / 1e6, WHEELS: sum(path.stat().st_size for path in wheels) / 1e6}


def _podman(*words: str) -> str:
    ended = podman.podman(*words, check=False)
    if ended.returncode != 0:
        raise Failed(f"podman {words[0]}: {ended.stderr.strip()[-200:]}")
    return ended.stdout


def _size(name: str) -> int:
    return int(json.loads(_podman("image", "inspect", name))[0]["Size"])


def _launchers_layer(name: str) -> int:
    """The size of the layer in which pip installed the launcher."""
    steps = json.loads(_podman("history", "--format", "json", name))
    return max(int(step["size"]) for step in steps if "trainer-launch[gpu]" in step["CreatedBy"])


@contextlib.contextmanager
def opened() -> Iterator[Setup]:
    """The images, built where they are not there yet.

    Raises:
        Failed: they cannot be built here.
    """
    try:
        image = images.image("torch")
        for target in TARGETS:
            images.image(target)
        images.launcher_wheels()
    except (pytest.skip.Exception, pytest.fail.Exception) as why:
        raise Failed(str(why)) from None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "first.py").write_text(FIRST_CHILD)
        (folder / "pass.py").write_text("")
        rows = {FIRST: "s", WHOLE: "s"}
        cases = [
            Case(way, {WHOLE: "s"} if way == BARE else rows, functools.partial(start, way, folder, image), LIMIT_S)
            for way in WAYS
        ]
        yield Setup([*cases, Case(OURS, SIZES, sizes, LIMIT_S)])


def missing() -> str | None:
    """Why no container can be started here; whether images can be built is only seen when they are."""
    if os.getuid() != 0:
        return "only root can make containers"
    try:
        peers.debian("podman", "podman")
    except peers.Absent as why:
        return str(why)
    return None


def versions() -> dict[str, str]:
    return {"trainer-launch": peers.version_here("trainer-launch"), "podman": peers.version_of_debian("podman")}


SECTION = Section(
    name="containers",
    title="Images and containers",
    about="""\
A container of the image that docker/Dockerfile builds from this tree, beside the same image with catatonit
(podman's `--init`, like tini) and with the program itself as PID 1; read-only, user 1000, no capabilities.
Measured from PID 1's start to its first child, with a resolution of 10 ms, and for a whole `podman run` of a
program that does nothing. Goals: at most 0.5 s to the first child, at most 25 MB for the launcher's layer.
`make bench` leaves this out: it needs root, podman and the images of `make test-containers`.""",
    open=opened,
    versions=versions,
    missing=missing,
    whos=tuple(WAYS),
    causes={
        FIRST: "Python starts and validates the contract before the program.",
        WHOLE: "Python starts before the program and looks for leftovers after it; torch jobs import torch.",
    },
    shown=(FIRST, WHOLE),
    is_by_default=False,
)
