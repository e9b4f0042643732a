"""What a node tells the others of itself: versions, code, variables, GPUs, adapters, measurements, findings."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.network import AdapterPort
from trainer_launch.model import units
from trainer_launch.model.codec import MessageError, decode
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.findings import Checksum, Finding, Measure, Status, fitted, fitted_checksums
from trainer_launch.model.redaction import REDACTED, redact, redact_command
from trainer_launch.model.units import counted
from trainer_launch.planning.command import Command
from trainer_launch.preflight import registry
from trainer_launch.preflight.check import Subject, Where
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_facts import ENV, NCCL, UNSET
from trainer_launch.preflight.cluster.nodes import TOLD
from trainer_launch.preflight.container import resource_limits
from trainer_launch.preflight.gpu.collect import Cards

LEAST_S, READ_S = 10.0, 30.0  # for versions and code: more than both take where nothing hangs
_VERSIONS_PROGRAM = Path(__file__).parents[1] / "children" / "worker_versions.py"
_VERSIONS_S = 20.0  # a cold disk, or a machine with much else to do
_OF_TORCH = ("torch", "cuda", "nccl")
_REPORT_S = 60.0  # for all nodes to say what they have found
_FACTS_BYTES = 24_000
_FINDINGS_BYTES = 10_000
_MAX_FILES = 1000  # of the program
_LOUD = (Status.FAIL, Status.WARN)
_PREFIXES = (
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "PYTORCH_",
    "OMP_", "KMP_", "GOMP_", "MKL_", "CUDA_", "CUBLAS_", "HSA_",
)  # fmt: skip
_NAMES = frozenset(("PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD"))
# Each node has its own, by what they are for.
_OWN = frozenset(("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"))
_IMAGE_VARIABLE = "FLYTE_INTERNAL_IMAGE"  # its name, which a container does not know elsewhere


def collect(
    subject: Subject,
    facts: Mapping[str, str],
    findings: Sequence[Finding],
    clock: tuple[float, float],
    tokens: Mapping[str, str],
    key: bytes,
) -> msg.NodeReport:
    """The report; `facts` took longer to find out, `key` is for hashes of secrets."""
    all_facts = dict(quick_facts(subject.env, subject.command, subject.topology.local_world_size, key)) | dict(
        facts
    )
    for check in registry.at(Where.CLUSTER):
        if check.tell is not None:
            with contextlib.suppress(OSError, *MALFORMED):  # it is this node's answer that is missing then
                all_facts[f"{TOLD}{check.id}"] = check.tell(subject)
    all_facts |= of_gpus(subject.cards, subject.host.gpus.count) | of_adapters(subject.adapters)
    return msg.NodeReport(cut(all_facts), *clock, loud(findings), *measured(subject.cards), tokens)


def loud(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What other nodes must know of a node's own findings."""
    return msg.fitted((finding for finding in findings if finding.status in _LOUD), _FINDINGS_BYTES)


def report_s(subject: Subject) -> float:
    """What node 0 waits for all nodes' reports: a GPU or a folder that hangs takes its time to tell."""
    gpus_s = 0.0 if subject.cards is None else subject.cards.limit_s
    return _REPORT_S + max(gpus_s, resource_limits.storage.limit_s(subject) if subject.storage else 0.0)


def measured(cards: Cards | None) -> tuple[tuple[Measure, ...], tuple[Checksum, ...]]:
    """What the GPUs did."""
    if cards is None or not cards.has_load:
        return (), ()
    return fitted(cards.facts().measures), fitted_checksums(cards.facts().checksums)


def read_meanwhile(command: Command | None, limit_s: float = READ_S) -> Callable[[], Mapping[str, str]]:
    """Find versions and code out while others are waited for; what hangs, on a dead mount, stays unknown."""
    facts_read: dict[str, str] = {}
    until_s = time.monotonic() + limit_s

    def read() -> None:
        facts_read.update(versions(command))
        program = _program(command) if command is not None else ()
        code = code_hash(program[0]) if program else None
        facts_read.update({"code": code} if code is not None else {})

    thread = threading.Thread(target=read, name="facts", daemon=True)
    thread.start()

    def take() -> Mapping[str, str]:
        thread.join(max(0.0, until_s - time.monotonic()))
        return dict(facts_read)

    return take


def versions(command: Command | None) -> dict[str, str]:
    """What the program's own interpreter would import; none of it where that could not be found out."""
    python = command.python[0] if command is not None and command.python else sys.executable
    ended = deadline_subprocess.run((python, str(_VERSIONS_PROGRAM)), None, _VERSIONS_S)
    try:
        facts = decode(dict[str, str], ended.stdout) if ended.code == 0 else {}
    except MessageError:
        return {}
    return dict.fromkeys(_OF_TORCH, UNSET) | facts if facts else {}


def code_hash(program: str) -> str | None:
    """A short hash of the script and the Python files beside it, with how many they are; None without a script.

    Folders below it do not count: runs write into them.
    """
    script = Path(program)
    if not script.is_file():
        return None
    digest = hashlib.sha256()
    script = script.resolve()
    beside = (path for path in script.parent.glob("*.py") if path.is_file() and not path.name.startswith("."))
    files = [script, *sorted({*beside} - {script})][:_MAX_FILES]
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as problem:
            content = str(problem.errno).encode()
        digest.update(f"{path.name}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return f"{digest.hexdigest()[:12]} ({counted(len(files), 'file')})"


def quick_facts(
    env: Mapping[str, str], command: Command | None, workers: int | None, salt: bytes
) -> dict[str, str]:
    """What is there to be read."""
    values = {"image": env[_IMAGE_VARIABLE]} if env.get(_IMAGE_VARIABLE) else {}
    if workers is not None:
        values["nproc_per_node"] = str(workers)
    if command is not None:
        values["command"] = " ".join(redact_command(_program(command) or command.argv))
    return values | {f"{ENV}{name}": shown for name, shown in variables(env, salt).items()}


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


def _program(command: Command) -> tuple[str, ...]:
    """The script or module and its arguments, without torchrun's own options, which tell each node its rank."""
    return command.torchrun.program if command.torchrun is not None else command.program


def of_gpus(cards: Cards | None, count: int) -> dict[str, str]:
    """What all nodes should have alike: GPUs, driver, and the NCCL that is loaded; `count` is without cards."""
    if cards is None:
        return {"gpus": str(count)}
    gpus = cards.facts()
    if gpus.trouble:
        return {}
    models = ", ".join(sorted({gpu.model for gpu in gpus.gpus if gpu.model}))
    facts = {"gpus": f"{len(gpus.gpus)} of {models or 'unknown model'}"}
    if gpus.driver:
        facts["driver"] = gpus.driver
    loaded = {test.facts["nccl"] for test in gpus.tests if "nccl" in test.facts}
    return facts | ({NCCL: ", ".join(sorted(loaded))} if loaded else {})


def of_adapters(ports: Sequence[AdapterPort]) -> dict[str, str]:
    """The RDMA adapters that are up, by their rates: a node with others slows all down, or hangs them."""
    rates = Counter(port.rate or "of unknown rate" for port in ports if port.is_active)
    shown = ", ".join(f"{count} x {rate}" for rate, count in sorted(rates.items()))
    return {"adapters": shown or "none of them"} if ports else {}


def cut(values: Mapping[str, str]) -> dict[str, str]:
    """A long value is shortened to its beginning and a hash; what does not fit into a message is left out."""
    short: dict[str, str] = {}
    size = 0
    for key, value in values.items():
        shown = value
        if len(value) > msg.MAX_VALUE:
            number = hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:12]
            shown = f"{value[: msg.MAX_VALUE - 30]}... #{number}"
        shown = units.printable(shown)
        size += len(json.dumps(key)) + len(json.dumps(shown)) + 2
        if size > _FACTS_BYTES or len(key) > msg.MAX_VALUE:
            break
        short[key] = shown
    return short
