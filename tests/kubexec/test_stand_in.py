"""The kubectl of a rehearsal: `exec` into a container that runs, in words of the real one; nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.rehearsal.controllers.manifests import job_of, replica
from trainer_launch.model import Process
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.controllers.pod_values import pods as pods
from trainer_launch.rehearsal.kubelet.pods import ExecRecords

pytestmark = pytest.mark.process
HEAD = "apiVersion: kubeflow.org/v1\nkind: MPIJob\nmetadata: {name: j}\n"


class Rehearsal:
    """One worker behind a kubectl."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        body = f"Launcher: {replica('l')}, Worker: {replica('w')}"
        self.launcher, self.worker = pods(job_of(f"{HEAD}spec: {{mpiReplicaSpecs: {{{body}}}}}"))
        self.doors = ExecRecords(folder / "the doors")
        self.kubectl = folder / "kubectl"
        self.kubectl.write_text(self.doors.kubectl())
        self.kubectl.chmod(0o755)

    def begin(self, pod: Pod, name: str) -> None:
        env = {"HOSTNAME": pod.name, "PATH": "/usr/bin:/bin", "SECRET": "s"}
        self.doors.open(
            pod, name, Process(name=f"{pod.name}/{name}", argv=("sleep",), env=env, cwd=str(self.folder))
        )

    def run(self, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run((self.kubectl, *words), input=given, capture_output=True, text=True, timeout=30)


@pytest.fixture
def rehearsal(tmp_path: Path) -> Rehearsal:
    made = Rehearsal(tmp_path)
    made.begin(made.worker, "w")
    return made


def test_the_command_has_the_containers_variables_and_folder(rehearsal: Rehearsal) -> None:
    ended = rehearsal.run("exec", "j-worker-0", "--", "sh", "-c", "echo $HOSTNAME in $PWD")
    assert ended.stdout == f"j-worker-0 in {rehearsal.folder}\n"
    assert ended.returncode == 0


@pytest.mark.parametrize(
    "words", [("-c", "w", "j-worker-0"), ("--container=w", "pod/j-worker-0"), ("-n", "ns", "-it", "10.244.0.3")]
)
def test_a_pod_is_found_by_its_name_and_its_address(rehearsal: Rehearsal, words: tuple[str, ...]) -> None:
    assert rehearsal.run("exec", *words, "--", "sh", "-c", "echo $HOSTNAME").stdout == "j-worker-0\n"


def test_its_standard_input_is_ours_only_when_asked_for(rehearsal: Rehearsal) -> None:
    assert rehearsal.run("exec", "-i", "j-worker-0", "--", "cat", given="told").stdout == "told"
    assert rehearsal.run("exec", "j-worker-0", "--", "cat", given="told").stdout == ""


@pytest.mark.parametrize(("text", "code"), [("exit 41", 41), ("kill -9 $$", 137), ("kill -11 $$", 139)])
def test_the_exit_code_is_the_commands(rehearsal: Rehearsal, text: str, code: int) -> None:
    ended = rehearsal.run("exec", "j-worker-0", "--", "sh", "-c", text)
    assert ended.returncode == code
    assert ended.stderr == f"command terminated with exit code {code}\n"


def test_a_program_that_is_not_there(rehearsal: Rehearsal) -> None:
    ended = rehearsal.run("exec", "j-worker-0", "--", "no-such-program")
    assert ended.returncode == 127
    assert "no-such-program" in ended.stderr


def test_into_what_does_not_run_nobody_comes(rehearsal: Rehearsal) -> None:
    assert 'pods "other" not found' in rehearsal.run("exec", "other", "--", "true").stderr
    assert 'container not found ("x")' in rehearsal.run("exec", "-c", "x", "j-worker-0", "--", "true").stderr
    rehearsal.doors.close(rehearsal.worker, "w")
    ended = rehearsal.run("exec", "j-worker-0", "--", "true")
    assert ended.returncode == 1
    assert 'container not found ("w")' in ended.stderr
    rehearsal.begin(rehearsal.worker, "w")
    assert rehearsal.run("exec", "j-worker-0", "--", "true").returncode == 0, "it runs again"


@pytest.mark.parametrize(
    "words",
    [
        ("get", "pods"),
        (),
        ("exec",),
        ("exec", "j-worker-0"),
        ("exec", "--", "true"),
        ("exec", "j-worker-0", "true"),
        ("exec", "j-worker-0", "--as", "root", "--", "true"),
        ("delete", "pod", "../x"),
    ],
)
def test_anything_else_is_refused_in_one_sentence(rehearsal: Rehearsal, words: tuple[str, ...]) -> None:
    ended = rehearsal.run(*words)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert "this rehearsal's kubectl knows only: kubectl exec POD" in ended.stderr


def test_others_on_the_machine_cannot_read_a_containers_variables(rehearsal: Rehearsal) -> None:
    record = rehearsal.folder / "the doors" / "j-worker-0" / "w.json"
    assert record.stat().st_mode & 0o777 == 0o600
    assert "SECRET" in record.read_text()
