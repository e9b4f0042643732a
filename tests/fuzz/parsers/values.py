"""Single values: numbers, names, endpoints, sizes, durations. What is read is written the same way again."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from tests.fuzz.oracle import Refused, attempt, text_of
from tests.fuzz.registry import target
from trainer_launch.host.network import AdapterPort, Interface
from trainer_launch.model import redaction, value_parsers
from trainer_launch.observability import html
from trainer_launch.planning import interfaces, shared_memory
from trainer_launch.rehearsal import faults
from trainer_launch.rehearsal.controllers import pod_values

_INTERFACES = (
    Interface(name="eth0", addresses=("10.0.0.1", "fd00::1")),
    Interface(name="ib0", addresses=("10.1.0.1",)),
)
_ADAPTERS = (AdapterPort("mlx5_0", 1, True), AdapterPort("mlx5_10", 2, True))


def _number(text: str) -> None:
    found = value_parsers.parse_number(text, 0, 10**9)
    assert found is None or (0 <= found <= 10**9 and text.strip().isascii())
    assert value_parsers.parse_flag(text) in (None, False, True)


def _host(text: str) -> None:
    found = value_parsers.parse_host(text)
    assert found is None or (value_parsers.parse_host(found) == found and found.isascii() and found.isprintable())
    hosts = value_parsers.parse_hosts(text)
    assert hosts is None or value_parsers.parse_hosts(",".join(hosts)) == hosts


def _endpoint(text: str) -> None:
    for naked in (False, True):
        found = value_parsers.parse_endpoint(text, 29400, naked_ipv6=naked)
        assert found is None or value_parsers.parse_endpoint(str(found), None) == found
        assert found is None or (0 <= found.port <= 65535 and str(found).isprintable())


def _ranges(text: str) -> None:
    nodes = value_parsers.parse_node_range(text)
    assert nodes is None or (0 < nodes.min <= nodes.max and value_parsers.parse_node_range(str(nodes)) == nodes)
    ports = value_parsers.parse_port_range(text)
    assert ports is None or (
        0 < ports.low <= ports.high < 65536 and value_parsers.parse_port_range(str(ports)) == ports
    )
    assert isinstance(value_parsers.parse_nproc(text), int | str | None)


def _pairs(text: str) -> None:
    conf = value_parsers.parse_conf(text)
    if conf is not None:
        assert all(key and value for key, value in conf.items())
    found = value_parsers.parse_path(text)
    assert found is None or (
        found.startswith("/") and value_parsers.parse_path(found) == found and "\n" not in found
    )


def _shown(text: str) -> None:
    for said in (value_parsers.shown(text), value_parsers.named(text)):
        assert said.isprintable()
        assert len(said) <= 160


def _quantity(text: str) -> None:
    found = value_parsers.parse_quantity(text)
    assert found is None or abs(found) < 10**200
    size = attempt(shared_memory.parse_size, text, names="--shm-size")
    assert isinstance(size, Refused) or 0 < size < 1 << 62


def _duration(text: str) -> None:
    seconds = value_parsers.parse_duration(text)
    assert seconds is None or value_parsers.parse_duration(f"{seconds}s") == seconds
    found = attempt(faults.split, text, "--fault", names="--fault")
    if not isinstance(found, Refused):
        assert faults.split(" ".join(map(shlex.quote, found)), "--fault") == found


def _interfaces(text: str) -> None:
    assert set(interfaces.nccl_interfaces(text, _INTERFACES)) <= set(_INTERFACES)
    assert all(interfaces.takes(text, port.device, port.port) in (False, True) for port in _ADAPTERS)
    found, absent = interfaces.gloo_interfaces(text, _INTERFACES)
    assert set(found) <= set(_INTERFACES)
    assert all(name in text for name in absent)


def _expanded(text: str) -> None:
    env = {"A": "x" * 1000, "B": text[:1000]}
    found = attempt(pod_values.expanded, text, env)
    assert isinstance(found, Refused) or len(found) <= max(131_072, len(text))


_KINDS: tuple[Callable[[str], None], ...] = (
    *(_number, _host, _endpoint, _ranges, _pairs, _shown, _quantity, _duration, _interfaces, _expanded),
)


@target(600)
def value(data: bytes) -> None:
    """The first byte chooses which."""
    if data:
        _KINDS[data[0] % len(_KINDS)](text_of(data[1:]))


@target(3000)
def secrets(data: bytes) -> None:
    """What looks like a secret does not leave; what is left once is left again; long texts take no longer."""
    text = text_of(data)
    once = redaction.redact_text(text)
    assert redaction.redact_text(once) == once
    redaction.redact_text((text * 40)[:60_000])
    redaction.redact_command(tuple(text.split("\0")))
    name, _, rest = text.partition("=")
    assert redaction.redact(name, rest) in (redaction.REDACTED, redaction.redact_text(rest))
    redaction.redact_file("/" + name, rest)
    shown = html.clean(text)
    assert shown.isprintable()
    for secret in ("hf_abcdefghijklmnopqrst", "ghp_abcdefghijklmnopqrst1234"):
        assert secret not in redaction.redact_text(f"{text[:50]} {secret} {text[50:]}")
