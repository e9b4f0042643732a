"""The same command under the installed torchrun and under us: workers find the same around themselves."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER, RECORDED, clean_env, ended, shm_of_its_own
from tests.conftest import require
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process, pytest.mark.long("tests/pytorch/test_fidelity.py")]

PROBE = Path(__file__).with_name("parity_probe.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
OURS = (*LAUNCHER, "run", "--engine", "torch", "--no-prefix", "--start-method")

# Variables with another value than under torchrun, and why. Each has to have the form that stands here.
OTHERWISE = {
    "MASTER_PORT": (r"\d+", "each generation's store has a fresh port"),
    "MASTER_ADDR": (r"[\w.-]+", "the store's node by its own name or address; one node uses loopback"),
    "TORCHELASTIC_RUN_ID": (r"[\w.-]+", "torchrun makes one up; ours is the job's name, unless --rdzv-id is given"),
    "TORCHELASTIC_ERROR_FILE": (r"/.*/attempt_\d+/\d+/error\.json", "it is in a folder of the run"),
}
# Variables that only we set, and why.
ONLY_OURS = {
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "an older torchrun, such as that of torch 2.4, has no such option",
    "TRAINER_LAUNCH_RUN_DIR": "report() and the cleanup between generations find the run by it",
    "TORCH_FR_BUFFER_SIZE": "it tells whom a hang waits for; --hang-report-after off leaves it off",
}
GIVEN = ("--rdzv-id=job", "--max-restarts=2")
# Arguments of the script. torchrun substitutes the second, for which each worker has to be a new interpreter.
ARGUMENTS = {"forkserver": ("x", ""), "exec": ("x", "$$y", "${local_rank}")}
# A forked worker writes its stacks to this file when it is asked by a signal; glibc has two signals of its own, and
# uses one of them once a process has had threads.
STACKS = r"/stacks\.\d+$"
# A thread of a forked worker answers the launcher on this descriptor.
RECORDER = {"1000": "socket:"}
LATER = ("--signals-to-handle", "--virtual-local-rank")  # options that an older torchrun lacks
OTHER_SIGNALS = 1 << (signal.SIGRTMAX - 1 - 1) | 1 << (32 - 1) | 1 << (33 - 1)


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")


def meeting(port: int, nnodes: str, rank: int, backend: str) -> list[str]:
    """The options by which the nodes of a job meet."""
    if backend == "c10d":
        where = [f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-backend=c10d"]
    else:
        where = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return [f"--nnodes={nnodes}", f"--node-rank={rank}", *where]


def ran(
    start: Sequence[str],
    folder: Path,
    nodes: Sequence[Sequence[str]],
    method: str,
    env: Mapping[str, str] | None = None,
    script: Path = PROBE,
) -> dict[int, Any]:
    """Start the script on all nodes of a job; what each rank has written."""
    folder.mkdir(parents=True)
    places = clean_env({**(env or {}), "PARITY_FOLDER": str(folder)})
    # Who runs the tests in a shell's background has them ignore SIGINT, which only torchrun passes on.
    alike = ("env", "--default-signal=INT,QUIT", *shm_of_its_own())
    argvs = [(*alike, *start, *words, str(script), *ARGUMENTS[method]) for words in nodes]
    started = [
        subprocess.Popen(
            argv,
            env=places,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for argv in argvs
    ]
    ends = [ended(process) for process in started]
    assert [code for code, _ in ends] == [0] * len(nodes), "\n".join(output for _, output in ends)
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def compare(theirs: dict[int, Any], ours: dict[int, Any]) -> None:
    """All of it, apart from what has a reason to differ."""
    for rank, their in theirs.items():
        our = ours[rank]
        for one in (their, our):
            names = {fd: re.sub(r"\[\d+\]", "", name) for fd, name in one["descriptors"].items()}
            one["descriptors"] = {fd: name for fd, name in names.items() if not re.search(STACKS, name)}
            assert one["process"].pop("cwd") == one["environment"].pop("PARITY_FOLDER")
            one["process"]["namespaces"].pop("mnt")  # each has a /dev/shm of its own
            one["process"]["signals"]["SigCgt"] = int(one["process"]["signals"]["SigCgt"], 16) & ~OTHER_SIGNALS
        _compare_environments(their.pop("environment"), our.pop("environment"))
        if our["descriptors"].items() >= RECORDER.items():
            del our["descriptors"]["1000"]
            our["process"]["threads"] = str(int(our["process"]["threads"]) - 1)
        assert our == their, rank


def _compare_environments(their: dict[str, str], our: dict[str, str]) -> None:
    their.pop("PWD", None), our.pop("PWD", None)  # a shell's, which has started both
    for name, (form, _) in OTHERWISE.items():
        assert re.fullmatch(form, our[name]), (name, our[name])
        assert re.fullmatch(form, their[name]), (name, their[name])
        tail = re.search(r"/attempt_.*", our[name])
        assert tail is None or their[name].endswith(tail.group()), (name, our[name])
        their[name] = our[name]
    if importlib.metadata.version("torch").startswith("2.4."):  # lets rank 0 serve the store that nodes meet by
        their["TORCHELASTIC_USE_AGENT_STORE"] = our["TORCHELASTIC_USE_AGENT_STORE"]
    assert our.keys() - their.keys() <= ONLY_OURS.keys()
    assert {name: our[name] for name in their.keys() & our.keys()} == {
        **their,
    }, "values differ"


@dataclass(frozen=True)
class Case:
    """One node's command and environment, and what it is started by."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    within: tuple[str, ...] = ()
    given: tuple[str, ...] = GIVEN
    differ: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # by name: torchrun's value, and ours


ONE_NODE = {
    "two workers": Case(("--standalone", "--nproc-per-node=2")),
    "one worker, options, variables of another launcher": Case(
        ("--nproc-per-node=1", "--role=learner", "--signals-to-handle=SIGTERM,SIGUSR1"),
        {"TORCHELASTIC_ERROR_FILE": "/dev/null", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0"},
    ),
    "devices, a nice value, limits and a umask": Case(
        ("--nnodes=1", "--nproc-per-node=2", "--virtual-local-rank"),
        {"CUDA_VISIBLE_DEVICES": "4,5,6", "OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        ("sh", "-c", 'umask 027; ulimit -n 4000; ulimit -c 0; exec nice -n 5 "$@"', "sh"),
    ),
    # Ours counts the whole job's failures, and has another default: the variable says what holds.
    "no option at all": Case((), given=(), differ={"TORCHELASTIC_MAX_RESTARTS": ("0", "3")}),
    "variables of the platform": Case(
        (),
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "5", "PET_ROLE": "learner"},
        given=(),
    ),
}


@functools.cache
def help_of_torchrun() -> str:
    """All options of the installed torchrun."""
    return subprocess.run([*TORCHRUN, "--help"], capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.parametrize("case", ONE_NODE.values(), ids=ONE_NODE)
def test_on_one_node(tmp_path: Path, case: Case) -> None:
    later = [option for option in LATER if any(word.startswith(option) for word in case.words)]
    require(all(option in help_of_torchrun() for option in later), f"this torchrun lacks {', '.join(later)}")
    nodes = [(*case.words, *case.given)]
    for method in ("exec", "forkserver"):
        ours = ran((*case.within, *OURS, method, "--", "torchrun"), tmp_path / method, nodes, method, case.env)
        theirs = ran((*case.within, *TORCHRUN), tmp_path / f"not {method}", nodes, method, case.env)
        for rank, (name, values) in itertools.product(theirs, case.differ.items()):
            assert (theirs[rank]["environment"].pop(name), ours[rank]["environment"].pop(name)) == values
        compare(theirs, ours)


@pytest.mark.parametrize(("backend", "nnodes"), [("static", "2"), ("c10d", "1:2")])
def test_on_two_nodes_with_roles_and_different_numbers_of_workers(
    tmp_path: Path, backend: str, nnodes: str
) -> None:
    port = free_port()
    nodes = [
        [*meeting(port, nnodes, 0, backend), "--nproc-per-node=2", "--role=learner", *GIVEN],
        [*meeting(port, nnodes, 1, backend), "--nproc-per-node=3", "--role=actor", *GIVEN],
    ]
    theirs = ran(TORCHRUN, tmp_path / "torchrun", nodes, "exec")
    ours = ran((*OURS, "exec", "--", "torchrun"), tmp_path / "ours", nodes, "exec")
    assert len(ours) == len(theirs) == 5
    if backend == "c10d":  # torchrun's nodes get their ranks as they come
        theirs, ours = by_role(theirs), by_role(ours)
    compare(theirs, ours)


def by_role(found: dict[int, Any]) -> dict[int, Any]:
    """Numbered without the order of the nodes."""
    key = {rank: (one["environment"]["ROLE_NAME"], one["environment"]["LOCAL_RANK"]) for rank, one in found.items()}
    for one in found.values():
        for name in ("RANK", "GROUP_RANK"):
            assert one["environment"].pop(name).isdigit()
    return dict(enumerate(found[rank] for rank in sorted(found, key=key.__getitem__)))


@pytest.mark.parametrize("method", ["exec", "forkserver"])
def test_the_launchers_own_error_file_tells_the_first_failure(tmp_path: Path, method: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(RECORDED)
    words = ("--nproc-per-node=2", "--max-restarts=0", str(script))
    said = {}
    for name, start in {"theirs": TORCHRUN, "ours": (*OURS, method, "--", "torchrun")}.items():
        path = tmp_path / f"{name}.json"
        env = clean_env({"TORCHELASTIC_ERROR_FILE": str(path)})
        done = subprocess.run([*start, *words], env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 1, done.stderr
        message = json.loads(path.read_text())["message"]
        assert message["extraInfo"].pop("timestamp").isdecimal()
        said[name] = message
    assert said["ours"] == said["theirs"]
    assert said["ours"]["message"] == "ValueError: no luck"


def test_each_start_after_a_failure_counts(tmp_path: Path) -> None:
    text = PROBE.read_text() + "    raise SystemExit(os.environ['TORCHELASTIC_RESTART_COUNT'] != '1')\n"
    script = tmp_path / "train.py"
    script.write_text(text)
    nodes = [("--nproc-per-node=1", *GIVEN)]
    theirs = ran(TORCHRUN, tmp_path / "torchrun", nodes, "forkserver", script=script)
    compare(
        theirs, ran((*OURS, "forkserver", "--", "torchrun"), tmp_path / "ours", nodes, "forkserver", script=script)
    )
