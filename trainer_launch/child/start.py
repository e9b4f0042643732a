"""How the agent begins: first the fork-server, then torch, so that both import it at the same time."""

from __future__ import annotations

import json
import os
import sys

from trainer_launch import run_folder


def torch_agent() -> None:
    """The process, to its end."""
    wanted = os.environ.pop("TRAINER_LAUNCH_WARM", "")
    server, reason = None, None
    if wanted:
        from trainer_launch.child.server import Server, ServerError

        server = Server(json.loads(wanted), os.environ[run_folder.VARIABLE])
        try:
            server.start()
        except ServerError as problem:
            reason = str(problem)
    from trainer_launch.child import torch_agent as agent

    agent.run(sys.argv[1:], server, reason)
