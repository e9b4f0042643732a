"""An elastic job at work without node 0, as far as who asks node 1's seat can see: `seat_at_work.py JOB PORT`."""

from __future__ import annotations

import sys
import threading

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.client import Client, Connected
from trainer_launch.membership.protocol import Claim
from trainer_launch.membership.server import Coordinator
from trainer_launch.membership.state import CoordinatorSettings
from trainer_launch.model import Endpoint


def main() -> None:
    job, port = sys.argv[1], int(sys.argv[2])
    server = Coordinator(
        CoordinatorSettings(job=job, min_nodes=1, max_nodes=3, max_restarts=3, candidate=1), Endpoint("", port)
    )
    server.start()
    claim = Claim(3, 1, "0-2", sure=True)
    own = Client(
        Endpoint("127.0.0.1", port), msg.Hello(msg.VERSION, job, 1, "job-worker-1", "x", 3, claims=(claim,))
    )
    while not isinstance(own.receive(None), Connected):
        pass
    print("at work", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
