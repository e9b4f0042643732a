"""Kubernetes' quantities, as far as controllers count with them: CPUs and devices. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

from trainer_launch.model.errors import UsageError

_QUANTITY = re.compile(
    r"([+-]?[0-9]{1,18}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:([eE])([+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)"
)
_SMALL = {"n": 9, "u": 6, "m": 3}
_SUFFIXES = "kMGTPE"


def whole(text: str, divisor: str = "1") -> int:
    """A quantity as a whole number of `divisor`, rounded up.

    Raises:
        UsageError: it is none.
    """
    value, unit = _exact(text), _exact(divisor)
    return -int(-value // (unit or 1))


def _exact(text: str) -> Fraction:
    found = _QUANTITY.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"invalid quantity {text[:60]!r}: expected a number such as 4, 500m or 16Gi")
    value, suffix = Fraction(found[1]), found[4] or ""
    if found[2]:
        value *= Fraction(10) ** int(found[3])
    elif suffix in _SMALL:
        value /= 10 ** _SMALL[suffix]
    elif suffix:
        power = ("K" + _SUFFIXES[1:] if suffix.endswith("i") else _SUFFIXES).index(suffix[0]) + 1
        value *= (1024 if suffix.endswith("i") else 1000) ** power
    return value


def gpus(limits: Mapping[str, str], requests: Mapping[str, str]) -> int:
    """GPUs as Trainer v2 counts them: any resource with gpu in its name, requests first."""
    return _gpus(requests) or _gpus(limits)


def cpus(limits: Mapping[str, str], requests: Mapping[str, str]) -> int:
    """CPUs as Trainer v2 counts them: requests, else limits, rounded up, at least 1."""
    return max(1, whole(requests.get("cpu", "0")) or whole(limits.get("cpu", "0")))


def _gpus(resources: Mapping[str, str]) -> int:
    return next((whole(amount) for name, amount in resources.items() if "gpu" in name.lower()), 0)
