"""Pods of MPI on one machine: our sshd at each one's own address, mpirun under our launcher, one key."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.rehearsal.controllers.manifests import job_of, replica
from trainer_launch.rehearsal.controllers import local_jobs
from trainer_launch.rehearsal.controllers.local_jobs import FILES
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

MPIRUN = replica("l", "command: [/usr/bin/mpirun, -n, '2', prog]")


def mpi(spec: str = "", launcher: str = MPIRUN, worker: str = "") -> list[Pod]:
    body = f"Launcher: {launcher}, Worker: {replica('w', worker, 'replicas: 2')}"
    head = "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: j}\n"
    text = f"{head}spec: {{{spec}mpiReplicaSpecs: {{{body}}}}}"
    return [local_jobs.with_ssh(pod, 2200, "/s/tmp") for pod in pods(job_of(text), local_jobs.address_of)]


@pytest.mark.parametrize("program", ["trainer-launch", "/usr/local/bin/trainer-launch"])
def test_options_of_our_own_sshd_stay_and_the_last_port_is_the_rehearsals(program: str) -> None:
    typed = "sshd, --ssh-port, '2222', --forward-env, HF_TOKEN, --grace, '60'"
    _, worker, _ = mpi(worker=f"command: [{program}], args: [{typed}]")
    assert (*worker.main.command, *worker.main.args) == (
        *("trainer-launch", "sshd", "--ssh-port", "2222", "--forward-env", "HF_TOKEN", "--grace", "60"),
        *("--ssh-port", "2200"),
    )


def words_of(command: str) -> tuple[str, ...]:
    launcher, *_ = mpi("sshAuthMountPath: /home/m/.ssh, ", replica("l", f"command: {command}"))
    return (*launcher.main.command, *launcher.main.args)


@pytest.mark.parametrize(
    ("before", "program"),
    [
        ("mpirun", "python, /home/m/train.py"),
        ("trainer-launch, run, --max-restarts, '3', --, /usr/bin/mpiexec, -n, '2'", "/home/m/prog"),
    ],
)
def test_ranks_get_the_home_of_their_own_pod(before: str, program: str) -> None:
    words, plain = words_of(f"[{before}, {program}]"), words_of(f"[{before}, prog]")
    first = len(plain) - 1
    assert words[:first] == plain[:first]
    bash, option, script, files, *rest = words[first:]
    assert (bash, option, files) == ("bash", "-c", "/s/files")
    assert tuple(rest) == words_of(f"[{program}]")[-len(rest) :], "as typed"
    argv = (bash, option, script, "/s/launcher/files", "printf", "%s|", "/s/launcher/files/home/m/x y", "*", "/s/q")
    done = subprocess.run(argv, env={**os.environ, "HOSTNAME": "worker-0"}, capture_output=True, text=True)
    assert done.stdout == "/s/worker-0/files/home/m/x y|*|/s/q|"


def test_only_the_folder_of_a_folder_named_ssh_is_a_home() -> None:
    launcher, *_ = mpi("sshAuthMountPath: /etc/keys, ", replica("l", "command: [mpirun, cat, /etc/passwd]"))
    assert launcher.main.args[-2:] == ("cat", "/etc/passwd")
    here = local_jobs.localised(
        launcher.main,
        local_jobs.LocalNetwork(pods={}, addresses={}),
        {FILES: "/s/files", "/etc": "/s/files/etc"}.get,
    )
    assert here.args[-2:] == ("cat", "/etc/passwd")


def test_a_launcher_that_is_a_worker_too_has_an_sshd_beside_it_that_looks_like_a_workers() -> None:
    launcher, *_ = mpi("runLauncherAsWorker: true, ")
    (sidecar,) = launcher.init
    assert sidecar.sidecar
    assert sidecar.env["TRAINER_LAUNCH_LISTEN_AT"] == "127.0.0.2"
    assert sidecar.env["K_MPI_JOB_ROLE"] == "worker"
    assert not [name for name in sidecar.env if name.startswith("OMPI_MCA_orte")]
    assert "/etc/mpi/hostfile" not in sidecar.files


def test_other_programs_are_left_as_they_are() -> None:
    launcher, worker, _ = mpi("", replica("l", "command: [python, launch.py]"), "command: [/entrypoint.sh]")
    assert launcher.main.command == ("python",)
    assert worker.main.command == ("/entrypoint.sh",)
