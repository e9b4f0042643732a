"""Names, ports and paths of a job are found wherever they stand, and nothing else is touched."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from tests.rehearsal.controllers.manifests import job_of, pytorch, replica
from trainer_launch.rehearsal.controllers import local_jobs
from trainer_launch.rehearsal.controllers.local_jobs import FILES, LocalNetwork
from trainer_launch.rehearsal.controllers.pod_values import Container, Mount, Pod, PodFile
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

TF = (
    "apiVersion: kubeflow.org/v1\nkind: TFJob\nmetadata: {name: my-worker-0-job, namespace: ns}\n"
    f"spec: {{tfReplicaSpecs: {{PS: {replica('tensorflow')}, "
    f"Worker: {replica('tensorflow', spec='replicas: 2')}}}}}\n"
)


def grounded(manifest: str) -> tuple[LocalNetwork, tuple[Pod, ...]]:
    workload = job_of(manifest)
    made = pods(workload, local_jobs.address_of)
    local = local_jobs.local_network_of(workload, made)
    new = {endpoint: 40000 + number for number, endpoint in enumerate(sorted(local_jobs.endpoints(local, made)))}
    return replace(local, ports=new), made


def here(container: Container, local: LocalNetwork) -> Container:
    return local_jobs.localised(container, local, {FILES: "/s/files", "data": "/s/claim"}.get)


def test_every_address_in_tf_config_is_one_of_this_machine_with_a_port_of_its_own() -> None:
    local, made = grounded(TF)
    configs = [json.loads(here(pod.main, local).env["TF_CONFIG"]) for pod in made]
    assert configs[0]["cluster"] == {
        "ps": ["127.0.0.2:40000"],
        "worker": ["127.0.0.3:40001", "127.0.0.4:40002"],
    }
    assert all(config["cluster"] == configs[0]["cluster"] for config in configs)
    assert [config["task"]["index"] for config in configs] == [0, 0, 1]


def test_the_master_port_is_the_same_in_all_pods_and_variables() -> None:
    specs = f"{{Master: {replica('pytorch')}, Worker: {replica('pytorch', spec='replicas: 2')}}}"
    local, made = grounded(pytorch(f"{{pytorchReplicaSpecs: {specs}}}"))
    for pod in made:
        env = here(pod.main, local).env
        assert (env["MASTER_ADDR"], env["PET_MASTER_ADDR"]) == ("127.0.0.2", "127.0.0.2")
        assert (env["MASTER_PORT"], env["PET_MASTER_PORT"]) == ("40000", "40000")
        assert env["RANK"] == str(made.index(pod)), "other numbers stay"


@pytest.mark.parametrize(("seed", "port"), [("7", "40000"), ("23456", "23456")])
def test_an_argument_has_the_port_that_the_variable_in_it_has_unless_another_is_the_same_number(
    seed: str, port: str
) -> None:
    typed = f"[--at=$(MASTER_ADDR):$(MASTER_PORT), $(MASTER_PORT), '{seed}', --rank=$(RANK), $$(RANK)]"
    specs = f"{{Master: {replica('pytorch', f'args: {typed}')}, Worker: {replica('pytorch', f'args: {typed}')}}}"
    local, made = grounded(pytorch(f"{{pytorchReplicaSpecs: {specs}}}"))
    for rank, pod in enumerate(made):
        words = here(pod.main, local).args
        assert words == ("--at=127.0.0.2:40000", port, seed, f"--rank={rank}", "$(RANK)")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("job-worker-1", "127.0.0.3"),
        ("tcp://job-worker-1:23456", "tcp://127.0.0.3:23456"),
        ("--hosts=job-worker-0,job-worker-1", "--hosts=127.0.0.2,127.0.0.3"),
        ("job-worker-1.default.svc.cluster.local.", "127.0.0.3"),
        ("job-worker-10", "job-worker-10"),
        ("my-job-worker-1", "my-job-worker-1"),
        ("/logs/job-worker-1/out", "/logs/job-worker-1/out"),
        ("job-worker-1-old", "job-worker-1-old"),
        ("127.0.0.3", "127.0.0.3"),
    ],
)
def test_a_name_is_found_as_a_whole_only(text: str, want: str) -> None:
    worker = replica("pytorch", spec="replicas: 2")
    local, made = grounded(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {worker}}}}}"))
    changed = here(replace(made[0].main, args=(text,), files={"/f": PodFile(text)}), local)
    assert changed.args == (want,)
    assert changed.files["/s/files/f"].text == want


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("/data", "/s/claim/part"),
        ("--out=/data/model.pt", "--out=/s/claim/part/model.pt"),
        ("/database/x", "/database/x"),
        ("PATH=/bin:/data/bin", "PATH=/bin:/s/claim/part/bin"),
        ("http://data/x", "http://data/x"),
        ("/etc/mpi/hostfile", "/s/files/etc/mpi/hostfile"),
        ("/dev/shm/x", "/dev/shm/x"),
        ("a/data", "a/data"),
        ("x=$(ls /data); cat </data/$x", "x=$(ls /s/claim/part); cat </s/claim/part/$x"),
    ],
)
def test_paths_of_volumes_and_files_are_folders_of_this_machine(text: str, want: str) -> None:
    mounts = (Mount("/data", "data", "part"), Mount("/dev/shm", "data"))
    container = Container(name="c", args=(text,), mounts=mounts, files={"/etc/mpi/hostfile": PodFile()})
    assert here(container, LocalNetwork(pods={}, addresses={})).args == (want,)


@pytest.mark.parametrize(
    ("words", "want"),
    [
        (("--run-name=job-worker-1",), "--run-name=job-worker-1"),
        (("--run_name", "job-worker-1"), "job-worker-1"),
        (("--tags=job-worker-1,v2",), "--tags=job-worker-1,v2"),
        (("--tags=v2,job-worker-1",), "--tags=v2,job-worker-1"),
        (("--worker-name=job-worker-1",), "--worker-name=job-worker-1"),
        (("echo training on job-worker-1",), "echo training on job-worker-1"),
        (("name: job-worker-1\nhost: job-worker-1",), "name: job-worker-1\nhost: 127.0.0.3"),
        (('"id": "job-worker-1", "hostIP": "job-worker-1"',), '"id": "job-worker-1", "hostIP": "127.0.0.3"'),
        (('[ "$HOSTNAME" = job-worker-1 ]',), '[ "$HOSTNAME" = job-worker-1 ]'),
        (('[ "$POD_NAME" = "job-worker-1" ]',), '[ "$POD_NAME" = "job-worker-1" ]'),
        (('[ "$MASTER_ADDR" = job-worker-1 ]',), '[ "$MASTER_ADDR" = 127.0.0.3 ]'),
        (("--master_addr", "job-worker-1"), "127.0.0.3"),
        (("--dist-host=job-worker-1",), "--dist-host=127.0.0.3"),
        (("mpirun", "-H", "job-worker-0,job-worker-1"), "127.0.0.2,127.0.0.3"),
        (("client.py", "job-worker-1"), "127.0.0.3"),
        (("nc", "-z", "job-worker-1", "23456"), "127.0.0.3"),
        (("until nc -z job-worker-1 23456; do echo job-worker-1; done",),
         "until nc -z 127.0.0.3 23456; do echo job-worker-1; done"),
        (("for h in job-worker-0 job-worker-1; do ssh $h; done",), "for h in 127.0.0.2 127.0.0.3; do ssh $h; done"),
        (("root@job-worker-1",), "root@127.0.0.3"),
        (("HOSTS='job-worker-0 job-worker-1'",), "HOSTS='127.0.0.2 127.0.0.3'"),
        (("NAMES='job-worker-0 job-worker-1'",), "NAMES='job-worker-0 job-worker-1'"),
        (("hosts:\n- job-worker-0\n- job-worker-1",), "hosts:\n- 127.0.0.2\n- 127.0.0.3"),
        (('hosts: ["job-worker-0", "job-worker-1"]',), 'hosts: ["127.0.0.2", "127.0.0.3"]'),
        (("job-worker-0 slots=2\njob-worker-1 slots=2",), "127.0.0.2 slots=2\n127.0.0.3 slots=2"),
    ],
)  # fmt: skip
def test_a_pods_name_stays_a_word_where_nothing_says_that_it_is_an_address(
    words: tuple[str, ...], want: str
) -> None:
    worker = replica("pytorch", spec="replicas: 2")
    local, made = grounded(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {worker}}}}}"))
    changed = here(replace(made[0].main, command=(), args=words), local).args
    assert want in changed


def test_a_variable_for_a_pods_own_name_has_the_name_and_one_for_its_host_the_address() -> None:
    field = "valueFrom: {fieldRef: {fieldPath: metadata.name}}"
    env = (
        f"env: [{{name: POD_NAME, {field}}}, {{name: MY_HOST, {field}}}, {{name: WANDB_NAME, value: job-worker-0}}]"
    )
    local, made = grounded(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch', env)}}}}}"))
    env_here = here(made[0].main, local).env
    values = {
        name: env_here[name] for name in ("POD_NAME", "MY_HOST", "WANDB_NAME", "MASTER_ADDR") if name in env_here
    }
    assert values == {"POD_NAME": "job-worker-0", "MY_HOST": "127.0.0.2", "WANDB_NAME": "job-worker-0"}


@pytest.mark.parametrize("path", ["/etc/my conf", "/etc/a,b", "/etc/a:b", "/home/m/.é\ufffdssh"])
def test_a_file_below_a_path_with_any_signs_is_written_to_its_volume_and_nowhere_else(path: str) -> None:
    local, made = grounded(pytorch(f"{{pytorchReplicaSpecs: {{Worker: {replica('pytorch')}}}}}"))
    container = replace(
        made[0].main,
        workdir=f"{path}/work",
        mounts=(Mount(path, "data"),),
        files={f"{path}/key": PodFile("x", is_mounted=True), f"{path} too": PodFile("y")},
    )
    changed = here(container, local)
    assert set(changed.files) == {"/s/claim/key", f"/s/files{path} too"}
    assert changed.workdir == "/s/claim/work"


def test_a_path_of_a_claim_that_only_other_pods_mount_is_the_claims_folder_too() -> None:
    local, (launcher, *_) = grounded(TF)
    container = replace(launcher.main, args=("mpirun", "train.py", "/checkpoints/m.npz", "/checkpoints2/m.npz"))
    here_ = here(container, replace(local, shared_mounts={"/checkpoints": "/s/claims/c"}))
    assert here_.args == ("mpirun", "train.py", "/s/claims/c/m.npz", "/checkpoints2/m.npz")
