"""From drafts to pods: addresses are given, variables resolved as the kubelet does. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from trainer_launch.contracts.source import MAX_VALUE_BYTES
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers import quantity
from trainer_launch.rehearsal.controllers.pod_values import Container, Draft, EnvItem, Pod, Workload

COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_REFERENCE = re.compile(r"\$(?:\$|\(([^()$]+)\))")
_SUBSCRIPT = re.compile(r"metadata\.(labels|annotations)\['?([^']*)'?\]")


def cluster_address(number: int) -> str:
    """An address such as the pods of a cluster have."""
    return f"10.244.{number // 250}.{number % 250 + 2}"


def pods(workload: Workload, address_of: Callable[[int], str] = cluster_address) -> tuple[Pod, ...]:
    """The pods of a job, each with its address."""
    return tuple(
        _pod(draft, workload.namespace, address_of(number)) for number, draft in enumerate(workload.drafts)
    )


def _pod(draft: Draft, namespace: str, address: str) -> Pod:
    fields = _fields(draft, namespace, address)
    init, containers = draft.template.init, draft.template.containers
    if draft.completion_index is not None:  # Indexed Jobs tell every container, unless it has the variable
        init, containers = tuple(map(_indexed, init)), tuple(map(_indexed, containers))
    return Pod(
        draft=draft,
        namespace=namespace,
        address=address,
        init=tuple(_resolved(one, fields) for one in init),
        containers=tuple(_resolved(one, fields) for one in containers),
    )


def _indexed(container: Container) -> Container:
    if any(item.name == "JOB_COMPLETION_INDEX" for item in container.items):
        return container
    index = EnvItem(name="JOB_COMPLETION_INDEX", field=COMPLETION_INDEX)
    return replace(container, items=(*container.items, index))


def _fields(draft: Draft, namespace: str, address: str) -> Mapping[str, str]:
    index = "" if draft.completion_index is None else str(draft.completion_index)
    labels = {**draft.template.labels, **draft.labels}
    return {
        "metadata.name": draft.hostname,
        "metadata.namespace": namespace,
        "status.podIP": address,
        "status.podIPs": address,
        COMPLETION_INDEX: index,
        **{f"metadata.labels['{name}']": value for name, value in labels.items()},
        **{f"metadata.annotations['{name}']": value for name, value in draft.template.annotations.items()},
    }


def _resolved(container: Container, fields: Mapping[str, str]) -> Container:
    env: dict[str, str] = {}
    secret: set[str] = set()  # variables that hold one, or one that another holds
    for item in container.items:
        if item.resource is not None:
            env |= _amount(container, item)
            continue
        shown = item.is_literal or item.field is not None
        is_secret = item.is_secret or (not shown and _names(item.value, secret))
        if item.field is not None:
            env[item.name] = fields.get(_plain(item.field), "")
        else:
            env[item.name] = item.value if item.is_literal else expanded(item.value, env)
        (secret.add if is_secret else secret.discard)(item.name)
    told = {word: expanded(word, env) for word in (*container.command, *container.args)}
    words = {text for word, text in told.items() if _names(word, secret)}
    return replace(
        container,
        env=MappingProxyType(env),
        command=tuple(told[word] for word in container.command),
        args=tuple(told[word] for word in container.args),
        mounts=tuple(
            replace(one, part=expanded(one.part, env), expands=False) if one.expands else one
            for one in container.mounts
        ),
        hidden=frozenset({*words, *(env[name] for name in secret)}) - {""},
    )


def _amount(container: Container, item: EnvItem) -> dict[str, str]:
    """A variable from the container's resources; without a limit it would tell of the whole node: there is none."""
    kind, _, name = (item.resource or "").partition(".")
    asked = container.limits if kind == "limits" else {**container.limits, **container.requests}
    return {item.name: str(quantity.whole(asked[name], item.divisor))} if name in asked else {}


def _names(text: str, names: Collection[str]) -> bool:
    """Whether $(NAME) of one of these stands in a text."""
    return any(found[1] in names for found in _REFERENCE.finditer(text))


def _plain(path: str) -> str:
    found = _SUBSCRIPT.fullmatch(path)
    return f"metadata.{found[1]}['{found[2]}']" if found else path


def expanded(text: str, env: Mapping[str, str]) -> str:
    """$(NAME) replaced by what came before it, $$ by $; a name that nothing has stays as it is written.

    Raises:
        UsageError: it is longer than Linux lets a variable or an argument be.
    """

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else env.get(found[1], found[0])

    size = len(text) + sum(len(value(found)) for found in _REFERENCE.finditer(text))
    if size > MAX_VALUE_BYTES:  # looked at before it is made: references to references grow without end
        start = shown(text[:40])
        raise UsageError(
            f"the value that begins with {start} is longer than {MAX_VALUE_BYTES} bytes, which is Linux's limit"
        )
    return _REFERENCE.sub(value, text)


# -- what controllers do to containers --------------------------------------------------------


def env_items(pairs: Mapping[str, str]) -> tuple[EnvItem, ...]:
    """Plain variables."""
    return tuple(EnvItem(name=name, value=value) for name, value in pairs.items())


def appended(container: Container, items: Iterable[EnvItem]) -> Container:
    """Variables put behind those that are there, as the v1 operators do: of one name the last counts."""
    return replace(container, items=(*container.items, *items))


def upserted(container: Container, items: Iterable[EnvItem]) -> Container:
    """Variables put in the place of those of the same name, else behind, as Trainer v2 does."""
    merged = list(container.items)
    for item in items:
        at = next((number for number, old in enumerate(merged) if old.name == item.name), None)
        if at is None:
            merged.append(item)
        else:
            merged[at] = item
    return replace(container, items=tuple(merged))
