"""What fuzzing has found and the corpus does not show by itself: sentences that people read, and what they hide."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.cli.launching import launch, launched
from tests.conftest import require
from tests.rehearsal.controllers.manifests import job_of, pytorch, replica
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import SnapshotFiles
from trainer_launch.contracts.source import PodInput
from trainer_launch.model.codec import MessageError
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.findings import Finding, Status
from trainer_launch.model.settings import unknown_variables
from trainer_launch.preflight.cluster import preflight_messages as calling
from trainer_launch.rehearsal.controllers.documents import read_documents


def test_findings_of_others_are_one_line_and_have_bounds() -> None:
    finding = Finding(check="dns", status=Status.PASS, text="a\nb\x1b[2J", evidence=("\r",))
    line = calling.render(calling.Decided((finding,)))
    message = calling.parse(line)
    assert isinstance(message, calling.Decided)
    assert (message.findings[0].text, message.findings[0].evidence) == ("a b [2J", (" ",))
    told = json.loads(line)
    for wrong, why in (({"scope": "1" * 4000}, "invalid enum value"), ({"took_s": int("9" * 400)}, "out of range")):
        with pytest.raises(MessageError, match=why) as problem:
            calling.parse(json.dumps(told | {"findings": [told["findings"][0] | wrong]}).encode())
        assert len(str(problem.value)) < 300


@pytest.mark.parametrize("text", ["a: !!int ''", "a: !!map [a]", "a: " + "9" * 5000])
def test_values_that_yaml_itself_trips_over_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^job.yaml is not valid YAML"):
        read_documents(text, "job.yaml")


@pytest.mark.parametrize("name", ["../../etc", "/tmp/x", "..", "a/b", "-", "a b", "x" * 300, "é"])
def test_names_in_manifests_become_no_paths(name: str) -> None:
    spec = f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch')}}}}}"
    with pytest.raises(UsageError, match=r"metadata.name is .*; expected a name of letters, digits"):
        job_of(pytorch(spec).replace("name: job", f"name: {json.dumps(name)}"))


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("volumes: [{name: ../../x, emptyDir: {}}]", "expected a name"),
        ("containers: [{name: ../x}]", "expected a name|stands twice"),
        (
            "containers: [{name: pytorch, volumeMounts: [{name: v, mountPath: /a/../r}]}]",
            "an absolute path without",
        ),
    ],
)
def test_nor_do_names_of_volumes_and_containers_or_mounts(field: str, why: str) -> None:
    spec = field if "pytorch" in field else f"containers: [{{name: pytorch}}], {field}"
    with pytest.raises(UsageError, match=why):
        job_of(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {{{spec}}}}}}}}}}}"))


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
    pod = PodInput(env={**env, name: value}, files=SnapshotFiles({}), hostname="")
    with pytest.raises(ContractError, match=name) as caught:
        read_job(pod)
    assert secret not in str(caught.value)
    assert "[redacted]" in str(caught.value)


@pytest.mark.parametrize("digits", ["9" * 5000, "\u00b2", "\u0663"])
def test_digits_that_python_makes_no_int_of_are_no_number(digits: str) -> None:
    ended = launch("local", "--nodes", digits, "--nproc-per-node", "1", "--", "true")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    spec = f"{{nprocPerNode: '{digits}', pytorchReplicaSpecs: {{Master: {replica('pytorch')}}}}}"
    with pytest.raises(UsageError, match="expected a number as a string, or auto, cpu or gpu"):
        job_of(pytorch(spec))


def test_messages_are_one_line_whatever_they_repeat() -> None:
    assert str(UsageError("it is 'a\nb\x1b[2J\udcff'; expected c")) == r"it is 'a b\x1b[2J\udcff'; expected c"
    assert len(str(UsageError("x" * 100_000))) == 2_000
    (sentence,) = unknown_variables(MappingProxyType({"TRAINER_LAUNCH_A\nB": "1"}))
    assert sentence.isprintable()


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", ["Exit code: 0", "=   EXIT CODE: 0"])
def test_a_job_whose_rank_prints_an_exit_code_of_0_and_fails_has_failed(line: str, tmp_path: Path) -> None:
    require(shutil.which("mpirun.openmpi"), "needs openmpi-bin")
    words = ("run", "--engine", "mpi", "--max-restarts", "0", "--termination-log", str(tmp_path / "words"))
    program = ("mpirun.openmpi", "-np", "1", "sh", "-c", f"echo '{line}' >&2; exit 3")
    launched(*words, "--", *program, env={"TMPDIR": str(tmp_path)}, code=3)
    assert (tmp_path / "words").read_text().startswith("reason=Failed ")
