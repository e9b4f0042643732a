"""The grammar of single values: text in, value or None out; and the one sentence for a value that does not fit.

Pure: nothing here knows a pod, a variable or a file.
"""

from __future__ import annotations

import math
import re
from ipaddress import IPv6Address, ip_address

from trainer_launch.model import Endpoint, NodeRange, PortRange
from trainer_launch.model.errors import ContractError
from trainer_launch.model.redaction import redact

MAX_COUNT = 1_000_000
MAX_LINE = 500  # characters of a line of output that patterns look in
NPROC_WORDS = ("auto", "gpu", "cpu", "xpu")

_SHOWN = 60  # characters of a bad value that a message repeats
_SHOWN_ESCAPED = 90  # and at most so many once they are escaped
_LOOKED_AT = 4_000  # characters of a bad value, for secrets in it
DURATION = "a time such as 60, 10m, 1h30m or 500ms"
_NUMBER = re.compile(r"[0-9]{1,12}")
_SECONDS = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_DURATION = re.compile(rf"(?:({_SECONDS})h)?(?:({_SECONDS})m)?(?:({_SECONDS})s)?(?:({_SECONDS})ms)?")
_UNITS_S = (3600.0, 60.0, 1.0, 0.001)
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]{1,18}(?:\.[0-9]{0,9})?|\.[0-9]{1,9}))([eE][+-]?[0-9]{1,2}|[numkMGTPE]|[KMGTPE]i)?"
)
_POWERS = {"": 1, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_POWERS |= {"E": 10**18, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50, "Ei": 1 << 60}
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_SCOPE = re.compile(r"(%[A-Za-z0-9_.-]{1,32})?")
_PATH = re.compile(r"/[^\0-\x1f\x7f]{0,4095}")


def shown(value: str) -> str:
    """A value as messages repeat it: quoted, escaped, shortened."""
    short = value[:_SHOWN]
    quoted = repr(short) if short.isprintable() else ascii(short)
    if len(quoted) > _SHOWN_ESCAPED:
        return f"{quoted[:_SHOWN_ESCAPED]}…"
    return f"{quoted}…" if len(value) > _SHOWN else quoted


def named(name: str, most: int = 160) -> str:
    """A variable's name or a path as messages repeat it: as it is when it is plain and at most `most` long."""
    return name if name.isprintable() and len(name) <= most else shown(name)


def bad_value(name: str, value: str, expected: str, contract: str) -> ContractError:
    """The one sentence for a value that does not fit; a secret that was put there by mistake is not repeated."""
    where = f" (contract {contract})" if contract else ""
    quoted = shown(redact(name, value[:_LOOKED_AT]))
    return ContractError(f"{named(name)} is {quoted}; expected {expected}{where}")


def parse_number(value: str, least: int, most: int) -> int | None:
    """Plain decimal digits between `least` and `most`; blanks around are tolerated."""
    text = value.strip()
    if not _NUMBER.fullmatch(text):
        return None
    number = int(text)
    return number if least <= number <= most else None


def parse_duration(value: str) -> float | None:
    """Seconds, to the millisecond, of `90`, `90s`, `1.5m`, `1h30m`, `500ms`; a number without a unit is seconds."""
    if re.fullmatch(_SECONDS, value):
        return round(float(value), 3)
    parts = _DURATION.fullmatch(value)
    if not value or parts is None:
        return None
    return round(sum(float(part) * unit_s for part, unit_s in zip(parts.groups("0"), _UNITS_S, strict=True)), 3)


def parse_quantity(value: str) -> int | None:
    """A number as Kubernetes writes it, such as 4, 500m or 16Gi, rounded up."""
    parts = _QUANTITY.fullmatch(value.strip())
    if parts is None:
        return None
    unit = parts[2] or ""
    amount = float(parts[1]) * _POWERS[unit] if unit in _POWERS else float(parts[1] + unit)
    return math.ceil(round(amount, 9))


def parse_flag(value: str) -> bool | None:
    """A whole number as torchrun's flags have it: 0 is off. The v1 operator writes "" and means on."""
    text = value.strip()
    if not text:
        return True
    number = parse_number(text, 0, MAX_COUNT)
    return None if number is None else bool(number)


def parse_path(value: str) -> str | None:
    """An absolute path without control characters."""
    text = value.strip()
    return text if _PATH.fullmatch(text) else None


def parse_host(value: str) -> str | None:
    """A DNS name, an IPv4 address, or an IPv6 address."""
    text = value.strip()
    if ":" in text:
        return text if _is_ipv6(text) else None
    return text if _HOST.fullmatch(text) else None


def is_address(host: str) -> bool:
    """Whether a host is an address, which needs no DNS."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    address, percent, scope = text[:100].partition("%")
    try:
        IPv6Address(address)
    except ValueError:
        return False
    return _SCOPE.fullmatch(percent + scope) is not None


def parse_endpoint(
    value: str, default_port: int | None, *, least_port: int = 0, naked_ipv6: bool = False
) -> Endpoint | None:
    """HOST:PORT or [IPv6]:PORT; HOST alone takes `default_port`, when there is one. Port 0 means "any free one".

    `naked_ipv6` also takes IPv6:PORT without brackets, split at the last colon.
    """
    text = value.strip()
    port_text: str | None
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or ":" not in host or (rest and not rest.startswith(":")):
            return None
        port_text = rest[1:] if rest else None
    elif text.count(":") > 1:
        if not naked_ipv6:
            return None
        host, _, port_text = text.rpartition(":")
    else:
        host, colon, after = text.partition(":")
        port_text = after if colon else None
    if parse_host(host) is None:
        return None
    port = default_port if port_text is None else parse_number(port_text, least_port, 65535)
    return None if port is None else Endpoint(host.strip(), port)


def parse_node_range(value: str) -> NodeRange | None:
    """N or MIN:MAX, with 0 < MIN <= MAX."""
    parts = [parse_number(p, 1, MAX_COUNT) for p in value.split(":", 2)]
    if len(parts) == 1 and parts[0] is not None:
        return NodeRange(parts[0], parts[0])
    if len(parts) == 2 and parts[0] is not None and parts[1] is not None and parts[0] <= parts[1]:
        return NodeRange(parts[0], parts[1])
    return None


def parse_port_range(value: str) -> PortRange | None:
    """LOW-HIGH, with 0 < LOW <= HIGH."""
    low, dash, high = value.partition("-")
    ports = parse_number(low, 1, 65535), parse_number(high, 1, 65535)
    if not dash or ports[0] is None or ports[1] is None or ports[0] > ports[1]:
        return None
    return PortRange(ports[0], ports[1])


def parse_nproc(value: str) -> int | str | None:
    """A whole number of at least 1, or one of `NPROC_WORDS`."""
    text = value.strip()
    return text if text in NPROC_WORDS else parse_number(text, 1, MAX_COUNT)


def parse_conf(value: str) -> dict[str, str] | None:
    """k=v,k=v: only the first `=` splits, blanks around are dropped, empty items are refused."""
    conf: dict[str, str] = {}
    for item in value.split(","):
        key, equals, rest = item.partition("=")
        if not key.strip() or not equals or not rest.strip():
            return None
        conf[key.strip()] = rest.strip()
    return conf


def parse_hosts(value: str) -> tuple[str, ...] | None:
    """Host names separated by commas."""
    names = tuple(parse_host(part) for part in value.split(","))
    return tuple(n for n in names if n is not None) if None not in names else None
