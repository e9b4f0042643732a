"""Faults in a YAML file: `faults:` with a list of texts, or of objects with the same words as keys. Pure.

faults:
- kill worker node=1 at=step:40
- {fault: slow link, node: 1, rate: 1MB/s, for: 10s, at: 30s}
"""

from __future__ import annotations

from typing import Any

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers.documents import read_values
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.faults import grammar
from trainer_launch.rehearsal.faults.fault import Fault

MAX_FAULTS = 1_000
ENDS = (".yaml", ".yml")


def names_file(text: str) -> bool:
    """Whether `--fault` is given a file rather than a fault."""
    return text.endswith(ENDS) and "=" not in text


def read(text: str, source: str) -> tuple[Fault, ...]:
    """All faults of a file, in its order; `source` is what messages call it.

    Raises:
        UsageError: it is no YAML, or a fault in it does not fit; the sentence names file and entry.
    """
    values = [value for value in read_values(text, source) if value is not None]
    if len(values) != 1:
        raise UsageError(f"{source} holds {len(values)} documents; expected one with faults: and a list")
    document = Field(values[0], "", source)
    document.only(("faults",))
    entries = document.get("faults").items()
    if not entries:
        raise document.get("faults").bad("a list of faults")
    if len(entries) > MAX_FAULTS:
        raise UsageError(f"{source} holds {len(entries)} faults; the maximum is {MAX_FAULTS}")
    return tuple(map(_fault, entries))


def _fault(entry: Field) -> Fault:
    where = f"{entry.where}: {entry.path}"
    if isinstance(entry.value, str):
        return grammar.parse(entry.value, where)
    if not isinstance(entry.value, dict):
        raise entry.bad("a text such as 'kill worker node=1', or an object with fault:")
    kind = " ".join(entry.get("fault").text().split()[:5])
    pairs = [(key, _word(field)) for key, field in entry.fields() if key != "fault" and field.given]
    return grammar.build(kind, pairs, f"{where} ({shown(kind)[1:-1]})")


def _word(field: Field) -> str:
    """YAML makes numbers of some values."""
    value: Any = field.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)[:40]
    return field.text()
