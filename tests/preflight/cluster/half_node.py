"""A node that goes only half of the way: `half_node.py HOME PORT JOB RANK STAGE`.

Stage `record`: it comes, and never says what it is. `test`: it says so, and never answers a pair test.
`handshake`: it connects, says half of who it is, and ends the connection, again and again.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time

from trainer_launch.model import Endpoint
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.node_side import NodeLink


def main() -> None:
    home, port, job, rank, stage = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5]
    present = msg.Hello(msg.VERSION, job, rank, socket.gethostname(), secrets.token_hex(8), listens=port)
    if stage == "handshake":
        while True:
            with contextlib.suppress(OSError), socket.create_connection((home, port), timeout=5) as sock:
                sock.sendall(msg.render(present)[:40])
            time.sleep(0.1)

    def never(test: msg.Test, ear: object) -> msg.Result:
        print("reached", flush=True)
        time.sleep(600)
        raise AssertionError

    caller = NodeLink(Endpoint(home, port), present, deadline_s=600, port=port, bench=never)
    while True:
        news = caller.receive(1.0)
        if isinstance(news, msg.Complete) and stage == "record":
            print("reached", flush=True)
        elif isinstance(news, msg.Complete):
            caller.send(msg.NodeReport({}, *caller.offset))


if __name__ == "__main__":
    main()
