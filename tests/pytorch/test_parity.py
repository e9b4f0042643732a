"""The same command under the installed torchrun and under us: a program can notice no difference.

`parity_probe.py` looks at everything of a process, and tries what programs do; both are started side by side, with
exec and from the fork server. What differs, and why, stands in the tables here, and for users in docs/running.md.
How a forked program ends is in test_endings.py, the guard of the import of torch in test_first_import.py.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER, clean_env, ended, shm_of_its_own
from tests.conftest import require
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process]
LONG = pytest.mark.long("tests/pytorch/test_parity.py")

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
    "TRAINER_LAUNCH_GENERATION": "generations() tells the program which generation it is",
    "TRAINER_LAUNCH_KEPT": "generations() tells how many ranks have their state",
    "PYTHONFAULTHANDLER": "a crash of native code shows the Python code that called it; here torchrun has it, too",
}
GIVEN = ("--rdzv-id=job", "--max-restarts=2")
# Arguments of the script. torchrun substitutes the second, for which each worker has to be a new interpreter.
ARGUMENTS = {"auto": ("x", ""), "exec": ("x", "$$y", "${local_rank}")}
# What a forked worker has besides. On the descriptors it answers PID 1, and writes its stacks when a signal asks
# for them; glibc has two signals of its own, and uses one of them once a process has had threads.
DESCRIPTORS = {"1000": r"socket:", "1001": r"socket:", "1002": r"/.*/stacks\.\d+"}
MODULES = {"trainer_launch", "msgspec", "decimal", "_decimal"}
SIGNALS = 1 << (signal.SIGRTMAX - 1 - 1) | 1 << (32 - 1) | 1 << (33 - 1)
LATER = ("--signals-to-handle", "--virtual-local-rank")  # options that an older torchrun lacks


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
    program: Sequence[str] = (str(PROBE),),
) -> dict[int, Any]:
    """Start the program on all nodes of a job; what each rank has written."""
    folder.mkdir(parents=True)
    places = clean_env({"PYTHONFAULTHANDLER": "1", **(env or {}), "PARITY_FOLDER": str(folder)})
    # Who runs the tests in a shell's background has them ignore SIGINT, which only torchrun passes on.
    alike = ("env", "--default-signal=INT,QUIT", *shm_of_its_own())
    argvs = [(*alike, *start, *words, *program, *ARGUMENTS[method]) for words in nodes]
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
    told = {
        int(path.stem): json.loads(path.read_text().replace(str(folder), "FOLDER"))
        for path in folder.glob("*.json")
    }
    for rank, one in told.items():
        one["exits"] = (folder / f"{rank}.exits").read_text().splitlines()
    drawn = [number for one in told.values() for number in one.pop("random")]
    assert len({*drawn}) == len(drawn), "every worker has random numbers of its own"
    return told


def compare(theirs: dict[int, Any], ours: dict[int, Any]) -> None:
    """All of it, apart from what has a reason to differ."""
    assert ours.keys() == theirs.keys()
    for rank, their in theirs.items():
        our = ours[rank]
        for one in (their, our):
            first, process = one["first"], one["process"]
            first["descriptors"] = {fd: re.sub(r"\[\d+\]", "", name) for fd, name in first["descriptors"].items()}
            process["namespaces"].pop("mnt")  # each has a /dev/shm of its own
            if process["name"][0] == "pt_main_thread\n":  # as soon as torch 2.4 is imported
                process["name"][0] = "python\n"
            process["signals"]["SigCgt"] = int(process["signals"]["SigCgt"], 16) & ~SIGNALS
            process["environ"] = {*process["environ"]} - ONLY_OURS.keys() - {"PWD"}
        _compare_environments(their["first"].pop("environment"), our["first"].pop("environment"))
        descriptors = our["first"]["descriptors"]
        for fd, name in DESCRIPTORS.items():
            assert fd not in descriptors or re.fullmatch(name, descriptors.pop(fd))
        assert {*our.pop("modules")} ^ {*their.pop("modules")} <= MODULES
        left, right = flat(our), flat(their)
        assert {name: (left.get(name), right.get(name)) for name in left if left.get(name) != right.get(name)} == {}
        assert left.keys() == right.keys()


def flat(value: object, name: str = "") -> dict[str, object]:
    """The leaves, by path, so that a difference can be read."""
    if not isinstance(value, dict):
        return {name: value}
    return {
        path: leaf
        for key, below in value.items()
        for path, leaf in flat(below, f"{name}/{key}".lstrip("/")).items()
    }


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
    program: tuple[str, ...] = (str(PROBE),)


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
    "a module": Case(
        ("--nproc-per-node=1",), {"PYTHONPATH": os.getcwd()}, program=("-m", "tests.pytorch.parity_probe")
    ),
    "variables of Python's": Case(
        ("--nproc-per-node=2",),
        {
            "PYTHONHASHSEED": "7",
            "PYTHONDEVMODE": "1",
            "PYTHONWARNINGS": "ignore::ImportWarning",
            "PYTHONIOENCODING": "latin-1",
            "PYTHONOPTIMIZE": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": "/nowhere",
            "PYTHONUNBUFFERED": "",
            "LC_ALL": "C",
        },
    ),
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


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("two workers", "auto"),
        *(pytest.param(name, "auto", marks=LONG) for name in [*ONE_NODE][1:]),
        *(pytest.param(name, "exec", marks=LONG) for name in ("two workers", "variables of Python's")),
    ],
)
def test_on_one_node(tmp_path: Path, name: str, method: str) -> None:
    case = ONE_NODE[name]
    later = [option for option in LATER if any(word.startswith(option) for word in case.words)]
    require(all(option in help_of_torchrun() for option in later), f"this torchrun lacks {', '.join(later)}")
    nodes = [(*case.words, *case.given)]
    launcher = (*OURS, method, "--", "torchrun")
    theirs, ours = (
        ran((*case.within, *start), tmp_path / folder, nodes, method, case.env, case.program)
        for folder, start in {"torchrun": TORCHRUN, "ours": launcher}.items()
    )
    for rank, (variable, values) in itertools.product(theirs, case.differ.items()):
        found = (one[rank]["first"]["environment"].pop(variable) for one in (theirs, ours))
        assert tuple(found) == values
    compare(theirs, ours)


@LONG
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
    places = {rank: one["first"]["environment"] for rank, one in found.items()}
    key = {rank: (place["ROLE_NAME"], place["LOCAL_RANK"]) for rank, place in places.items()}
    for place in places.values():
        for name in ("RANK", "GROUP_RANK"):
            assert place.pop(name).isdigit()
    return dict(enumerate(found[rank] for rank in sorted(found, key=key.__getitem__)))
