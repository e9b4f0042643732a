"""The launchers that we are measured against: where each is, its version, how it starts workers on one node.

Each lives in an environment of its own in the user's cache, made once by tests/setup; Debian's come from Debian.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trainer_launch
from benchmarks.measuring import wait_for
from tests.cli.launching import clean_env
from trainer_launch.host import network

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "tests" / "setup"
INSTALL_S = 1200.0
SHARED_OFF = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# What images have in place of a launcher: start all; when one fails, end the others and start all again.
SHELL = r"""
n=$1; shift
export WORLD_SIZE=$n MASTER_ADDR=127.0.0.1 LOCAL_WORLD_SIZE=$n TORCHELASTIC_RESTART_COUNT=0
while :; do
    export MASTER_PORT=$((29500 + RANDOM % 2000))
    pids=()
    for ((i = 0; i < n; i++)); do RANK=$i LOCAL_RANK=$i "$@" & pids+=($!); done
    code=0
    for ((i = 0; i < n; i++)); do wait -n || { code=$?; break; }; done
    [ $code = 0 ] && exit 0
    kill "${pids[@]}" 2>/dev/null; wait
    [ $((TORCHELASTIC_RESTART_COUNT += 1)) -le 3 ] || exit $code
done
"""


class Absent(Exception):
    """What is to be measured or run is not on this machine; why."""


def made(script: str, *words: str, requirements: Path | None = None) -> str:
    """What a script of tests/setup says that it has made.

    Raises:
        Absent: it cannot be made here.
    """
    env = {**os.environ, "PYTHON": sys.executable, "REPOSITORY": str(ROOT)}
    if requirements is not None:
        env["REQUIREMENTS"] = str(requirements)
    argv = [str(SETUP / script), *words]
    try:
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise Absent(f"{script} did not end within {INSTALL_S:g} s") from None
    if done.returncode:
        raise Absent((done.stderr.strip().splitlines() or [f"{script} ended with {done.returncode}"])[-1])
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way of starting workers on one node. `command` takes their number; the program comes behind."""

    who: str
    command: Callable[[int], tuple[str, ...]]
    env: Mapping[str, str]
    about_s: float  # what it takes to the program's first line here
    beside: Callable[[], contextlib.AbstractContextManager[Mapping[str, str]]] = contextlib.nullcontext  # type: ignore[assignment]


@functools.cache
def python_of(name: str) -> str:
    """The Python of a peer's environment.

    Raises:
        Absent: it cannot be made here.
    """
    folder = Path(__file__).with_name("peers")
    return made("frameworks.sh", name, requirements=folder if (folder / f"{name}.txt").exists() else None)


def program_of(name: str, program: str) -> str:
    return str(Path(python_of(name)).with_name(program))


@functools.cache
def debian(program: str, package: str) -> str:
    """Where a program of Debian is, installed if need be.

    Raises:
        Absent: it is not here, and cannot be had.
    """
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if not shutil.which(program, path=path):
        made("system_packages.sh", package)
    found = shutil.which(program, path=path)
    if not found:
        raise Absent(f"Debian's {package} is not installed and cannot be installed here")
    return found


RELEASE = "0.2.0"  # of this project
_RUN = ("-m", "trainer_launch", "run", "--log-level", "warning", "--max-restarts", "3")
_TORCHRUN = (*TORCHRUN, "--standalone", "--max-restarts", "3")
OURS = Launcher("trainer-launch", lambda n: (sys.executable, *_RUN, f"--nproc-per-node={n}", "--"), {}, 1.5)
SHELL_LOOP = Launcher("shell", lambda n: ("bash", "-c", SHELL, "entrypoint", str(n), sys.executable), {}, 1.5)


def launchers() -> tuple[list[Launcher], dict[str, str]]:
    """All that are here, in the order of the tables; and why the others are not."""

    def torchrun(n: int) -> tuple[str, ...]:
        return (*_TORCHRUN, f"--nproc-per-node={n}")

    others, absent = those_here({RELEASE: _release, "ft_launcher": _nvrx, "dlrover-run": _dlrover})
    known = [
        Launcher("torchrun", torchrun, {}, 2.5),
        Launcher("torchrun, shared store off", torchrun, SHARED_OFF, 2.5),
    ]
    return [OURS, *known, *others, SHELL_LOOP], absent


Made = TypeVar("Made")


def those_here(makers: Mapping[str, Callable[[str], Made]]) -> tuple[list[Made], dict[str, str]]:
    """What can be made on this machine, by name; and why the others cannot."""
    found: list[Made] = []
    absent: dict[str, str] = {}
    for name, make in makers.items():
        with _noting(absent, name):
            found.append(make(name))
    return found, absent


@contextlib.contextmanager
def _noting(absent: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except Absent as reason:
        absent[name] = str(reason)


def release() -> str:
    """The Python that has this project's last release.

    Raises:
        Absent: it cannot be made here.
    """
    return python_of(f"release-{RELEASE.rpartition('.')[0]}")


def _release(who: str) -> Launcher:
    python = release()
    return Launcher(who, lambda n: (python, *_RUN, f"--nproc-per-node={n}", "--"), {}, 1.5)


def _nvrx(who: str) -> Launcher:
    program = program_of("nvrx", "ft_launcher")
    return Launcher(
        who, lambda n: (program, "--standalone", "--max-restarts", "3", f"--nproc-per-node={n}"), {}, 5.0
    )


def _dlrover(who: str) -> Launcher:
    program, python = program_of("dlrover", "dlrover-run"), python_of("dlrover")
    words = (program, "--nnodes", "1", "--max-restarts", "3")
    beside = functools.partial(_master, python)
    return Launcher(who, lambda n: (*words, f"--nproc-per-node={n}"), {}, 6.0, beside)


def master(python: str, port: int, nodes: int) -> tuple[str, ...]:
    """DLRover's master, which dlrover-run needs; on Kubernetes it has a pod of its own."""
    words = ("--platform", "local", "--job_name", "bench", "--port", str(port), "--node_num", str(nodes))
    return (python, "-m", "dlrover.python.master.main", *words)


@contextlib.contextmanager
def _master(python: str) -> Iterator[Mapping[str, str]]:
    """One that is up; the variables that lead to it."""
    port = network.free_port()
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(master(python, port, 1), env=clean_env(), stdout=sink, stderr=sink, cwd="/")
        try:
            wait_for(lambda: answers(port), "DLRover's master", 30.0, 0.05)
            yield {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "NODE_ID": "0", "NODE_RANK": "0", "NODE_NUM": "1"}
        finally:
            process.kill()
            process.wait()


def answers(port: int) -> bool:
    """Whether a server listens there."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
        return True
    return False


# -- versions -------------------------------------------------------------------------------------


def versions_here(*packages: str) -> dict[str, str]:
    """Of packages of this Python, and of itself; the commit behind our own."""
    return {package: _version_here(package) for package in packages}


def _version_here(package: str) -> str:
    if package == "Python":
        return platform.python_version()
    if package != "trainer-launch":
        return importlib.metadata.version(package)
    version = trainer_launch.__version__  # the metadata of an editable installation may be older than the code
    commit, changed = (
        _git(*words, "--", "trainer_launch") for words in (("log", "-1", "--format=%h"), ("status", "-s"))
    )
    return f"{version} ({commit}{', changed' if changed else ''})" if commit else version


def _git(*words: str) -> str:
    done = subprocess.run(("git", "-C", str(ROOT), *words), capture_output=True, text=True, timeout=20)
    return done.stdout.strip()


def version_in(python: str, package: str) -> str:
    """Of a package in another environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output((python, "-I", "-c", code), text=True, timeout=60).strip()


def horovod_version() -> str:
    """Which tests/setup/horovod.sh builds."""
    found = re.search(r"^VERSION=(\S+)", (SETUP / "horovod.sh").read_text(), re.MULTILINE)
    return found[1] if found else "?"


def version_of_debian(package: str) -> str:
    words = ("dpkg-query", "-W", "-f", "${Version}", package)
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    return done.stdout.strip() or "?"


def _release_commit() -> str:
    """The commit that the last release is built from.

    Raises:
        Absent: it cannot be built here.
    """
    release()
    found = re.search(r"@(\w+)#egg", Path(__file__).with_name("peers").joinpath("release-0.2.txt").read_text())
    return found[1] if found else "?"


def versions_of_launchers() -> dict[str, str]:
    """Of whatever starts workers here."""
    found = versions_here("trainer-launch", "torch", "Python")
    with contextlib.suppress(Absent):
        found[f"trainer-launch {RELEASE}"] = _release_commit()
    return found | versions_of_peers({"nvrx": "nvidia-resiliency-ext", "dlrover": "dlrover"})


def versions_of_peers(packages: Mapping[str, str]) -> dict[str, str]:
    """Of the packages in these environments, those that can be made here."""
    found = {}
    for name, package in packages.items():
        with contextlib.suppress(Absent):
            found[package] = version_in(python_of(name), package)
    return found
