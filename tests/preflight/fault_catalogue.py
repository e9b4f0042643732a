"""Faults that preflight has to find, and healthy fleets that it must not accuse; for tests and for `make bench`.

A fault is put into one machine of a healthy fleet of 8. A new rule's fault is one more line of FAULTS: its kind and
its words, the checks that may find it, whom they must name, and what breaks the machine.
"""

from __future__ import annotations

import errno
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, field
from msgspec.structs import replace

from tests.cli.launching import LAUNCHER, clean_env
from tests.pods import hosts
from tests.preflight.cluster.test_hosts import LATEST_S, Pods
from tests.preflight.fleet import ADAPTERS, RATE, Fleet, Node, label, loud, names_of
from tests.preflight.gpu.machine import GIB, Change
from tests.preflight.gpu.test_faults import benching as bench
from tests.preflight.gpu.test_faults import card
from tests.preflight.gpu.test_faults import under_load as loaded
from tests.preflight.gpus import under_load
from tests.preflight.world import LO, MIB, STORED, Names
from trainer_launch.host.deadline_subprocess import Tried
from trainer_launch.host.network import AdapterPort, Interface, adapter_ports
from trainer_launch.model import Cpus, Gpus
from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.cluster import node_facts, pairs

SIZE = 8  # nodes of a fleet with a fault
BAD = 3  # the rank of the machine that has it
PAIR = (label(3), label(4))  # the ends of a bad link
_DENIES_NAMES = Path(__file__).with_name("nxdomain.py")

Break = Callable[[Fleet, Node, Path], object]


class FleetFault(Struct, frozen=True, kw_only=True):
    """One thing that is wrong with a machine, a link or a job."""

    kind: str
    text: str
    checks: tuple[str, ...]  # one of them has to say it
    who: tuple[str, ...] = (label(BAD),)  # what its finding has to name
    find: Callable[[Path], Sequence[Finding]]
    needs_root: bool = False
    innocent: tuple[str, ...] = field(default_factory=lambda: tuple(map(label, {*range(SIZE)} - {BAD})))


class Found(Struct, frozen=True):
    """What was said of a fault."""

    finding: Finding | None = None  # the one that says it
    is_named: bool = False
    accused: tuple[str, ...] = ()  # machines that failed and have nothing

    def __str__(self) -> str:
        if self.finding is None:
            return "NOT FOUND" + (f"; accused: {', '.join(self.accused)}" if self.accused else "")
        words = [f"{self.finding.check} {self.finding.status.value}"]
        words += [self.finding.remedy] if self.finding.remedy else []
        words += [] if self.is_named else ["NOT NAMED"]
        return " ".join(words) + (f"; ACCUSED, too: {', '.join(self.accused)}" if self.accused else "")

    @property
    def is_right(self) -> bool:
        return self.finding is not None and self.is_named and not self.accused


def looked_for(fault: FleetFault) -> Found:
    """Put the fault in, and see what is said of it."""
    with tempfile.TemporaryDirectory(prefix="fault-", ignore_cleanup_errors=True) as folder:
        findings = loud(tuple(fault.find(Path(folder))))
    findings.sort(key=lambda finding: finding.status is not Status.FAIL)
    its = [finding for finding in findings if finding.check in fault.checks]
    named = [one for one in its if all(who in f"{one.subject} {one.text}" for who in fault.who)]
    failed = [finding for finding in findings if finding.status is Status.FAIL]
    accused = {node for node in fault.innocent for one in failed if node in one.subject.split(", GPU")[0]}
    return Found(next(iter(named or its), None), bool(named), tuple(sorted(accused)))


def in_fleet(
    kind: str, text: str, check: str, broken: Break, *who: str, nodes: int = SIZE, **more: Any
) -> FleetFault:
    """A fault in a made-up fleet; `check` are names with a blank between them, `who` is named, too."""

    def find(folder: Path) -> Sequence[Finding]:
        fleet = Fleet(nodes, **more)
        broken(fleet, fleet.nodes[BAD], folder)
        return fleet.findings()

    whole = who if who and who[0].startswith(("node ", "job")) else (label(BAD), *who)
    named = tuple(word for word in whole if word != "job")
    innocent = tuple(label(rank) for rank in range(nodes) if not any(label(rank) in word for word in whole))
    return FleetFault(kind=kind, text=text, checks=tuple(check.split()), who=named, find=find, innocent=innocent)


def library(text: str, check: str, change: Change, *who: str, kind: str = "device") -> FleetFault:
    """A fault of a GPU, below NVIDIA's simulated library."""
    return in_fleet(kind, text, check, lambda fleet, node, folder: node.play(folder, change), *who)


def on_node(**values: Any) -> Change:
    return lambda told: told["bench"].update(values)


def container(**changes: Any) -> Break:
    """This node's container is or has that."""
    return lambda fleet, node, folder: node.change(**changes)


def fact(**facts: str) -> Break:
    return lambda fleet, node, folder: node.versions.update(facts)


def resolver(**answers: Any) -> Break:
    """This node's DNS answers otherwise: of node 0, and of itself."""

    def broken(fleet: Fleet, node: Node, folder: Path) -> None:
        known: dict[str, Any] = dict(names_of(SIZE))
        known |= {"job-node-0-0.job": answers["home"]} if "home" in answers else {}
        known |= {f"job-node-0-{node.rank}": answers["own"]} if "own" in answers else {}
        node.change(lookup=Names(known, answers.get("problem", socket.EAI_NONAME)))

    return broken


def adapters(**files: str) -> Break:
    """A /sys in which the third of this node's adapters has these files; without files, all are down."""

    def broken(fleet: Fleet, node: Node, folder: Path) -> None:
        for number in range(ADAPTERS):
            port = folder / f"sys/class/infiniband/mlx5_{number}/ports/1"
            port.mkdir(parents=True)
            told = {"state": "1: DOWN"} if not files else files if number == 2 else {}
            for name, value in {"state": "4: ACTIVE", "rate": RATE, **told}.items():
                (port / name).write_text(f"{value}\n")
        node.change(adapters=adapter_ports(folder))

    return broken


def tried(what: str, result: Tried) -> Break:
    """What a trial of this node's storage or memory comes to."""

    def try_out(asked: str, argument: str, limit_s: float) -> Tried:
        return result if asked == what else STORED if asked == "storage" else Tried(values={"bytes": 1.0})

    return container(try_out=try_out)


def rated(rail: int | None, why: str, rate: float, *ends: int) -> Break:
    """Pair tests with this node, or of these two nodes alone, on a rail or on all, end so."""

    def broken(fleet: Fleet, node: Node, folder: Path) -> None:
        def result(one: int, other: int, on: int) -> tuple[str, float] | None:
            is_it = {one, other} == set(ends) if ends else node.rank in (one, other)
            return (why, rate) if is_it and rail in (None, on) else None

        fleet.rated = result

    return broken


def clock(offset_s: float) -> Break:
    return lambda fleet, node, folder: setattr(node, "offset_s", offset_s)


def own_name_on_loopback(fleet: Fleet, node: Node, folder: Path) -> None:
    resolver(own=frozenset({"127.0.1.1"}))(fleet, node, folder)
    node.change(env={"GLOO_SOCKET_IFNAME": ""})


def slow_dns(fleet: Fleet, node: Node, folder: Path) -> None:
    known = Names(names_of(SIZE))

    def lookup(name: str) -> frozenset[str]:
        time.sleep(3.0)
        return known(name)

    node.change(lookup=lookup, deadline_s=30.0)


_TMPFS = 'mount -t tmpfs -o size={size} tmpfs {at} && exec "$0" "$@"'


def alone(
    kind: str, text: str, check: str, inside: Callable[[Path], Sequence[str]], *words: str, **env: str
) -> FleetFault:
    """One real preflight, in a container that `inside` prepares; `{}` in words is a directory of its own."""

    def find(folder: Path) -> Sequence[Finding]:
        place = folder / "place"
        place.mkdir()
        own = (word.replace("{}", str(place)) for word in words)
        argv = [*inside(place), *LAUNCHER, "preflight", "--json", *own]
        done = subprocess.run(argv, env=clean_env(env), capture_output=True, text=True, timeout=LATEST_S)
        return findings_of(done.stdout)

    return FleetFault(
        kind=kind, text=text, checks=tuple(check.split()), who=(), find=find, needs_root=True, innocent=()
    )


def findings_of(report: str) -> list[Finding]:
    """A report's findings."""
    return [convert(finding, Finding) for finding in json.loads(report)["findings"]]


def in_job(text: str, check: str, rule: str) -> FleetFault:
    """Four real pods, one of which has this rule in its firewall; `{}` is the address of node 1."""
    bad = 2

    def find(folder: Path) -> Sequence[Finding]:
        with hosts(*(f"job-node-0-{node}" for node in range(4))) as pods:
            chain = f"type filter hook input priority 0; {rule.format(pods[1].address)};"
            table = f"table ip t {{ chain c {{ {chain} }}; }}"
            made = subprocess.run((*pods[bad].enter("net"), "nft", "-f", "-"), input=table, text=True, check=False)
            if made.returncode:
                return []
            job = Pods(pods, folder, deadline_s=12)
            for node in range(4):
                job.start(node)
            for started in job.started.values():
                started.communicate(timeout=LATEST_S)
            return findings_of((folder / "0" / "report.json").read_text())

    ends = (label(1), label(bad)) if "{}" in rule else (label(bad),)
    innocent = tuple(label(rank) for rank in range(4) if label(rank) not in ends)
    return FleetFault(
        kind="link", text=text, checks=tuple(check.split()), who=ends, find=find, needs_root=True, innocent=innocent
    )


def mounted(at: str, size: str) -> Callable[[Path], Sequence[str]]:
    return lambda place: ("unshare", "-m", "sh", "-c", _TMPFS.format(size=size, at=at.format(place)))


def full(place: Path) -> Sequence[str]:
    """A volume of 256 KiB that is full."""
    fill = f"mount -t tmpfs -o size=256k tmpfs {place} && (dd if=/dev/zero of={place}/x bs=64k 2>/dev/null || true)"
    return ("unshare", "-m", "sh", "-c", f'{fill} && exec "$0" "$@"')


def with_links(place: Path) -> Sequence[str]:
    links = "ip link add net1 type veth peer name net2 && ip link set net2 up && ip link set net1 up"
    return ("unshare", "-n", "sh", "-c", f'{links} && ip addr add 10.9.8.6/24 dev net1 && exec "$0" "$@"')


def denied(place: Path) -> Sequence[str]:
    """A DNS server that knows no name."""
    conf = place / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\nsearch team.svc.cluster.local\noptions ndots:5 timeout:1 attempts:1\n")
    program = shlex.join([sys.executable, str(_DENIES_NAMES), "3"])
    make = f'ip link set lo up && mount --bind {conf} /etc/resolv.conf && exec {program} "$0" "$@"'
    return ("unshare", "-nm", "sh", "-c", make)


def taken(place: Path) -> Sequence[str]:
    program = (
        "import socket, subprocess, sys; s = socket.create_server(('', 29500)); "
        "sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    )
    return ("unshare", "-n", sys.executable, "-c", program)


_NODE_1 = ("--nodes", "2", "--node-rank", "1", "--master-addr", "job-node-0-0.job", "--wait-timeout", "0")
HDR = "200 Gb/sec (4X HDR)"
_NO_GPU = {"gpus": Gpus(count=0, reason="none")}

# fmt: off
FAULTS: tuple[FleetFault, ...] = (
    # GPUs, by NVIDIA's simulated library
    library("uncorrected ECC errors", "gpu-ecc", card(1, uncorrected=2), "GPU 1"),
    library("a remapped row waits for a reset", "gpu-remap", card(2, remapped=[0, 1, 1, 0]), "GPU 2"),
    library("remapping a row failed", "gpu-remap", card(2, remapped=[0, 9, 0, 1]), "GPU 2"),
    library("a retired page waits for a reset", "gpu-remap", card(
        0, remapped={"error": 3}, retired_pending=1), "GPU 0"),
    library("the driver asks for a reboot", "gpu-recovery", card(3, recovery=2), "GPU 3"),
    library("a GPU is lost", "gpu-recovery gpu-count", card(1, uncorrected={"error": 15}), "GPU 1"),
    library("a GPU is missing", "gpu-count", lambda told: told["gpus"].pop()),
    library("XID 79 under load", "gpu-xid", card(2, xids=[79]), "GPU 2"),
    library("MIG was left on", "gpu-mig", card(0, mig=1), "GPU 0"),
    library("a dead process holds 40 GiB", "gpu-memory", card(1, memory_used=40 * GIB), "GPU 1"),
    library("thermal throttling in each look", "gpu-clocks", loaded(1, reasons=0x44), "GPU 1"),
    library("power brake", "gpu-clocks", loaded(1, reasons=0x80), "GPU 1"),
    in_fleet("device", "thermal throttling in 40 of 400 looks", "gpu-clocks", lambda fleet, node, folder: (
        node.each_card(1, **under_load(clock_reasons={"looks": 400, "times": {"4": 400, "64": 40}}))), "GPU 1"),
    library("low clocks, of which no reason is told", "gemm gpu-clocks", bench(1, gemm=300.0), "GPU 1"),
    library("slow GPU memory", "hbm", bench(2, hbm=3000.0), "GPU 2"),
    library("half the PCIe lanes", "gpu-pcie", card(0, pcie_width=8), "GPU 0"),
    library("slow copies to one GPU", "pcie", bench(3, h2d=20.0), "GPU 3"),
    library("an NVLink is down", "gpu-nvlink", card(3, nvlinks=[1] * 17 + [0]), "GPU 3"),
    library("NVLink errors under load", "gpu-nvlink", loaded(1, nvlink_errors=[0, 5]), "GPU 1"),
    library("NVLink bandwidth at a quarter", "allreduce", on_node(rate=115.0)),
    library("a product does not repeat", "gpu-load", bench(1, different=3), "GPU 1"),
    library("sums are wrong between GPUs", "gpu-peers", on_node(adds_together=False)),
    library("a GPU's test dies", "gpu-load", bench(1, dies="gemm"), "GPU 1"),
    library("NCCL falls back to sockets", "gpu-network", on_node(network="Socket"), kind="rail"),
    library("the driver hangs", "gpu-count", lambda told: told.update(hangs="init"), kind="driver"),
    library("driver and library do not match", "gpu-count gpu-load", lambda told: (told.update(
        init={"error": 18}), on_node(fails=["device", "torch 2.11, built with CUDA 13.0, sees no GPU"])(told)),
        kind="driver"),
    library("torch is not built for this GPU", "gpu-load", on_node(
        fails=["device", "RuntimeError: no kernel image is available"]), kind="version"),
    library("another NCCL is loaded", "facts", on_node(nccl="2.27.7"), kind="version"),
    in_fleet("driver", "another driver version", "facts", lambda fleet, node, folder: setattr(
        node, "gpus", replace(node.gpus, driver="570.1"))),
    # adapters, rails and links
    in_fleet("device", "one of eight HCAs is down", "facts nccl-ib-hca adapters", adapters(state="1: DOWN")),
    in_fleet("device", "all HCAs are down", "nccl-ib-hca", adapters()),
    in_fleet("rail", "a HCA is linked at a quarter of its rate", "facts nccl-ib-hca adapters", adapters(
        rate="100 Gb/sec (4X EDR)")),
    in_fleet("rail", "a rail at a quarter of its rate", "pairs", rated(2, "", 11e9), "rail 2"),
    in_fleet("rail", "a rail fails", "pairs", rated(1, "no route", 0.0), "rail 1"),
    in_fleet("link", "a node fails with all others", "pairs", rated(None, "connection reset", 0.0)),
    in_fleet("link", "a node is slow with all others", "pairs", rated(None, "", 9e9)),
    in_fleet("link", "the link between two nodes fails", "pairs", rated(None, "reset", 0.0, 3, 4), *PAIR),
    in_fleet("link", "the link between two nodes is slow", "pairs", rated(None, "", 9e9, 3, 4), *PAIR),
    in_job("packets over 1,000 bytes to a node are lost (MTU)", "pairs roll-call", "meta length > 1000 drop"),
    in_job("a firewall drops what one node sends to another", "pairs", "ip saddr {} drop"),
    # clocks
    in_fleet("clock", "a clock 45 s ahead", "clock", clock(-45.0)),
    in_fleet("time", "a clock 3 s behind", "clock", clock(3.0)),
    # versions
    in_fleet("version", "another torch", "facts", fact(torch="2.10.0")),
    in_fleet("version", "another CUDA", "facts", fact(cuda="12.8")),
    in_fleet("version", "another Python", "facts", fact(python="3.10.14")),
    in_fleet("version", "other code", "facts", fact(code="fedcba987654 (4 files)")),
    in_fleet("version", "another architecture", "facts", fact(arch="aarch64")),
    # environment
    in_fleet("environment", "NCCL_ALGO on one node only", "facts", container(env={"NCCL_ALGO": "Ring"}),
             "NCCL_ALGO"),
    in_fleet("environment", "NCCL_IB_DISABLE on one node only", "facts", container(env={"NCCL_IB_DISABLE": "1"}),
             "NCCL_IB_DISABLE"),
    in_fleet("environment", "OMP_NUM_THREADS differs", "facts", container(env={"OMP_NUM_THREADS": "1"}),
             "OMP_NUM_THREADS"),
    in_fleet("environment", "NCCL_SOCKET_IFNAME fits no interface", "nccl-socket-ifname", container(
        env={"NCCL_SOCKET_IFNAME": "ens"})),
    in_fleet("environment", "NCCL_IB_HCA leaves no adapter", "nccl-ib-hca", container(
        env={"NCCL_IB_HCA": "^mlx5"})),
    in_fleet("environment", "GLOO_SOCKET_IFNAME names no interface", "gloo-socket-ifname", container(
        env={"GLOO_SOCKET_IFNAME": "eth9"})),
    alone("environment", "GLOO_SOCKET_IFNAME is a pattern (real interfaces)", "gloo-socket-ifname", with_links,
          "--nodes", "2", "--node-rank", "1", "--master-addr", "10.9.8.7", "--only", "gloo-socket-ifname",
          GLOO_SOCKET_IFNAME="net"),
    in_fleet("environment", "one worker too few", "facts gpu-count", lambda fleet, node, folder: node.change(
        topology=replace(node.subject.topology, local_world_size=3))),
    # containers
    in_fleet("environment", "a memory limit of 1.4 GiB", "memory", container(
        host={"memory_limit_bytes": 1400 * MIB})),
    in_fleet("environment", "a limit of 64 open files", "nofile", lambda fleet, node, folder: node.change(
        limits=replace(node.subject.limits, nofile_soft=64))),
    in_fleet("environment", "10 processes are left", "pids", container(pids=(1000, 10))),
    in_fleet("environment", "memory cannot be locked", "memlock", tried("memlock", Tried(errno=errno.ENOMEM))),
    in_fleet("shm", "/dev/shm has 64 MiB", "shm", container(
        host={"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB})),
    in_fleet("shm", "/dev/shm is full", "shm", container(write_problem=lambda size: errno.ENOSPC)),
    alone("shm", "/dev/shm of 64 KiB (mounted)", "shm", mounted("/dev/shm", "64k"), "--only", "shm"),
    # disks
    in_fleet("disk", "the checkpoint volume is full", "storage", tried("storage", Tried(
        stage="write", errno=errno.ENOSPC))),
    in_fleet("disk", "the checkpoint volume hangs", "storage", tried("storage", Tried(
        stage="fsync", timed_out=True))),
    in_fleet("disk", "data come back changed", "storage", tried("storage", replace(
        STORED, values={**STORED.values, "same": 0.0}))),
    alone("disk", "a full volume (mounted)", "storage", full, "--only", "storage", "--storage", "{}"),
    # names
    in_fleet("DNS", "node 0 has no name", "dns", resolver(home=None)),
    in_fleet("DNS", "the DNS server fails", "dns", resolver(home=None, problem=socket.EAI_AGAIN)),
    in_fleet("DNS", "each answer takes 3 s", "dns", slow_dns),
    in_fleet("DNS", "the own name is on loopback", "own-name", own_name_on_loopback),
    alone("DNS", "a server that knows no name (real)", "dns", denied, *_NODE_1, "--only", "dns"),
    alone("environment", "another program has the port (real)", "roll-call", taken,
          "--nodes", "2", "--node-rank", "0", "--master-addr", "job-0", "--only", "roll-call"),
)
# fmt: on


class HealthyFleet(Struct, frozen=True):
    """Machines among which nothing is wrong, and that differ all the same."""

    text: str
    differ: Callable[[Fleet, Path], object]
    settings: dict[str, Any] = field(default_factory=dict)


def each(change: Callable[[Node], object]) -> Callable[[Fleet, Path], object]:
    """On each of its nodes."""
    return lambda fleet, folder: [change(node) for node in fleet.nodes]


def some(change: Callable[[Node], object], of: int = 3) -> Callable[[Fleet, Path], object]:
    """On each third of its nodes, or so."""
    return lambda fleet, folder: [change(node) for node in fleet.nodes if node.rank % of == 1]


def the_bad_one(change: Callable[[Node], object]) -> Callable[[Fleet, Path], object]:
    return lambda fleet, folder: change(fleet.nodes[BAD])


def own_variables(node: Node) -> None:
    """What a pod has for itself: places of its dumps, host ID, devices in another order, secrets."""
    name = node.subject.host.hostname
    node.change(
        env={
            "NCCL_HOSTID": name,
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"/tmp/{name}",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"/tmp/dump-{name}",
            "NCCL_DEBUG_FILE": f"/tmp/nccl.{name}",
            "CUDA_VISIBLE_DEVICES": "0,1,2,3" if node.rank % 2 else "3,2,1,0",
            "HOSTNAME": name,
            "HF_TOKEN": f"hf_{node.rank:032d}",
        }
    )


def badly_measured(node: Node) -> None:
    node.offset_s, node.error_s = 2.5, 3.0


def scattered(fleet: Fleet, folder: Path) -> None:
    for node in fleet.nodes:
        node.offset_s = 0.9 * (node.rank % 5 - 2) / 2


def slow_racks(fleet: Fleet, folder: Path) -> None:
    fleet.rated = lambda one, other, rail: ("", 45e9 if one // 4 == other // 4 else 40e9)


def shared_switches(fleet: Fleet, folder: Path) -> None:
    fleet.rated = lambda one, other, rail: ("", 45e9 if one // 4 == other // 4 else 22e9)


def a_busy_moment(fleet: Fleet, folder: Path) -> None:
    """One test of a pair is slow, as another job's checkpoint uses the network; later ones are not."""
    seen: dict[tuple[int, int], int] = {}

    def rated(one: int, other: int, rail: int) -> tuple[str, float] | None:
        if {one, other} != {3, 4}:
            return None
        seen[one, rail] = seen.get((one, rail), 0) + 1
        return ("", 12e9) if seen[one, rail] == 1 else None

    fleet.rated = rated


def without_gpus(node: Node) -> None:
    node.change(host=_NO_GPU, adapters=(), has_rdma=False, env={"NCCL_IB_HCA": ""})
    node.versions.pop(pairs.FACT, None)


def without_rdma(node: Node) -> None:
    node.change(adapters=(), has_rdma=False, env={"NCCL_IB_HCA": ""})
    node.gpus = replace(node.gpus, tests=tuple(replace(test, network="Socket") for test in node.gpus.tests))


def consumer_cards(node: Node) -> None:
    """They have neither ECC nor NVLink, and no reference tells how fast they are."""
    node.no_card_tells("ecc_uncorrected", "remapped", "mig", "nvlinks", "load nvlink_errors")
    node.each_card(name="NVIDIA GeForce RTX 4090")
    node.measures(lambda gpu, name: 0.25, "NVIDIA GeForce RTX 4090")


def another_model(node: Node) -> None:
    """A pool of two models, each as fast as it should be."""
    node.each_card(name="NVIDIA H100 80GB HBM3")
    node.measures(lambda gpu, name: 0.8 if name == "hbm-copy" else 1.0, "NVIDIA H100 80GB HBM3")


def ipv6_only(fleet: Fleet, folder: Path) -> None:
    known = {
        name: frozenset({f"fd00::{int(next(iter(its)).split('.')[-1]):x}"}) for name, its in names_of(64).items()
    }
    for node in fleet.nodes:
        node.change(
            interfaces=(LO, Interface(name="eth0", addresses=(f"fd00::{node.rank + 10:x}", "fe80::7"))),
            lookup=Names(known),
        )


def an_idle_port(node: Node) -> None:
    """A port that has no cable on any machine."""
    node.change(adapters=(*node.subject.adapters, AdapterPort("mlx5_bond_0", 1, False)))


def written_by_runs(fleet: Fleet, folder: Path) -> None:
    """Beside the script, earlier runs wrote their own files."""
    for node in fleet.nodes:
        place = folder / str(node.rank)
        (place / "wandb" / f"run-{node.rank}").mkdir(parents=True)
        (place / "train.py").write_text("print(1)")
        (place / "wandb" / f"run-{node.rank}" / "config.py").write_text(str(node.rank))
        (place / f"events.{node.rank}").write_text("x")
        node.versions["code"] = node_facts.code_hash(str(place / "train.py")) or "none"


def names_come_later(node: Node) -> None:
    """A cache still denies node 0's name, and knows it a moment later."""
    known: dict[str, Any] = dict(names_of(64))
    known["job-node-0-0.job"] = [None, None, known["job-node-0-0.job"]]
    node.change(lookup=Names(known), deadline_s=30.0)


def worn(node: Node) -> None:
    """Rows were remapped long ago, and errors were corrected."""
    node.each_card(remapped=[3, 1, 0, 0])


def power_capped(node: Node) -> None:
    node.each_card(**under_load(clock_reasons={"looks": 400, "times": {"4": 400}}))


def of_less_power(node: Node) -> None:
    """A machine in a rack whose power is limited: its products take longer."""
    node.each_card(power_limit=[500_000, 700_000])
    node.measures(lambda gpu, name: 0.78 if name == "gemm" else 1.0)


def warm_once(node: Node) -> None:
    node.each_card(**under_load(clock_reasons={"looks": 400, "times": {"4": 400, "32": 1}}))


def of_more_cores(node: Node) -> None:
    node.change(host={"cpus": Cpus(affinity=192, quota=None), "memory_limit_bytes": 512 * GIB})


def on_host_network(node: Node) -> None:
    many = tuple(Interface(name=f"veth{number}", addresses=(f"fe80::{number + 1:x}",)) for number in range(60))
    bridge = Interface(name="docker0", addresses=("172.17.0.1",))
    node.change(interfaces=(*node.subject.interfaces, bridge, *many))


def slower_silicon(node: Node) -> None:
    node.measures(lambda gpu, name: 0.96 if (gpu, name) == (2, "gemm") else 1.0)


def unread_versions(node: Node) -> None:
    """A machine that is too busy to start a Python in time."""
    for name in ("python", "torch", "cuda", "nccl", "code"):
        node.versions.pop(name)


def no_ecc_told(node: Node) -> None:
    node.no_card_tells("ecc_uncorrected", why="timeout")


def of_two_models(older: tuple[int, str], newer: tuple[int, str]) -> Callable[[Fleet, Path], object]:
    """Each with adapters of its own: so many of a rate."""

    def differ(fleet: Fleet, folder: Path) -> None:
        for node in fleet.nodes:
            count, rate = older if node.rank % 3 == 1 else newer
            if node.rank % 3 == 1:
                another_model(node)
            node.change(adapters=tuple(AdapterPort(f"mlx5_{at}", 1, True, rate) for at in range(count)))

    return differ


def alone_in_a_rack(fleet: Fleet, folder: Path) -> None:
    fleet.rated = lambda one, other, rail: ("", 22e9) if BAD in (one, other) else None


def on_cpus(node: Node) -> None:
    without_gpus(node)
    node.change(env={"NCCL_IB_DISABLE": "1"}, topology=replace(node.subject.topology, local_world_size=1))


def with_few_adapters(node: Node) -> None:
    node.change(adapters=tuple(replace(port, has_others=True) for port in node.subject.adapters[:4]))


def with_one_adapter(node: Node) -> None:
    node.change(adapters=(AdapterPort("mlx5_0", 1, True, HDR if node.rank % 3 == 1 else RATE),))


def with_a_provider(node: Node) -> None:
    """Of libfabric; or without GPUs, and so without NCCL."""
    if node.rank % 3 == 1:
        without_gpus(node)
    else:
        node.change(env={"FI_PROVIDER": "efa"})


def far_from_its_cpus(node: Node) -> None:
    node.measures(lambda gpu, name: 0.6 if name in ("h2d", "d2h") else 1.0)


def with_one_gpu(node: Node) -> None:
    """Which on some machines other pods use as well."""
    node.gpus = replace(node.gpus, gpus=node.gpus.gpus[:1], tests=node.gpus.tests[: node.rank % 3 != 1])
    node.each_card(memory_used=(40 if node.rank % 3 == 1 else 1) * GIB, memory_total=141 * GIB)
    topology = replace(node.subject.topology, local_world_size=1)
    node.change(host={"gpus": Gpus(count=1, reason="1 in /dev")}, topology=topology)
    node.versions[pairs.FACT] = "nccl on 1 GPUs"


def in_cliques(node: Node) -> None:
    """Of one NVLink fabric."""
    fabric = {"state": 3, "status": 0, "health": 0xAA, "cluster": "ab" * 16, "clique": node.rank // 4}
    node.each_card(fabric=fabric)


def rebooted(node: Node) -> None:
    """Its clock is being set yet, and it has a newer kernel."""
    node.offset_s = 2.0
    node.versions["kernel"] = "6.8.0-70"


HEALTHY_FLEETS: tuple[HealthyFleet, ...] = (
    HealthyFleet("nothing differs", each(lambda node: None), {"spread": 0.0}),
    HealthyFleet("all figures scatter by 1 %", each(lambda node: None)),
    HealthyFleet("all figures scatter by 3 %", each(lambda node: None), {"spread": 0.03}),
    HealthyFleet("clocks scatter by 0.9 s", scattered),
    HealthyFleet("a clock that could be measured to 3 s only", the_bad_one(badly_measured)),
    HealthyFleet("each pod has variables and secrets of its own", each(own_variables)),
    HealthyFleet("racks between which it is a little slower", slow_racks),
    HealthyFleet("racks whose switches share half the bandwidth", shared_switches),
    HealthyFleet("one pair is disturbed once", a_busy_moment),
    HealthyFleet("no GPUs", each(without_gpus)),
    HealthyFleet("no RDMA", each(without_rdma)),
    HealthyFleet("consumer cards", each(consumer_cards)),
    HealthyFleet("two models of GPU in one pool", some(another_model)),
    HealthyFleet("IPv6 only", ipv6_only),
    HealthyFleet("a port without a cable on each machine", each(an_idle_port)),
    HealthyFleet("earlier runs wrote below the script", written_by_runs),
    HealthyFleet("a DNS cache denies node 0 for a moment", some(names_come_later)),
    HealthyFleet("cards with remapped rows", some(worn)),
    HealthyFleet("all cards are at their power limit", each(power_capped)),
    HealthyFleet("a machine with a lower power limit", the_bad_one(of_less_power)),
    HealthyFleet("one look of 400 is throttled by heat", the_bad_one(warm_once)),
    HealthyFleet("machines with more cores and memory", some(of_more_cores)),
    HealthyFleet("the host's network with bridges and pods' links", some(on_host_network)),
    HealthyFleet("one card is 4 % slower", the_bad_one(slower_silicon)),
    HealthyFleet("a machine too busy to tell its versions", the_bad_one(unread_versions)),
    HealthyFleet("cards of which ECC is not told", the_bad_one(no_ecc_told)),
    HealthyFleet("two models, with one adapter of their own rate", of_two_models((1, HDR), (1, RATE))),
    HealthyFleet("two models, with their own number of adapters", of_two_models((4, RATE), (8, RATE))),
    HealthyFleet("a node alone behind a shared switch", alone_in_a_rack),
    HealthyFleet("nodes without GPUs, and without RDMA by a variable", some(on_cpus)),
    HealthyFleet("a pod that was given half the adapters", the_bad_one(with_few_adapters)),
    HealthyFleet(
        "a pod that chooses half the adapters",
        the_bad_one(lambda node: node.change(env={"NCCL_IB_HCA": "=mlx5_0,mlx5_1,mlx5_2,mlx5_3"})),
    ),
    HealthyFleet("one adapter in each machine, of two generations", each(with_one_adapter)),
    HealthyFleet("nodes without GPUs beside such that choose a provider of libfabric", each(with_a_provider)),
    HealthyFleet("NVLS that is asked for or used anyway", some(lambda n: n.change(env={"NCCL_NVLS_ENABLE": "1"}))),
    HealthyFleet(
        "UCX_TLS in another order",
        each(lambda node: node.change(env={"UCX_TLS": "sm,rc" if node.rank % 2 else "rc,sm"})),
    ),
    HealthyFleet("a pod whose CPUs are of the other socket", the_bad_one(far_from_its_cpus)),
    HealthyFleet("one GPU in each pod, some of them shared", each(with_one_gpu)),
    HealthyFleet("two cliques of an NVLink fabric", each(in_cliques)),
    HealthyFleet("a machine that was rebooted a moment ago", the_bad_one(rebooted)),
    HealthyFleet(
        "two kernels while machines are updated", some(lambda node: node.versions.update(kernel="6.8.0-60"), 2)
    ),
    HealthyFleet(
        "two driver versions while machines are updated",
        some(lambda node: setattr(node, "gpus", replace(node.gpus, driver="580.167")), 2),
    ),
)


def accused(fleet: HealthyFleet, nodes: int) -> tuple[list[str], list[str]]:
    """What failed in a fleet of so many nodes, and what was only warned of: nothing should fail."""
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        made = Fleet(nodes, seed=nodes, **fleet.settings)
        fleet.differ(made, Path(folder))
        findings = loud(made.findings())
    failed, warned = (
        [f"{one.check}: {one.text}" for one in findings if one.status is status]
        for status in (Status.FAIL, Status.WARN)
    )
    return failed, warned
