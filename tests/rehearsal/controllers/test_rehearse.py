"""`rehearse -f` with real processes: what a pod sees, the order of containers, restarts, conditions, stopping."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import launch, launched, program, start
from tests.conftest import require
from tests.rehearsal.controllers.manifests import runtime, trainjob
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers import read, workload_of
from trainer_launch.rehearsal.kubelet import Kubelet, Setting, words_of

pytestmark = pytest.mark.process


def job(folder: Path, pod: str, spec: str = "", replicas: str = "", kind: str = "PyTorchJob") -> str:
    """A job of workers; `pod` is their pod's specification."""
    field, path = {"PyTorchJob": "pytorch", "TFJob": "tf", "PaddleJob": "paddle"}[kind], folder / "job.yaml"
    path.write_text(
        f"apiVersion: kubeflow.org/v1\nkind: {kind}\nmetadata: {{name: job}}\nspec: {{{spec + ', ' if spec else ''}"
        f"{field}ReplicaSpecs: {{Worker: {{template: {{spec: {pod}}}{', ' + replicas if replicas else ''}}}}}}}\n"
    )
    return str(path)


def shell(text: str, more: str = "", name: str = "pytorch") -> str:
    """A container that runs a shell script."""
    return f"{{name: {name}, image: i, command: [sh, -c, {json.dumps(text)}]{', ' + more if more else ''}}}"


def pod(container: str, more: str = "") -> str:
    return f"{{containers: [{container}]{', ' + more if more else ''}}}"


def rows(stderr: str) -> dict[str, list[str]]:
    return {
        words[0]: words[1:5]
        for line in stderr.splitlines()
        if (words := line.split()) and words[0].startswith("job-")
    }


def test_each_pod_sees_its_own_variables_and_every_line_tells_whose_it_is(tmp_path: Path) -> None:
    text = "echo $HOSTNAME of $PET_NNODES at $PET_RDZV_ENDPOINT for $LR $RANK"
    env = "env: [{name: LR, value: '0.1'}]"
    path = job(tmp_path, pod(shell(text, env)), "elasticPolicy: {minReplicas: 1, maxReplicas: 3}", "replicas: 2")
    ended = launched("rehearse", "-f", path, env={"RANK": "from the shell"})
    lines = sorted(line for line in ended.stdout.splitlines() if line)
    assert [line.rpartition(":")[0] for line in lines] == [
        f"[job-worker-{index}] job-worker-{index} of 1:3 at 127.0.0.2" for index in (0, 1)
    ]
    assert all(line.endswith(" for 0.1") for line in lines), "and nothing of the shell's own platform"
    assert rows(ended.stderr) == {f"job-worker-{index}": ["Succeeded", "1", "0", "0"] for index in (0, 1)}
    assert "PyTorchJob job: Succeeded" in ended.stderr.splitlines()[-1]


def process_env(folder: Path, path: str) -> list[dict[str, str]]:
    """The variables of each pod's main container on this machine."""
    kubelet = Kubelet(workload_of(read((path,))), folder, Setting(launchers={}, path="/bin"))
    return [dict(kubelet.process(pod, pod.draft.main, 1).env) for pod in kubelet.pods]


def test_a_pod_that_starts_late_or_again_finds_its_port_free(tmp_path: Path) -> None:
    """The kernel gives it to no program that connects, or asks for any port."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    require(lowest > 16_384, "here the kernel may give almost any port")
    path = job(tmp_path, pod(shell("true")), "elasticPolicy: {minReplicas: 1, maxReplicas: 3}", "replicas: 2")
    ports = {int(env["PET_RDZV_ENDPOINT"].rpartition(":")[2]) for env in process_env(tmp_path, path)}
    assert all(1024 < port < lowest for port in ports), ports


def test_a_pytorchjob_of_workers_alone_meets_at_its_first_worker_unless_it_says_where(tmp_path: Path) -> None:
    envs = process_env(tmp_path, job(tmp_path, pod(shell("true")), "", "replicas: 2"))
    assert {env["TRAINER_LAUNCH_MASTER_ADDR"] for env in envs} == {"127.0.0.2"}
    assert len({env["TRAINER_LAUNCH_MASTER_PORT"] for env in envs}) == 1, "the same for both"
    own = "env: [{name: TRAINER_LAUNCH_MASTER_ADDR, value: job-worker-1}]"
    envs = process_env(tmp_path, job(tmp_path, pod(shell("true", own)), "", "replicas: 2"))
    assert {env["TRAINER_LAUNCH_MASTER_ADDR"] for env in envs} == {"127.0.0.3"}
    assert not any("TRAINER_LAUNCH_MASTER_PORT" in env for env in envs)


def test_pods_of_a_paddlejob_have_their_address_which_its_launcher_compares_with_the_masters(
    tmp_path: Path,
) -> None:
    path = job(tmp_path, pod(shell("true", name="paddle")), "", "replicas: 2", "PaddleJob")
    assert [(env["POD_IP"], env["PADDLE_MASTER"].partition(":")[0]) for env in process_env(tmp_path, path)] == [
        ("127.0.0.2", "127.0.0.2"),
        ("127.0.0.3", "127.0.0.2"),
    ]


def test_init_containers_come_first_and_share_the_pods_volumes(tmp_path: Path) -> None:
    init = shell("echo told > /state/word", "volumeMounts: [{name: s, mountPath: /state}]", "first")
    main = shell("cat /mine/word", "volumeMounts: [{name: s, mountPath: /mine}]")
    path = job(tmp_path, pod(main, f"initContainers: [{init}], volumes: [{{name: s, emptyDir: {{}}}}]"))
    ended = launched("rehearse", "-f", path)
    assert ended.stdout.splitlines() == ["[job-worker-0] told"]


def test_a_failed_init_container_is_in_the_table_and_named_as_the_cause(tmp_path: Path) -> None:
    says = "echo 'reason=NoDisk exit=30 | the disk is full' >$TRAINER_LAUNCH_TERMINATION_LOG; exit 30"
    init, main = shell(says, name="check"), shell("echo never")
    path = job(tmp_path, pod(main, f"initContainers: [{init}]"), "", "restartPolicy: Never")
    ended = launched("rehearse", "-f", path, code=30)
    assert rows(ended.stderr) == {"job-worker-0": ["Failed", "1", "0", "30"]}
    table = next(line for line in ended.stderr.splitlines() if line.startswith("job-worker-0"))
    assert table.endswith("init container check: reason=NoDisk exit=30 | the disk is full")
    assert ended.stderr.splitlines()[-1] == (
        "Cause: job-worker-0 ended with exit code 30: init container check: the disk is full"
    )


LIVES = (
    "n=$(cat /claim/n 2>/dev/null || echo 0); echo $((n+1)) > /claim/n; touch /own/$n; "
    "echo life $n has $(ls /own); [ $n -ge 2 ] && exit 0; exit 137"
)
VOLUMES = "volumes: [{name: c, persistentVolumeClaim: {claimName: x}}, {name: o, emptyDir: {}}]"
MOUNTS = "volumeMounts: [{name: c, mountPath: /claim}, {name: o, mountPath: /own}]"


def test_a_retryable_code_makes_the_pod_anew_and_only_the_claim_is_kept(tmp_path: Path) -> None:
    ended = launched(
        "rehearse", "-f", job(tmp_path, pod(shell(LIVES, MOUNTS), VOLUMES), "", "restartPolicy: ExitCode")
    )
    assert ended.stdout.splitlines() == [f"[job-worker-0] life {n} has {n}" for n in range(3)]
    assert rows(ended.stderr) == {"job-worker-0": ["Succeeded", "3", "0", "0"]}


def test_nothing_of_a_pod_outlives_it_not_even_in_a_session_of_its_own(tmp_path: Path) -> None:
    """On a cluster the end of a container's first process ends all others."""
    text = (
        "if [ -e /own/begun ]; then for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done 2>/dev/null "
        "| grep -c '^sleep 98765'; exit 0; fi; touch /own/begun; setsid sleep 98765 & sleep 0.3; exit 1"
    )
    mounts, volumes = "volumeMounts: [{name: o, mountPath: /own}]", "volumes: [{name: o, emptyDir: {}}]"
    ended = launched("rehearse", "-f", job(tmp_path, pod(shell(text, mounts), volumes)))
    assert ended.stdout.splitlines() == ["[job-worker-0] 0"]


def test_the_end_of_the_job_ends_workers_that_still_run_and_all_that_they_started(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    chief, worker = pod(shell("exit 0", name="tensorflow")), pod(shell("sleep 987 & sleep 987", name="tensorflow"))
    path.write_text(
        "apiVersion: kubeflow.org/v1\nkind: TFJob\nmetadata: {name: job}\n"
        "spec: {runPolicy: {cleanPodPolicy: Running}, "
        f"tfReplicaSpecs: {{Chief: {{template: {{spec: {chief}}}}}, Worker: {{template: {{spec: {worker}}}}}}}}}\n"
    )
    ended = launched("rehearse", "-f", str(path))
    assert rows(ended.stderr)["job-worker-0"][0] == "Completed"
    assert not [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "987"]]


def test_a_missing_program_is_said_before_anything_starts(tmp_path: Path) -> None:
    other = "{name: pytorch, image: i, command: [no-such-program, x]}"
    init = shell("echo started", "", "first")
    ended = launched("rehearse", "-f", job(tmp_path, pod(other, f"initContainers: [{init}]")), code=127)
    for part in ("'no-such-program'", "container pytorch of job-worker-0", "--command"):
        assert part in ended.stderr
    assert ended.stdout == ""


def test_a_container_runs_in_its_working_folder_where_that_exists_and_finds_programs_in_its_own_path(
    tmp_path: Path,
) -> None:
    program(tmp_path / "bin" / "here-i-am", "pwd; cat word")
    (tmp_path / "word").write_text("found\n")
    path = f"env: [{{name: PATH, value: '{tmp_path}/bin:/usr/bin:/bin'}}]"
    inside = f"{{name: pytorch, image: i, command: [here-i-am], workingDir: '{tmp_path}', {path}}}"
    ended = launched("rehearse", "-f", job(tmp_path, pod(inside)))
    assert ended.stdout.splitlines() == [f"[job-worker-0] {tmp_path}", "[job-worker-0] found"]


def test_another_command_may_be_run_in_its_place_and_the_launcher_runs_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('trained\\n', end='')  # in one write, also by two workers\n")
    path = job(tmp_path, pod("{name: pytorch, image: i, command: [no-such-program, x]}"))
    ended = launched("rehearse", "-f", path, "--command", "train.py --steps 20", cwd=tmp_path)
    assert set(ended.stdout.splitlines()) == {"[job-worker-0] trained"}


def test_without_a_command_the_launcher_is_the_entrypoint(tmp_path: Path) -> None:
    container = "{name: node, image: i, args: [sh, -c, 'echo rank $PET_NODE_RANK of $PET_NNODES']}"
    label = "metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}"
    template = f"{{{label}, spec: {{template: {{spec: {{containers: [{container}]}}}}}}}}"
    (tmp_path / "job.yaml").write_text(trainjob("{numNodes: 2}"))
    (tmp_path / "runtime.yaml").write_text(runtime(jobs=f"{{name: node, template: {template}}}"))
    files = ("-f", str(tmp_path / "job.yaml"), "-f", str(tmp_path / "runtime.yaml"))
    ended = launched("rehearse", *files)
    assert sorted(ended.stdout.split("\n")[:2]) == [f"[job-node-0-{n}] rank {n} of 2" for n in (0, 1)]
    assert "reason=Succeeded" in ended.stderr, "the termination message of the launcher in the pod"


@pytest.mark.parametrize(
    "words", ["", ", command: [trainer-launch, run, --nproc-per-node, '2']"], ids=["none", "options alone"]
)
def test_a_container_without_a_program_is_named_with_what_to_add(tmp_path: Path, words: str) -> None:
    ended = launched("rehearse", "-f", job(tmp_path, pod(f"{{name: pytorch, image: i{words}}}")), code=2)
    assert "container pytorch of job-worker-0 has no program to run; add it to the command or args" in ended.stderr


def test_a_manifest_is_also_read_from_standard_input(tmp_path: Path) -> None:
    piped = 'exec "$@" < ' + job(tmp_path, pod(shell("echo piped")))
    ended = launch("rehearse", "-f", "-", within=("sh", "-c", piped, "sh"))
    assert "] piped" in ended.stdout, ended.stderr


def test_asked_to_stop_all_pods_end_and_the_code_says_so(tmp_path: Path) -> None:
    text = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    with start("rehearse", "-f", job(tmp_path, pod(shell(text)), "", "replicas: 2")) as rehearsal:
        rehearsal.read_until("ready", 2)
        rehearsal.signal(signal.SIGTERM)
        output = rehearsal.ends_with(143)
    assert output.count("] saved") == 2
    assert "PyTorchJob job: stopped" in output


@pytest.mark.parametrize(("command", "part"), [("'open", "cannot be split"), (" ", "--command is empty")])
def test_a_command_that_is_no_command_is_refused(command: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        words_of(command)


def mpijob(folder: Path, version: str, launcher: str, spec: str = "") -> str:
    path, worker = folder / "job.yaml", "{replicas: 2, template: {spec: {containers: [{name: mpi, image: i}]}}}"
    front = f"{{template: {{spec: {{containers: [{{name: mpi, image: i, {launcher}}}]}}}}}}"
    path.write_text(
        f"apiVersion: kubeflow.org/{version}\nkind: MPIJob\nmetadata: {{name: job}}\n"
        f"spec: {{{spec}mpiReplicaSpecs: {{Launcher: {front}, Worker: {worker}}}}}\n"
    )
    return str(path)


def test_mpirun_reaches_the_pods_of_mpi_operator_and_the_launchers_own_by_ssh(tmp_path: Path) -> None:
    require(shutil.which("mpirun.openmpi") or shutil.which("orterun"), "Open MPI is not installed")
    require(shutil.which("sshd", path="/usr/sbin:/usr/bin"), "sshd is not installed")
    words = "mpirun sh -c 'echo rank $OMPI_COMM_WORLD_RANK on $HOSTNAME'"
    spec = "runLauncherAsWorker: true, runPolicy: {cleanPodPolicy: Running}, "
    path = mpijob(tmp_path, "v2beta1", "command: [/no/such/program]", spec)
    ended = launch("rehearse", "-f", path, "--command", words)  # the workers keep their sshd
    assert ended.returncode == 0, ended.stderr
    hosts = ["job-launcher", "job-worker-0", "job-worker-1"]
    said = sorted(word for word in ended.stdout.replace("[job-launcher] ", "\n").splitlines() if word)
    assert said == [f"rank {rank} on {host}" for rank, host in enumerate(hosts)]
    assert rows(ended.stderr)["job-launcher"][0] == "Succeeded"
