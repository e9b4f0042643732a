"""Source: the only read-only view of what was injected, with getters that check and remember.

Every getter returns a valid value or raises one `ContractError` that names the variable, its value, what was
expected and the contract; every value that was read is kept as a `Fact`. No contract parses an integer itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Protocol, TypeAlias, TypeVar, cast

from msgspec import Meta, Struct

from trainer_launch.model import Endpoint, Fact, Job, Json, NodeRange, Origin, codec, value_parsers
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import MAX_COUNT, NPROC_WORDS

P = TypeVar("P")
T = TypeVar("T")

MAX_VALUE_BYTES = 131_072  # Linux gives no process a longer variable (MAX_ARG_STRLEN)
MAX_FILE_BYTES = 4_194_304  # a hostfile of 30,000 lines is smaller

_BRACKETS = re.compile(r"\A\s*\[(.*:.*)\]\s*\Z")

# In the JSON of a variable.
Word: TypeAlias = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_.-]{1,63}\Z")]


class _Required:
    """Stands for "no default": the variable has to be there."""


REQUIRED = _Required()


class Files(Protocol):
    """The container's files, live or from a snapshot."""

    def read(self, path: str) -> bytes | None:
        """At most MAX_FILE_BYTES + 1 bytes of the file, None when it cannot be read."""

    def exists(self, path: str) -> bool:
        """Whether the path is there."""


class PodInput(Struct, frozen=True, kw_only=True):
    """The input injected into a pod: variables, files, host name, command. Live or from a snapshot."""

    env: Mapping[str, str]
    files: Files
    hostname: str
    command: tuple[str, ...] = ()
    namespace: str | None = None
    stop_signal: str | None = None  # of a rendered pod: lifecycle.stopSignal, which no container can see


class Marks(Struct, frozen=True, kw_only=True):
    """The variables and files of a pod by which a contract applies."""

    all_of: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    none_of: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # all of them
    when: Callable[[Source], bool] | None = None  # what names alone cannot tell

    def fit(self, source: Source) -> bool:
        """Whether the pod carries these marks."""
        return (
            all(map(source.has, self.all_of))
            and (not self.any_of or any(map(source.has, self.any_of)))
            and not any(map(source.has, self.none_of))
            and all(map(source.has_file, self.files))
            and (self.when is None or self.when(source))
        )


class ReplicaTask(Struct, frozen=True):
    """The place of a pod in its job, as TF_CONFIG and CLUSTER_SPEC have it."""

    type: Word
    index: Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class Contract(Struct, frozen=True):
    """A platform: its name, how its pods differ from others, and how they are read."""

    name: str
    marks: Marks
    read: Callable[[Source], Job]
    kind: str = ""  # of job; marks of two kinds in one pod are an error. "": these marks decide, or yield to all


class Source:
    """A pod as one contract reads it."""

    def __init__(self, pod: PodInput, contract: str = "") -> None:
        self.pod = pod
        self.contract = contract
        self._facts: list[Fact] = []
        self._warnings: list[str] = []

    def has(self, name: str) -> bool:
        """Whether the variable is set, even to nothing."""
        return name in self.pod.env

    def peek(self, name: str) -> str:
        """The value unchecked and unremembered, "" when absent: for marks, never for a job."""
        return self.pod.env.get(name, "").strip()

    def has_any(self, *names: str) -> bool:
        """Whether one of the variables is set."""
        return any(map(self.has, names))

    def has_prefix(self, *prefixes: str) -> bool:
        """Whether a variable's name starts with one of `prefixes`."""
        return any(name.startswith(prefixes) for name in self.pod.env)

    def has_file(self, path: str) -> bool:
        """Whether the file is there."""
        return self.pod.files.exists(path)

    @property
    def facts(self) -> tuple[Fact, ...]:
        """The facts that were read so far, in order, each once."""
        return tuple({(fact.name, fact.field): fact for fact in self._facts}.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about oddities that do not stop a job."""
        return tuple(dict.fromkeys(self._warnings))

    def warn(self, sentence: str) -> None:
        """Keep a sentence for the person who asks what is odd."""
        self._warnings.append(sentence)

    def note(self, name: str, value: str, origin: Origin, field: str, became: Json = None) -> None:
        """Remember something that was read other than by a getter."""
        self._facts.append(Fact(name=name, value=value, origin=origin, field=field, became=became))

    def derive(self, **words: Json) -> None:
        """Keep the platform's own words by their keys in the `job` of `explain --json`."""
        for key, value in words.items():
            self.note(key, "", Origin.DERIVED, key, value)

    def raw(self, name: str) -> str | None:
        """The value as it stands, checked for encoding and length only; None when absent."""
        value = self.pod.env.get(name)
        if value is None:
            return None
        if len(value) > MAX_VALUE_BYTES:
            raise self.error(name, value, f"at most {MAX_VALUE_BYTES} bytes (it has {len(value)})")
        if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
            raise self.error(name, value, "text in UTF-8")
        if "\0" in value:
            raise self.error(name, value, "text without NUL bytes")
        return value

    def blank(self, name: str) -> bool:
        """Whether the variable is absent or holds nothing but blanks."""
        return not (self.raw(name) or "").strip()

    def text(self, name: str, field: str = "", *, default: T | _Required = REQUIRED) -> str | T:
        """A text that is not empty."""
        return self._get(name, field, "a text that is not empty", lambda v: v.strip() or None, default)

    def count(self, name: str, field: str = "", *, least: int = 1, default: T | _Required = REQUIRED) -> int | T:
        """A whole number, at least `least`."""
        expected = f"a whole number from {least} to {MAX_COUNT}"
        return self._get(name, field, expected, lambda v: value_parsers.parse_number(v, least, MAX_COUNT), default)

    def index(
        self, name: str, field: str = "", *, below: int | None = None, default: T | _Required = REQUIRED
    ) -> int | T:
        """A 0-based index, smaller than `below` when that is known."""
        top = MAX_COUNT if below is None else below - 1
        return self._get(
            name, field, f"a whole number from 0 to {top}", lambda v: value_parsers.parse_number(v, 0, top), default
        )

    def port(self, name: str, field: str = "", *, default: T | _Required = REQUIRED) -> int | T:
        """A TCP port, 1 to 65535."""
        expected = "a port from 1 to 65535"
        return self._get(name, field, expected, lambda v: value_parsers.parse_number(v, 1, 65535), default)

    def flag(self, name: str, field: str = "", *, default: T | _Required = REQUIRED) -> bool | T:
        """A number that is 0 for off; the empty string is on."""
        return self._get(name, field, "0 or 1", value_parsers.parse_flag, default)

    def path(self, name: str, field: str = "", *, default: T | _Required = REQUIRED) -> str | T:
        """An absolute path."""
        return self._get(name, field, "an absolute path", value_parsers.parse_path, default)

    def host(self, name: str, field: str = "", *, default: T | _Required = REQUIRED) -> str | T:
        """A host name or an IP address; IPv6 may have brackets, as torchrun's --help writes it."""

        def parse(value: str) -> str | None:
            return value_parsers.parse_host(_BRACKETS.sub(r"\1", value))

        return self._get(name, field, "a host name or an IP address", parse, default)

    def endpoint(
        self,
        name: str,
        field: str = "",
        *,
        default_port: int | None = None,
        least_port: int = 0,
        naked_ipv6: bool = False,
    ) -> Endpoint:
        """HOST:PORT, [IPv6]:PORT (as the kubelet joins them, IPv6:PORT), or HOST alone with a `default_port`."""
        expected = "HOST:PORT" if default_port is None else "HOST or HOST:PORT"

        def parse(value: str) -> Endpoint | None:
            return value_parsers.parse_endpoint(value, default_port, least_port=least_port, naked_ipv6=naked_ipv6)

        return self._get(name, field, expected, parse, REQUIRED)

    def node_range(self, name: str, field: str = "", *, default: T | _Required = REQUIRED) -> NodeRange | T:
        """N or MIN:MAX, with 0 < MIN <= MAX."""
        expected = f"N or MIN:MAX with 0 < MIN <= MAX <= {MAX_COUNT}"
        return self._get(name, field, expected, value_parsers.parse_node_range, default)

    def nproc(self, name: str, field: str = "", *, default: T | _Required = REQUIRED) -> int | str | T:
        """Processes per node: a whole number, or one of the words auto, gpu, cpu, xpu."""
        expected = f"a whole number from 1 to {MAX_COUNT}, or one of {', '.join(NPROC_WORDS)}"
        # mypy joins int and str to object when both type variables are free
        return cast("int | str | T", self._get(name, field, expected, value_parsers.parse_nproc, default))

    def choice(self, name: str, words: tuple[str, ...], field: str = "") -> str:
        """A word of `words`."""
        expected = f"one of {', '.join(words)}"
        return self._get(name, field, expected, lambda v: v.strip() if v.strip() in words else None, REQUIRED)

    def hosts(self, name: str, field: str = "") -> tuple[str, ...]:
        """Host names separated by commas."""
        return self._get(name, field, "host names separated by commas", value_parsers.parse_hosts, REQUIRED)

    def conf(self, name: str, field: str = "") -> dict[str, str]:
        """k=v,k=v as torchrun's --rdzv-conf takes it; absent or blank is empty."""
        if self.blank(name):
            return {}
        expected = "k=v pairs separated by commas, none of them empty"
        return self._get(name, field, expected, value_parsers.parse_conf, REQUIRED)

    def json(self, name: str, kind: type[T], field: str = "") -> T:
        """A JSON value of this kind."""
        value = self.raw(name)
        if value is None:
            raise self.missing(name, "a JSON object")
        try:
            parsed = codec.decode(kind, value, MAX_VALUE_BYTES)
            json.loads(value, object_pairs_hook=_once_each)
        except (codec.MessageError, ValueError, RecursionError) as problem:
            raise self.error(name, value, f"JSON as its platform writes it ({problem})") from None
        self.note(name, value, Origin.ENV, field)
        return parsed

    def file(self, path: str, field: str = "") -> str | None:
        """A whole file as text, None when it cannot be read."""
        data = self.pod.files.read(path)
        if data is None:
            return None
        if len(data) > MAX_FILE_BYTES:
            raise self.error(path, f"{len(data)} bytes", f"at most {MAX_FILE_BYTES} bytes")
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as problem:
            raise self.error(path, repr(data[:20]), "text in UTF-8") from problem
        self.note(path, f"{len(data)} bytes", Origin.FILE, field)
        return text

    def error(self, name: str, value: str, expected: str) -> ContractError:
        """The one sentence for a bad value."""
        return value_parsers.bad_value(name, value, expected, self.contract)

    def missing(self, name: str, expected: str) -> ContractError:
        """The one sentence for a variable, or a file by its path, that is not there."""
        absent, act = ("cannot be read", "mount") if name.startswith("/") else ("is not set", "set")
        return ContractError(
            f"{value_parsers.named(name)} {absent}; contract {self.contract} needs it as {expected}; "
            f"{act} it, or name another contract with --contract"
        )

    def _get(
        self, name: str, field: str, expected: str, parse: Callable[[str], P | None], default: T | _Required
    ) -> P | T:
        value = self.raw(name)
        if value is None:
            if isinstance(default, _Required):
                raise self.missing(name, expected)
            return default
        parsed = parse(value)
        if parsed is None:
            raise self.error(name, value, expected)
        self.note(name, value, Origin.ENV, field, _plain(parsed))
        return parsed


def _once_each(pairs: list[tuple[str, object]]) -> None:
    """Refuse an object that has a key twice: either value may be meant."""
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key comes twice")


def _plain(value: object) -> Json:
    """A parsed value as JSON has it."""
    if isinstance(value, Endpoint):
        return str(value)
    return value if isinstance(value, (bool, int, str, tuple)) else None
