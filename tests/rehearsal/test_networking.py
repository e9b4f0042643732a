"""Pods with a network, names and /dev/shm of their own, really made: by root, and by a user who may."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.pods import Host, hosts
from trainer_launch.rehearsal import pod_isolation

ROOT = Path(__file__).parents[2]
NOBODY = 65534
SERVER = """
import socket
with socket.create_server(("", 5000)) as listening:
    print("listening", flush=True)
    while True: listening.accept()[0].close()
"""
REACH = """
import socket
try:
    socket.create_connection(("pod-2", 5000), timeout=1.5).close()
    print("yes")
except socket.gaierror: print("no such name")
except TimeoutError: print("silence")
except OSError as problem: print(problem)
"""
TRIED = (
    "import json; from trainer_launch.rehearsal import pod_isolation;"
    "found = pod_isolation.capability(); print(json.dumps([found.as_user, found.why_not]))"
)
pytestmark = pytest.mark.process


@pytest.fixture
def pods() -> Iterator[list[Host]]:
    machine = pod_isolation.capability()
    require(not machine.why_not, f"no network of its own for each pod here: {machine.why_not}")
    with hosts("pod-0", "pod-1", "pod-2") as made:
        yield made


def python(pod: Host, code: str) -> str:
    output, _ = pod.start((sys.executable, "-c", code), {}).communicate(timeout=60)
    return output.strip()


def test_a_pod_has_a_place_of_its_own_and_its_program_is_process_1(pods: list[Host]) -> None:
    code = "import os, socket; print(os.getpid(), socket.gethostname(), os.getcwd(), os.environ['TMPDIR'])"
    assert python(pods[1], code) == f"1 pod-1 {os.getcwd()} {pods[1].tmp}"
    assert python(pods[1], "import socket; print(*[name for _, name in socket.if_nameindex()])") == "lo eth0"
    assert python(pods[1], "import os; print(len([name for name in os.listdir('/proc') if name.isdigit()]))") == "1"


def test_all_pods_reach_a_pod_that_has_moved_by_its_name(pods: list[Host]) -> None:
    before = pods[2].address
    with served(pods[2]):
        assert python(pods[0], REACH) == "yes"
        pods[2].move()
        assert pods[2].address != before
        assert python(pods[0], REACH) == "yes"


def test_a_pod_can_be_cut_off_and_its_name_hidden_for_a_time(pods: list[Host]) -> None:
    network = pods[0].network
    assert network is not None
    with served(pods[2]):
        for _ in range(2):  # a pod that is cut off stays so
            network.cut_off("pod-2")
        assert python(pods[0], REACH) == "silence"
        for _ in range(2):
            network.reconnect("pod-2")
        assert python(pods[0], REACH) == "yes"
        network.hide_names(True)
        assert python(pods[0], REACH) == "no such name"
        network.hide_names(False)
        assert python(pods[0], REACH) == "yes"


def test_a_new_pod_finds_nothing_in_dev_shm(pods: list[Host]) -> None:
    assert pods[0].network is not None
    look = "import os; print(os.listdir('/dev/shm'))"
    python(pods[0], "open('/dev/shm/left', 'w').write('of the old pod')")
    assert python(pods[0], look) == "['left']"
    assert python(pods[1], look) == "[]"
    pods[0].network.renew("pod-0")
    assert python(pods[0], look) == "[]"


@pytest.mark.parametrize("act", [lambda pod, started: pod.kill(started), lambda _, started: started.kill()])
def test_who_is_killed_takes_all_of_the_pod_with_it(
    pods: list[Host], act: Callable[[Host, subprocess.Popen[str]], None]
) -> None:
    started = pods[0].start(("sh", "-c", "sleep 1000 & sleep 1000 & echo both; wait"), {})
    assert started.stdout is not None
    assert started.stdout.readline() == "both\n"
    act(pods[0], started)
    assert started.communicate(timeout=60)[0] == "", "nobody has its output open"
    assert started.returncode == -signal.SIGKILL


def test_signals_and_exit_codes_pass_between_a_pod_and_whoever_started_it(pods: list[Host]) -> None:
    asks = 'trap "echo asked; exit 9" TERM; echo ready; while :; do sleep 0.05; done'
    started = pods[0].start(("sh", "-c", asks), {})
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.terminate()
    assert started.communicate(timeout=60)[0] == "asked\n"
    assert started.returncode == 9


@contextlib.contextmanager
def served(pod: Host) -> Iterator[None]:
    """While a pod listens."""
    started = pod.start((sys.executable, "-c", SERVER), {})
    assert started.stdout is not None
    assert started.stdout.readline() == "listening\n"
    yield
    pod.kill(started)


def test_pods_are_apart_when_a_user_makes_them(tmp_path: Path) -> None:
    """The tests above once more, by a user who is root in a namespace of its own only."""
    become = python_of_nobody()
    output = subprocess.run((*become, "-c", TRIED), capture_output=True, text=True, check=True, cwd="/", env=env())
    as_user, why_not = json.loads(output.stdout)
    if why_not:
        pytest.skip(f"this kernel lets users make no network: {why_not}")
    assert as_user
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "not user and not machine")
    argv = (*become[:-1], "unshare", *pod_isolation.AS_USER, "--net", "--mount", "--", become[-1], *tests)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=240, cwd=ROOT, env=env())
    assert done.returncode == 0, done.stdout + done.stderr


def python_of_nobody() -> tuple[str, ...]:
    """How a user without rights runs a Python that has our dependencies; the last word is the program."""
    require(
        os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv, to become a user without rights"
    )
    for program in (sys.executable, "/usr/bin/python3"):
        become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        argv = (*become, "sh", "-c", 'exec "$0" "$@"', program)  # setpriv itself keeps rights until its exec
        same = f"assert sys.version_info[:2] == {sys.version_info[:2]}"
        code = f"import trainer_launch, pytest, psutil, pydantic_settings, sys; {same}"
        done = subprocess.run((*argv, "-c", code), capture_output=True, check=False, cwd="/", env=env())
        if done.returncode == 0:
            return argv
    pytest.skip("a user without rights cannot run this Python")


def env() -> dict[str, str]:
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def test_nothing_is_left_of_the_pods_network() -> None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        assert "trainer-launch-rehearsal" not in line
