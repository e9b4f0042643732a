"""A strict reader of Prometheus' text format 0.0.4, for tests: what it does not know is an error."""

from __future__ import annotations

import re

_NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
_SAMPLE = re.compile(rf"({_NAME})(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (NaN|[+-]Inf|-?[0-9][0-9.e+-]*)")
_UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

Labels = frozenset[tuple[str, str]]


def parse(text: str) -> dict[str, dict[Labels, float]]:
    """Values by metric and labels; every metric has its HELP and TYPE, once, and all its samples below."""
    assert text.endswith("\n")
    found: dict[str, dict[Labels, float]] = {}
    helped, kind = "", ""
    for line in text[:-1].split("\n"):
        if line.startswith("# HELP "):
            helped, _, words = line[7:].partition(" ")
            assert re.fullmatch(_NAME, helped)
            assert words
            assert helped not in found, f"{helped} comes in two parts"
        elif line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert name == helped
            assert kind in ("gauge", "counter")
            assert (kind == "counter") == name.endswith("_total")
            found[name] = {}
        else:
            sample = _SAMPLE.fullmatch(line)
            assert sample, f"no sample: {line!r}"
            name, labels = sample[1], sample[2] or ""
            assert name == helped, f"{name} stands below {helped}"
            pairs = re.findall(_LABEL, labels)
            key = frozenset((label, _unescape(value)) for label, value in pairs)
            assert len({label for label, _ in pairs}) == len(pairs)
            assert key not in found[name], f"{line} comes twice"
            found[name][key] = float(sample[sample.lastindex or 0])
    assert all(found.values()), "a metric without samples"
    return found


def _unescape(value: str) -> str:
    return re.sub(r"\\.", lambda match: _UNESCAPED[match[0]], value)
