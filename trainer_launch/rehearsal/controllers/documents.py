"""Text of a manifest to documents, and each place in them as a `Field`, whose complaints say where it is. Pure.

PyYAML is loaded only here, and only for a manifest.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model.errors import MALFORMED, UsageError
from trainer_launch.model.redaction import REDACTED
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import MAX_COUNT, shown

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class Field(Struct, frozen=True):
    """A value of a manifest; None stands for a field that is absent, as null does in Kubernetes."""

    value: Any
    path: str
    where: str  # file, document, kind and name
    configs: Configs = field(default_factory=lambda: Configs())  # given with the job

    def bad(self, expected: str, text: str = "") -> UsageError:
        """The error about this field; `text` stands in place of its value."""
        near = self._near_miss() if self.value is None else ""
        text = text or ("missing" if self.value is None else _in_words(self.value))
        return UsageError(f"{self.where}: {self.path or 'the document'} is {text}; expected {expected}{near}")

    def _near_miss(self) -> str:
        """An unknown field beside this one that may be meant."""
        beside = f"{self.path.rpartition('.')[0]}."
        hints = (text for text in self.configs.ignored if text.startswith(beside) and text.endswith("?)"))
        return next((f"; unknown field {text}" for text in hints), "")

    @property
    def place(self) -> str:
        """The beginning of a sentence about the field."""
        return f"{self.where}: {self.path}"

    @property
    def given(self) -> bool:
        """Whether the field is there."""
        return self.value is not None

    def get(self, *keys: str) -> Field:
        """A field below this one, absent when any on the way is."""
        place = self
        for key in keys:
            inner = place.mapping().get(key)
            place = Field(inner, f"{place.path}.{key}" if place.path else key, self.where, self.configs)
        return place

    def items(self) -> list[Field]:
        """The members of a list; none when it is absent."""
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            raise self.bad("a list")
        where, configs = self.where, self.configs
        return [Field(value, f"{self.path}[{index}]", where, configs) for index, value in enumerate(self.value)]

    def named_items(self) -> list[Field]:
        """The members of a list, each of which has a name of its own."""
        names = set[str]()
        for item in self.items():
            name = item.get("name")
            if name.text() in names:
                raise name.bad("a name that no other member of the list has")
            names.add(name.text())
        return self.items()

    def mapping(self) -> Mapping[str, Any]:
        """The keys and values of an object; none when it is absent."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise self.bad("an object")
        for key in self.value:
            if not isinstance(key, str):
                raise self.bad("keys that are strings", _in_words(key))
        return self.value

    def fields(self) -> list[tuple[str, Field]]:
        """The members of an object by name."""
        return [(key, self.get(key)) for key in self.mapping()]

    def changed(self, keys: tuple[str, ...], value: Any) -> Field:
        """The same with another value at a place below; nothing of this one changes."""
        key, *inner = keys
        below = value if not inner else self.get(key).changed(tuple(inner), value).value
        return replace(self, value={**self.mapping(), key: below})

    def ignore(self, phrase: str) -> None:
        """Note a field that has an effect in a cluster and none here."""
        self.configs.ignored[phrase] = None

    def only(self, read: Iterable[str], whose: str = "") -> None:
        """Note the fields that are not read, of a misspelled field its place and what it may have meant."""
        for key, inner in self.fields():
            if key not in read and inner.given:
                hint = did_you_mean(key, read)
                self.ignore(f"{inner.path} ({hint})" if hint else f"{key} {whose}".rstrip())

    def text(self, default: str | None = None) -> str:
        """A text; without a default the field has to be there."""
        if self.value is None and default is not None:
            return default
        if not isinstance(self.value, str):
            raise self.bad("a string; quote it" if isinstance(self.value, bool | int | float) else "a string")
        if "\0" in self.value:
            raise self.bad("a string without NUL")
        return self.value

    def name(self, default: str | None = None) -> str:
        """The name of an object, container or volume; it becomes a part of paths and host names."""
        text = self.text(default)
        if self.value is not None and _NAME.fullmatch(text) is None:
            raise self.bad("a name of letters, digits, '-' and '.', as in my-job, '-' and '.' only inside")
        return text

    def number(self, default: int | None = None, *, least: int = 0, most: int = MAX_COUNT) -> int:
        """A whole number from `least` to `most`."""
        if self.value is None and default is not None:
            return default
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            raise self.bad(f"a whole number from {least} to {most}")
        return self.value

    def flag(self, default: bool = False) -> bool:
        """true or false."""
        if self.value is None:
            return default
        if not isinstance(self.value, bool):
            raise self.bad("true or false")
        return self.value

    def choice(self, words: tuple[str, ...], default: str | None = None) -> str:
        """A text that is among these words."""
        if self.value is None and default is not None:
            return default
        if self.value not in words:
            raise self.bad(f"one of {', '.join(words)}")
        return str(self.value)

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(item.text() for item in self.items())


def _in_words(value: object) -> str:
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {str(value)[:40]}"
    if isinstance(value, dict):
        return "an object"
    return "an empty list" if value == [] else f"a {type(value).__name__}"


CONFIG_KINDS = ("ConfigMap", "Secret")
RUNTIMES = ("ClusterTrainingRuntime", "TrainingRuntime")
PLACEHOLDER = "placeholder"  # the value of each key of a Secret that is not given
_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")

Values = Mapping[str, str]  # key -> text; bytes that are no UTF-8 survive as surrogates


class Configs(Struct, frozen=True):
    """ConfigMaps and Secrets by kind and name, and notes made while the job's documents were read.

    The values of a Secret are never a part of a message.
    """

    given: Mapping[tuple[str, str], Values] = field(default_factory=dict)
    ignored: dict[str, None] = field(default_factory=dict)  # phrases, each once
    runtimes: tuple[Field, ...] = ()  # of TrainJobs

    def __repr__(self) -> str:
        return f"Configs({len(self.given)})"  # Secrets are not shown

    def find(self, reference: Field, kind: str, name: str, key: str = "") -> Values:
        """All values that `reference` means, or that of this key; none of what is optional and not there.

        A Secret that is not given has a placeholder for each key that is asked for, as a claim has a directory.

        Raises:
            UsageError: it is not there.
        """
        values = self.given.get((kind, name))
        if values is not None and not key:
            return values
        if values is not None and key in values:
            return {key: values[key]}
        if reference.get("optional").flag():
            reference.ignore(f"{kind} {name} (optional, and not given)")
            return {}
        if values is None and kind == "Secret":
            reference.ignore(f"Secret {name} (not given): {PLACEHOLDER!r} for each value")
            return {key: PLACEHOLDER} if key else {}
        if values is None:
            names = ", ".join(name for given, name in self.given if given == kind) or "none"
            raise UsageError(
                f"{reference.place} refers to the {kind} {name[:80]!r}, which is in none of the files "
                f"(found: {names}); add its file with another -f, or set optional: true"
            )
        raise UsageError(
            f"{reference.place} refers to the key {key[:80]!r}, which the {kind} {name} does not have "
            f"(it has {', '.join(values) or 'none'}); correct it, or set optional: true"
        )


def read_configs(documents: Iterable[Field], namespace: str, *, shows_secrets: bool) -> Configs:
    """The ConfigMaps and Secrets of a job's namespace; values of Secrets that are not to be shown are redacted.

    Raises:
        UsageError: a document is no ConfigMap or Secret as Kubernetes takes it, or is there twice.
    """
    given: dict[tuple[str, str], Values] = {}
    for document in documents:
        kind, name = document.get("kind").text(), document.get("metadata", "name")
        if (document.get("metadata", "namespace").text("") or namespace) != namespace:
            continue
        if (kind, name.text()) in given:
            raise name.bad(f"a name that no other {kind} of these files has")
        values = dict(_values(document, kind))
        is_hidden = kind == "Secret" and not shows_secrets
        given[kind, name.text()] = dict.fromkeys(values, REDACTED) if is_hidden else values
    return Configs(given)


def _values(document: Field, kind: str) -> Iterator[tuple[str, str]]:
    plain, coded, hidden = ("stringData", "data", "there") if kind == "Secret" else ("data", "binaryData", "")
    for part in (coded, plain):  # of a key in both the plain text counts
        for key, text in document.get(part).fields():
            if _KEY.fullmatch(key) is None:
                raise text.bad("a key of letters, digits, '-', '_' and '.'", hidden or shown(key))
            if not isinstance(text.value, str):
                raise text.bad("a string; quote it", hidden)
            yield key, _decoded(text) if part == coded else text.value


def _decoded(text: Field) -> str:
    try:
        data = base64.b64decode("".join(text.value.split()), validate=True)
    except (binascii.Error, ValueError):
        expected = "text in base64 (stringData of a Secret, data of a ConfigMap, take it plain)"
        raise text.bad(expected, "there") from None
    return data.decode("utf-8", "surrogateescape")


MAX_BYTES = 1_048_576  # etcd takes no larger object


def read_documents(text: str, name: str) -> tuple[Field, ...]:
    """The Kubernetes objects of a file, which messages call `name`. Members of a List count singly.

    Raises:
        UsageError: PyYAML is missing, or the text is no YAML of objects, or too much of it.
    """
    loaded = _values_of(text, name)
    documents = [
        item for number, value in enumerate(loaded, 1) for item in _objects(value, f"{name}, document {number}")
    ]
    if not documents:
        raise UsageError(f"{name} holds no Kubernetes object; expected kind, metadata and spec")
    return tuple(documents)


def _values_of(text: str, name: str) -> list[Any]:
    """The documents as plain values; None for an empty document."""
    if len(text) > MAX_BYTES:
        raise UsageError(f"{name} is larger than {MAX_BYTES} bytes; expected the manifests of one job")
    try:
        import yaml
    except ImportError:
        raise UsageError(
            f"{name} is YAML; install PyYAML to read it: pip install 'trainer-launch[local]'"
        ) from None
    try:
        return list(yaml.load_all(text, Loader=_loader(yaml)))
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        why = getattr(problem, "problem", None) or str(problem)
        raise UsageError(f"{name} is not valid YAML{place}: {' '.join(why.split())[:200]}") from None
    except MALFORMED as problem:  # what PyYAML itself trips over
        raise UsageError(f"{name} is not valid YAML: {shown(str(problem))}") from None


# Plain words as kubectl's parser takes them (sigs.k8s.io/yaml, goyaml.v2/resolve.go): 12:30 and dates are text.
_WORDS = {
    "bool": (r"y|Y|n|N|[yY]es|YES|[nN]o|NO|[tT]rue|TRUE|[fF]alse|FALSE|[oO]n|ON|[oO]ff|OFF", "yYnNtTfFoO"),
    "int": (
        r"[-+]?(0|[1-9][0-9_]*|0[oO]?_*[0-7][0-7_]*|0[bB]_*[01][01_]*|0[xX]_*[0-9a-fA-F][0-9a-fA-F_]*)",
        "-+0123456789",
    ),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "merge": (r"<<", "<"),
}
_OCTAL = re.compile(r"^([-+]?0)([0-7_]+)")


def _loader(yaml: Any) -> Any:
    """A safe loader that reads plain words as kubectl does, which makes JSON of them: 2.0 is a whole number."""

    class LikeKubectl(yaml.SafeLoader):  # type: ignore[misc]  # libyaml's dies of deep nests
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}
        bool_values: ClassVar[dict[str, bool]] = {**yaml.SafeLoader.bool_values, "y": True, "n": False}

        def compose_mapping_node(self, anchor: Any) -> Any:
            node, keys = super().compose_mapping_node(anchor), set[str]()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in keys:  # kubectl would take the last, and drop the others
                    why = f"the key {shown(key.value)} stands twice in one object"
                    raise yaml.composer.ComposerError(None, None, why, key.start_mark)
                keys |= {key.value} - {"<<"}  # several merges are fine
            return node

        def construct_yaml_int(self, node: Any) -> int:
            return int(_OCTAL.sub(r"\1o\2", node.value, count=1).replace("_", ""), 0)

        def construct_yaml_float(self, node: Any) -> float:
            value: float = super().construct_yaml_float(node)
            return int(value) if value.is_integer() else value

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            made = super().construct_mapping(node, deep).items()
            return {str(key).lower() if isinstance(key, int) else key: value for key, value in made}

    for name, (pattern, firsts) in _WORDS.items():
        LikeKubectl.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"({pattern})$"), list(firsts))
    for kind in ("int", "float"):
        LikeKubectl.add_constructor(f"tag:yaml.org,2002:{kind}", getattr(LikeKubectl, f"construct_yaml_{kind}"))
    return LikeKubectl


def _objects(value: Any, where: str) -> Iterator[Field]:
    if value is None:  # an empty document, as before the first ---
        return
    document = Field(value, "", where)
    if not isinstance(value, dict):
        raise document.bad("a Kubernetes object with kind, metadata and spec")
    kind = document.get("kind").text()
    if kind == "List":
        for item in document.get("items").items():
            yield from _objects(item.value, f"{where}, {item.path}")
        return
    metadata = document.get("metadata")
    title = metadata.get("name").text("") or metadata.get("generateName").text("")
    yield Field(value, "", f"{where} ({kind} {shown(title)[1:-1]})" if title else f"{where} ({kind})")
