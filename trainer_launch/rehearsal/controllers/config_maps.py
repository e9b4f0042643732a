"""ConfigMaps and Secrets that are given with a job: their values in its pods' variables and volumes. Pure.

What a Secret holds is marked all the way, and never a part of a message.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.documents import HIDDEN, Field
from trainer_launch.rehearsal.controllers.pod_values import (
    Container,
    EnvItem,
    File,
    Filling,
    Ref,
    Template,
    Workload,
)

KINDS = ("ConfigMap", "Secret")
_KNOWN = {
    "ConfigMap": ("apiVersion", "kind", "metadata", "data", "binaryData", "immutable"),
    "Secret": ("apiVersion", "kind", "metadata", "data", "stringData", "type", "immutable"),
}
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")

Values = Mapping[str, str]  # key -> text; bytes that are no UTF-8 survive as surrogates


@dataclass(frozen=True, slots=True)
class Configs:
    """By kind and name, what is given."""

    given: Mapping[tuple[str, str], Values] = field(default_factory=dict)

    def find(self, ref: Ref) -> Values | None:
        """All values that a reference means; None: it is optional, and not there.

        Raises:
            UsageError: it is not there.
        """
        values = self.given.get((ref.kind, ref.name))
        if values is None and not ref.optional:
            names = ", ".join(name for kind, name in self.given if kind == ref.kind) or "none"
            raise UsageError(
                f"{ref.where} refers to the {ref.kind} {ref.name[:80]!r}, which is in none of the files "
                f"(found: {names}); add its file with another -f, or set optional: true"
            )
        if values is None or not ref.key:
            return values
        if ref.key in values:
            return {ref.key: values[ref.key]}
        if ref.optional:
            return None
        raise UsageError(
            f"{ref.where} refers to the key {ref.key[:80]!r}, which the {ref.kind} {ref.name} does not have "
            f"(it has {', '.join(values) or 'none'}); correct it, or set optional: true"
        )


def read(documents: Iterable[Field], namespace: str) -> Configs:
    """Those of a job's namespace.

    Raises:
        UsageError: one is no ConfigMap or Secret as Kubernetes takes it, or is there twice.
    """
    given: dict[tuple[str, str], Values] = {}
    for found in documents:
        kind, name = found.get("kind").text(), found.get("metadata", "name")
        if (found.get("metadata", "namespace").text("") or namespace) != namespace:
            continue
        if (kind, name.text()) in given:
            raise name.bad(f"a name that no other {kind} of these files has")
        given[kind, name.text()] = dict(_values(found, kind))
    return Configs(given)


def _values(found: Field, kind: str) -> Iterator[tuple[str, str]]:
    found.only(_KNOWN[kind])
    is_secret = kind == "Secret"
    plain, coded = ("stringData", "data") if is_secret else ("data", "binaryData")
    for part in (coded, plain):  # of one key in both the plain text counts
        for key, one in found.get(part).fields():
            if _KEY.fullmatch(key) is None:
                raise one.bad("a key of letters, digits, '-', '_' and '.'", found=HIDDEN if is_secret else key)
            if not isinstance(one.value, str):
                raise one.bad("a string; quote it", found=HIDDEN if is_secret else None)
            yield key, _decoded(one) if part == coded else one.value


def _decoded(one: Field) -> str:
    try:
        data = base64.b64decode("".join(one.value.split()), validate=True)
    except (binascii.Error, ValueError):
        raise one.bad(
            "text in base64 (stringData of a Secret, data of a ConfigMap, take it plain)", HIDDEN
        ) from None
    return data.decode("utf-8", "surrogateescape")


# -- into the pods ----------------------------------------------------------------------------


def filled(workload: Workload, configs: Configs) -> Workload:
    """The job with every reference replaced by what it means.

    Raises:
        UsageError: one is to nothing.
    """
    made: dict[int, Template] = {}  # pods of a role often share one template
    absent: dict[str, None] = {}
    drafts = []
    for draft in workload.drafts:
        if id(draft.template) not in made:
            made[id(draft.template)] = _template(draft.template, configs, absent)
        drafts.append(replace(draft, template=made[id(draft.template)]))
    return replace(workload, drafts=tuple(drafts), ignored=(*workload.ignored, *absent))


def _template(template: Template, configs: Configs, absent: dict[str, None]) -> Template:
    contents = {volume: dict(_content(fillings, configs, absent)) for volume, fillings in template.fillings.items()}

    def changed(container: Container) -> Container:
        return replace(
            container,
            items=tuple(_items(container, configs, absent)),
            sources=(),
            files={**container.files, **dict(_files(container, contents))},
        )

    return replace(
        template,
        containers=tuple(map(changed, template.containers)),
        init=tuple(map(changed, template.init)),
        fillings={},
    )


def _items(container: Container, configs: Configs, absent: dict[str, None]) -> Iterator[EnvItem]:
    """envFrom comes first, so that `env` is stronger."""
    for prefix, ref in container.sources:
        values = configs.find(ref)
        if values is None:
            absent[_absent(ref)] = None
        for key, value in (values or {}).items():
            yield _item(f"{prefix}{key}", value, ref)
    for item in container.items:
        if item.ref is None:
            yield item
            continue
        values = configs.find(item.ref)
        if values is None:
            absent[_absent(item.ref)] = None
        for value in (values or {}).values():
            yield _item(item.name, value, item.ref)


def _item(name: str, value: str, ref: Ref) -> EnvItem:
    if "\0" in value:
        raise UsageError(f"{ref.where} makes a variable of a value with NUL in it; mount it as a file")
    return EnvItem(name=name, value=value, is_literal=True, is_secret=ref.is_secret)


def _absent(ref: Ref) -> str:
    return f"{ref.kind} {ref.name} (optional, and not given)"


def _content(
    fillings: tuple[Filling, ...], configs: Configs, absent: dict[str, None]
) -> Iterator[tuple[str, File]]:
    """What a volume holds: path in it -> file."""
    for filling in fillings:
        values = configs.find(filling.ref)
        if values is None:
            absent[_absent(filling.ref)] = None
            continue
        items = filling.items or tuple((key, key, None) for key in values)
        for key, path, mode in items:
            if key in values:
                yield (
                    path,
                    File(values[key], mode or filling.mode, is_mounted=True, is_secret=filling.ref.is_secret),
                )
            elif not filling.ref.optional:
                configs.find(replace(filling.ref, key=key))  # says that it is not there


def _files(container: Container, contents: Mapping[str, Mapping[str, File]]) -> Iterator[tuple[str, File]]:
    """The same by paths in the container."""
    for mount in container.mounts:
        for path, file in contents.get(mount.volume, {}).items():
            if not mount.part:
                yield f"{mount.path.rstrip('/')}/{path}", file
            elif path == mount.part:
                yield mount.path, file
            elif path.startswith(f"{mount.part}/"):
                yield mount.path + path.removeprefix(mount.part), file
