"""What a node says of itself, what is made of all nodes' facts, and what they are called."""

from __future__ import annotations

import platform
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.planning.requests import MACHINE
from tests.preflight.world import subject
from trainer_launch.model import Endpoint, Job, Member, NodeRange
from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.job import place
from trainer_launch.preflight import registry
from trainer_launch.preflight.check import Where
from trainer_launch.preflight.cluster import node_facts, present_nodes
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_facts import UNSET, clocks, code_hash, differences
from trainer_launch.preflight.cluster.node_side import failing_nodes
from trainer_launch.preflight.cluster.preflight_messages import MAX_FACTS, NodeReport, parse, render
from trainer_launch.preflight.cluster.present_nodes import JobNode, places_of
from trainer_launch.preflight.node_preflight import explained, merged

NODES = tuple(f"node {number} (host-{number})" for number in range(5))


@pytest.mark.parametrize("odd", [0, 4])
@pytest.mark.parametrize(
    ("word", "key", "fault"),
    [
        ("NCCL", "nccl", Fault.JOB),
        ("the GPU driver", "driver", None),
        ("the kernel", "kernel", None),
        ("the architecture", "arch", None),
        ("Python", "python", None),
        ("the command line", "command", None),
        *((name, f"env {name}", Fault.JOB) for name in ("GLOO_DEVICE_TRANSPORT", "UCX_TLS", "FI_PROVIDER")),
        *(
            (name, f"env {name}", Fault.JOB)
            for name in ("TORCH_DIST_USE_NCCL2", "TORCH_DISTRIBUTED_USE_TORCHCOMMS")
        ),
        *((name, f"env {name}", None) for name in ("OMP_NUM_THREADS", "KMP_BLOCKTIME", "TORCHCOMM_X")),
        *((name, f"env {name}", None) for name in ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "NCCL_RAS_ADDR")),
        *((name, f"env {name}", None) for name in ("NCCL_IB_GID_INDEX", "NCCL_DEBUG_FILE", "NCCL_SOCKET_IFNAME")),
        ("the program's code", "code", None),
    ],
)
def test_the_node_that_differs_is_named_and_only_what_must_be_alike_fails(
    word: str, key: str, fault: Fault | None, odd: int
) -> None:
    (found,) = differences(NODES, [{key: "b" if node == odd else "a"} for node in range(5)])
    assert found.text == f"{word} differs: a on 4 nodes, b on {NODES[odd]}"
    assert (found.status, found.fault) == (Status.WARN if fault is None else Status.FAIL, fault)
    assert (found.subject, found.measured, found.expected) == (NODES[odd], "b", "a")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("NCCL_IB_DISABLE", ("0", None)),
        ("NCCL_ALGO", ("Ring", "ring")),
        ("NCCL_PROTO", ("", None)),
        ("NCCL_BUFFSIZE", ("4194304", None)),
        ("UCX_TLS", ("rc,sm,self", "sm,self,rc")),
    ],
)
def test_a_variable_with_the_value_that_it_has_without_it_fails_no_job(
    name: str, values: tuple[str, str | None]
) -> None:
    told = [{f"env {name}": value} if value is not None else {} for value in (*[values[0]] * 4, values[1])]
    (found,) = differences(NODES, told)
    assert (found.status, found.remedy) == (Status.WARN, "")


@pytest.mark.parametrize(
    ("gpus", "its", "status"),
    [
        ("0", "0", Status.WARN),
        ("8 of NVIDIA H200", "8 of NVIDIA H200", Status.FAIL),
        ("8 of NVIDIA H200", "0", Status.WARN),
    ],
)
def test_without_gpus_nobody_needs_nccls_variables_to_agree(gpus: str, its: str, status: Status) -> None:
    told = [{"gpus": gpus, "env NCCL_ALGO": "Ring"}] * 4 + [{"gpus": its, "env NCCL_ALGO": "Tree"}]
    found = {one.text.partition(" ")[0]: one.status for one in differences(NODES, told)}
    assert found["NCCL_ALGO"] is status


def test_a_variable_that_one_node_lacks_is_a_difference() -> None:
    (found,) = differences(NODES, [*[{"env NCCL_ALGO": "Ring"}] * 4, {}])
    assert found.text == "NCCL_ALGO differs: Ring on 4 nodes, (unset) on node 4 (host-4)"


@pytest.mark.parametrize("key", ["code", "gpus", "driver", "nccl loaded"])
def test_what_a_node_could_not_find_out_is_no_difference(key: str) -> None:
    (found,) = differences(
        NODES[:3], [{"python": "3.11", key: "a"}, {"python": "3.11", key: "a"}, {"python": "3.11"}]
    )
    assert (found.status, found.text) == (Status.PASS, "1 fact alike on all 3 nodes")


def test_without_a_majority_nobody_is_accused() -> None:
    (found,) = differences(NODES[:4], [{"torch": "2.8"}, {"torch": "2.8"}, {"torch": "2.9"}, {"torch": "2.9"}])
    assert (found.subject, found.scope) == ("", Scope.JOB)
    assert found.text.endswith("no value has a majority")


@pytest.mark.parametrize(
    ("offset_s", "error_s", "status"),
    [(0.5, 0.0, Status.PASS), (5.0, 0.0, Status.WARN), (-45.0, 0.0, Status.FAIL), (45.0, 40.0, Status.WARN)],
)
def test_a_clock_counts_as_off_by_what_is_sure(offset_s: float, error_s: float, status: Status) -> None:
    (found,) = clocks(NODES, [*[(0.0, 0.01)] * 4, (offset_s, error_s)], NODES)
    assert found.status is status


def test_secrets_are_told_as_hashes_that_agree_only_with_the_same_salt() -> None:
    def told(value: str, salt: bytes) -> str:
        return node_facts.variables({"UCX_AUTH_TOKEN": value, "HOME": "/root"}, salt)["UCX_AUTH_TOKEN"]

    assert told("hush", b"1") == told("hush", b"1")
    assert told("hush", b"1") != told("hush", b"2")
    assert told("hush", b"1") != told("hash", b"1")
    assert "hush" not in told("hush", b"1")


def test_only_variables_that_matter_to_all_nodes_are_told() -> None:
    env = {"NCCL_ALGO": "Ring", "HOSTNAME": "a", "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "4"}
    env |= {"TORCHCOMM_X": "1", "TORCH_WATCHDOG_STUCK_ACTION": "log", "TORCH_FR_DUMP_ON_TIMEOUT": "0"}
    assert node_facts.variables(env, b"").keys() == env.keys() - {"HOSTNAME", "CUDA_VISIBLE_DEVICES"}


def test_addresses_of_services_that_a_pod_got_at_its_start_are_no_variables_of_the_job() -> None:
    env = {"TORCH_UI_SERVICE_HOST": "10.1.1.1", "TORCH_UI_SERVICE_PORT": "80", "TORCH_UI_PORT": "tcp://10.1.1.1:80"}
    env |= {"TORCH_UI_PORT_80_TCP": "tcp://10.1.1.1:80", "TORCH_UI": "1"}
    assert node_facts.variables(env, b"") == {"TORCH_UI": "1"}


def test_variables_that_are_too_many_for_a_message_cover_up_no_version() -> None:
    crowded = subject(env={f"TORCH_SOME_VARIABLE_{number}": "1" for number in range(500)})
    report = node_facts.collect(crowded, {"python": "3.11", "torch": "2.11"}, (), (0.0, 0.0), b"")
    assert {"python", "torch", "gpus", "driver", "nproc_per_node", "command"} <= report.facts.keys()
    assert len(report.facts) == MAX_FACTS


def test_versions_come_from_the_programs_own_interpreter() -> None:
    assert node_facts.versions(None)["python"] == platform.python_version()
    assert node_facts.versions(parse_command(("python-that-is-not-there.py",)))["arch"] == platform.machine()


def test_torchruns_own_options_do_not_make_commands_differ() -> None:
    def told(rank: str) -> str:
        command = parse_command(("torchrun", f"--node-rank={rank}", "train.py", "--lr", "1"))
        return node_facts.quick_facts({}, command, 1, b"")["command"]

    assert told("0") == told("1") == "train.py --lr 1"


def test_versions_that_could_not_be_found_out_in_time_are_unknown_and_no_difference() -> None:
    whole = {"python": "3.11", "torch": "2.9", "arch": "x86_64", "gpus": "0"}
    found = list(differences(["a", "b", "c"], [whole, whole, {"gpus": "0"}]))
    assert [(one.status, one.subject) for one in found] == [(Status.UNKNOWN, "c")]
    without = whole | {"torch": UNSET}
    (one,) = differences(["a", "b", "c"], [whole, whole, without])
    assert (one.status, one.subject) == (Status.FAIL, "c")


def test_code_counts_and_what_it_leaves_behind_does_not(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    before = code_hash(str(script))
    (tmp_path / "config.yaml").write_text("lr: 1")
    (tmp_path / ".hidden.py").write_text("1")
    for folder in ("__pycache__", "wandb", "another-job"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.py").write_text("1")
    assert code_hash(str(script)) == before
    (tmp_path / "model.py").write_text("2")
    assert code_hash(str(script)) != before
    assert code_hash(str(tmp_path / "none.py")) is None


def test_a_folder_that_hangs_costs_the_code_and_neither_the_versions_nor_the_preflight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    over = threading.Event()
    monkeypatch.setattr(node_facts, "code_hash", lambda program: str(over.wait(60)))
    monkeypatch.setattr(node_facts, "versions", lambda command: {"python": "3.11"})
    read_slowly = node_facts.read_meanwhile(parse_command(("train.py",)), 0.3)
    assert read_slowly() == {"python": "3.11"}
    over.set()


def test_facts_always_fit_into_a_message() -> None:
    found = node_facts.cut({f"env NCCL_{number}": "\u20ac" * 1000 for number in range(900)})
    assert 0 < len(found) <= MAX_FACTS
    record = NodeReport(found)
    assert parse(render(record).rstrip(b"\n")) == record


def test_names_come_from_members_or_from_the_pattern_of_indices() -> None:
    def name(rank: int, home: str, hostname: str, **told: object) -> str | None:
        job = Job(contract="c", nodes=NodeRange(4, 4), node_rank=1, coordinator=Endpoint(home, 1), **told)  # type: ignore[arg-type]
        topology = place(job, replace(MACHINE, hostname=hostname))
        places = places_of(job, topology, Endpoint(home, 1), hostname)
        return places[rank].host if rank < len(places) else None

    assert name(3, "job-node-0-0.job", "job-node-0-1") == "job-node-0-3.job"
    assert name(3, "job-master-0", "job-worker-0") == "job-worker-2"
    assert name(3, "10.0.0.1", "job-node-0-1") is None
    assert name(3, "job-node-0-0.job", "something-else") is None
    assert name(0, "10.0.0.1", "x") == "10.0.0.1"
    members = tuple(Member(host) for host in "abcd")
    assert name(3, "a", "b", members=members) == "d"


def fail(check: str, subject: str = "", text: str = "x") -> Finding:
    return Finding(check=check, status=Status.FAIL, fault=Fault.NODE, subject=subject, text=text)


def test_what_this_node_and_others_have_found_alike_is_told_once() -> None:
    decided = [fail("shm", "node 0 (a), node 1 (b)", "on node 0 (a): x"), fail("pairs", "node 2 (c)")]
    told = merged([fail("shm")], decided, "node 1 (b)", registry.ids(Where.CLUSTER))
    assert [finding.check for finding in told] == ["pairs", "shm"]
    assert told[1].subject == "node 0 (a), node 1 (b)"


def test_what_is_one_nodes_fault_and_what_is_the_jobs_are_two_findings_also_of_one_check() -> None:
    """Every node comes to the same verdict, whichever of the two it has itself."""
    of_job = Finding(check="storage", status=Status.FAIL, fault=Fault.JOB, subject="node 2 (c)", text="full")
    decided = [of_job, fail("storage", "node 3 (d)", "hangs")]
    for own, name in (((), "node 0 (a)"), ((replace(of_job, subject="/b"),), "node 2 (c)")):
        told = merged(own, decided, name, registry.ids(Where.CLUSTER))
        assert sorted((one.fault, one.subject) for one in told if one.fault) == [
            (Fault.JOB, "node 2 (c)"),
            (Fault.NODE, "node 3 (d)"),
        ]


def test_who_has_met_all_nodes_or_rejoins_a_job_at_work_is_not_stopped_for_a_name() -> None:
    """A cache denies node 0's own name to node 0, which all others have reached by it; or node 0 is away."""
    all_here = present_nodes.all_present.passed("all 2 nodes are present")
    for met in (all_here, present_nodes.runs_already("host-1")):
        assert [one.status for one in explained([fail("dns")], [met])] == [Status.WARN]
    missing = replace(fail("roll-call", "node 2 (c)"), measured="no DNS record")
    assert [one.status for one in explained([fail("dns")], [missing])] == [Status.FAIL]


def test_a_node_that_is_refused_without_a_reason_is_told_so() -> None:
    finding = present_nodes.all_present.found("refused", "")
    assert (finding.fault, finding.text) == (Fault.JOB, "node 0 refuses this node: no reason was given")


@pytest.mark.parametrize(
    ("scope", "fault", "subject", "hosts"),
    [
        (Scope.GPU, Fault.NODE, "node 1 (host-1), GPU 3", "host-1"),
        (Scope.RAIL, Fault.NODE, "node 2 (host-2), rail 0, 5", "host-2"),
        (Scope.NODE, Fault.NODE, "node 3 (c), node 0 (a), node 3 (c)", "c a"),
        (Scope.LINK, Fault.NODE, "node 5 (host-5) - node 6 (host-6)", ""),
        (Scope.NODE, Fault.JOB, "node 3 (d)", ""),
    ],
)
def test_failing_nodes_are_those_at_fault_themselves(scope: Scope, fault: Fault, subject: str, hosts: str) -> None:
    found = Finding(check="x", status=Status.FAIL, fault=fault, scope=scope, subject=subject, text="x")
    machines = {host: f"gpu-{host}" for host in hosts.split()}
    listed = "".join(f"{host}\t{machine}\n" for host, machine in machines.items())
    assert failing_nodes([found], {**machines, "host-9": "gpu-9"}) == listed


def test_a_pod_that_never_came_has_no_machine_and_on_a_shared_one_its_name_counts() -> None:
    found = Finding(check="x", status=Status.FAIL, fault=Fault.NODE, subject="node 1 (a), node 2 (b)", text="x")
    assert failing_nodes([found], {"a": "gpu-1", "c": "gpu-1"}) == "a\nb\tunknown\n"
    for check in ("roll-call", "dns"):  # which say nothing of a machine
        lost = replace(found, check=check, subject="node 3 (d)")
        listed = failing_nodes([lost, found], {"d": "gpu-4", "b": "gpu-2"})
        assert listed == "d\tunknown\na\tunknown\nb\tgpu-2\n"


def test_of_many_failing_nodes_each_is_listed_and_a_message_names_a_few() -> None:
    names = [f"node {number} (host-{number})" for number in range(20)]
    report, well = msg.NodeReport(findings=(fail("shm"),)), msg.NodeReport()
    nodes = [
        JobNode(
            msg.Hello(1, "job", n, f"host-{n}", "i"),
            n,
            Endpoint("", 1),
            None,
            0.0,
            report=report if n < 20 else well,
        )
        for n in range(40)
    ]
    (found,) = present_nodes.own_findings(nodes)
    assert len(failing_nodes([found], {}).splitlines()) == 20
    (told,) = msg.fitted([found])
    assert told.subject.endswith("node 7 (host-7) and 12 more")
    skewed = list(clocks([*names, "node 20 (x)"], [*[(60.0, 0.0)] * 10, *[(0.0, 0.0)] * 11], [*names, ""]))
    assert len(failing_nodes(skewed, {}).splitlines()) == 10


def test_a_machine_with_fewer_but_faster_adapters_is_not_slower() -> None:
    assert not node_facts.is_slower("1 x 100, 4 x 400", "1 x 100, 8 x 200")
    assert node_facts.is_slower("1 x 100, 7 x 200", "1 x 100, 8 x 200")
