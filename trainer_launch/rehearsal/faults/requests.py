"""What `--fault` and `--chaos` ask for, held against the job and this machine before anything starts."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess, runtime_directory
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers import text_of
from trainer_launch.rehearsal.controllers.documents import Field, read_values
from trainer_launch.rehearsal.controllers.local_jobs import RUN, check_size
from trainer_launch.rehearsal.controllers.pod_values import Draft, Workload
from trainer_launch.rehearsal.faults import grammar
from trainer_launch.rehearsal.faults.grammar import KINDS, Chaos, Fault
from trainer_launch.rehearsal.kubelet import pod_isolation

# -- faults as values, held against a job ------------------------------------------------------


_APART = ("launcher",)  # roles that are no node of the job: they only start ranks elsewhere
_TRAINER = "node"  # the role of a TrainJob's nodes, beside which there may be initializers


class Asked(Struct, frozen=True, kw_only=True):
    """All faults of a rehearsal."""

    faults: tuple[Fault, ...] = ()
    chaos: Chaos | None = None

    @property
    def anything(self) -> bool:
        """Whether anything may go wrong."""
        return bool(self.faults) or self.chaos is not None

    @property
    def samples(self) -> tuple[Fault, ...]:
        """The faults, and one of each kind that may come by chance: what this machine has to be able to do."""
        kinds = self.chaos.kinds if self.chaos is not None else ()
        return (*self.faults, *(Fault(kind=kind, when=KINDS[kind].first, text=kind) for kind in kinds))


def nodes_of(drafts: Iterable[Draft]) -> tuple[str, ...]:
    """The pods that are nodes of the job, node 0 first; all of them where every pod only starts others."""
    found = [draft for draft in drafts if draft.role not in _APART]
    trainers = [draft for draft in found if draft.role == _TRAINER]
    return tuple(draft.hostname for draft in trainers or found or drafts)


def workers_of(drafts: Iterable[Draft]) -> int:
    """How many Worker replicas a job has."""
    return sum(draft.role == "worker" for draft in drafts)


# -- whom a fault is for -----------------------------------------------------------------------


OF_ALL = ("delay dns", "add node", "scale")  # these are for the whole job


def target(fault: Fault, nodes: Sequence[str], pods: Sequence[str]) -> str | None:
    """The name of the pod; None for a fault of the whole job.

    `nodes` are those with an index, in its order; `pods` all, a launcher too. Of a name its end suffices: worker-0.

    Raises:
        UsageError: the job has no such pod.
    """
    if fault.kind in OF_ALL:
        return None
    if fault.pod is not None:
        return _named(fault, fault.pod, pods)
    if fault.node is None:
        return nodes[-1]
    if fault.node >= len(nodes):
        there = grammar.counted_nodes(len(nodes))
        raise UsageError(f"--fault {shown(fault.text)}: there is no node {fault.node}; the job has {there}")
    return nodes[fault.node]


def _named(fault: Fault, name: str, pods: Sequence[str]) -> str:
    found = [pod for pod in pods if pod == name] or [pod for pod in pods if pod.endswith(f"-{name}")]
    if len(found) == 1:
        return found[0]
    said = f"--fault {shown(fault.text)}"
    if found:
        raise UsageError(f"{said}: {name} is ambiguous: {' or '.join(found[:5])}; give the full name")
    hint = did_you_mean(name, pods) or f"the job has {', '.join(pods[:5])}{'…' if len(pods) > 5 else ''}"
    raise UsageError(f"{said}: the job has no pod {name}; {hint}")


# -- flags, held against the job and this machine ----------------------------------------------


_log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `local` about faults."""
    parser.add_argument(
        "--fault",
        action="append",
        metavar="TEXT|FILE.yaml",
        help="inject this fault, such as 'kill worker node=1 at=step:40'; may be repeated; see above",
    )
    parser.add_argument(
        "--chaos", metavar="TEXT", help="inject random faults, such as 'seed=7 rate=1/30s'; a seed repeats them"
    )


def asked(flags: Mapping[str, Any]) -> Asked:
    """Read the flags, and the files that they name. Raises UsageError: one does not fit."""
    faults: list[Fault] = []
    for text in flags["fault"] or ():
        faults += read(text_of(text, "--fault"), text) if names_file(text) else [grammar.parse(text)]
    if len(faults) > MAX_FAULTS:
        raise UsageError(f"--fault has {len(faults)} faults; the maximum is {MAX_FAULTS}")
    text = flags["chaos"]
    return Asked(faults=tuple(faults), chaos=None if text is None else grammar.parse_chaos(text))


def isolate(wanted: Asked) -> bool:
    """Whether the pods have a network of their own; for that the same command begins once more, in namespaces.

    Raises:
        UsageError: a fault cannot be carried out on this machine.
    """
    if is_inside():
        return True
    machine = check(wanted.samples)
    if wants_own_network(wanted.samples):
        enter(machine)  # does not return
    if wants_names(wanted.faults):
        machine = look(network=True, memory=False)
        why = why_no_network(machine)
        if not why:
            enter(machine)
        _log.warning("the loss of node 0 cannot be survived here, because pods have no names of their own: %s", why)
    return False


def fitted(wanted: Asked, drafts: Sequence[Draft], grown: Callable[[int], Workload] | None) -> Asked:
    """The same for this job; `grown` makes it with so many more nodes, None where it cannot. Logs hints.

    Raises:
        UsageError: a fault is for a pod that the job has not, or scales a job of a fixed size.
    """
    chaos = None if wanted.chaos is None else wanted.chaos.over(range(len(nodes_of(drafts))))
    scales = [fault for fault in wanted.faults if fault.kind in ("add node", "scale")]
    if scales and grown is None:
        raise UsageError(
            f"--fault {shown(scales[0].text)} needs a job that can grow, and this one has a fixed number of nodes; "
            "use a range such as --nodes 1:2, or with -f a job with Worker replicas"
        )
    if scales and grown is not None:
        largest = grown(_most(scales, workers_of(drafts)))
        check_size(largest)
        drafts = largest.drafts
    for fault in wanted.faults:
        if fault.hint:
            _log.warning("%s", fault.hint)
        target(fault, nodes_of(drafts), tuple(draft.hostname for draft in drafts))
    return replace(wanted, chaos=chaos)


def _most(scales: Sequence[Fault], workers: int) -> int:
    """By how many nodes the job grows at most."""
    added = sum(fault.kind == "add node" for fault in scales)
    return max(workers, *(fault.workers or 0 for fault in scales)) + added - workers


# -- YAML files --------------------------------------------------------------------------------


MAX_FAULTS = 1_000
ENDS = (".yaml", ".yml")


def names_file(text: str) -> bool:
    """Whether `--fault` is given a file rather than a fault."""
    return text.endswith(ENDS) and "=" not in text


def read(text: str, source: str) -> tuple[Fault, ...]:
    """All faults of a file, in its order; `source` is what messages call it.

    Raises:
        UsageError: it is no YAML, or a fault in it does not fit; the sentence names file and entry.
    """
    values = [value for value in read_values(text, source) if value is not None]
    if len(values) != 1:
        raise UsageError(f"{source} holds {len(values)} documents; expected one with faults: and a list")
    document = Field(values[0], "", source)
    document.only(("faults",))
    entries = document.get("faults").items()
    if not entries:
        raise document.get("faults").bad("a list of faults")
    if len(entries) > MAX_FAULTS:
        raise UsageError(f"{source} holds {len(entries)} faults; the maximum is {MAX_FAULTS}")
    return tuple(map(_fault, entries))


def _fault(entry: Field) -> Fault:
    where = f"{entry.where}: {entry.path}"
    if isinstance(entry.value, str):
        return grammar.parse(entry.value, where)
    if not isinstance(entry.value, dict):
        raise entry.bad("a text such as 'kill worker node=1', or an object with fault:")
    kind = " ".join(entry.get("fault").text().split()[:5])
    words = [f"{key}={_word(field)}" for key, field in entry.fields() if key != "fault" and field.given]
    return grammar.build(kind, words, f"{where} ({shown(kind)[1:-1]})")


def _word(field: Field) -> str:
    """YAML makes numbers of some values."""
    value: Any = field.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)[:40]
    return field.text()


# -- what this machine can do, found out by trying ---------------------------------------------


_TRY_S = 20.0
AS_USER = ("--user", "--map-root-user")
# Each line says a word when it works; the words are those of NETWORK_PARTS.
_CAPABILITY_TEST = """
ip link set lo up && echo lo
hostname capability-test && echo name
ip link add port0 type veth peer name port1 && echo veth
echo 1 >/proc/sys/net/ipv4/ip_forward && echo forward
ip rule add from 10.77.0.2 blackhole && echo rule
mount --bind /etc/hosts /etc/hosts && echo hosts
mount -t tmpfs -o mode=1777,size=1m shm /dev/shm && echo shm
nft add table ip capability_test && nft "add chain ip capability_test c { type filter hook forward priority 0; }" &&
  nft add rule ip capability_test c limit rate over 1000000 bytes/second burst 131072 bytes drop && echo limit
true
"""


def is_inside() -> bool:
    """Whether this process has namespaces of its own already."""
    return os.environ.get(runtime_directory.INSIDE) == str(os.getpid())


def check(faults: Sequence[Fault]) -> Machine:
    """Refuse what cannot be done here, before anything has started.

    Raises:
        UsageError: a fault cannot be carried out on this machine.
    """
    machine = look(network=wants_own_network(faults), memory=wants_memory_groups(faults))
    sentences = cannot(faults, machine)
    if sentences:
        raise UsageError("; ".join(sentences))
    return machine


def enter(machine: Machine) -> None:
    """Become the same command in namespaces of its own; does not return. Signals and terminal stay as they are."""
    flags = (*(AS_USER if machine.as_user else ()), "--net", "--mount")
    argv = ("unshare", *flags, "--", sys.executable, "-c", RUN, *sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, {**os.environ, runtime_directory.INSIDE: str(os.getpid())})


def look(*, network: bool, memory: bool) -> Machine:
    """Find out; what is not asked for is not tried."""
    missing = frozenset(one for one in (*PROGRAMS, "nft") if network and shutil.which(one) is None)
    why = pod_isolation.why_not() if memory else ""
    machine = Machine(missing=missing, memory=memory and not why, why_no_memory=why)
    if not network or missing - {"nft"}:
        return machine
    works, why = _try(())
    as_user = not works and os.geteuid() != 0
    if as_user:
        works, why = _try(AS_USER)
    return replace(machine, namespaces=bool(works), as_user=as_user, works=works, why=why)


def _try(flags: Sequence[str]) -> tuple[frozenset[str], str]:
    """The words of what works in new namespaces; none, and why, when they cannot be made."""
    argv = ("unshare", *flags, *pod_isolation.UNSHARE, "--", "sh", "-c", f"echo made; {_CAPABILITY_TEST}")
    done = deadline_subprocess.run(argv, None, _TRY_S)
    if done.failure:
        return frozenset(), done.failure[:120]
    lines = done.err.strip().splitlines()
    return frozenset(done.out.split()), lines[0][:120] if lines and not done.out else ""


# -- which faults this machine can carry out ---------------------------------------------------


PROGRAMS = ("unshare", "nsenter", "ip", "mount", "umount", "hostname", "sh")
_PACKAGES = {"ip": "iproute2", "nft": "nftables", "hostname": "hostname"}  # Debian's; all else is of util-linux
# What has to work in a network of the pods' own, by the word that the capability test says; in the order of trying.
NETWORK_PARTS = {
    "lo": "a network namespace cannot be brought up",
    "name": "the host name cannot be set",
    "veth": "the kernel has no veth devices, which connect pods",
    "forward": "/proc/sys/net is read-only, so packets between pods cannot be forwarded",
    "rule": "the kernel has no routing rules, which drop the packets",
    "hosts": "/etc/hosts cannot be mounted over",
    "shm": "tmpfs cannot be mounted at /dev/shm",
}
OWN_NETWORK = ("partition", "slow link", "delay dns", "fill shm")
_PRIVILEGED = "run it as root, or in a --privileged container"


class Machine(Struct, frozen=True, kw_only=True):
    """What was found out here by trying."""

    missing: frozenset[str] = frozenset()  # programs, of PROGRAMS and nft
    namespaces: bool = False  # whether they can be made
    as_user: bool = False  # only with a namespace of users around them
    works: frozenset[str] = frozenset()  # of NETWORK_PARTS, and "limit": nft takes a limit of bytes
    why: str = ""  # what was said when namespaces could not be made
    memory: bool = False  # whether memory cgroups can be made
    why_no_memory: str = ""


def wants_own_network(faults: Iterable[Fault]) -> bool:
    """Whether one of these needs pods with a network, names and /dev/shm of their own."""
    return any(fault.kind in OWN_NETWORK for fault in faults)


def wants_names(faults: Iterable[Fault]) -> bool:
    """Whether node 0 is lost for good: the survivors look for each other by their pods' names."""
    return any(
        fault.kind in ("kill pod", "term pod") and fault.back_s is None and fault.node == 0 for fault in faults
    )


def wants_memory_groups(faults: Iterable[Fault]) -> bool:
    """Whether one of these needs pods with a memory limit of their own."""
    return any(fault.kind == "oom" for fault in faults)


def cannot(faults: Iterable[Fault], machine: Machine) -> tuple[str, ...]:
    """A sentence for each fault that cannot be carried out here: why, and what to do. Of one kind once."""
    firsts = {fault.kind: fault for fault in reversed(tuple(faults))}
    found = ((fault, why) for fault in firsts.values() if (why := _why_not(fault.kind, machine)))
    return tuple(f"--fault {shown(fault.text)} is not possible on this machine: {why}" for fault, why in found)


def _why_not(kind: str, machine: Machine) -> str:
    if kind == "oom":
        return "" if machine.memory else machine.why_no_memory
    if kind not in OWN_NETWORK:
        return ""
    return why_no_network(machine) or (_why_no_limit(machine) if kind == "slow link" else "")


def why_no_network(machine: Machine) -> str:
    """Why pods cannot have a network of their own here, and what to do; "" when they can."""
    missing = [program for program in PROGRAMS if program in machine.missing]
    if missing:
        return f"{' and '.join(missing)} not found in PATH; install {_packages(missing)}"
    if not machine.namespaces:
        said = f" ({machine.why})" if machine.why else ""
        return f"network namespaces are not permitted here{said}; {_PRIVILEGED}"
    broken = next((why for word, why in NETWORK_PARTS.items() if word not in machine.works), None)
    return f"{broken}; {_PRIVILEGED}" if broken else ""


def _why_no_limit(machine: Machine) -> str:
    if "nft" in machine.missing:
        return f"nft not found in PATH; install {_packages(['nft'])}"
    return "" if "limit" in machine.works else "the kernel's nftables have no byte limit; use partition instead"


def _packages(programs: Iterable[str]) -> str:
    return " and ".join(dict.fromkeys(_PACKAGES.get(program, "util-linux") for program in programs))
