"""How the agent begins: with the import of torch, and with the fork-server that it is for as well."""

from __future__ import annotations

import json
import os
import sys
import tempfile

from trainer_launch import run_folder


def torch_agent() -> None:
    """The process, to its end."""
    wanted = os.environ.pop("TRAINER_LAUNCH_WARM", "")
    server, reason = None, None
    if wanted:
        from trainer_launch.child import places
        from trainer_launch.child.server import Server, ServerError

        places.forget_predecessor(os.environ[run_folder.VARIABLE])
        server = Server(json.loads(wanted), os.environ[run_folder.VARIABLE])
        try:
            server.start()
        except ServerError as problem:
            reason = str(problem)
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # PID 1 has found a folder where Python looks for none, such as /dev/shm
        tempfile.tempdir = os.environ[run_folder.VARIABLE]
    from trainer_launch.child import torch_agent as agent

    agent.run(sys.argv[1:], server, reason)


def mpi_agent() -> None:
    """What runs mpirun, to its end."""
    from trainer_launch.child import mpi_agent as agent

    agent.run()


def horovod_agent() -> None:
    """What runs horovodrun, to its end."""
    from trainer_launch.child import horovod_agent as agent
    from trainer_launch.child.mpi_agent import run

    run(agent.HorovodAgent)
