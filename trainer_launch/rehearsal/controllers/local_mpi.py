"""A job of MPI on one machine: our sshd in the place of the image's, one port, and mpirun under our launcher. Pure.

The image's sshd and ssh know neither a loopback address nor the key that a rehearsal makes; `trainer-launch sshd`
and `trainer-launch run` do, with what they are told here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer_launch.planning.horovodrun_options import is_horovodrun
from trainer_launch.planning.typed_mpirun import is_mpirun
from trainer_launch.rehearsal.controllers.flags import ON_A_LAPTOP
from trainer_launch.rehearsal.controllers.pod_values import Container, File, Pod

OURS = "trainer-launch"
KUBECTL = "/opt/kube/kubectl"  # where MPIJob v1 has it delivered
_HOSTFILE = "/etc/mpi/hostfile"
_KUBEXEC = "/etc/mpi/kubexec.sh"
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_WHERE = ("--listen-address", "--ssh-port")  # the port is told by a variable
_LAUNCHERS = ("OMPI_MCA_", "I_MPI_", "HYDRA_")  # variables that only who runs mpirun gets


def uses_ssh(pod: Pod) -> bool:
    """Whether a key of the job is mounted in this pod."""
    return any(_key_folder(container) for container in pod.containers)


def is_worker(pod: Pod) -> bool:
    """Whether the pod only serves: its program is sshd, or sleeps while others come by `kubectl exec`."""
    serves = uses_ssh(pod) or reached_by_kubectl(pod)
    return serves and not any(_HOSTFILE in container.files for container in pod.containers)


def reached_by_kubectl(pod: Pod) -> bool:
    """Whether mpirun would reach its hosts by `kubectl exec`: MPIJob v1."""
    return any(_KUBEXEC in container.files for container in pod.containers)


def by_kubectl(pod: Pod, kubectl: str, scratch: str) -> Pod:
    """The pod of an MPIJob v1, whose launcher has this text as its kubectl; commands stay as they are."""
    if not reached_by_kubectl(pod):
        return pod

    def changed(container: Container) -> Container:
        if _KUBEXEC not in container.files:
            return container
        is_launcher = _HOSTFILE in container.files
        told = {**ON_A_LAPTOP, **_AS_ROOT} if is_launcher else _apart(scratch)
        files = {**container.files, **({KUBECTL: File(kubectl, 0o755)} if is_launcher else {})}
        return replace(container, env={**container.env, "TMPDIR": scratch, **told}, files=files)

    return replace(pod, containers=tuple(map(changed, pod.containers)))


def on_loopback(pod: Pod, port: int, scratch: str) -> Pod:
    """The pod with our sshd and launcher in it; `scratch` is a folder of its own for temporary files."""
    if not uses_ssh(pod):
        return pod
    containers = tuple(_changed(container, pod, port, scratch) for container in pod.containers)
    works = any(_names_itself(container, pod) for container in pod.containers)
    init = (*pod.init, _own_sshd(pod, port, scratch)) if works else pod.init
    return replace(pod, containers=containers, init=init)


def _changed(container: Container, pod: Pod, port: int, scratch: str) -> Container:
    if _key_folder(container) is None:
        return container
    is_launcher = _HOSTFILE in container.files
    words = (*container.command, *container.args)
    name = words[0].rpartition("/")[2] if words else ""
    if name == "sshd":
        words = _sshd(pod)
    elif name == OURS and words[1:2] == ("sshd",):
        words = _sshd(pod, words[2:])
    elif name and (is_mpirun(name) or is_horovodrun(words)):
        words = (OURS, "run", "--", *words)
    env = {**container.env, **_env(container, port, scratch), **(ON_A_LAPTOP if is_launcher else _apart(scratch))}
    return replace(container, env=env, command=words[:1], args=words[1:])


def _own_sshd(pod: Pod, port: int, scratch: str) -> Container:
    """A launcher that is a node too is reached like the others: here it has an address like theirs."""
    container = pod.main
    told = {name: value for name, value in container.env.items() if not name.startswith(_LAUNCHERS)}
    if "K_MPI_JOB_ROLE" in told:
        told["K_MPI_JOB_ROLE"] = "worker"
    env = {**told, **_env(container, port, scratch), **_apart(scratch)}
    words = _sshd(pod)
    keys = {path: file for path, file in container.files.items() if file.key}
    return replace(container, name="sshd", env=env, command=words[:1], args=words[1:], files=keys, sidecar=True)


def _sshd(pod: Pod, typed: Sequence[str] = ()) -> tuple[str, ...]:
    """Our sshd at the pod's own address; of what was `typed` all stays but where it listens."""
    kept: list[str] = []
    is_value = False
    for word in typed:
        option, joined, _ = word.partition("=")
        if is_value or option in _WHERE:
            is_value = not is_value and not joined
        else:
            kept.append(word)
    return (OURS, "sshd", *kept, "--listen-address", pod.address)


def _env(container: Container, port: int, scratch: str) -> Mapping[str, str]:
    ssh = {"TRAINER_LAUNCH_SSH_DIR": _key_folder(container) or "", "TRAINER_LAUNCH_SSH_PORT": str(port)}
    return {**ssh, "TMPDIR": scratch}


def _apart(scratch: str) -> Mapping[str, str]:
    """Open MPI takes pods of one machine for machines that share no memory, and its files would meet."""
    return {f"OMPI_MCA_btl_{btl}_backing_directory": scratch for btl in ("vader", "sm")}


def _names_itself(container: Container, pod: Pod) -> bool:
    hosts = container.files[_HOSTFILE].text if _HOSTFILE in container.files else ""
    return any(
        line.startswith(tuple(f"{name}{end}" for name in pod.draft.names for end in " :"))
        for line in hosts.splitlines()
    )


def _key_folder(container: Container) -> str | None:
    return next((path.rpartition("/")[0] for path, file in container.files.items() if file.key == "private"), None)
