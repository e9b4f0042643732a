"""What the launcher adds to an image and to the start of a container. Prints figures, judges nothing. As root.

    python -m benchmarks.containers

The images are those of `make test-containers`, built from this tree. A container runs as a pod of the restricted
profile does: read-only, user 1000, no capabilities. The ways to start one take turns, so that whatever else the
machine does befalls all; the figures are medians. Times of processes come from /proc, whose clock ticks each 10 ms;
a container's PID 1 counts from where the runtime forked it, so what the runtime still does is in every figure.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from tests.containers.images import bases, image, launcher_wheels
from tests.containers.podman import podman

RUNS = 5
TARGETS = ("torch", "preflight", "mpi")
# The first child of PID 1, as any process of the container sees it: seconds after PID 1 itself.
FIRST_CHILD = """
import os
def stat(pid): return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
begun = [int(stat(pid)[19]) for pid in os.listdir("/proc") if pid.isdigit() and stat(pid)[1] == "1"]
print("FIRST", (min(begun) - int(stat(1)[19])) / os.sysconf("SC_CLK_TCK") if begun else 0.0, flush=True)
"""
PROFILE = ("--rm", "--network", "none", "--read-only", "--user", "1000:1000", "--cap-drop", "all", "--memory", "1g")
TORCH = (
    "PET_NNODES=1",
    "PET_NPROC_PER_NODE=1",
    "PET_NODE_RANK=0",
    "PET_MASTER_ADDR=localhost",
    "PET_MASTER_PORT=29500",
)
LAUNCHER, BARE = "trainer-launch run", "nothing: the program is PID 1"
TINI = "podman's --init (catatonit, as tini)"


def main() -> None:
    print(f"{os.cpu_count()} CPUs, Linux {platform.release()}, {podman('--version').stdout.strip()}; ", end="")
    print(f"load {os.getloadavg()[0]:.1f}\n")
    sizes()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "first.py").write_text(FIRST_CHILD)
        (Path(folder) / "pass.py").write_text("")
        starts(folder)


def sizes() -> None:
    """What each target adds to its base, and what of that is the launcher's own layer."""
    base = facts(bases().torch)
    print(f"{'image':<12}{'added':>12}{'launcher':>12}   target: launcher <= 25 MB")
    for target in TARGETS:
        name = image(target)
        added = facts(name)["Size"] - base["Size"]
        print(f"{target:<12}{added / 1e6:>9.1f} MB{launcher_bytes(name) / 1e6:>9.1f} MB")
    print()


def launcher_bytes(name: str) -> int:
    """The size of the layer in which pip installed the launcher."""
    steps = json.loads(podman("history", "--format", "json", name).stdout)
    return max(int(step["size"]) for step in steps if "trainer-launch[gpu]" in step["CreatedBy"])


def facts(name: str) -> dict[str, int]:
    found: list[dict[str, int]] = json.loads(podman("image", "inspect", name).stdout)
    return found[0]


def starts(folder: str) -> None:
    """Containers by turns."""
    code = ("-v", f"{folder}:/code:ro", "-w", "/code")
    python = ("--entrypoint", "python3")
    env = tuple(word for variable in TORCH for word in ("-e", variable))
    plain = ("-e", "TRAINER_LAUNCH_ENGINE=plain")
    ways = {
        LAUNCHER: ((*code, *plain), ("python3",)),
        TINI: ((*code, *python, "--init"), ()),
        BARE: ((*code, *python), ()),
        "trainer-launch run, torch elastic": ((*code, *env), ()),
    }
    spawned: dict[str, list[float]] = {way: [] for way in ways}
    whole: dict[str, list[float]] = {way: [] for way in ways}
    name = image("torch")
    for _ in range(RUNS):
        for way, (options, words) in ways.items():
            said = podman("run", *PROFILE, *options, name, *words, "first.py").stdout
            spawned[way].append(float(said.partition("FIRST ")[2].split()[0]))
            before_s = time.monotonic()
            podman("run", *PROFILE, *options, name, *words, "pass.py")
            whole[way].append(time.monotonic() - before_s)
    print(f"{'PID 1':<40}{'to the first child':>20}{'podman run, in all':>20}   target: <= 0.5 s")
    for way in ways:
        first = "-" if way == BARE else f"{statistics.median(spawned[way]):.2f} s"
        print(f"{way:<40}{first:>20}{statistics.median(whole[way]):>18.2f} s")
    print(f"\nload when done: {os.getloadavg()[0]:.1f}; wheels of the launcher and what it needs: ", end="")
    wheels = [path.stat().st_size for path in Path(launcher_wheels()).iterdir()]
    print(f"{len(wheels)} of {sum(wheels) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
