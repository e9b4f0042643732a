"""A pod template as Kubernetes has it, read strictly; what this machine cannot do is kept as phrases. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from trainer_launch.model import signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import parse_quantity, shown
from trainer_launch.rehearsal.controllers.documents import Field
from trainer_launch.rehearsal.controllers.pod_values import (
    FIELDS,
    Container,
    EnvItem,
    ExitRule,
    Mount,
    PodFile,
    Template,
    escaped,
)

RESTARTS = ("Always", "OnFailure", "Never")
# What a pod may hold that changes nothing for a rehearsal.
_POD_SILENT = (
    "imagePullSecrets", "enableServiceLinks", "automountServiceAccountToken", "dnsPolicy", "dnsConfig",
    "subdomain", "setHostnameAsFQDN", "readinessGates", "os", "shareProcessNamespace",
)  # fmt: skip
_POD_READ = (
    "containers", "initContainers", "restartPolicy", "terminationGracePeriodSeconds", "volumes", "hostname",
    "serviceAccountName", "serviceAccount",
)  # fmt: skip
_CONTAINER_SILENT = (
    "image", "imagePullPolicy", "stdin", "stdinOnce", "tty", "terminationMessagePath",
    "terminationMessagePolicy", "resizePolicy",
)  # fmt: skip
_CONTAINER_READ = (
    "name", "command", "args", "workingDir", "env", "resources", "volumeMounts", "restartPolicy", "ports",
    "envFrom", "restartPolicyRules", "lifecycle",
)  # fmt: skip
# Volumes of which each pod has its own; all others are outside, and the job's pods share them.
_OWN_VOLUMES = ("emptyDir", "ephemeral", "downwardAPI", "projected", "configMap", "secret", "image", "csi")
_RESTART_ALL = "RestartAllContainers"
_MOUNT = ("name", "mountPath", "subPath", "subPathExpr", "readOnly", "recursiveReadOnly", "mountPropagation")
_ENV = {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}
_ENV_FROM = {"configMapRef": "ConfigMap", "secretRef": "Secret"}
_CONTENT = ("configMap", "secret", "projected")  # volumes with files
_FILE_MODE = 0o644
_MAX_MODE = 0o777


def read_template(template: Field) -> Template:
    """A PodTemplateSpec."""
    template.only(("metadata", "spec"))
    spec = template.get("spec")
    spec.only((*_POD_READ, *_POD_SILENT))
    containers = tuple(map(read_container, spec.get("containers").items()))
    if not containers:
        raise spec.get("containers").bad("at least one container")
    init = tuple(map(_init, spec.get("initContainers").items()))
    names = [container.name for container in (*init, *containers)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise spec.get("containers").bad("unique container names", shown(twice[0]))
    volumes = {volume.get("name").name(): _volume(volume) for volume in spec.get("volumes").named_items()}
    for container in (*containers, *init):
        for mount in container.mounts:
            if mount.volume not in volumes:
                raise spec.get("volumes").bad(f"the volume {mount.volume} that {container.name} mounts")
    contents = {volume.get("name").text(): dict(_content(volume)) for volume in spec.get("volumes").items()}
    return Template(
        containers=tuple(
            replace(container, files=dict(_mounted_files(container, contents))) for container in containers
        ),
        init=tuple(replace(container, files=dict(_mounted_files(container, contents))) for container in init),
        restart=spec.get("restartPolicy").choice(RESTARTS, "") or None,
        grace_s=float(spec.get("terminationGracePeriodSeconds").number(30)),
        volumes=volumes,
        labels={name: text.text("") for name, text in template.get("metadata", "labels").fields()},
        annotations={name: text.text("") for name, text in template.get("metadata", "annotations").fields()},
        service_account=spec.get("serviceAccountName").text("") or spec.get("serviceAccount").text("") or "default",
    )


def read_container(field: Field) -> Container:
    """A container, main or init."""
    field.only((*_CONTAINER_READ, *_CONTAINER_SILENT))
    resources = field.get("resources")
    resources.only(("limits", "requests", "claims"))
    limits, requests = quantities(resources.get("limits")), quantities(resources.get("requests"))
    ignore_resources(field, limits, requests)
    return Container(
        name=field.get("name").name(),
        command=field.get("command").texts(),
        args=field.get("args").texts(),
        sources=tuple(_of_env_from(field.get("envFrom"))),
        items=read_env(field.get("env")),
        mounts=tuple(_mount(mount) for mount in field.get("volumeMounts").items()),
        workdir=field.get("workingDir").text("") or None,
        ports={
            port.get("name").text(""): port.get("containerPort").number(least=1, most=65535)
            for port in field.get("ports").items()
        },
        limits=limits,
        requests=requests,
        restart=field.get("restartPolicy").choice(RESTARTS, "") or None,
        restart_rules=tuple(map(_restart_rule, field.get("restartPolicyRules").items())),
        stop_signal=_stop_signal(field.get("lifecycle")),
    )


def _stop_signal(lifecycle: Field) -> str | None:
    lifecycle.only(("stopSignal",), "of lifecycle")
    signal = lifecycle.get("stopSignal")
    if signal.given and signal_policy.number_of(signal.text()) is None:
        raise signal.bad("the name of a signal, such as SIGTERM or SIGRTMIN+3")
    return signal.text("") or None


def _init(field: Field) -> Container:
    made = read_container(field)
    if not made.command and not made.args:
        field.ignore(f"container {made.name}: its program is in its image")
    return replace(made, sidecar=made.restart == "Always", platforms=not (made.command or made.args))


def _restart_rule(rule: Field) -> ExitRule:
    """A member of restartPolicyRules (KEP-5307)."""
    rule.only(("action", "exitCodes"))
    if rule.get("action").choice(("Restart", _RESTART_ALL)) == _RESTART_ALL:
        rule.ignore(f"{_RESTART_ALL}: only the container itself restarts")
    return exit_rule(rule.get("exitCodes"), "Restart")


def exit_rule(codes: Field, action: str) -> ExitRule:
    """A rule by exit codes, as containers and Jobs have it."""
    codes.only(("containerName", "operator", "values"))
    return ExitRule(
        action=action,
        container=codes.get("containerName").text("") or None,
        among=codes.get("operator").choice(("In", "NotIn")) == "In",
        codes=tuple(value.number(most=255) for value in codes.get("values").items()),
    )


def read_env(field: Field) -> tuple[EnvItem, ...]:
    """A list of variables; those that only a cluster can give, or that are optional and not there, are left out."""
    return tuple(item for each in field.items() if (item := _env_item(each)) is not None)


def _env_item(field: Field) -> EnvItem | None:
    field.only(("name", "value", "valueFrom"))
    name = field.get("name").text()
    if not name or "=" in name:
        raise field.get("name").bad("the name of a variable")
    source, value = field.get("valueFrom"), field.get("value").text("")
    if not source.given:
        return EnvItem(name=name, value=value)
    if value or sum(each.given for _, each in source.fields()) != 1:
        raise source.bad("one source, and no value beside it")
    source.only(("fieldRef", "resourceFieldRef", "secretKeyRef", "configMapKeyRef", "fileKeyRef"))
    for kind_key, kind in _ENV.items():
        reference = source.get(kind_key)
        if reference.given:
            reference.only(("name", "key", "optional"))
            config, key = reference.get("name").text(), reference.get("key").text()
            if not key:
                raise reference.get("key").bad("the name of a key")
            values = reference.configs.find(reference, kind, config, key)
            return _variable(name, values[key], reference) if key in values else None
    path = source.get("fieldRef", "fieldPath").text("")
    if path in FIELDS or path.startswith(("metadata.labels[", "metadata.annotations[")):
        return EnvItem(name=name, field=path)
    field.ignore(f"variable {name} (from {next(iter(source.mapping()), 'nothing')})")
    return None


def ignore_resources(field: Field, limits: Mapping[str, str], requests: Mapping[str, str]) -> None:
    """Note that these resources have no effect here."""
    if limits or requests:
        field.ignore(f"resources ({', '.join(dict.fromkeys((*requests, *limits)))})")


def quantities(field: Field) -> Mapping[str, str]:
    """Resources and how much of each."""
    return {name: _quantity(amount) for name, amount in field.fields()}


def _quantity(field: Field) -> str:
    is_number = isinstance(field.value, int | float) and not isinstance(field.value, bool)
    text = str(field.value) if is_number else field.text("0")
    if (parse_quantity(text) or 0) < 0 or parse_quantity(text) is None:
        raise field.bad("a quantity such as 4, 500m or 16Gi")
    return text


def _mount(field: Field) -> Mount:
    field.only(_MOUNT)
    path = field.get("mountPath").text()
    if not path.startswith("/") or ".." in path.split("/"):
        raise field.get("mountPath").bad("an absolute path without ..")
    part = field.get("subPathExpr" if field.get("subPathExpr").given else "subPath").text("")
    return Mount(path.rstrip("/") or "/", field.get("name").text(), part.strip("/"))


def _volume(field: Field) -> str:
    """The owner of a volume: "pod", or a claim of all pods of the job."""
    name, kind = field.get("name").text(), next((key for key in field.mapping() if key != "name"), "emptyDir")
    field.get("emptyDir").only(("medium",), f"of volume {name}")
    if kind not in ("emptyDir", *_CONTENT):
        field.ignore(f"volume {name} ({kind}): an empty directory instead")
    if kind in _OWN_VOLUMES:
        return "pod"
    return f"claim:{field.get('persistentVolumeClaim', 'claimName').name('') or name}"


def _of_env_from(field: Field) -> Iterator[EnvItem]:
    """The variables of each member of `envFrom`."""
    for source in field.items():
        source.only(("prefix", *_ENV_FROM))
        given = [(source.get(key), kind) for key, kind in _ENV_FROM.items() if source.get(key).given]
        if len(given) != 1:
            raise source.bad("a configMapRef or a secretRef")
        ((ref, kind),) = given
        ref.only(("name", "optional"))
        for key, value in ref.configs.find(ref, kind, ref.get("name").text()).items():
            yield _variable(f"{source.get('prefix').text('')}{key}", value, ref)


def _variable(name: str, value: str, field: Field) -> EnvItem:
    if "\0" in value:
        raise UsageError(f"{field.place} makes a variable of a value with NUL in it; mount it as a file")
    return EnvItem(name=name, value=escaped(value))


def _content(volume: Field) -> Iterator[tuple[str, PodFile]]:
    """The files of a volume of the kinds configMap, secret and projected, by their paths in it."""
    projected = volume.get("projected")
    mode = projected.get("defaultMode").number(_FILE_MODE, most=_MAX_MODE)
    for source in projected.get("sources").items():
        for key in source.mapping():
            if key not in _CONTENT:
                source.ignore(f"volume {volume.get('name').text()} (projected): without {key}")
    for source in (volume, *projected.get("sources").items()):
        if source.get("configMap").given:
            yield from _files(source.get("configMap"), "ConfigMap", "name", mode)
        if source.get("secret").given:
            yield from _files(source.get("secret"), "Secret", "secretName" if source is volume else "name", mode)


def _files(field: Field, kind: str, name: str, mode: int) -> Iterator[tuple[str, PodFile]]:
    field.only((name, "items", "optional", "defaultMode"))
    config, mode = field.get(name).text(), field.get("defaultMode").number(mode, most=_MAX_MODE)
    chosen = [_chosen(item, mode) for item in field.get("items").items()]
    values = field.configs.find(field, kind, config)
    for key, path, own_mode in chosen or [(key, key, mode) for key in values]:
        if key in values or not field.get("optional").flag():
            text = values[key] if key in values else field.configs.find(field, kind, config, key)[key]
            yield path, PodFile(text, own_mode, is_mounted=True)


def _chosen(item: Field, mode: int) -> tuple[str, str, int]:
    """Key, path in the volume, and mode of a file."""
    item.only(("key", "path", "mode"))
    path = item.get("path").text()
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise item.get("path").bad("a path inside the volume")
    return item.get("key").text(), path, item.get("mode").number(mode, most=_MAX_MODE)


def _mounted_files(
    container: Container, contents: Mapping[str, Mapping[str, PodFile]]
) -> Iterator[tuple[str, PodFile]]:
    """The files of the volumes that a container mounts, by their paths in the container."""
    for mount in container.mounts:
        for path, file in contents.get(mount.volume, {}).items():
            if not mount.part:
                yield f"{mount.path.rstrip('/')}/{path}", file
            elif path == mount.part:
                yield mount.path, file
            elif path.startswith(f"{mount.part}/"):
                yield mount.path + path.removeprefix(mount.part), file
