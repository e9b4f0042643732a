"""Where a pod template refers to ConfigMaps and Secrets: `env`, `envFrom` and volumes. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.pod_values import Filling, Ref

_ENV = {"configMapKeyRef": "ConfigMap", "secretKeyRef": "Secret"}
_ENV_FROM = {"configMapRef": "ConfigMap", "secretRef": "Secret"}
_VOLUMES = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "secretName")}
_PROJECTED = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "name")}
_FILE_MODE = 0o644
_MAX_MODE = 0o777


def of_env(source: Field) -> Ref | None:
    """What the `valueFrom` of a variable refers to, None when that is something else."""
    for key, kind in _ENV.items():
        found = source.get(key)
        if found.given:
            found.only(("name", "key", "optional"))
            return _ref(found, kind, "name", found.get("key").text())
    return None


def of_env_from(found: Field) -> Iterator[tuple[str, Ref]]:
    """Prefix and reference of each member of `envFrom`."""
    for one in found.items():
        one.only(("prefix", *_ENV_FROM))
        given = [(key, kind) for key, kind in _ENV_FROM.items() if one.get(key).given]
        if len(given) != 1:
            raise one.bad("a configMapRef or a secretRef")
        key, kind = given[0]
        one.get(key).only(("name", "optional"))
        yield one.get("prefix").text(""), _ref(one.get(key), kind, "name")


def of_volume(volume: Field) -> tuple[Filling, ...]:
    """What fills a volume of the kinds configMap, secret and projected."""
    made = [
        _filling(volume.get(key), kind, name) for key, (kind, name) in _VOLUMES.items() if volume.get(key).given
    ]
    projected = volume.get("projected")
    mode = _mode(projected.get("defaultMode"), _FILE_MODE)
    for source in projected.get("sources").items():
        for key, (kind, name) in _PROJECTED.items():
            if source.get(key).given:
                made.append(_filling(source.get(key), kind, name, mode))
    return tuple(made)


def left_empty(volume: Field) -> list[str]:
    """Sources of a projected volume that nothing here can give."""
    sources = volume.get("projected", "sources").items()
    return [key for source in sources for key in source.mapping() if key not in _PROJECTED]


def _filling(found: Field, kind: str, name: str, mode: int = _FILE_MODE) -> Filling:
    found.only((name, "items", "optional", "defaultMode"))
    items = []
    for item in found.get("items").items():
        item.only(("key", "path", "mode"))
        path = item.get("path").text()
        if not path or path.startswith("/") or ".." in path.split("/"):
            raise item.get("path").bad("a path inside the volume")
        given = item.get("mode")
        items.append((item.get("key").text(), path, _mode(given, 0) if given.given else None))
    return Filling(ref=_ref(found, kind, name), items=tuple(items), mode=_mode(found.get("defaultMode"), mode))


def _ref(found: Field, kind: str, name: str, key: str = "") -> Ref:
    return Ref(
        kind=kind,
        name=found.get(name).text(),
        key=key,
        optional=found.get("optional").flag(),
        where=f"{found.where}: {found.path}",
    )


def _mode(found: Field, default: int) -> int:
    return found.number(default, most=_MAX_MODE)
