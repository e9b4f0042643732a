"""What fuzzing has found, each as one case with the sentence that people now read."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import pytest
from msgspec.structs import replace

from tests.cli.launching import launch
from tests.rehearsal.controllers.manifests import job_of, pytorch, replica
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import SnapshotFiles
from trainer_launch.contracts.source import Pod
from trainer_launch.host import deadline_subprocess, machine, process_tree, shm
from trainer_launch.host.network import AdapterPort
from trainer_launch.membership import protocol as coordination
from trainer_launch.membership.authentication import Channel
from trainer_launch.model import Member, value_parsers
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.findings import Finding, Status
from trainer_launch.model.settings import unknown_variables
from trainer_launch.mpi import mpirun_command
from trainer_launch.observability import event_log, node_view, progress
from trainer_launch.preflight import thresholds
from trainer_launch.preflight.cluster import preflight_messages as calling
from trainer_launch.preflight.container import network_checks
from trainer_launch.preflight.gpu import facts
from trainer_launch.rehearsal.controllers.documents import read_values
from trainer_launch.supervisor import failure, stacks, worker_samples

HUGE = "9" * 400  # an int beyond every float
DEEP = "[" * 5000 + "]" * 5000  # Python 3.13 reads it, earlier ones refuse it
TOO_DEEP = "[" * 60_000


@pytest.mark.parametrize(
    "line",
    [
        b'{"kind":"time","sent":' + HUGE.encode() + b"}",
        b'{"kind":"timeis","sent":1,"heard":-' + HUGE.encode() + b',"answered":1}',
        b'{"kind":' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_a_strangers_number_or_nest_does_not_end_the_cluster_preflight(line: bytes) -> None:
    with pytest.raises(MessageError):
        calling.parse(line)


@pytest.mark.parametrize("ranks", [",".join(["0-99999"] * 250), "3-1", "1,1", "5,2", "0-65536"])
def test_a_strangers_claim_names_each_rank_once_so_that_it_costs_nothing(ranks: str) -> None:
    hello = coordination.Hello(coordination.VERSION, "job", 0, "n", "i")
    told = json.loads(coordination.render(hello)) | {"claims": [[1, 0, ranks, True]]}
    with pytest.raises(MessageError, match="ranks such as 0-3,7"):
        coordination.parse(json.dumps(told).encode())


def test_a_challenge_that_is_no_text_gets_a_proof_that_is_wrong() -> None:
    channel = Channel(b"secret")
    channel.challenged("signed:\ud800")
    hello = channel.introduced(coordination.Hello(coordination.VERSION, "job", 0, "n", "i"))
    assert hello.proof
    assert not Channel(b"secret").admits(hello)


def test_findings_of_others_are_one_line_and_have_bounds() -> None:
    finding = replace(_finding(), text="a\nb\x1b[2J", evidence=("\r",))
    line = calling.render(calling.Decided((finding,)))
    message = calling.parse(line)
    assert isinstance(message, calling.Decided)
    assert (message.findings[0].text, message.findings[0].evidence) == ("a b [2J", (" ",))
    told = json.loads(line)
    for wrong, why in (({"scope": "1" * 4000}, "invalid enum value"), ({"took_s": int(HUGE)}, "out of range")):
        with pytest.raises(MessageError, match=why) as problem:
            calling.parse(json.dumps(told | {"findings": [told["findings"][0] | wrong]}).encode())
        assert len(str(problem.value)) < 300


def _finding() -> Finding:
    return Finding(check="dns", status=Status.PASS, text="well")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: !!int ''", "line 1, column 4: a value is no int"),
        ("a: !!float ''", "a value is no float"),
        ("a: !!bool x", "a value is no bool"),
        ("a: !!timestamp x", "a value is no timestamp"),
        ("a: !!map [a]", "expected a mapping"),
        ("a: !!set [a]", "expected a mapping"),
        ("a: 0x" + "f" * 4000, "more than 64 bits"),
        ("a: " + "1" * 5000, "a value is no int"),
    ],
)
def test_values_that_yaml_itself_trips_over_are_refused_with_their_place(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=r"^job.yaml is not valid YAML at line 1.*") as caught:
        read_values(text, "job.yaml")
    assert why in str(caught.value)


@pytest.mark.parametrize("name", ["../../etc", "/tmp/x", "..", "a/b", "-", "a b", "x" * 300, "é"])
def test_names_in_manifests_become_no_paths(name: str) -> None:
    spec = f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch')}}}}}"
    with pytest.raises(UsageError, match=r"metadata.name is .*; expected a name of letters, digits"):
        job_of(pytorch(spec).replace("name: job", f"name: {json.dumps(name)}"))


@pytest.mark.parametrize("field", ["volumes: [{name: ../../x, emptyDir: {}}]", "containers: [{name: ../x}]"])
def test_nor_do_names_of_volumes_and_containers(field: str) -> None:
    spec = (
        f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {{containers: [{{name: pytorch}}], {field}}}}}}}}}}}"
    )
    with pytest.raises(UsageError, match=r"expected a name|stands twice"):
        job_of(pytorch(spec))


def test_a_mount_stays_where_it_is_said_to_be() -> None:
    more = "volumeMounts: [{name: v, mountPath: /a/../../../root}]"
    with pytest.raises(UsageError, match="an absolute path without"):
        job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch', more)}}}}}"))


def test_a_reference_beyond_every_float_is_refused() -> None:
    row = {"model": "H100", "measure": "gemm", "value": int(HUGE), "unit": "TFLOP/s", "source": "me"}
    data = json.dumps({"format": thresholds.FORMAT, "version": thresholds.VERSION, "references": [row]}).encode()
    with pytest.raises(UsageError, match=r"it, reference 1 has the value 9+; expected a number above 0"):
        thresholds.parse_table(data, "it")


@pytest.mark.parametrize(
    "text", ["NaN", "[1]", HUGE, DEEP, TOO_DEEP, '"x"', '{"event":["x"],"time_s":1}', '{"pid":Infinity}']
)
def test_what_others_leave_for_pid_1_never_ends_it(text: str, tmp_path: Path) -> None:
    data = text.encode()
    (tmp_path / "launcher.json").write_bytes(data)
    assert node_view.read(str(tmp_path)) is None
    assert event_log._parse_all(data) == []
    note = failure.parse_agent_failure(text)
    assert note is None or note.rank is None
    assert deadline_subprocess._tried(data, status=1).problem
    assert facts.facts_of(data).trouble


def test_numbers_in_news_are_such_as_metrics_can_have() -> None:
    told = json.dumps({"event": "generation_formed", "time_s": 1, "restarts": int(HUGE), "nodes": 2}).encode()
    standing = event_log.stand(event_log._parse_all(told))
    assert (standing.restarts, standing.nodes) == (None, 2)


def test_a_metric_whose_name_is_no_text_takes_no_other_with_it() -> None:
    told = {"rank": 0, "local_rank": 0, "pid": 7, "at_s": 1.0, "time_s": 1.0, "progress": None, "eta_s": None}
    found = progress.parse(json.dumps({**told, "metrics": {"a\ud800": 1.0, "b": 2.0}}).encode())
    assert found is not None
    assert found.metrics == {"a?": 1.0, "b": 2.0}


def test_a_line_number_of_5000_digits_is_none() -> None:
    text = f'Current thread 0x1 (most recent call first):\n  File "t.py", line {"1" * 5000} in main\n'
    assert stacks.main_thread(text) == ()


@pytest.mark.parametrize("stat", [b"", b"7 (a) S", b"7 (a) S 1 x 7 " + b"0 " * 40, b"x (a) S 1 7 7 " + b"0 " * 40])
def test_a_process_of_which_a_sandbox_shows_too_little_is_none(stat: bytes, tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/stat").write_bytes(stat)
    (tmp_path / "7/status").touch()
    assert process_tree.read(7, str(tmp_path)) is None
    assert worker_samples.read(7, str(tmp_path)) is None or len(stat) > 40  # it looks at other fields


def test_files_of_the_kernel_that_are_cut_short_tell_nothing(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("CapEff:\n")
    (tmp_path / "proc/self/mounts").write_text("tmpfs /dev/shm\n")
    assert shm.may_enlarge(tmp_path) is False


def test_the_order_of_keys_in_tf_config_means_nothing() -> None:
    def members(cluster: dict[str, list[str]]) -> object:
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        return read_job(Pod(env={"TF_CONFIG": config}, files=SnapshotFiles({}), hostname="")).members

    lists = {"worker": ["w-0:1"], "chief": ["c-0:1"], "ps": ["p-0:1"]}
    assert members(lists) == members(dict(reversed(lists.items())))


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("KUBEFLOW_TRAINER_SERVER_TOKEN", "opaque-0123456789abcdef", "opaque-0123456789abcdef"),
        ("KUBEFLOW_TRAINER_SERVER_URL", "https://user:passw0rd@s.svc/x", "passw0rd"),
        ("KUBEFLOW_TRAINER_SERVER_CA_CERT", "hf_abcdefghijklmnopqrstuv", "hf_abcdefghijklmnopqrstuv"),
    ],
)
def test_a_secret_in_the_wrong_variable_is_not_repeated(name: str, value: str, secret: str) -> None:
    url = "https://s.svc:1/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/j/status"
    env = {"KUBEFLOW_TRAINER_SERVER_URL": url, "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/c"}
    pod = Pod(env={**env, name: value}, files=SnapshotFiles({}), hostname="")
    with pytest.raises(ContractError, match=name) as caught:
        read_job(pod)
    assert secret not in str(caught.value)
    assert "[redacted]" in str(caught.value)


LONG = "9" * 5000  # digits: more than Python makes an int of


@pytest.mark.parametrize("digits", [LONG, "\u00b2", "\u0663"])
def test_digits_that_python_makes_no_int_of_are_no_number_anywhere(digits: str, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert machine.count({"CUDA_VISIBLE_DEVICES": digits}, tmp_path).count == 0
    adapter = AdapterPort("mlx5_0", 1, True)
    assert network_checks.nccl_adapters(f"mlx5_0:{digits}", [adapter]) == (adapter,)
    assert mpirun_command.filtered((Member("a", 2),), f"b:{digits}") == f"b:{digits}:1"
    ended = launch("local", "--nodes", digits, "--nproc-per-node", "1", "--", "true")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    spec = f"{{nprocPerNode: '{digits}', pytorchReplicaSpecs: {{Master: {replica('pytorch')}}}}}"
    with pytest.raises(UsageError, match="expected a number as a string, or auto, cpu or gpu"):
        job_of(pytorch(spec))


def test_a_number_beyond_every_float_is_no_json_for_controllers() -> None:
    assert value_parsers.parse_json_object('{"a": 1e400}') is None
    assert value_parsers.parse_json_object('{"a": 1e30}') == {"a": 1e30}


def test_messages_are_one_line_whatever_they_repeat() -> None:
    assert str(UsageError("it is 'a\nb\x1b[2J\udcff'; expected c")) == r"it is 'a b\x1b[2J\udcff'; expected c"
    assert len(str(UsageError("x" * 100_000))) == 2_000
    (sentence,) = unknown_variables(MappingProxyType({"TRAINER_LAUNCH_A\nB": "1"}))
    assert sentence.isprintable()
