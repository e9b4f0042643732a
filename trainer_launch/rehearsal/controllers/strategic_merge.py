"""Kubernetes' strategic merge, as far as pod templates need it: members of lists are matched by their key. Pure."""

from __future__ import annotations

from typing import Any

# The field by which members of a list of this name are the same thing; every other list is replaced as a whole.
_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "topologySpreadConstraints": "topologyKey",
    "hostAliases": "ip",
}


def merged(base: Any, patch: Any, name: str = "") -> Any:
    """`base` with `patch` over it; null removes."""
    if isinstance(base, dict) and isinstance(patch, dict):
        kept = {key: value for key, value in base.items() if key not in patch or patch[key] is not None}
        over = {key: merged(base.get(key), value, key) for key, value in patch.items() if value is not None}
        return {**kept, **over}
    if isinstance(base, list) and isinstance(patch, list) and name in _KEYS:
        return _lists(base, patch, _KEYS[name])
    return patch


def _lists(base: list[Any], patch: list[Any], key: str) -> list[Any]:
    made = list(base)
    fresh = []
    for item in patch:
        at = next(
            (n for n, old in enumerate(made) if _of(old, key) is not None and _of(old, key) == _of(item, key)), None
        )
        if at is None:
            fresh.append(item)
        else:
            made[at] = merged(made[at], item)
    return [*fresh, *made]  # as Kubernetes has it: what is new comes first


def _of(item: Any, key: str) -> Any:
    return item.get(key) if isinstance(item, dict) else None
