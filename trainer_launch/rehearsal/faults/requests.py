"""What `--fault` asks for, held against the job and this machine before anything starts."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from trainer_launch.host import deadline_subprocess, runtime_directory
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.units import listed
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers.local_jobs import RUN, check_size
from trainer_launch.rehearsal.controllers.pod_values import Draft, Workload
from trainer_launch.rehearsal.faults.kinds import KINDS, InjectedFault
from trainer_launch.rehearsal.kubelet import pod_isolation

PROGRAMS = ("unshare", "nsenter", "ip", "mount", "umount", "hostname", "sh")
AS_USER = ("--user", "--map-root-user")
_LAUNCHER = "launcher"  # a role that is no node of the job: it only starts ranks elsewhere
_TRAINER = "node"  # the role of a TrainJob's nodes, beside which there may be initializers
_PACKAGES = {"ip": "iproute2", "hostname": "hostname"}  # Debian's; all else is of util-linux
_TRY_S = 20.0
_CAPABILITY_TEST = """set -e
ip link set lo up
hostname capability-test
ip link add port0 type veth peer name port1
echo 1 >/proc/sys/net/ipv4/ip_forward
ip rule add from 10.77.0.2 blackhole
mount --bind /etc/hosts /etc/hosts
mount -t tmpfs -o mode=1777,size=1m shm /dev/shm
"""
_log = logging.getLogger(__name__)


def nodes_of(drafts: Iterable[Draft]) -> tuple[str, ...]:
    """The pods that are nodes of the job, node 0 first; all of them where every pod only starts others."""
    drafts = tuple(drafts)
    nodes = [draft for draft in drafts if draft.role != _LAUNCHER]
    trainers = [draft for draft in nodes if draft.role == _TRAINER]
    return tuple(draft.hostname for draft in trainers or nodes or drafts)


def workers_of(drafts: Iterable[Draft]) -> int:
    """How many Worker replicas a job has."""
    return sum(draft.role == "worker" for draft in drafts)


def target(fault: InjectedFault, nodes: Sequence[str], pods: Sequence[str]) -> str | None:
    """The name of the pod; None for a fault of the whole job.

    `nodes` are those with an index, in its order; `pods` all, a launcher too. Of a name its end suffices: worker-0.

    Raises:
        UsageError: the job has no such pod.
    """
    if KINDS[fault.kind].is_of_job:
        return None
    where = f"--fault {shown(fault.text)}"
    if fault.pod is None:
        place = -1 if fault.node is None else fault.node
        if place < len(nodes):
            return nodes[place]
        there = f"nodes 0 to {len(nodes) - 1}" if len(nodes) > 1 else "one node, 0"
        raise UsageError(f"{where}: there is no node {place}; the job has {there}")
    fitting = [pod for pod in pods if pod == fault.pod] or [pod for pod in pods if pod.endswith(f"-{fault.pod}")]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"{where}: {fault.pod} is ambiguous: {' or '.join(fitting[:5])}; give the full name")
    hint = did_you_mean(fault.pod, pods) or f"the job has {listed(pods)}"
    raise UsageError(f"{where}: the job has no pod {fault.pod}; {hint}")


def check_targets(
    faults: Sequence[InjectedFault], drafts: Sequence[Draft], grown: Callable[[int], Workload] | None
) -> None:
    """Hold them against this job; `grown` makes it with so many more nodes, None where it cannot.

    Raises:
        UsageError: a fault is for a pod that the job has not, or scales a job of a fixed size.
    """
    scales = [fault for fault in faults if KINDS[fault.kind].scales]
    if scales and grown is None:
        raise UsageError(
            f"--fault {shown(scales[0].text)} needs a job that can grow, and this one has a fixed number of nodes; "
            "use a range such as --nodes 1:2, or with -f a job with Worker replicas"
        )
    if scales and grown is not None:
        workers, added = workers_of(drafts), sum(fault.workers is None for fault in scales)
        largest = grown(max(workers, *(fault.workers or 0 for fault in scales)) + added - workers)
        check_size(largest)
        drafts = largest.drafts
    for fault in faults:
        target(fault, nodes_of(drafts), tuple(draft.hostname for draft in drafts))


class Machine(Struct, frozen=True, kw_only=True):
    """What was found out here by trying."""

    why_not: str = ""  # why pods cannot have a network of their own, and what to do
    as_user: bool = False  # they can only with a namespace of users around them


def isolate(faults: Sequence[InjectedFault]) -> bool:
    """Whether the pods have a network of their own; for that the same command begins once more, in namespaces.

    Raises:
        UsageError: a fault cannot be carried out on this machine.
    """
    if os.environ.get(runtime_directory.INSIDE) == str(os.getpid()):
        return True
    on_network = next((fault for fault in faults if KINDS[fault.kind].needs_network), None)
    if on_network is None and not wants_names(faults):
        return False
    machine = look()
    if not machine.why_not:
        _enter(machine)  # does not return
    if on_network is not None:
        raise UsageError(f"--fault {shown(on_network.text)} is not possible on this machine: {machine.why_not}")
    _log.warning(
        "the loss of node 0 cannot be survived here, because pods have no names of their own: %s", machine.why_not
    )
    return False


def wants_names(faults: Iterable[InjectedFault]) -> bool:
    """Whether node 0 is lost for good: the survivors look for each other by their pods' names."""
    return any(
        fault.kind in ("kill pod", "term pod") and fault.back_s is None and fault.node == 0 for fault in faults
    )


def _enter(machine: Machine) -> None:
    """Become the same command in namespaces of its own; does not return. Signals and terminal stay as they are."""
    flags = (*(AS_USER if machine.as_user else ()), "--net", "--mount")
    argv = ("unshare", *flags, "--", sys.executable, "-c", RUN, *sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, {**os.environ, runtime_directory.INSIDE: str(os.getpid())})


def look() -> Machine:
    """Find out whether pods can have a network, names and /dev/shm of their own here."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        packages = dict.fromkeys(_PACKAGES.get(program, "util-linux") for program in missing)
        return Machine(why_not=f"{' and '.join(missing)} not found in PATH; install {' and '.join(packages)}")
    why = _try(())
    as_user = bool(why) and os.geteuid() != 0
    why = _try(AS_USER) if as_user else why
    advice = f"{why}; run it as root, or in a --privileged container" if why else ""
    return Machine(why_not=advice, as_user=as_user)


def _try(flags: Sequence[str]) -> str:
    """What does not work in new namespaces; "" when all does."""
    argv = ("unshare", *flags, *pod_isolation.UNSHARE, "--", "sh", "-c", _CAPABILITY_TEST)
    done = deadline_subprocess.run(argv, None, _TRY_S)
    if done.code == 0:
        return ""
    first = next(iter(done.err.strip().splitlines()), done.failure or f"exit code {done.code}")
    return f"network namespaces are not permitted here ({first[:120]})"
