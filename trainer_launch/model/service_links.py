"""Variables that Kubernetes injects for Services, in the form of Docker's old links: no settings of ours. Pure."""

from __future__ import annotations

import re

_SERVICE = re.compile(r"([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_[0-9]+_(TCP|UDP|SCTP).*)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+")


def is_link(name: str, value: object) -> bool:
    """Whether it is one for a Service called trainer-launch or trainer-launch-…; `name` is without our prefix."""
    linked = isinstance(value, str) and _ADDRESS.fullmatch(value) is not None
    is_port = name.upper().endswith("PORT")
    return (is_port and linked) or _SERVICE.fullmatch(name) is not None
