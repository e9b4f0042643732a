"""Each check has containers that are broken in its own way: it speaks, and no other one does."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.preflight.fault_catalogue import FAULTS
from tests.preflight.gpus import FACTS
from tests.preflight.world import ADDRESSES, ETH0, GIB, HEALTHY, JOB, LO, MIB, STORED, Names, run_all, subject
from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.host.machine import Limits
from trainer_launch.host.network import AdapterPort, Interface
from trainer_launch.model import Cpus, Endpoint, Gpus, Member, Mpi, NodeRange
from trainer_launch.model.findings import Fault, Finding, PreflightVerdict, Status
from trainer_launch.preflight import check, container_checks, registry
from trainer_launch.preflight.check import Subject, Where
from trainer_launch.preflight.cluster import node_facts
from trainer_launch.preflight.gpu_collect import Cards

CPU_ONLY = {"gpus": Gpus(count=0, reason="none")}
COORDINATOR = {"is_coordinator": True, "node_rank": 0}
TWO_WAYS = (LO, ETH0, Interface(name="net1", addresses=("10.1.0.7",)))
VETH = Interface(name="eth-veth1", addresses=("169.254.1.1",))


def limits(**changes: object) -> Limits:
    return replace(HEALTHY.limits, **changes)


def of_names(**answers: object) -> Names:
    return Names(ADDRESSES | {"job-node-0-0.job": answers["node_0"]})


def of_own_name(address: str | None, interfaces: tuple[Interface, ...] = (LO, ETH0)) -> Subject:
    """A job without GPUs whose gloo goes by the own name; `run` mends it if it knows the way out."""
    addresses = None if address is None else frozenset({address})
    names, env = Names(ADDRESSES | {"job-node-0-1": addresses}), {"GLOO_SOCKET_IFNAME": ""}
    return subject(host=CPU_ONLY, env=env, lookup=names, interfaces=interfaces)


SICK_DNS = Names(ADDRESSES | {"job-node-0-0.job": None}, socket.EAI_AGAIN)


def unlocked(number: int) -> Callable[[str, str, float], Tried]:
    """Trials in which memory cannot be locked."""
    return lambda what, argument, limit_s: STORED if what == "storage" else Tried(stage="mlock", errno=number)


def stored(tried: Tried) -> Subject:
    def try_out(what: str, argument: str, limit_s: float) -> Tried:
        return tried if what == "storage" else Tried(values={"bytes": 1.0})

    return subject(try_out=try_out)


JOBS: list[tuple[str, Subject, str]] = [
    ("pids", subject(pids=(1000, 5)), "5 more processes and threads are allowed (limit 1000) for 2 workers"),
    (
        "nofile",
        subject(
            host=CPU_ONLY,
            limits=limits(nofile_soft=1024),
            topology={"nodes": NodeRange(1000, 1000)},
        ),
        "a worker of 2000 ranks may need 4256",
    ),
    (
        "memlock",
        subject(limits=limits(memlock_bytes=64 << 10), try_out=unlocked(errno.ENOMEM)),
        "32 MiB of memory cannot be locked: Cannot allocate memory; the limit is 64 KiB",
    ),
    ("shm", subject(write_problem=lambda size: errno.EROFS), "cannot be written: Read-only file system"),
    ("own-name", of_own_name("127.0.1.1", TWO_WAYS), "resolves to 127.0.1.1, which other nodes cannot reach"),
    ("gloo-socket-ifname", subject(host=CPU_ONLY, env={"GLOO_SOCKET_IFNAME": "eth"}), "names eth, which is not"),
    ("nccl-socket-ifname", subject(env={"NCCL_SOCKET_IFNAME": "lo"}), "leaves only lo (127.0.0.1)"),
    ("storage", stored(Tried(stage="create", errno=errno.ENOENT)), "No such file or directory at create"),
]


NODES: list[tuple[str, Subject, str]] = [
    (
        "nccl-ib-hca",
        subject(adapters=(AdapterPort("mlx5_0", 1, False),)),
        "no port of an RDMA adapter is active: mlx5_0:1 (down)",
    ),
    (
        "dns",
        subject(lookup=SICK_DNS),
        "job-node-0-0.job: the DNS server does not answer, or answers SERVFAIL or REFUSED",
    ),
    (
        "dns",
        subject(lookup=Names(ADDRESSES | {"job-node-0-0.job": None}, socket.EAI_MEMORY)),
        "job-node-0-0.job: the resolver failed",
    ),
    ("storage", stored(Tried(stage="fsync", timed_out=True)), "/checkpoints hangs at fsync, after 20 s"),
    (
        "storage",
        stored(Tried(stage="fsync", timed_out=True, stuck=True)),
        "the process that waits for it cannot be killed",
    ),
    ("storage", stored(Tried(stage="read", errno=errno.EIO)), "Input/output error at read"),
]

WARNINGS: list[tuple[str, Subject, str]] = [
    ("tmpdir", subject(env={"TMPDIR": f"/scratch/{'x' * 70}"}), "is a path of 79 bytes, and sockets in it need"),
    ("tmpdir", subject(env={"TMPDIR": "/no/such/folder"}), "/no/such/folder is not a writable directory"),
    ("own-name", replace(of_own_name(None, TWO_WAYS), route=lambda: "net1"), "does not resolve"),
    ("memory", subject(host={"memory_limit_bytes": 1200 * MIB}), "176 MiB are left of the limit of 1200 MiB"),
    ("memory", subject(host={"memory_limit_bytes": 4 * GIB}), "2048 MiB for each are usual"),
    ("memory", subject(is_torch=False, host={"memory_limit_bytes": 1025 * MIB}), "1 MiB are left of the limit"),
    ("rdma-errors", subject(count_errors=lambda: {("mlx5_1", 1, "symbol_error"): 7}), "mlx5_1:1 symbol_error +7"),
    ("shm", subject(host={"shm_bytes": 32 * MIB, "shm_free_bytes": 32 * MIB}), "alone may take 37 MiB"),
    ("nccl-ib-hca", subject(has_rdma=False), "this container was given no RDMA adapter"),
    ("nccl-socket-ifname", subject(host=CPU_ONLY, env={"NCCL_SOCKET_IFNAME": "ib"}), "leaves no interface here"),
    ("cpu", subject(host={"cpus": Cpus(affinity=16, quota=1.5)}), "1.5 CPUs for 2 workers"),
    ("pids", subject(pids=(1000, 200)), "with data loaders 128 in each are usual"),
    ("nofile", subject(limits=limits(nofile_soft=200)), "a worker of 4 ranks may need 264"),
    ("nccl-socket-ifname", subject(interfaces=(LO, ETH0, VETH)), "not all of which lead to other nodes"),
    ("nccl-ib-hca", subject(adapters=()), "NCCL will use plain sockets"),
    (
        "storage",
        stored(replace(STORED, values={**STORED.values, "free_inodes": 3.0})),
        "room for only 3 more files",
    ),
    ("storage", stored(replace(STORED, values={**STORED.values, "free_bytes": 1e6})), "it is nearly full"),
    ("storage", stored(replace(STORED, values={**STORED.values, "seconds": 9.0})), "it is slow"),
    ("storage", stored(replace(STORED, values={**STORED.values, "lacks": 1.0})), "as a mounted bucket"),
]


def the_one_finding(broken: Subject) -> Finding:
    report = run_all(broken)
    loud = [finding for finding in report.findings if finding.status not in (Status.PASS, Status.SKIPPED)]
    assert len(loud) == 1, loud
    return loud[0]


def test_a_healthy_container_passes_every_check() -> None:
    report = run_all(HEALTHY)
    assert report.verdict is PreflightVerdict.PASS
    skipped = [finding.check for finding in report.findings if finding.status is Status.SKIPPED]
    assert skipped == []
    assert [finding.check for finding in report.findings] == list(registry.ids(Where.CONTAINER, Where.GPU))


OUTCOMES = (("fatal", JOBS, Fault.JOB), ("retryable", NODES, Fault.NODE), ("warning", WARNINGS, None))


@pytest.mark.parametrize(
    ("check", "broken", "text", "fault"),
    [pytest.param(*row, fault, id=f"{row[0]} is {outcome}") for outcome, rows, fault in OUTCOMES for row in rows],
)
def test_what_is_wrong_is_told_with_whose_fault_it_is_and_what_to_do(
    check: str, broken: Subject, text: str, fault: Fault | None
) -> None:
    finding = the_one_finding(broken)
    status = Status.WARN if fault is None else Status.FAIL
    assert (finding.check, finding.status, finding.fault) == (check, status, fault)
    assert text in finding.text
    assert finding.action


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        ("storage", stored(Tried(problem="the child ended with -9 at the stage write"))),
        ("memlock", subject(try_out=lambda what, a, s: STORED if what == "storage" else Tried(timed_out=True))),
    ],
)
def test_what_cannot_be_found_out_is_unknown_and_no_failure(check: str, broken: Subject) -> None:
    finding = the_one_finding(broken)
    assert (finding.check, finding.status, finding.fault) == (check, Status.UNKNOWN, None)


def test_memory_that_cannot_be_locked_where_nothing_locks_it_is_no_finding() -> None:
    report = run_all(subject(has_rdma=False, adapters=(), env={"NCCL_IB_HCA": ""}, try_out=unlocked(errno.EPERM)))
    (finding,) = (finding for finding in report.findings if finding.check == "memlock")
    assert (report.verdict, finding.status) == (PreflightVerdict.PASS, Status.SKIPPED)
    assert finding.text.endswith("only RDMA needs it, and no RDMA device is here")


def test_a_job_of_one_node_is_not_stopped_for_a_network_that_it_does_not_use() -> None:
    sockets = [replace(one, network="Socket") for one in FACTS.tests]
    fallen_back = Cards(lambda: replace(FACTS, tests=tuple(sockets)))
    alone = subject(
        topology={"nodes": NodeRange(1, 1), "node_rank": 0},
        adapters=(AdapterPort("mlx5_0", 1, False),),
        cards=fallen_back,
        try_out=unlocked(errno.EPERM),
    )
    ports_up = replace(alone, adapters=(AdapterPort("mlx5_0", 1, True),))
    for node in (alone, ports_up):
        report = run_all(node)
        assert report.verdict is PreflightVerdict.PASS, [
            one for one in report.findings if one.status is Status.FAIL
        ]


@pytest.mark.parametrize("folders", [(), ("/a", "/b", "/c"), tuple(f"/{number}" for number in range(16))])
def test_node_0_waits_for_longer_than_any_check_of_another_node_may_take(folders: tuple[str, ...]) -> None:
    node = subject(storage=folders)
    limits_s = [
        one.limit_s(node) for one in registry.at(Where.CONTAINER, Where.GPU) if one is not container_checks.dns
    ]
    assert node_facts.report_s(node) > max(limits_s) + 30


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "::1"])
def test_nodes_that_meet_on_loopback_need_no_other_address(address: str) -> None:
    """An own name on loopback, loopback as the only interface, and variables that choose it are right there."""
    on_loopback = subject(
        host=CPU_ONLY,
        topology={"coordinator": Endpoint(address, 29500)},
        interfaces=(LO,),
        env={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
        lookup=Names({HEALTHY.host.hostname: frozenset({"127.0.0.1"})}),
    )
    of_network = {"own-name", "gloo-socket-ifname", "nccl-socket-ifname"}
    loud = [one for one in run_all(on_loopback).findings if one.status not in (Status.PASS, Status.SKIPPED)]
    assert [one.text for one in loud if one.check in of_network] == []


def test_all_folders_are_tried_at_once_and_given_up_at_the_deadline() -> None:
    given_s: list[float] = []
    together = threading.Barrier(3)

    def try_out(what: str, argument: str, limit_s: float) -> Tried:
        if what == "storage":
            given_s.append(limit_s)
            together.wait(10)  # breaks unless all are there
        return Tried(stage="fsync", timed_out=True)

    hanging = subject(storage=("/a", "/b", "/c"), ends_at_s=time.monotonic() + 8, try_out=try_out)
    found = check.run(hanging, [container_checks.storage]).findings
    (limit_s,) = set(given_s)
    texts = [f"{at} hangs at fsync, after {limit_s:.0f} s" for at in ("/a", "/b", "/c")]
    assert [one.text for one in found] == texts
    assert 5 <= limit_s <= 8
    late = replace(hanging, ends_at_s=time.monotonic() - 60)  # even then a slow server is no dead one
    given_s.clear()
    assert len(check.run(late, [container_checks.storage]).findings) == 3
    assert set(given_s) == {5.0}


def test_a_kernel_that_lists_no_interfaces_leaves_unknown_what_depends_on_them() -> None:
    blind = subject(interfaces=(), topology=COORDINATOR)
    found = {finding.check for finding in run_all(blind).findings if finding.status is Status.UNKNOWN}
    assert found == {"own-name", "gloo-socket-ifname", "nccl-socket-ifname"}
    assert run_all(blind).verdict is PreflightVerdict.UNKNOWN


def test_a_node_with_hundreds_of_interfaces_does_not_fill_the_screen() -> None:
    many = tuple(Interface(name=f"cali{number}", addresses=("169.254.1.1",)) for number in range(500))
    finding = the_one_finding(subject(interfaces=(LO, ETH0, *many), env={"NCCL_SOCKET_IFNAME": "ib"}))
    assert len(finding.text) + sum(map(len, finding.evidence)) < 1000


def test_every_check_has_a_broken_fixture() -> None:
    broken = {check for check, _, _ in (*JOBS, *NODES, *WARNINGS)}
    broken |= {check for fault in FAULTS for check in fault.checks}
    assert broken >= set(registry.ids(Where.CONTAINER, Where.GPU))


def test_both_names_unknown_names_the_field_that_publishes_names_of_pods_that_are_not_ready() -> None:
    known = {"job-node-0-1": ADDRESSES["job-node-0-1"]}
    finding = the_one_finding(subject(lookup=Names(known)))
    assert finding.check == "dns"
    assert "job-node-0-0.job: NXDOMAIN; job-node-0-1.job: NXDOMAIN" in finding.text
    assert "publishNotReadyAddresses: true" in finding.action
    assert finding.fault is Fault.NODE  # it was not long enough to be sure


def test_a_name_that_comes_before_the_deadline_is_waited_for() -> None:
    late = of_names(node_0=[None, None, frozenset({"10.0.0.6"})])
    assert run_all(subject(lookup=late, deadline_s=10.0)).verdict is PreflightVerdict.PASS


def test_names_that_an_operator_hides_from_init_containers_are_unknown_and_not_waited_for() -> None:
    job = replace(JOB, contract="pytorchjob-v1", members=(Member("job-master-0"), Member("job-node-0-1")))
    topology = {"coordinator": Endpoint("job-master-0", 23456)}
    finding = the_one_finding(subject(job=job, topology=topology))
    assert (finding.check, finding.status) == ("dns", Status.UNKNOWN)
    assert finding.text.startswith(
        "job-master-0: not in DNS yet; Services of pytorchjob-v1 name only pods that are"
    )
    sick = subject(job=job, topology=topology, lookup=Names(ADDRESSES, socket.EAI_AGAIN))
    assert the_one_finding(sick).status is Status.FAIL


def test_dns_that_hangs_is_given_up_soon_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container_checks, "_POLL_S", 0.1)
    release = threading.Event()
    looks: list[str] = []

    def lookup(name: str) -> frozenset[str]:
        looks.append(name)
        release.wait(60)
        raise OSError(-3, "Temporary failure in name resolution")

    hanging = subject(lookup=lookup)
    try:
        finding = next(iter(container_checks.dns.run(hanging)))
    finally:
        release.set()
    assert (finding.status, finding.fault) == (Status.FAIL, Fault.NODE)
    assert "the DNS server does not answer" in finding.text
    assert len(looks) == 2  # both names once: a second look would hang as well


def test_an_init_container_without_gpus_knows_that_the_workers_may_have_them() -> None:
    loopback = Names(ADDRESSES | {"job-node-0-1": frozenset({"127.0.1.1"})})
    env = {"GLOO_SOCKET_IFNAME": "", "NVIDIA_VISIBLE_DEVICES": "all"}
    finding = the_one_finding(subject(host=CPU_ONLY, env=env, lookup=loopback))
    assert (finding.check, finding.status) == ("own-name", Status.WARN)


@pytest.mark.parametrize("problem", [socket.EAI_NONAME, socket.EAI_AGAIN])
def test_names_that_nobody_connects_to_are_not_held_against_a_node(problem: int) -> None:
    """A peer that was never made, and this node's own name that a cache denies still."""
    members = tuple(Member(f"job-node-0-{index}.job") for index in range(200))
    node_0_alone = Names({name: ADDRESSES[name] for name in ("job-node-0-0.job", "job-node-0-1")}, problem)
    large = {"nodes": NodeRange(200, 200)}
    assert run_all(subject(job=replace(JOB, members=members), topology=large, lookup=node_0_alone)).verdict is (
        PreflightVerdict.PASS
    )


def test_names_by_which_a_pod_is_alone_are_not_looked_up() -> None:
    alone = subject(topology={"nodes": NodeRange(1, 1)}, lookup=Names({"job-node-0-1": frozenset({"127.0.0.1"})}))
    report = run_all(alone)
    assert report.verdict is PreflightVerdict.PASS
    assert {f.check for f in report.findings if f.status is Status.SKIPPED} == {
        "dns",
        "nccl-ib-hca",
    }


def test_an_mpi_launcher_that_hosts_no_rank_needs_no_shared_memory() -> None:
    mpi = Mpi(hostfile_path="/etc/mpi/hostfile", launch_agent="ssh")
    launcher = replace(HEALTHY.job, role="launcher", engine="mpirun", mpi=mpi)
    small = {"shm_bytes": MIB, "shm_free_bytes": MIB}
    (finding,) = container_checks.shm.run(subject(host=small, job=launcher))
    assert (finding.status, finding.text) == (Status.PASS, "1 MiB; left as it is; no worker runs in this pod")
    (finding,) = container_checks.shm.run(
        subject(host=small, job=replace(launcher, mpi=replace(mpi, launcher_in_hostfile=True)))
    )
    assert finding.status is Status.WARN
