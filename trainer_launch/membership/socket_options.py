"""How both sides set their sockets up."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket

from trainer_launch.host import network
from trainer_launch.model import Endpoint
from trainer_launch.model.errors import NodeError

_BACKLOG = 4096  # the kernel cuts it to net.core.somaxconn
_MOST_IDLE_S = 32_767  # that the kernel takes for TCP_KEEPIDLE
_OTHER_FILES = 256  # descriptors that stay free for the rest of the process
NO_ROOM = "the limit of open files (ulimit -n) leaves this process no room for %d nodes"
_ANY = ("", "0.0.0.0", "::", "*")


def listen(endpoint: Endpoint) -> socket.socket:
    """Listen there, on IPv4 and IPv6 when no address is named; port 0 lets the kernel pick."""
    try:
        listener = _listen_anywhere(endpoint.port) if endpoint.host in _ANY else _listen_at(endpoint)
    except (OSError, OverflowError, UnicodeError) as problem:
        number = getattr(problem, "errno", None)  # the resolver has numbers of its own
        why = os.strerror(int(number)) if number and number in errno.errorcode else str(problem)
        holder = network.listener(endpoint.port) if number == errno.EADDRINUSE else ""
        why += f" by {holder}" if holder else ""
        raise NodeError(
            f"the coordinator cannot listen on {endpoint.host or '*'}:{endpoint.port}: {why}; free that port"
            " (see `ss -ltnp`) or choose another one for the job"
        ) from None
    listener.setblocking(False)
    return listener


def _listen_anywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # a kernel with IPv6 compiled in but switched off
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _listen_at(endpoint: Endpoint) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server((address[0], int(address[1])), family=family, backlog=_BACKLOG)


def tune(sock: socket.socket, silence_s: float) -> None:
    """Send small lines at once, and let the kernel end a connection whose other end no longer answers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(max(1, round(silence_s)), _MOST_IDLE_S))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1000, round(silence_s * 1000)))


def make_room(connections: int) -> bool:
    """Let this process have so many connections, and what it starts; whether that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(connections + _OTHER_FILES, hard)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return spare_files() >= connections


def spare_files() -> int:
    """How many descriptors may be connections."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
