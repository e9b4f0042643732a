"""Facts that a node reports of itself (versions, code, variables, GPUs), and nodes that differ from most.

No node is the measure of the others. A node does not differ for a fact that it does not report: that is unknown.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.network import AdapterPort
from trainer_launch.model import units
from trainer_launch.model.codec import decoded
from trainer_launch.model.findings import Basis, Finding, Measure, Scope, Status, fitted, within
from trainer_launch.model.redaction import REDACTED, redact, redact_command
from trainer_launch.model.units import counted, grouped
from trainer_launch.planning.command import Command
from trainer_launch.preflight import container_checks
from trainer_launch.preflight.check import Subject, Where, check
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.present_nodes import Cluster, listed
from trainer_launch.preflight.gpu_collect import Cards
from trainer_launch.preflight.rules import RULES

CLOCK_WARN_S, CLOCK_FAIL_S = 1.0, 30.0
UNSET = "(unset)"
NCCL = "nccl loaded"
ENV = "env "  # how a variable's fact begins
GPUS, WORKERS = "gpus", "nproc_per_node"
CLIQUE = "clique of NVLink fabric"  # and its name
_ADAPTERS = f"{ENV}NCCL_IB_HCA"
_SHOWN = 8
_VERSIONS = "python"  # where this is missing, so is all that is found out with it
_ALWAYS_REPORTED = (WORKERS, "command", "adapters", "pair tests")  # or there is none
# Of the variables, these change what nodes send each other: where they differ, a collective hangs or fails. Beside
# each are the values that are as good as none on a machine that works.
_MUST_AGREE: Mapping[str, str] = {
    "NCCL_ALGO": "", "NCCL_PROTO": "", "NCCL_NET": "", "NCCL_IB_DISABLE": "0", "NCCL_BUFFSIZE": "4194304",
    "NCCL_COLLNET_ENABLE": "0", "NCCL_NVLS_ENABLE": "1,2", "NCCL_MIN_NCHANNELS": "", "NCCL_MAX_NCHANNELS": "",
    "GLOO_DEVICE_TRANSPORT": "tcp", "UCX_TLS": "all", "FI_PROVIDER": "",
    "TORCH_DIST_USE_NCCL2": "0", "TORCH_DISTRIBUTED_USE_TORCHCOMMS": "0",  # which class of torch speaks
}  # fmt: skip
LEAST_S, READ_S = 10.0, 30.0  # for versions and code: more than both take where nothing hangs
_VERSIONS_PROGRAM = Path(__file__).parents[1] / "children" / "worker_versions.py"
_RATES = re.compile(r"(\d+) x (\d+)")  # of adapters, as `of_adapters` tells them
_GIVEN = ", of "  # and before how many a pod was given, where that is not all
_VERSIONS_S = 20.0  # a cold disk, or a machine with much else to do
_OF_TORCH = ("torch", "cuda", "nccl")
_REPORT_S = 60.0  # for all nodes to say what they have found
_FACTS_BYTES = 24_000
_FINDINGS_BYTES = 10_000
_MAX_FILES = 1000  # of the program
_LOUD = (Status.FAIL, Status.WARN)
_PREFIXES = (
    "NCCL_", "RCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "TORCHCOMM_", "PYTORCH_",
    "OMP_", "KMP_", "GOMP_", "MKL_", "CUDA_", "CUBLAS_", "HSA_",
)  # fmt: skip
_NAMES = frozenset(("PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD"))
# Each node has its own, by what they are for.
_OWN = frozenset(("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"))


@check("facts", Where.CLUSTER)
def facts(cluster: Cluster) -> Iterator[Finding]:
    """All nodes agree on versions, GPUs, adapters, variables, command and code."""
    if cluster.nodes:
        yield from differences(cluster.names, [node.report.facts for node in cluster.nodes])


@check("clock", Where.CLUSTER)
def clock(cluster: Cluster) -> Iterator[Finding]:
    """All clocks agree."""
    if cluster.nodes:
        offsets = [(node.report.offset_s, node.report.error_s) for node in cluster.nodes]
        yield from clocks(cluster.names, offsets, [node.machine for node in cluster.nodes])


def differences(names: Sequence[str], reports: Sequence[Mapping[str, str]]) -> Iterator[Finding]:
    """A finding for each fact that is not the same on all nodes; `names` say whose facts they are."""
    keys = dict.fromkeys(key for report in reports for key in sorted(report))
    # A node whose value could not be read is left out; no variable and no adapter are values.
    values_by_key = {
        key: {
            name: report.get(key, UNSET)
            for name, report in zip(names, reports, strict=True)
            if key in report or key.startswith(ENV) or key in _ALWAYS_REPORTED
        }
        for key in keys
    }
    differing = {key: values for key, values in values_by_key.items() if len(set(values.values())) > 1}
    unread = [name for name in names if _VERSIONS in keys and name not in values_by_key[_VERSIONS]]
    if unread:  # a machine that is too busy to start a Python in time has no other versions for that
        text = f"the versions of Python and torch could not be determined in time on {listed(unread)}"
        yield facts.unknown(text, subject=listed(unread))
    asked = {name: (report.get(GPUS), report.get(_ADAPTERS)) for name, report in zip(names, reports, strict=True)}
    for key, values in differing.items():
        of_nccl = {value for name, value in values.items() if asked[name][0] != "0"}
        is_harmless = key.startswith((f"{ENV}NCCL_", f"{ENV}FI_")) and len(of_nccl) < 2
        groups = grouped((value, name) for name, value in values.items())
        yield _difference(key, groups, asked, is_harmless=is_harmless)
    if not differing and not unread:
        n_alike = sum(all(key in report for report in reports) for key in keys)
        yield facts.passed(f"{counted(n_alike, 'fact')} alike on all {len(names)} nodes", scope=Scope.JOB)


def _difference(
    key: str, groups: Mapping[str, Sequence[str]], asked: Mapping[str, object], *, is_harmless: bool
) -> Finding:
    """The finding; where `asked` is not the same, nodes may have other adapters."""
    name = key.removeprefix(ENV)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[0]))
    most, others = ordered[0], ordered[1:]
    has_majority = 2 * len(most[1]) > sum(map(len, groups.values()))
    alike = {asked[node] for node in most[1]}
    slower: list[tuple[str, Sequence[str]]] = [
        (value, its)
        for value, nodes in others
        if key == "adapters" and has_majority and is_slower(value, most[0])
        if (its := [node for node in nodes if asked[node] in alike])
    ]
    if slower:  # who has more is not accused
        key, others = "slower adapters", slower
    values = [f"{value} on {listed(nodes)}" for value, nodes in ordered[:_SHOWN]]
    if has_majority:
        values[0] = f"{most[0]} on {counted(len(most[1]), 'node')}"
    else:
        values.append("no value has a majority")
    text = ", ".join(values)
    if not any((rule.check, rule.fact) == (facts.id, key) for rule in RULES):
        is_alike = is_harmless or len({_in_effect(name, value) for value in groups}) == 1
        key, text = "must agree" if name in _MUST_AGREE and not is_alike else "other", f"{name} differs: {text}"
    return facts.found(
        key,
        text,
        scope=Scope.NODE if has_majority else Scope.JOB,
        subject=", ".join(node for _, nodes in others for node in nodes) if has_majority else "",
        measured=ordered[-1][0],
        expected=most[0] if has_majority else None,
        basis=Basis.PEER,
    )


def _in_effect(name: str, value: str) -> str:
    """The value of a variable as libraries read it: in small letters, and none where it is what they do anyway."""
    default = _MUST_AGREE.get(name)
    read = ",".join(sorted(value.strip().lower().split(",")))  # they choose, in no order
    return value if default is None else "" if read in (UNSET, *default.split(",")) else read


def clocks(
    names: Sequence[str], offsets: Sequence[tuple[float, float]], machines: Sequence[str]
) -> Iterator[Finding]:
    """A finding for each clock that is off; `offsets` are from one clock, with their uncertainty.

    Where no majority of clocks agrees, as with two machines, none of them is named.
    """
    # Nodes of a machine have one clock, unless they tell different times.
    alike = grouped((machine, offset) for machine, (offset, _) in zip(machines, offsets, strict=True))
    shared = {machine for machine, its in alike.items() if max(its) - min(its) < CLOCK_WARN_S}
    owners = [machine if machine in shared else name for machine, name in zip(machines, names, strict=True)]
    middle = statistics.median(dict(zip(owners, (offset for offset, _ in offsets), strict=True)).values())
    # By how much each is sure to be off; node 0's clock is ahead of this one's by `offset`.
    off = [
        (max(0.0, abs(middle - offset) - error), name, "ahead of" if middle > offset else "behind", owner)
        for name, (offset, error), owner in zip(names, offsets, owners, strict=True)
    ]
    off.sort(key=lambda clock: -clock[0])
    kinds = grouped(
        ("far off" if clock[0] > CLOCK_FAIL_S else "off", clock) for clock in off if clock[0] > CLOCK_WARN_S
    )
    if not kinds:
        text = f"all clocks agree to {max(off[0][0], 0.001):.3f} s"
        yield clock.passed(text, scope=Scope.JOB, measured=round(off[0][0], 3), unit="s")
    has_majority = 2 * len({clock[3] for its in kinds.values() for clock in its}) < len({*owners})
    for kind, its in kinds.items():
        texts = [f"the clock of {name} is {off_s:.1f} s {way} the others'" for off_s, name, way, _ in its]
        limit_s = CLOCK_FAIL_S if kind == "far off" else CLOCK_WARN_S
        about = {"measured": round(its[0][0], 3), "expected": limit_s, "unit": "s", "basis": Basis.PEER}
        if has_majority:
            yield clock.found(kind, listed(texts), subject=", ".join(name for _, name, *_ in its), **about)
            continue
        text = (
            f"the clocks of {counted(len(names), 'node')} differ by {max(offsets)[0] - min(offsets)[0]:.1f} s, and "
        )
        about |= {"action": "check the time services of these machines (chrony, ntpd)", "scope": Scope.JOB}
        text += "no majority agrees, so none can be called wrong"
        yield clock.found(kind, text, evidence=tuple(texts[:_SHOWN]), **about)
        return


def collect(
    subject: Subject,
    facts: Mapping[str, str],
    findings: Sequence[Finding],
    clock: tuple[float, float],
    key: bytes,
) -> msg.NodeReport:
    """The report; `facts` took longer to find out, `key` is for hashes of secrets."""
    gpus = of_gpus(subject.cards, subject.host.gpus.count)
    if gpus.get(GPUS) == "0" and subject.may_use_gpus:  # its workers have some, and need NCCL
        gpus = {GPUS: "0 here"}
    all_facts = dict(facts) | gpus | of_adapters(container_checks.used_adapters(subject))
    # Last, as variables may be too many for a message.
    all_facts |= quick_facts(subject.env, subject.command, subject.topology.local_world_size, key)
    return msg.NodeReport(cut(all_facts), *clock, loud(findings), measured(subject.cards))


def loud(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of a node that other nodes must know."""
    return msg.fitted((finding for finding in findings if finding.status in _LOUD), _FINDINGS_BYTES)


def report_s(subject: Subject) -> float:
    """The time that node 0 gives all nodes to report: a GPU or a folder that hangs is found out late."""
    gpus_s = 0.0 if subject.cards is None else subject.cards.limit_s
    return _REPORT_S + max(gpus_s, container_checks.storage.limit_s(subject) if subject.storage else 0.0)


def measured(cards: Cards | None) -> tuple[Measure, ...]:
    """The measures of the GPUs."""
    return () if cards is None or not cards.has_load else fitted(cards.facts().measures)


def read_meanwhile(command: Command | None, limit_s: float) -> Callable[[], Mapping[str, str]]:
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
    """The versions that the program's own interpreter would import; none where its Python did not answer."""
    python = command.python[0] if command is not None and command.python else sys.executable
    ended = deadline_subprocess.run((python, str(_VERSIONS_PROGRAM)), None, _VERSIONS_S)
    facts = decoded(dict[str, str], ended.stdout) if ended.code == 0 else None
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
    """The facts that take no time to read."""
    values = {}
    if workers is not None:
        values[WORKERS] = str(workers)
    if command is not None:
        values["command"] = " ".join(redact_command(_program(command) or command.argv))
    return values | {f"{ENV}{name}": shown for name, shown in variables(env, salt).items()}


def variables(env: Mapping[str, str], salt: bytes) -> dict[str, str]:
    """The variables that all nodes should have alike; of a secret, only a hash with this preflight's salt."""
    chosen = {}
    # Kubernetes tells each pod of the Services that were there when it started.
    services = [name.removesuffix("SERVICE_HOST") for name in env if name.endswith("_SERVICE_HOST")]
    links = tuple(f"{service}{kind}" for service in services for kind in ("SERVICE_", "PORT"))
    for name in sorted(env):
        if name in _OWN or name.startswith(links) or not (name.startswith(_PREFIXES) or name in _NAMES):
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
    """Facts that all nodes should have alike: GPUs, driver, and the loaded NCCL; `count` is without cards."""
    if cards is None:
        return {GPUS: str(count)}
    gpus = cards.facts()
    if gpus.trouble:
        return {}
    models = ", ".join(sorted({gpu.model + gpu.power for gpu in gpus.gpus if gpu.model}))
    facts = {GPUS: f"{len(gpus.gpus)} of {models or 'unknown model'}"}
    if gpus.driver:
        facts["driver"] = gpus.driver
    loaded = {test.facts["nccl"] for test in gpus.tests if "nccl" in test.facts}
    direct = {test.gpudirect for test in gpus.tests if test.gpudirect}
    facts |= {"adapters that reach GPUs directly": ", ".join(sorted(direct))} if direct else {}
    domains = grouped(gpu.domain for gpu in gpus.gpus if gpu.domain)  # a job may span several
    facts |= {f"{CLIQUE} {name}": ", ".join(sorted({*its})) for name, its in domains.items()}
    return facts | ({NCCL: ", ".join(sorted(loaded))} if loaded else {})


def of_adapters(ports: Sequence[AdapterPort]) -> dict[str, str]:
    """The RDMA adapters that are up, by their rates: a node with others slows all down, or hangs them."""
    rates = Counter(port.rate or "of unknown rate" for port in ports if port.is_active)
    shown = ", ".join(f"{count} x {rate}" for rate, count in sorted(rates.items())) or "none of them"
    shown += f"{_GIVEN}{len(ports)} given" if any(port.has_others for port in ports) else ""
    return {"adapters": shown} if ports else {}


def is_slower(value: str, most: str) -> bool:
    """Whether fewer of these adapters have the rate that most of those have; slower ones may be spare."""
    if UNSET in (value, most) or "unknown" in value + most:
        return False  # nobody knows
    if value.partition(_GIVEN)[2] != most.partition(_GIVEN)[2]:
        return False  # its pod was given another number of those that its machine has
    its, usual = ([(int(count), int(rate)) for count, rate in _RATES.findall(text)] for text in (value, most))
    if len(its) == len(usual) == 1 and its[0][1] != usual[0][1] and "(1X " not in value:  # a lane of the cable
        return False  # all its ports have a rate of their own: another kind of machine
    _, least = max(usual, default=(0, 0))
    its, usual = ([port for port in ports if port[1] >= least] for ports in (its, usual))
    n_its, n_usual = (sum(count for count, _ in ports) for ports in (its, usual))
    return n_its < n_usual and sum(n * rate for n, rate in its) < sum(n * rate for n, rate in usual)


def cut(values: Mapping[str, str]) -> dict[str, str]:
    """A long value is shortened to its beginning and a hash; what does not fit into a message is left out."""
    short = (
        (key, units.printable(_shortened(value))) for key, value in values.items() if len(key) <= msg.MAX_VALUE
    )
    return dict(within(short, msg.MAX_FACTS, _FACTS_BYTES))


def _shortened(value: str) -> str:
    if len(value) <= msg.MAX_VALUE:
        return value
    number = hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:12]
    return f"{value[: msg.MAX_VALUE - 30]}... #{number}"
