"""What was measured on a node, as values that travel to node 0, where those of all nodes are judged. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

MAX_MEASURES = 256
MAX_CHECKSUMS = 64
MAX_BYTES = 12_000  # of all measures of a node as JSON; checksums have a quarter of that
_MAX_NAME = 120
_MAX_VALUE = 1e18
_MAX_GPU = 1024


class Measure(NamedTuple):
    """One figure: the greater, the better."""

    name: str  # what was measured, by a stable name: gemm, hbm-copy, h2d, d2h
    value: float
    unit: str  # TFLOP/s, GB/s (10^9 bytes)
    model: str  # of the GPU that it was measured on; "" where none was
    gpu: int | None  # its number on the node, as nvidia-smi has it; None: of the whole node


class Checksum(NamedTuple):
    """What a computation that must come out alike made of its numbers on one GPU."""

    gpu: int
    uuid: str
    kind: str  # only those of one kind can be compared: model, driver, libraries
    value: str


class UnfitMeasuresError(ValueError):
    """Its text says what was expected."""


def fitted(measures: Iterable[Measure]) -> tuple[Measure, ...]:
    """As many as fit into a message, in their order; a name that is too long is cut."""
    return tuple(_fitted((_cut(one) for one in measures), MAX_MEASURES, MAX_BYTES))


def fitted_checksums(checksums: Iterable[Checksum]) -> tuple[Checksum, ...]:
    """As `fitted`."""
    return tuple(_fitted((_cut_checksum(one) for one in checksums), MAX_CHECKSUMS, MAX_BYTES // 4))


def measures_of(value: Any) -> tuple[Measure, ...]:
    """Measures from JSON, where each is a list of its fields.

    Raises:
        UnfitMeasuresError: they are none, or too many.
    """
    return tuple(Measure(*_row(row, _MEASURE, "a measure")) for row in _rows(value, MAX_MEASURES))


def checksums_of(value: Any) -> tuple[Checksum, ...]:
    """As `measures_of`."""
    return tuple(Checksum(*_row(row, _CHECKSUM, "a checksum")) for row in _rows(value, MAX_CHECKSUMS))


def _fitted(rows: Iterable[Any], count: int, size: int) -> Iterable[Any]:
    used = 2
    for number, row in enumerate(rows):
        used += len(json.dumps(row)) + 1
        if used > size or number == count:
            return
        yield row


def _cut(one: Measure) -> Measure:
    value = one.value if math.isfinite(one.value) else 0.0
    return one._replace(
        name=one.name[:_MAX_NAME], unit=one.unit[:_MAX_NAME], model=one.model[:_MAX_NAME], value=value
    )


def _cut_checksum(one: Checksum) -> Checksum:
    return one._replace(uuid=one.uuid[:_MAX_NAME], kind=one.kind[:_MAX_NAME], value=one.value[:_MAX_NAME])


def _rows(value: Any, count: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > count:
        raise UnfitMeasuresError(f"a list of at most {count} rows")
    return value


def _row(row: Any, checks: tuple[Any, ...], what: str) -> list[Any]:
    if not isinstance(row, list) or len(row) != len(checks):
        raise UnfitMeasuresError(f"{what} of {len(checks)} fields")
    return [check(one) for check, one in zip(checks, row, strict=True)]


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_NAME:
        raise UnfitMeasuresError(f"a text of at most {_MAX_NAME} characters")
    return value


def _amount(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _MAX_VALUE:
        raise UnfitMeasuresError("a number of at least 0")
    return float(value)


def _gpu(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_GPU:
        raise UnfitMeasuresError("the number of a GPU")
    return value


def _gpu_or_none(value: Any) -> int | None:
    return None if value is None else _gpu(value)


_MEASURE = (_text, _amount, _text, _text, _gpu_or_none)
_CHECKSUM = (_gpu, _text, _text, _text)
