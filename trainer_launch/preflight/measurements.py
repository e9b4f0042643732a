"""What was measured on a node, as values that travel to node 0, where those of all nodes are judged. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple, TypeAlias

from trainer_launch.model.json_lines import Bound

MAX_MEASURES = 256
MAX_CHECKSUMS = 64
MAX_BYTES = 12_000  # of all measures of a node as JSON; checksums have a quarter of that
_MAX_NAME = 120
_Word: TypeAlias = Annotated[str, Bound(0, _MAX_NAME)]
_Gpu: TypeAlias = Annotated[int, Bound(0, 1023)]


class Measure(NamedTuple):
    """One figure: the greater, the better."""

    name: _Word  # what was measured, by a stable name: gemm, hbm-copy, h2d, d2h
    value: Annotated[float, Bound(0, 1e18)]
    unit: _Word  # TFLOP/s, GB/s (10^9 bytes)
    model: _Word  # of the GPU that it was measured on; "" where none was
    gpu: _Gpu | None  # its number on the node, as nvidia-smi has it; None: of the whole node


class Checksum(NamedTuple):
    """What a computation that must come out alike made of its numbers on one GPU."""

    gpu: _Gpu
    uuid: _Word
    kind: _Word  # only those of one kind can be compared: model, driver, libraries
    value: _Word


Measures: TypeAlias = Annotated[tuple[Measure, ...], Bound(0, MAX_MEASURES)]
Checksums: TypeAlias = Annotated[tuple[Checksum, ...], Bound(0, MAX_CHECKSUMS)]


def fitted(measures: Iterable[Measure]) -> tuple[Measure, ...]:
    """As many as fit into a message, in their order; a name that is too long is cut."""
    return tuple(_fitted((_cut(one) for one in measures), MAX_MEASURES, MAX_BYTES))


def fitted_checksums(checksums: Iterable[Checksum]) -> tuple[Checksum, ...]:
    """As `fitted`."""
    return tuple(_fitted((_cut_checksum(one) for one in checksums), MAX_CHECKSUMS, MAX_BYTES // 4))


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
