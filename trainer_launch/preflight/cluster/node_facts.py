"""What a node is, by stable names, and which nodes differ from most: no node is the measure of the others."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.network import AdapterPort
from trainer_launch.model import units
from trainer_launch.model.findings import (
    Basis,
    Checksum,
    Fault,
    Finding,
    Measure,
    Scope,
    Status,
    fitted,
    fitted_checksums,
)
from trainer_launch.model.redaction import REDACTED, redact, redact_command
from trainer_launch.model.units import counted
from trainer_launch.planning.command import Command
from trainer_launch.preflight.check import Subject, Where, check
from trainer_launch.preflight.cluster.nodes import TOLD, Cluster
from trainer_launch.preflight.cluster.preflight_messages import MAX_VALUE
from trainer_launch.preflight.container import resource_limits
from trainer_launch.preflight.gpu.collect import Cards

FACTS = "facts"
CLOCK = "clock"
CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
UNSET = "(unset)"
NCCL = "nccl loaded"
_SHOWN = 8
# A node that could not find them out is not another one for that.
_WHERE_KNOWN = frozenset((NCCL, "code"))
ENV = "env "  # how a variable's fact begins

# Each node may have its own: devices, interfaces and files of one machine, and how much it says.
_MAY_DIFFER = frozenset(
    f"{ENV}{name}"
    for name in (
        "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE",
        "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES", "UCX_LOG_LEVEL",
        "FI_LOG_LEVEL", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH",
        "OMP_PLACES", "KMP_AFFINITY", "GOMP_CPU_AFFINITY",
    )
)  # fmt: skip


class Rule(Struct, frozen=True):
    """What it means when a fact differs, and what to do."""

    word: str
    fault: Fault | None  # None: a warning
    action: str


_IMAGE = "start all nodes from the same image, by digest"
_ALWAYS = "python"  # where this is missing, so is all that is found out with it
_VERSIONS = frozenset((_ALWAYS, "arch", "kernel", "torch", "cuda", "nccl"))
_RULES: Mapping[str, Rule] = {
    "torch": Rule("torch", Fault.JOB, _IMAGE),
    "cuda": Rule("CUDA of torch", Fault.JOB, _IMAGE),
    "nccl": Rule("NCCL", Fault.JOB, _IMAGE),
    NCCL: Rule("the NCCL that is really loaded", Fault.JOB, f"{_IMAGE}; see LD_LIBRARY_PATH and LD_PRELOAD"),
    "arch": Rule("the architecture", Fault.JOB, "put all nodes on machines of one architecture (nodeSelector)"),
    "code": Rule("the program's code", Fault.JOB, "start all nodes from the same code: image, git-sync or volume"),
    "command": Rule("the command line", None, "give all nodes the same command, unless it is meant to differ"),
    "gpus": Rule("the GPUs", Fault.NODE, "see which devices that machine has lost (nvidia-smi -L), or drain it"),
    "adapters": Rule("the RDMA ports that are up", None, "see that machine's adapters and cables (ibstat)"),
    "nproc_per_node": Rule("the number of workers", None, "give all nodes the same nproc_per_node"),
    "image": Rule("the image", None, _IMAGE),
    "python": Rule("Python", None, _IMAGE),
    "driver": Rule("the GPU driver", None, "bring the machines to one driver version"),
    "pair tests": Rule("what can test pairs", None, "start all nodes with the same GPUs and the same torch"),
    "kernel": Rule("the kernel", None, "bring the machines to one kernel"),
}
_SET_ALIKE = "give it the same value in every pod of the job"
_SET_PERHAPS = "is it meant to differ? It is set by hand or by an image"


@check(FACTS, Where.CLUSTER)
def facts(cluster: Cluster) -> Iterator[Finding]:
    """All nodes have alike what should be: versions, GPUs, adapters, variables, command and code."""
    if cluster.nodes and cluster.settings.with_facts:
        yield from differences(cluster.names, [node.facts for node in cluster.nodes])


@check(CLOCK, Where.CLUSTER)
def clock(cluster: Cluster) -> Iterator[Finding]:
    """All clocks agree."""
    if cluster.nodes and cluster.settings.with_facts:
        yield from clocks(cluster.names, [node.offset for node in cluster.nodes])


def differences(names: Sequence[str], told: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """A finding for each fact that is not the same on all nodes; `names` say whose facts they are."""
    differing = 0
    keys = dict.fromkeys(key for one in told for key in sorted(one) if not key.startswith(TOLD))
    is_told = any(_ALWAYS in one for one in told)
    unread = [node for node, one in enumerate(told) if is_told and _ALWAYS not in one]
    if unread:  # a machine that is too busy to start a Python in time has no other versions for that
        who = listed([names[node] for node in unread])
        yield facts.unknown(
            f"the versions of Python and torch could not be found out in time on {who}", subject=who
        )
    for key in keys:
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for node, one in enumerate(told):
            if key in one or not (key in _WHERE_KNOWN or (key in _VERSIONS and node in unread)):
                groups[one.get(key, UNSET)].append(node)
        if len(groups) > 1:
            differing += 1
            yield _difference(key, groups, names)
    if not differing and not unread:
        n_known = sum(all(key in one for one in told) for key in keys)
        text = f"{counted(n_known, 'fact')} alike on all {len(names)} nodes"
        yield facts.passed(text, scope=Scope.JOB)


def _difference(key: str, groups: Mapping[str, Sequence[int]], names: Sequence[str]) -> Finding:
    rule = _rule(key)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    most = ordered[0][1]
    has_majority = 2 * len(most) > sum(map(len, groups.values()))
    if has_majority:
        odd = [node for _, nodes in ordered[1:] for node in nodes]
        told = [f"{ordered[0][0]} on {counted(len(most), 'node')}"]
        told += [f"{value} on {listed([names[node] for node in nodes])}" for value, nodes in ordered[1:_SHOWN]]
    else:
        odd = []
        told = [f"{value} on {listed([names[node] for node in nodes])}" for value, nodes in ordered[:_SHOWN]]
        told.append("no value has a majority")
    return facts.bad(
        rule.fault,
        f"{rule.word} differs: {', '.join(told)}",
        scope=Scope.NODE if has_majority else Scope.JOB,
        subject=", ".join(names[node] for node in sorted(odd)),
        measured=ordered[-1][0],
        expected=ordered[0][0] if has_majority else None,
        basis=Basis.PEER,
        action=rule.action,
    )


def _rule(key: str) -> Rule:
    if key in _RULES:
        return _RULES[key]
    name = key.removeprefix(ENV)
    return Rule(name, None, _SET_PERHAPS) if key in _MAY_DIFFER else Rule(name, Fault.JOB, _SET_ALIKE)


def clocks(names: Sequence[str], offsets: Sequence[tuple[float, float]]) -> Iterator[Finding]:
    """A finding for each clock that is off; `offsets` are from one clock, with their uncertainty."""
    middle = statistics.median(offset for offset, _ in offsets)
    worst = 0.0
    problems: list[tuple[float, Finding]] = []
    for name, (offset, error) in zip(names, offsets, strict=True):
        # What is sure to be off; node 0's clock is ahead of this one's by `offset`.
        off_s = max(0.0, abs(middle - offset) - error)
        worst = max(worst, off_s)
        if off_s > CLOCK_WARN_S:
            problems.append((off_s, _skewed(name, off_s, is_ahead=middle > offset)))
    ordered = [finding for _, finding in sorted(problems, key=lambda one: -one[0])]
    yield from ordered[:_SHOWN]
    for status in (Status.FAIL, Status.WARN):
        rest = [finding for finding in ordered[_SHOWN:] if finding.status is status]
        if rest:
            text = f"{rest[0].text}, and {len(rest) - 1} more off by less"
            yield replace(rest[0], subject=", ".join(one.subject for one in rest), text=text)
    if not problems:
        text = f"all clocks agree to {max(worst, 0.001):.3f} s"
        yield clock.passed(text, scope=Scope.JOB, measured=round(worst, 3), unit="s")


def _skewed(name: str, off_s: float, *, is_ahead: bool) -> Finding:
    fails = off_s > CLOCK_FAIL_S
    return clock.bad(
        Fault.NODE if fails else None,
        f"the clock of {name} is {off_s:.1f} s {'ahead of' if is_ahead else 'behind'} the others'",
        subject=name,
        measured=round(off_s, 3),
        expected=CLOCK_FAIL_S if fails else CLOCK_WARN_S,
        unit="s",
        basis=Basis.PEER,
        action="check the time service of that machine (chrony, ntpd): tokens and certificates will be refused",
    )


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return units.listed(names, _SHOWN)


# -- what this node is -------------------------------------------------------------------------


_VERSIONS_PROGRAM = Path(__file__).parents[1] / "children" / "worker_versions.py"
_VERSIONS_S = 20.0  # a cold disk, or a machine with much else to do
LEAST_S, READ_S = 10.0, 30.0  # for versions and code: more than both take where nothing hangs
_MAX_BYTES = 24_000
_PREFIXES = (
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_",
    "OMP_", "KMP_", "GOMP_", "MKL_", "CUDA_", "CUBLAS_", "HSA_",
)  # fmt: skip
_IMAGE_VARIABLE = "FLYTE_INTERNAL_IMAGE"  # its name, which a container does not know elsewhere
_NAMES = frozenset(("PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD"))
# Each node has its own, by what they are for.
_OWN = frozenset(("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"))
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]*)")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def read_meanwhile(command: Command | None, limit_s: float = READ_S) -> Callable[[], Mapping[str, str]]:
    """Find versions and code out while others are waited for; what hangs, on a dead mount, stays unknown."""
    found: dict[str, str] = {}
    until_s = time.monotonic() + limit_s

    def read() -> None:
        found.update(versions(command))
        program = _program(command) if command is not None else ()
        code = code_hash(program[0]) if program else None
        found.update({"code": code} if code is not None else {})

    thread = threading.Thread(target=read, name="facts", daemon=True)
    thread.start()

    def take() -> Mapping[str, str]:
        thread.join(max(0.0, until_s - time.monotonic()))
        return dict(found)

    return take


def quick_facts(
    env: Mapping[str, str],
    command: Command | None,
    workers: int | None,
    gpus: int,
    salt: bytes,
    root: Path = Path("/"),
) -> dict[str, str]:
    """What is there to be read."""
    found = devices(gpus, root)
    found |= {"image": env[_IMAGE_VARIABLE]} if env.get(_IMAGE_VARIABLE) else {}
    if workers is not None:
        found["nproc_per_node"] = str(workers)
    if command is not None:
        found["command"] = " ".join(redact_command(_program(command) or command.argv))
    return found | {f"{ENV}{name}": shown for name, shown in variables(env, salt).items()}


def variables(env: Mapping[str, str], salt: bytes) -> dict[str, str]:
    """The variables that all nodes should have alike; of a secret, only a hash with this preflight's salt."""
    chosen = {}
    for name in sorted(env):
        if name in _OWN or not (name.startswith(_PREFIXES) or name in _NAMES):
            continue
        value = env[name]
        if REDACTED in redact(name, value):
            value = (
                f"secret #{hmac.new(salt, value.encode(errors='surrogateescape'), hashlib.sha256).hexdigest()[:12]}"
            )
        chosen[name] = value
    return chosen


def versions(command: Command | None) -> dict[str, str]:
    """What the program's own interpreter would import."""
    python = command.python[0] if command is not None and command.python else sys.executable
    ended = deadline_subprocess.run((python, str(_VERSIONS_PROGRAM)), None, _VERSIONS_S)
    try:
        told = json.loads(ended.stdout) if ended.code == 0 else {}
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else {}


def devices(gpus: int, root: Path = Path("/")) -> dict[str, str]:
    """The GPUs that this container may use, and their driver, by the kernel's files."""
    found = {"gpus": str(gpus)}
    folder = root / "proc/driver/nvidia"
    try:
        driver = _DRIVER.search((folder / "version").read_text(encoding="utf-8", errors="replace"))
        models = Counter(
            model[1]
            for path in sorted((folder / "gpus").glob("*/information"))
            for model in [_MODEL.search(path.read_text(encoding="utf-8", errors="replace"))]
            if model is not None
        )
    except OSError:
        return found
    found |= {"driver": driver[1]} if driver is not None else {}
    if models:
        found["gpus"] = f"{gpus} of {', '.join(sorted(models))}"
    return found


def _program(command: Command) -> tuple[str, ...]:
    """The script or module and its arguments, without torchrun's own options, which tell each node its rank."""
    return command.torchrun.program if command.torchrun is not None else command.program


def cut(found: Mapping[str, str]) -> dict[str, str]:
    """A long value is told by its beginning and a hash; what does not fit into a message is left out."""
    told: dict[str, str] = {}
    size = 0
    for key, value in found.items():
        shown = value
        if len(value) > MAX_VALUE:
            number = hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:12]
            shown = f"{value[: MAX_VALUE - 30]}... #{number}"
        shown = units.printable(shown)
        size += len(json.dumps(key)) + len(json.dumps(shown)) + 2
        if size > _MAX_BYTES or len(key) > MAX_VALUE:
            break
        told[key] = shown
    return told


# -- the program's code as one number ----------------------------------------------------------


_SOURCES = frozenset((".py", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".yaml", ".yml", ".toml"))
_MAX_FILES = 3000
_MAX_SOURCE_BYTES = 64 << 20
_MAX_S = 5.0
_OTHERS = frozenset(("__pycache__", "node_modules", "site-packages", "venv"))


def code_hash(program: str) -> str | None:
    """A short hash, with how many files it is of; None without a script, or where it cannot be read in time.

    Above the limits, which fall alike on all nodes, only sizes count.
    """
    script = Path(program)
    if not script.is_file():
        return None
    folder = script.resolve().parent
    found = hashlib.sha256()
    until_s = time.monotonic() + _MAX_S
    count = size = 0
    for path in _sources(folder, until_s):
        if count >= _MAX_FILES or time.monotonic() >= until_s:
            break
        try:
            length = path.stat().st_size
            size += length
            content = path.read_bytes() if size <= _MAX_SOURCE_BYTES else str(length).encode()
        except OSError:
            continue
        count += 1
        found.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode(errors="surrogateescape"))
        found.update(content)
    # What a slow disk leaves unread would look like other code.
    return None if time.monotonic() >= until_s else f"{found.hexdigest()[:12]} ({counted(count, 'file')})"


def _sources(folder: Path, until_s: float) -> Iterator[Path]:
    """Source files, in an order that is the same everywhere; no more of them when the time is up."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OTHERS)
        if time.monotonic() >= until_s:
            return
        for name in sorted(files):
            path = Path(place, name)
            if path.suffix in _SOURCES and not name.startswith(".") and not path.is_symlink():
                yield path


# -- GPUs and measurements ----------------------------------------------------------------------


_RECORD_S = 60.0  # for all nodes to say what they have found


def record_s(subject: Subject) -> float:
    """What node 0 waits for all nodes' records: a GPU or a folder that hangs takes its time to tell."""
    gpus_s = 0.0 if subject.cards is None else subject.cards.limit_s
    return _RECORD_S + max(gpus_s, resource_limits.storage.limit_s(subject) if subject.storage else 0.0)


def of_gpus(cards: Cards | None) -> dict[str, str]:
    """What all nodes should have alike, better known than by files: models, driver, and the NCCL that is loaded."""
    if cards is None or cards.facts().trouble:
        return {}
    found = cards.facts()
    models = Counter(gpu.model for gpu in found.gpus if gpu.model)
    told = {"gpus": f"{len(found.gpus)} of {', '.join(sorted(models)) or 'unknown model'}"}
    if found.driver:
        told["driver"] = found.driver
    loaded = {test.facts["nccl"] for test in found.tests if "nccl" in test.facts}
    return told | ({NCCL: ", ".join(sorted(loaded))} if loaded else {})


def of_adapters(ports: Sequence[AdapterPort]) -> dict[str, str]:
    """The RDMA adapters that are up, by their rates: a node with others slows all down, or hangs them."""
    rates = Counter(port.rate or "of unknown rate" for port in ports if port.is_active)
    told = ", ".join(f"{count} x {rate}" for rate, count in sorted(rates.items()))
    return {"adapters": told or "none of them"} if ports else {}


def measured(cards: Cards | None) -> tuple[tuple[Measure, ...], tuple[Checksum, ...]]:
    """For node 0."""
    found = cards.facts() if cards is not None and cards.has_load else None
    return ((), ()) if found is None else (fitted(found.measures), fitted_checksums(found.checksums))
