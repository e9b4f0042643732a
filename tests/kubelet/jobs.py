"""Jobs on the cluster: the pods that `trainer-launch rehearse -f … --render` writes, made by Kubernetes' own Jobs.

Kubernetes' Job stands for what JobSet and the operators make: one for each pod, which brings a lost pod back under
the same host name. The rest of a pod is the manifest's own: its restricted profile, grace, volumes and probes.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import posixpath
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cli.launching import launched
from tests.containers.images import image
from tests.containers.jobs import steps_in
from tests.kubelet.cluster import Cluster
from tests.kubernetes import pod_rules, published

Json = dict[str, Any]
CHECKPOINTS = "/checkpoints"
IMAGES = {"trainer-launch/torch": "torch", "trainer-launch/mpi": "mpi"}
_KEYS = ("id_rsa", "id_rsa.pub", "authorized_keys")
_CODE = "/code"
_SCRIPTS = ("train_charlm.py", "train_mpi.py")
Change = Callable[[str, Json], None]  # of a pod's specification, by its host name
Test = Callable[[Cluster, str, Path], None]  # with its namespace and folder
_ATTEMPTS = 3


class KubeletForgotError(AssertionError):
    """The kubelet never reports how a deleted pod ended.

    If it looks at containers between the end of the pod's last one and that of its network, it removes them before
    it has read their exit codes (https://github.com/kubernetes/kubernetes/issues/104107, open).
    """


def again_if_the_kubelet_forgets(test: Test) -> Test:
    """The test, which begins anew in another namespace where it cannot be known how a pod ended."""

    @functools.wraps(test)
    def repeated(cluster: Cluster, namespace: str, tmp_path: Path) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            folder = tmp_path / str(attempt)
            folder.mkdir()
            try:
                with cluster.namespace(f"{namespace}-{attempt}") as own:
                    test(cluster, own, folder)
            except KubeletForgotError as forgot:
                if attempt == _ATTEMPTS:
                    raise
                warnings.warn(f"begun again: {str(forgot).partition(chr(10))[0]}", stacklevel=1)
            else:
                return

    return repeated


@dataclass(frozen=True)
class Running:
    """A job's pods on the cluster, by their host names."""

    cluster: Cluster
    namespace: str
    hosts: tuple[str, ...]
    checkpoints: Path

    def pods(self, host: str) -> list[Json]:
        """All pods that have had this host name, the newest last."""
        listed = self.cluster.get("pods", "-n", self.namespace, "-l", f"host={host}")["items"]
        return sorted(listed, key=lambda pod: (pod["metadata"]["creationTimestamp"], _is_alive(pod)))

    def pod(self, host: str) -> Json:
        """The newest pod of this host name; an empty one where there is none yet."""
        return (self.pods(host) or [{"metadata": {"name": ""}, "status": {}}])[-1]

    def name(self, host: str) -> str:
        return str(self.cluster.eventually(lambda: self.pod(host)["metadata"]["name"], f"a pod {host}"))

    def container(self, host: str, name: str = "") -> Json:
        """The status of a container of the newest pod, else of the main one."""
        return _status(self.pod(host), name)

    def logs(self, host: str, *words: str, pod: str = "") -> str:
        return self.kubectl("logs", pod or self.name(host), *words, check=False).stdout

    def kubectl(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.cluster.kubectl("-n", self.namespace, *words, check=check)

    def execute(self, host: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.kubectl("exec", self.name(host), "--", *words, check=False)

    def until_it_says(self, host: str, text: str, *words: str) -> None:
        self.cluster.eventually(
            lambda: text in self.logs(host, *words), lambda: f"{text!r} from {host}:\n{self.told()}"
        )

    def ended(self, host: str, name: str = "") -> Json:
        """How a container of the newest pod, else its main one, ended: `exitCode`, `message` and `reason`."""
        return self._ended(host, lambda: self.container(host, name))

    @contextlib.contextmanager
    def kept(self, *hosts: str) -> Iterator[list[str]]:
        """Their present pods, which the API server keeps until this is closed, even deleted ones."""
        names = [self.name(host) for host in hosts]
        self._set_finalizers(names, ["trainer-launch.test/kept"])
        try:
            yield names
        finally:
            self._set_finalizers(names, None)

    def _set_finalizers(self, names: Sequence[str], wanted: list[str] | None) -> None:
        for name in names:
            patch = json.dumps({"metadata": {"finalizers": wanted}})
            self.kubectl("patch", "pod", name, "--type=merge", "-p", patch, check=wanted is not None)

    def until_status(self, pod: str, text: str) -> None:
        """What `kubectl get pods` shows of it."""
        self.cluster.eventually(lambda: text in self.kubectl("get", "pod", pod).stdout, self.told)

    def is_deleted(self, name: str) -> bool:
        """Whether somebody has deleted this pod, which may still have its grace."""
        return "deletionTimestamp" in self.cluster.get("pod", name, "-n", self.namespace)["metadata"]

    def ended_as(self, pod: str, name: str = "") -> Json:
        """The same of a container of this pod, whatever came after it."""
        return self._ended(pod, lambda: _status(self.cluster.get("pod", pod, "-n", self.namespace), name))

    def _ended(self, whose: str, status: Callable[[], Json]) -> Json:
        def found() -> Any:
            seen = status()
            if forgotten := _forgotten(seen):
                raise KubeletForgotError(f"{forgotten}\n{self.told()}")
            return seen.get("state", {}).get("terminated")

        return dict(self.cluster.eventually(found, lambda: f"the end of {whose}:\n{self.told()}"))

    def until_it_resumes(self, host: str) -> None:
        """Rank 0, which is there, has read a checkpoint and trains on."""

        def resumed() -> bool:
            _, _, after = self.logs(host).rpartition("resumed at step ")
            return "resumed at step " in self.logs(host) and len(steps_in(after)) > 2

        self.cluster.eventually(resumed, lambda: f"{host} trains on:\n{self.told()}")

    def told(self) -> str:
        """Everything that may say why something did not happen."""
        words = [self.kubectl("get", "pods", "-o", "wide", check=False).stdout]
        words += [self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False).stdout[-3000:]]
        words.append(self.kubectl("get", "pods", "-o", "jsonpath={.items[*].status}", check=False).stdout)
        words.append(self.cluster.said_of(self.namespace))
        words += [f"== {host}\n{self.logs(host, '--all-containers', '--tail=40')}" for host in self.hosts]
        return "\n".join(words)


def _status(pod: Json, container: str) -> Json:
    status = pod["status"]
    listed = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return next((one for one in reversed(listed) if container in ("", one["name"])), {})


def _forgotten(status: Json) -> str | None:
    """What the kubelet says where it has removed a deleted pod's container before it looked at its end."""
    last: Json = status.get("lastState", {}).get("terminated") or {}
    return last["message"] if last.get("reason") == "ContainerStatusUnknown" else None


def _is_alive(pod: Json) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


def no_change(_host: str, _spec: Json) -> None:
    """A pod as its manifest has it."""


def submit(
    cluster: Cluster,
    namespace: str,
    folder: Path,
    documents: Sequence[Json],
    change: Change = no_change,
    script: str = "",
) -> Running:
    """Create a job's pods, with what its controller makes beside them."""
    job = next(one for one in documents if "Runtime" not in one["kind"])
    job["metadata"]["namespace"] = namespace
    (folder / "job.yaml").write_text("---\n".join(json.dumps(one) + "\n" for one in documents))
    launched("rehearse", "-f", str(folder / "job.yaml"), "--render", str(folder / "pods"), cwd=published.EXAMPLES)
    snapshots = [json.loads(path.read_text()) for path in sorted((folder / "pods").iterdir())]
    templates = {pod.where.lower(): pod for one in documents for pod in published.pods(one)}
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    checkpoints.chmod(0o777)
    folder.chmod(0o755)
    _claim(cluster, namespace, checkpoints)
    name = job["metadata"]["name"]
    hosts = tuple(dict.fromkeys(one["hostname"] for one in snapshots))
    objects = [_service(name), _code(script)]
    for host in hosts:
        own = [one for one in snapshots if one["hostname"] == host]
        role = own[0]["pod"]["role"]
        spec, files = _pod(name, host, templates[role].spec, own)
        spec["restartPolicy"] = own[0]["pod"]["restart_policy"]
        change(host, spec)
        _assert_restricted(spec)
        objects += [*files, _job(host, name, spec)]
    for image_ in {one["image"] for one in _containers(objects)}:
        cluster.load(image_)
    cluster.apply([{**one, "metadata": {"namespace": namespace, **one["metadata"]}} for one in objects])
    return Running(cluster, namespace, hosts, checkpoints)


def _containers(objects: Sequence[Json]) -> Iterator[Json]:
    for one in objects:
        if one["kind"] == "Job":
            spec = one["spec"]["template"]["spec"]
            yield from (*spec.get("initContainers", []), *spec["containers"])


def _assert_restricted(spec: Json) -> None:
    pod = published.Pod(where="", spec=spec, job={}, restart="")
    assert [*pod_rules.restricted(pod), *pod_rules.hardened(pod)] == []


def _pod(job: str, host: str, template: Mapping[str, Any], snapshots: Sequence[Json]) -> tuple[Json, list[Json]]:
    """A pod: its template with what the controller wrote into it; and the objects that it mounts."""
    spec: Json = json.loads(json.dumps(template))
    spec |= {"hostname": host, "subdomain": job}
    files: dict[str, Json] = {}
    kept = [one for one in spec.get("volumes", []) if "persistentVolumeClaim" not in one]
    for container in (*spec.get("initContainers", []), *spec["containers"]):
        snapshot = next(one for one in snapshots if one["pod"]["container"] == container["name"])
        container["image"] = image(IMAGES[container["image"]])
        container["env"] = [{"name": name, "value": _literal(value)} for name, value in snapshot["env"].items()]
        container["env"].append({"name": "OMP_NUM_THREADS", "value": "1"})  # two cores for all of them
        container |= {"command": snapshot["command"], "args": [_literal(word) for word in snapshot["args"]]}
        container.pop("resources", None)
        container["workingDir"] = _CODE
        mounts = {one["mountPath"]: one["name"] for one in container.get("volumeMounts", [])}
        mounts |= {_CODE: "code", CHECKPOINTS: "checkpoints"}
        for folder, volume in _volumes(host, snapshot):
            mounts[folder] = volume["metadata"]["name"]
            files[volume["metadata"]["name"]] = volume
        container["volumeMounts"] = [{"name": name, "mountPath": path} for path, name in mounts.items()]
    spec["volumes"] = [
        *kept,
        {"name": "code", "configMap": {"name": "code"}},
        {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}},
        *(_mounted(name, one) for name, one in files.items()),
    ]
    return spec, [{key: value for key, value in one.items() if key != "modes"} for one in files.values()]


def _literal(word: str) -> str:
    """What was expanded already."""
    return word.replace("$(", "$$(")


def _volumes(host: str, snapshot: Json) -> Iterator[tuple[str, Json]]:
    """The files of a container by their folders: keys are a Secret, others a ConfigMap; `modes` is ours."""
    folders: dict[str, dict[str, str]] = {}
    for path, text in snapshot["files"].items():
        folders.setdefault(posixpath.dirname(path), {})[posixpath.basename(path)] = text
    for number, (folder, texts) in enumerate(folders.items()):
        modes = {name: int(snapshot["pod"]["modes"][f"{folder}/{name}"], 8) for name in texts}
        if set(texts) == set(_KEYS):
            made: Json = {"kind": "Secret", "metadata": {"name": "keys"}, "data": _keys()}
        else:
            made = {"kind": "ConfigMap", "metadata": {"name": f"{host}-{number}"}, "data": texts}
        yield folder, {"apiVersion": "v1", **made, "modes": modes}


def _mounted(name: str, made: Json) -> Json:
    items = [{"key": key, "path": key, "mode": mode} for key, mode in made["modes"].items()]
    if made["kind"] == "Secret":
        return {"name": name, "secret": {"secretName": name, "items": items}}
    return {"name": name, "configMap": {"name": name, "items": items}}


@functools.cache
def _keys() -> Json:
    """A pair of keys as mpi-operator makes it."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", f"{folder}/id_rsa"]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
        private, public = (base64.b64encode(Path(folder, name).read_bytes()).decode() for name in _KEYS[:2])
    return dict(zip(_KEYS, (private, public, public), strict=True))


def _service(job: str) -> Json:
    """Headless, and with the names of pods that are not ready, as JobSet and mpi-operator make it."""
    spec = {"clusterIP": "None", "selector": {"job": job}, "publishNotReadyAddresses": True}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": job}, "spec": spec}


def _code(script: str) -> Json:
    """The scripts that pods run; `script` is one of the test's own, train.py."""
    data = {name: (published.EXAMPLES / name).read_text() for name in _SCRIPTS} | {"train.py": script}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": data}


def _claim(cluster: Cluster, namespace: str, folder: Path) -> None:
    """The disk of a job, which all its pods mount."""
    access = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    disk = {
        **access,
        "capacity": {"storage": "1Gi"},
        "claimRef": {"namespace": namespace, "name": "checkpoints"},
        "hostPath": {"path": str(folder)},
    }
    claim = {**access, "volumeName": namespace, "resources": {"requests": {"storage": "1Gi"}}}
    about = {"name": "checkpoints", "namespace": namespace}
    cluster.apply(
        [
            {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": namespace}, "spec": disk},
            {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": about, "spec": claim},
        ]
    )
    query = ("persistentvolumeclaim", "checkpoints", "-n", namespace)
    cluster.eventually(lambda: cluster.get(*query)["status"].get("phase") == "Bound", "the claim is bound")


def _job(host: str, job: str, spec: Json) -> Json:
    template = {"metadata": {"labels": {"job": job, "host": host}}, "spec": spec}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": host},
        "spec": {"backoffLimit": 6, "template": template},
    }
