"""What a pod must fulfil: Pod Security Standards' profile "restricted" (Kubernetes 1.34), and rules of our own.

Each function returns what is wrong, a sentence for each; nothing: all is well. What the profile allows and no
manifest of ours has, such as sysctls, is refused here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tests.kubernetes.published import Pod

VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)
UNUSED = ("sysctls", "seLinuxOptions", "procMount", "windowsOptions")  # our manifests have none of them
GRACE_MARGIN_S = (5, 30)  # of the pod's grace over the launcher's: to kill, to speak, to end
DEFAULT_GRACE_S = 25  # the launcher's


def restricted(pod: Pod) -> Iterator[str]:
    """What the profile "restricted" would refuse."""
    spec, context = pod.spec, pod.spec.get("securityContext", {})
    yield from (f"{flag} is set" for flag in ("hostNetwork", "hostPID", "hostIPC") if spec.get(flag))
    for volume in spec.get("volumes", []):
        for kind in volume.keys() - VOLUMES - {"name"}:
            yield f"volume {volume['name']} is of the kind {kind}"
    yield from (f"{name} is set" for name in UNUSED if name in context)
    if context.get("runAsUser") == 0:
        yield "runs as root"
    for container in pod.containers:
        for problem in _container(container, context):
            yield f"{container['name']}: {problem}"
        for port in container.get("ports", []):
            if port.get("hostPort"):
                yield f"{container['name']}: hostPort {port['hostPort']}"


def _container(container: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    own = container.get("securityContext", {})
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield "does not drop ALL capabilities"
    for added in capabilities.get("add", []):
        if added != "NET_BIND_SERVICE":
            yield f"adds the capability {added}"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield "runAsNonRoot is not true"
    if own.get("runAsUser") == 0:
        yield "runs as root"
    if own.get("seccompProfile", pod.get("seccompProfile", {})).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "no seccompProfile"
    yield from (f"{name} is set" for name in UNUSED if name in own)


def hardened(pod: Pod) -> Iterator[str]:
    """What we promise beyond the profile: nothing is writable but volumes, and there is one at /tmp."""
    for container in pod.containers:
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            yield f"{container['name']}: readOnlyRootFilesystem is not true"
        if "/tmp" not in {mount["mountPath"] for mount in container.get("volumeMounts", [])}:
            yield f"{container['name']}: nothing is mounted at /tmp"


def grace(pod: Pod) -> Iterator[str]:
    """The pod's grace must leave the launcher time to end what is deaf, and to say so."""
    whole = pod.spec.get("terminationGracePeriodSeconds", 30)
    for container in pod.spec["containers"]:
        env = {one["name"]: one.get("value", "") for one in container.get("env", [])}
        own = float(env.get("TRAINER_LAUNCH_GRACE", DEFAULT_GRACE_S))
        low, high = GRACE_MARGIN_S
        if not low <= whole - own <= high:
            longer = f"{whole - own:g} s longer than the launcher's"
            yield f"{container['name']}: the pod's grace of {whole} s is {longer}"


def shared_memory(pod: Pod) -> Iterator[str]:
    """Who trains by more than one process has more at /dev/shm than 64 MiB, bounded, and below the memory limit."""
    volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", [])}
    for container in pod.containers:
        for mount in container.get("volumeMounts", []):
            if mount["mountPath"] == "/dev/shm":
                folder = volumes.get(mount["name"], {}).get("emptyDir", {})
                if folder.get("medium") != "Memory" or "sizeLimit" not in folder:
                    yield f"{container['name']}: /dev/shm is not in memory, or not bounded"
                elif (most := _limit(container)) and _bytes(folder["sizeLimit"]) > most / 2:
                    yield f"{container['name']}: /dev/shm may take more than half of the memory limit"


def _limit(container: Mapping[str, Any]) -> int:
    return _bytes(container.get("resources", {}).get("limits", {}).get("memory", "0"))


def _bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?", str(quantity)).groups()  # type: ignore[union-attr]
    return int(number) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[unit]
