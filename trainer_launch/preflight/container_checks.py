"""Checks of a container: its limits and folders, its names, interfaces, adapters and ports.

The folders of --storage are tried in children, as a checkpoint would use them.

In an init container names resolve only if the Service publishes addresses of pods that are not ready. Kubeflow
Trainer v2 sees to that; the older operators do not, so there an init container cannot know.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from trainer_launch.host import network
from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.host.network import AdapterPort, Addresses, Answer, named
from trainer_launch.host.shm import TMP_VARIABLES, too_long_for_sockets
from trainer_launch.model import value_parsers
from trainer_launch.model.units import MIB, counted, in_mib, in_units
from trainer_launch.planning import interfaces, shared_memory
from trainer_launch.planning.interfaces import NetworkProblem, set_to, takes
from trainer_launch.preflight.check import Subject, at_once, check
from trainer_launch.preflight.rules import Observed

# What a worker usually takes. Less only warns: an init container's limits need not be the workers'.
USUAL_MIB, USUAL_GPU_MIB = 512, 2048
# Of a process with torch alone, as forked workers share most of it; of a worker with NCCL, data loaders and OpenMP.
LEAST_THREADS, USUAL_THREADS = 8, 128
BASE_FILES = 256  # libraries, data files, loaders' pipes
FILES_OF_EACH_RANK = 2  # gloo connects each rank with each, NCCL its root with all and the others with some
LOCKED_BYTES = 32 * MIB  # the usual limits of containers, 64 KiB and 8 MiB, are below
_LOCK_S = 8.0
_WRITTEN_BYTES = 16 * MIB
_STORAGE_CHILD_S = 20.0
_LEAST_S = 5.0  # whatever the deadline
_SLOW_S = 5.0  # for one file of 1 MiB
_LOW_BYTES, _LOW_INODES = 1 << 30, 1000
_LET_WRITE = "let this user write there: securityContext.fsGroup or runAsUser"
_ADVICE = {
    errno.ENOENT: "mount the volume there, or create the directory",
    errno.EROFS: "the mount is read-only: see readOnly in volumeMounts, and the volume's access mode",
    errno.EACCES: _LET_WRITE,
    errno.EPERM: _LET_WRITE,
    errno.ENOSPC: "free space on the volume",
    errno.EDQUOT: "free space, or have the quota raised",
}
_LACKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # a file system that cannot do it
# Whatever node it is, these stay the same.
_JOBS = frozenset((*_ADVICE, *_LACKS, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG))
_WITHOUT_RDMA = (("NCCL_IB_DISABLE", "1"), ("NCCL_NET", "socket"))  # as NCCL compares names
_HEADROOM = 8  # of the memory limit's rest, this part at most is locked or written
SETTLED_S = 60.0  # after which a name that its Service publishes is there: caches deny for up to 30 s
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 1.0
_POLL_S = 12.0  # glibc's own patience with two servers that do not answer is 10 s
_LAST_LOOK_S = 1.5  # after the deadline, at most
_SLOW_LOOKUP_S = 2.0  # of a look-up that is answered; a lost packet costs glibc 5 s

# Whose Services name only pods that are ready; their main containers have names some seconds after they start.
HIDING = frozenset(("pytorchjob-v1", "pytorchjob-v1-elastic", "tfjob-v1", "xgboostjob-v1", "paddlejob-v1"))
HIDING |= {"jaxjob-v1", "mpijob-v1", "mpijob-v2beta1", "flyte-elastic"}
HIDDEN_S = 3.0  # how long to hope there

_BOTH_ABSENT = (
    "neither name is known: does the job's headless Service exist, with the pods' subdomain and with "
    "publishNotReadyAddresses: true (without it pods in init containers have no names)?"
)
_ABSENT = "node 0's pod is not there yet: check whether it is scheduled and has started"
_NO_DNS = "DNS does not work here: check the cluster's DNS pods, and network policies for port 53"
_SLOW = (
    "check the cluster's DNS pods and their CPU limits; ndots and search domains multiply each look-up (dnsConfig)"
)


@check("memory")
def memory(subject: Subject) -> Observed:
    """The container's memory limit is enough for this node's workers."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    if limit is None:
        return Observed(good="the container's memory is not limited")
    usual = USUAL_GPU_MIB if subject.host.gpus.cuda else USUAL_MIB
    there, in_use = limit // MIB, used // MIB
    about = f"{max(0, there - in_use)} MiB are left of the limit of {there} MiB"
    return _within(subject, about, there, in_use, usual)


def _within(subject: Subject, about: str, limit: int, in_use: int, usual: int, **facts: Any) -> Observed:
    """What is left of a limit: whether that is enough for all workers in the long run."""
    about += f" for {counted(subject.workers, 'worker')}"
    facts |= {"about": about, "usual": usual, "all": (limit, in_use + usual * subject.workers)}
    return Observed(facts=facts, good=about, more={"measured": limit})


@check("cpu")
def cpu(subject: Subject) -> Observed:
    """Each worker of this node has at least one CPU: with less, collectives are many times slower."""
    cpus = subject.host.cpus
    usable = float(cpus.affinity if cpus.quota is None else min(cpus.affinity, cpus.quota))
    quota = "no quota" if cpus.quota is None else f"a quota of {cpus.quota:g}"
    have, workers = f"{usable:g} {'CPU' if usable == 1 else 'CPUs'}", counted(subject.workers, "worker")
    about = f"{have} for {workers} ({cpus.affinity} in the affinity mask, {quota})"
    return Observed(facts={"about": about, "cpus": (usable, subject.workers)}, good=about)


@check("pids")
def pids(subject: Subject) -> Observed:
    """The container's limit allows all processes and threads that its workers start."""
    if subject.pids is None:
        return Observed(good="processes and threads are not limited")
    limit, left = subject.pids
    about = f"{left} more processes and threads are allowed (limit {limit})"
    one = {"one": (limit, limit - left + LEAST_THREADS)} if subject.is_torch else {}
    return _within(subject, about, limit, limit - left, USUAL_THREADS, least=LEAST_THREADS, **one)


@check("nofile")
def nofile(subject: Subject) -> Observed:
    """The limit of open files is high enough for a worker of a job of this size."""
    soft, hard = subject.limits.nofile_soft, subject.limits.nofile_hard  # a program starts with the soft one
    if soft is None:
        return Observed(good="open files are not limited")
    need = BASE_FILES + FILES_OF_EACH_RANK * subject.ranks
    raising = f"raise LimitNOFILE of the container runtime on the nodes (hard limit {hard})"
    facts = {"soft": soft, "need": need, "ranks": counted(subject.ranks, "rank"), "estimate": (soft, need)}
    fewest_nodes = subject.topology.nodes.min if subject.topology.nodes else 1
    of_gloo = subject.workers * fewest_nodes if subject.needs_gloo else 0  # it connects each rank with each
    facts["certain"] = soft, max(BASE_FILES // 2, of_gloo)
    facts["action"] = f"ulimit -n {need} before the command" if hard is None or hard >= need else raising
    return Observed(facts=facts, good=f"{soft} open files are allowed, {need} may be needed")


@check("memlock", limit_s=lambda subject: _LOCK_S + 1)
def memlock(subject: Subject) -> Observed:
    """Memory can be locked, as RDMA needs it. Locking is tried: with CAP_IPC_LOCK the limit has no effect."""
    size = _bearable(subject, LOCKED_BYTES)
    tried = subject.try_out("memlock", str(size), _LOCK_S)
    if tried.is_good:
        return Observed(good=f"{in_mib(size)} can be locked", more={"measured": size // MIB, "unit": "MiB"})
    if tried.errno is None:
        why = tried.problem or "the child did not end in time"
        return Observed(unknown=f"whether memory can be locked is not known: {why}")
    allowed = subject.limits.memlock_bytes
    limit = "none" if allowed is None else f"{allowed // 1024} KiB"
    text = f"{in_mib(size)} of memory cannot be locked: {os.strerror(tried.errno)}; the limit is {limit}"
    why = "" if subject.has_rdma else "no RDMA device is here"
    why = why or ("" if subject.has_peers else "there are no other nodes") or without_rdma(subject)
    if subject.is_torch and not subject.may_use_gpus:
        why = why or "gloo goes by plain sockets"
    if subject.adapters and not any(port.is_active for port in subject.adapters):
        why = why or "no port of them is up"
    if not why:
        return Observed(facts={"refused": text})
    return Observed(skipped=f"{text}; only RDMA needs it, and {why}")


@check("shm")
def shm(subject: Subject) -> Observed:
    """/dev/shm can be written, and is large enough for this node's workers, as `run` estimates it."""
    host, need = subject.host, subject.shm_need
    size, free = host.shm_bytes, host.shm_free_bytes
    # NCCL makes a segment there also where each node has one worker.
    broken = "broken" if need.size_bytes or (need.workers and need.on_gpus and subject.has_peers) else "small"
    if size is None or free is None:
        action = "mount an emptyDir with medium: Memory at /dev/shm"
        return Observed(facts={broken: "/dev/shm is not there", "action": action})
    more = {"measured": size // MIB, "unit": "MiB"}
    number = subject.write_problem(_bearable(subject, _WRITTEN_BYTES))
    if number is not None:
        text = f"/dev/shm ({in_mib(size)}, {in_mib(free)} free) cannot be written: {os.strerror(number)}"
        action = "remove what fills it, or mount an emptyDir with medium: Memory there"
        return Observed(facts={broken: text, "action": action}, more=more)
    if subject.shm_size == "keep":  # it stays as it is; whether it is enough is a question all the same
        host = replace(host, may_enlarge_shm=False)
    decision = shared_memory.decide(host, need, "auto" if subject.shm_size == "keep" else subject.shm_size)
    text, _, action = decision.warning.partition(". To enlarge it: ")
    if decision.is_short:
        text += f"; NCCL and MPI alone may take {in_mib(need.least_bytes)}, and die of SIGBUS"
    return Observed(facts={"small": text, "action": action}, good=f"{in_mib(size)}; {decision.text}", more=more)


def _bearable(subject: Subject, most: int) -> int:
    """Bytes that may be written or locked without the kernel killing somebody for it: they count as memory."""
    limit, used = subject.host.memory_limit_bytes, subject.host.memory_used_bytes or 0
    return most if limit is None else min(most, max(4096, (limit - used) // _HEADROOM))


@check("tmpdir")
def tmpdir(subject: Subject) -> Observed:
    """The directory for temporary files can be written, and its path is short enough for sockets."""
    name = next((name for name in TMP_VARIABLES if subject.env.get(name)), None)
    path = "/tmp" if name is None else subject.env[name]
    if (long := too_long_for_sockets(subject.env)) is not None:
        return Observed(facts={"wrong": long, "action": "set TMPDIR to a shorter one, such as /tmp"})
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        text = f"{path} is not a writable directory; Python uses another one, torch and MPI may not"
        action = f"make it, correct {name or 'TMPDIR'}, or mount an emptyDir at /tmp"
        return Observed(facts={"wrong": text, "action": action})
    return Observed(good=f"temporary files go to {path}")


@check("storage", limit_s=lambda subject: _STORAGE_CHILD_S + 2)
def storage(subject: Subject) -> Iterator[Observed]:
    """A checkpoint can be written, synced, renamed, read and removed in each --storage directory in time."""
    if not subject.storage:
        yield Observed(skipped="no directory was given with --storage")
        return
    limit_s = subject.left_s(_LEAST_S, _STORAGE_CHILD_S)
    folders = subject.storage
    tried = at_once(folders, lambda folder: subject.try_out("storage", folder, limit_s), len(folders))
    for folder in folders:
        observed = _of_folder(folder, tried[folder], limit_s)
        yield replace(observed, more={"subject": folder, **observed.more})


def _of_folder(folder: str, tried: Tried, limit_s: float) -> Observed:
    if tried.timed_out:
        text = f"{folder} hangs at {tried.stage or 'the start'}, after {limit_s:.0f} s"
        text += "; the process that waits for it cannot be killed" if tried.stuck else ""
        return Observed(facts={"hangs": text})
    if tried.errno is not None:
        text, whose = f"{folder}: {os.strerror(tried.errno)} at {tried.stage}", tried.errno in _JOBS
        action = _ADVICE.get(tried.errno, "check the volume and its server")
        return Observed(facts={"refused" if whose else "fails": text, "action": action})
    if tried.problem:
        return Observed(unknown=f"{folder} could not be tested: {tried.problem}")
    if not tried.values["same"]:
        action = "do not train on this volume; check its server and this node"
        return Observed(
            facts={"fails": f"{folder}: the data read back differs from the data written", "action": action}
        )
    return _room(folder, tried.values)


def _room(folder: str, values: Mapping[str, float]) -> Observed:
    seconds, free, inodes = values["seconds"], int(values["free_bytes"]), int(values["free_inodes"])
    room = f"{in_units(free)} free, " if free >= 0 else ""
    text = f"{folder}: {room}1 MiB written, synced and read back in {seconds:.3f} s"
    problems = ["it is nearly full"] * (0 <= free < _LOW_BYTES)
    problems += ["it cannot sync, rename or remove files, as a mounted bucket"] * (values.get("lacks", 0.0) > 0)
    problems += [f"room for only {counted(inodes, 'more file')}"] * (0 <= inodes < _LOW_INODES)
    problems += ["it is slow"] * (seconds > _SLOW_S)
    more: dict[str, Any] = {"measured": round(seconds, 3), "expected": _SLOW_S, "unit": "s"}
    return Observed(facts={"low": "; ".join((text, *problems)) if problems else ""}, good=text, more=more)


def _limit_s(subject: Subject) -> float:
    return max(subject.deadline_s, subject.left_s(_LAST_LOOK_S, _POLL_S)) + 1.0


@check("dns", limit_s=_limit_s, is_late=True)
def dns(subject: Subject) -> Observed:
    """Node 0's name resolves before the deadline: all workers connect to it by that name.

    Nobody connects to this node by its own name, so the own name only explains why node 0's is absent.
    """
    coordinator = subject.topology.coordinator
    home = "localhost" if coordinator is None else coordinator.host
    if not subject.has_peers or home == "localhost" or value_parsers.is_address(home):
        return Observed(skipped="there is no name of another node to look up")
    began_s = time.monotonic()
    answers, look_s = _wait(subject, home)
    answer = answers[home]
    if isinstance(answer, Answer):
        return _absent(subject, home, answers, time.monotonic() - began_s)
    good = f"{home} resolves to {', '.join(sorted(answer))}"
    slow = f"{good}, but a look-up takes {look_s:.1f} s" if look_s > _SLOW_LOOKUP_S else ""
    return Observed(facts={"slow": slow, "action": _SLOW}, good=good)


def _wait(subject: Subject, home: str) -> tuple[Mapping[str, Addresses | Answer], float]:
    """Node 0's addresses when there are some, or why there are none when the time is up; so for the own name.

    Behind them are the seconds that the last look-up took.
    """
    hope_s = HIDDEN_S if subject.job.contract in HIDING else subject.deadline_s
    began_s = time.monotonic()
    until_s = began_s + min(hope_s, subject.deadline_s)
    end_s = max(until_s, began_s + subject.left_s(_LAST_LOOK_S, _POLL_S))
    names = list(dict.fromkeys([home, _own(subject) or home]))
    pause_s = _FIRST_PAUSE_S
    while True:
        patience_s = min(_POLL_S, max(_LAST_LOOK_S, end_s - time.monotonic()))
        asked_s = time.monotonic()
        answers = network.lookup_all(names, patience_s, subject.lookup)
        if not isinstance(answers[home], Answer) or time.monotonic() >= until_s:
            return answers, round(time.monotonic() - asked_s, 1)
        time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        pause_s *= 2


def _own(subject: Subject) -> str | None:
    """The name of this node among the job's."""
    rank, members = subject.topology.node_rank, subject.job.members or ()
    return members[rank].host if rank is not None and rank < len(members) else None


def _absent(subject: Subject, home: str, answers: Mapping[str, Addresses | Answer], waited_s: float) -> Observed:
    denied = [name for name, answer in answers.items() if answer in (Answer.NXDOMAIN, Answer.NO_DATA)]
    if home in denied and subject.job.contract in HIDING:
        text = f"{home}: not in DNS yet; Services of {subject.job.contract} name only pods that are ready, which "
        action = "nothing: `run` waits for the names it needs; --policy dns=off saves these seconds"
        return Observed(unknown=f"{text}pods in init containers are not", more={"action": action})
    are_both = len(denied) == len(answers)
    is_settled = are_both and waited_s >= SETTLED_S and _own(subject) in denied
    reasons = "; ".join(f"{name}: {answer.value}" for name, answer in answers.items() if isinstance(answer, Answer))
    text = f"node 0's name does not resolve after {waited_s:.0f} s: {reasons}"
    action = _BOTH_ABSENT if are_both else _ABSENT if home in denied else _NO_DNS
    return Observed(facts={"never there" if is_settled else "absent": text, "action": action})


@check("own-name")
def own_name(subject: Subject) -> Observed:
    """The host name resolves to an address of this host other than loopback: gloo listens there."""
    node = subject.network
    if node.addresses and not node.interfaces:
        return Observed(unknown="the kernel does not list the network interfaces")
    shown = ", ".join(node.addresses)
    return _observed(interfaces.of_own_name(node), f"{node.hostname} resolves to {shown}", shown or "nothing")


def _observed(problem: NetworkProblem | None, good: str, measured: str) -> Observed:
    if problem is None:
        return Observed(good=good, more={"measured": measured})
    facts = {"wrong" if problem.is_fatal else "doubtful": problem.text, "action": problem.action}
    return Observed(facts=facts, more={"measured": measured, "evidence": problem.evidence})


@check("gloo-socket-ifname")
def gloo_socket_ifname(subject: Subject) -> Observed:
    """All interfaces that GLOO_SOCKET_IFNAME names exist: gloo needs exact names."""
    spec = subject.env.get(interfaces.GLOO)
    if spec is None or not interfaces.chooses_for_gloo(subject.env):
        return Observed(skipped="it is not set; own-name checks what gloo uses then")
    if not subject.interfaces:
        return Observed(unknown="the kernel does not list the network interfaces")
    return _observed(interfaces.of_gloos_variable(subject.network), f"{interfaces.GLOO}={spec} is here", spec)


@check("nccl-socket-ifname")
def nccl_socket_ifname(subject: Subject) -> Observed:
    """NCCL_SOCKET_IFNAME, or NCCL's default, leaves an interface that other nodes can reach."""
    spec = subject.env.get(interfaces.NCCL)
    if spec is None and subject.host.gpus.cuda == 0:
        return Observed(skipped="it is not set, and no GPU is here")
    if not subject.interfaces:
        return Observed(unknown="the kernel does not list the network interfaces")
    names = named(interfaces.nccl_interfaces(spec, subject.interfaces, subject.env.get("NCCL_SOCKET_FAMILY")))
    good = f"{set_to(interfaces.NCCL, spec)}: {names}"
    return _observed(interfaces.of_nccls_interfaces(subject.network), good, names)


def without_rdma(subject: Subject) -> str:
    """The variable by which this job does without RDMA."""
    set_so = (name for name, value in _WITHOUT_RDMA if subject.env.get(name, "").lower() == value)
    return next((f"{name}={subject.env[name]}" for name in set_so), "")


def used_adapters(subject: Subject) -> tuple[AdapterPort, ...]:
    """The ports that NCCL would take if all were active; none where this job does without RDMA."""
    if without_rdma(subject) or not subject.has_rdma or not subject.may_use_gpus:
        return ()
    spec = subject.env.get("NCCL_IB_HCA", "")
    return tuple(port for port in subject.adapters if port.is_foreign or takes(spec, port.device, port.port))


@check("nccl-ib-hca")
def nccl_ib_hca(subject: Subject) -> Observed:
    """NCCL_IB_HCA leaves an adapter for each GPU: with fewer, NCCL is slower, without a warning."""
    spec = subject.env.get("NCCL_IB_HCA") or None
    if not subject.has_peers:
        return Observed(skipped="there are no other nodes")
    if without := without_rdma(subject) or ("" if subject.may_use_gpus else "no GPU is here"):
        return Observed(skipped=without)
    if not (subject.adapters and subject.has_rdma):
        if not spec:
            return Observed(skipped="this container was given no RDMA adapter")
        text = f"NCCL_IB_HCA={spec}, but this container was given no RDMA adapter: NCCL will use plain sockets"
        return Observed(facts={"not given": text})
    taken, n_gpus = used_adapters(subject), subject.host.gpus.cuda
    up, down = ([port for port in taken if port.is_active is is_up] for is_up in (True, False))
    setting, there = set_to("NCCL_IB_HCA", spec), _shown(subject.adapters)
    if not taken:
        fact = "shut out" if setting.partition("=")[2].startswith("^") else "left out"
        return Observed(facts={fact: f"{setting} leaves none of {there}", "there": there})
    if not up:  # not that of another rail, or for storage
        return Observed(facts={"all down" if spec else "none up": _shown(down)})
    # A port without a cable is no fault where each GPU has another one, where a machine has few of them, and where
    # all of its kind are down.
    kinds = [[port for port in taken if port.is_ethernet is is_ethernet] for is_ethernet in (True, False)]
    is_short = any(0 < sum(port.is_active for port in kind) < n_gpus <= len(kind) for kind in (taken, *kinds))
    text = f"{len(up)} of {len(taken)} RDMA ports are up for {n_gpus} GPUs; {_shown(down)}" if is_short else ""
    more = {"measured": len(up), "unit": "ports"}
    return Observed(facts={"some down": text}, good=f"{setting}: {_shown(up)}", more=more)


def _shown(ports: Sequence[AdapterPort]) -> str:
    return ", ".join(f"{port.device}:{port.port}{'' if port.is_active else ' (down)'}" for port in ports)


@check("rdma-errors", is_late=True)
def rdma_errors(subject: Subject) -> Observed:
    """No RDMA port counted errors while pairs of nodes were tested."""
    before, taken = subject.port_errors, {(port.device, port.port) for port in used_adapters(subject)}
    if before is None or not taken:
        return Observed(skipped="no pairs were tested over RDMA adapters here")
    now = subject.count_errors()
    grown = [(at, now[at] - before.get(at, 0)) for at in sorted(now) if at[:2] in taken]
    text = ", ".join(f"{device}:{port} {name} +{more}" for (device, port, name), more in grown if more > 0)
    return Observed(facts={"errors": text}, good=f"no new errors on {counted(len(taken), 'port')}")
