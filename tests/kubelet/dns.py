"""Names of headless Services for the pods of tests: Endpoints are watched, and dnsmasq answers, as CoreDNS would.

    dns.py ADDRESS API STATE

Who stops this process by SIGSTOP has a DNS that answers, but knows nothing new: one that lags.
"""

from __future__ import annotations

import http.client
import json
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

DOMAIN = "cluster.local"
TTL_S = "5"


def lines_of(namespace: str, service: str, subsets: list[dict[str, Any]] | None) -> list[str]:
    """Of a hosts file: each pod by its own name, if it has one, and by its Service's."""
    zone = f"{service}.{namespace}.svc.{DOMAIN}"
    found = [address for subset in subsets or [] for address in subset.get("addresses") or []]
    own = [f"{one['ip']} {one['hostname']}.{zone}" for one in found if one.get("hostname")]
    return own + [f"{one['ip']} {zone}" for one in found]


class Names:
    """The names that dnsmasq answers."""

    def __init__(self, address: str, state: Path) -> None:
        self._hosts = state / "run" / "hosts"
        self._hosts.touch()
        self._known: dict[tuple[str, str], list[dict[str, Any]] | None] = {}
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited: too early a one must not end dnsmasq
        quiet = ["--conf-file=/dev/null", "--no-hosts", "--no-resolv", "--no-poll", "--pid-file=", "--user=root"]
        # Foreign names do not exist: to refuse them would make resolvers ask again.
        zones = [f"--local=/{DOMAIN}/", "--local=/in-addr.arpa/", "--address=/#/"]
        times = [f"--local-ttl={TTL_S}", f"--neg-ttl={TTL_S}"]
        where = [f"--listen-address={address}", "--bind-interfaces", f"--addn-hosts={self._hosts}"]
        self._server = subprocess.Popen(["dnsmasq", "--keep-in-foreground", *quiet, *zones, *times, *where])

    def take(self, endpoints: dict[str, Any], gone: bool = False) -> None:
        """The Endpoints of a Service, as they are now."""
        about = endpoints["metadata"]
        self._known[about["namespace"], about["name"]] = None if gone else endpoints.get("subsets")

    def publish(self) -> None:
        """Let dnsmasq read them."""
        found = [line for (space, name), subsets in self._known.items() for line in lines_of(space, name, subsets)]
        self._hosts.write_text("".join(f"{line}\n" for line in found))
        if self._server.poll() is not None:
            raise SystemExit("dnsmasq has ended")
        self._server.send_signal(signal.SIGHUP)


def follow(names: Names, connection: http.client.HTTPConnection) -> None:
    """Until the API server ends the watch."""
    connection.request("GET", "/api/v1/endpoints")
    listed = json.load(connection.getresponse())
    for item in listed["items"]:
        names.take(item)
    names.publish()
    since = listed["metadata"]["resourceVersion"]
    connection.request("GET", f"/api/v1/endpoints?watch=1&resourceVersion={since}")
    for line in connection.getresponse():
        event = json.loads(line)
        if event["type"] == "ERROR":
            return
        names.take(event["object"], event["type"] == "DELETED")
        names.publish()


def main(address: str, api: str, state: Path) -> None:
    trusted = ssl.create_default_context(cafile=str(state / "pki" / "ca.crt"))
    trusted.load_cert_chain(str(state / "pki" / "admin.crt"), str(state / "pki" / "admin.key"))
    names = Names(address, state)
    while True:
        try:
            follow(names, http.client.HTTPSConnection(api, context=trusted))
        except (OSError, http.client.HTTPException) as problem:
            sys.stderr.write(f"watching again: {problem}\n")
        time.sleep(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
