"""Text of a manifest to documents, bounded in size, depth and number; an alias counts as what it stands for.

PyYAML is loaded only here, and only when somebody asks for a manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer_launch.model.errors import MALFORMED, UsageError
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers.fields import Field

MAX_BYTES = 1_048_576  # etcd takes no larger object
MAX_DEPTH = 64
MAX_NODES = 100_000
MAX_DOCUMENTS = 64
_MAX_INT = 1 << 64  # Kubernetes has none beyond; Python would, without end


def read_documents(text: str, name: str) -> tuple[Field, ...]:
    """The Kubernetes objects of one file; `name` is what messages call it. Members of a List count singly.

    Raises:
        UsageError: PyYAML is missing, or the text is no YAML of objects, or too much of it.
    """
    loaded = read_values(text, name)
    documents = [
        item for number, value in enumerate(loaded, 1) for item in _objects(value, f"{name}, document {number}")
    ]
    if not documents:
        raise UsageError(f"{name} holds no Kubernetes object; expected kind, metadata and spec")
    return tuple(documents)


def read_values(text: str, name: str) -> list[Any]:
    """The documents of any YAML file as plain values, within the same bounds; None for an empty one.

    Raises:
        UsageError: PyYAML is missing, or the text is no YAML, or too much of it.
    """
    if len(text) > MAX_BYTES:
        raise UsageError(f"{name} is larger than {MAX_BYTES} bytes; expected the manifests of one job")
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"{name} is YAML; install PyYAML to read it: pip install 'trainer-launch[local]'"
        ) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _bound(yaml.parse(text, Loader=loader), name)
        return list(yaml.load_all(text, Loader=_strict(yaml, loader)))
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = getattr(problem, "problem", None) or str(problem)
        raise UsageError(f"{name} is not valid YAML{place}: {' '.join(why.split())[:200]}") from None
    except MALFORMED as problem:  # what PyYAML itself trips over
        raise UsageError(f"{name} is not valid YAML: {shown(str(problem))}") from None


def _strict(yaml: Any, loader: Any) -> Any:
    """A safe loader that takes no key twice, as Kubernetes does not, and leaves dates as they are written."""

    def bad(text: str, node: Any) -> Exception:
        return yaml.constructor.ConstructorError(None, None, text, node.start_mark)  # type: ignore[no-any-return]

    class Strict(loader):  # type: ignore[misc]
        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                made = super().construct_object(node, deep)
            except MALFORMED:  # as of !!int '', which PyYAML does not expect
                raise bad(f"a value is no {node.tag.rpartition(':')[2]}", node) from None
            if type(made) is int and not -_MAX_INT <= made <= _MAX_INT:
                raise bad("a number has more than 64 bits", node)
            return made

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                if str(key.value) in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise bad(f"the key {key.value!r} stands twice", key)
                seen.add(str(key.value))
            return super().construct_mapping(node, deep)

    implicit = loader.yaml_implicit_resolvers.items()
    Strict.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
        for first, pairs in implicit
    }
    return Strict


def _bound(events: Iterator[Any], name: str) -> None:
    """Count nodes before any is made; an alias counts as much as what it stands for."""
    sizes: dict[str, int] = {}
    open_nodes: list[tuple[str | None, int]] = []  # anchor, and how many nodes came before it
    count = documents = 0
    for event in events:
        kind = type(event).__name__
        if kind == "DocumentStartEvent":
            documents += 1
            sizes.clear()
        elif kind == "AliasEvent":
            count += sizes.get(event.anchor, MAX_NODES)  # one inside of itself has no size yet
        elif kind == "ScalarEvent":
            count += 1
            sizes[event.anchor or ""] = 1
        elif kind in ("SequenceStartEvent", "MappingStartEvent"):
            open_nodes.append((event.anchor, count))
            count += 1
        elif kind in ("SequenceEndEvent", "MappingEndEvent"):
            anchor, before = open_nodes.pop()
            sizes[anchor or ""] = count - before
        if len(open_nodes) > MAX_DEPTH:
            raise UsageError(f"{name} is nested deeper than {MAX_DEPTH} levels; expected the manifests of one job")
        if count > MAX_NODES or documents > MAX_DOCUMENTS:
            raise UsageError(
                f"{name} holds more than {MAX_NODES} values or {MAX_DOCUMENTS} documents, aliases counted as what "
                "they stand for; give the manifests of one job"
            )


def _objects(value: Any, where: str) -> Iterator[Field]:
    if value is None:  # an empty document, as before the first ---
        return
    found = Field(value, "", where)
    if not isinstance(value, dict):
        raise found.bad("a Kubernetes object with kind, metadata and spec")
    kind = found.get("kind").text()
    if kind == "List":
        for item in found.get("items").items():
            yield from _objects(item.value, f"{where}, {item.path}")
        return
    metadata = found.get("metadata")
    title = metadata.get("name").text("") or metadata.get("generateName").text("")
    yield Field(value, "", f"{where} ({kind} {shown(title)[1:-1]})" if title else f"{where} ({kind})")
