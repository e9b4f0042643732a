"""How the agents of MPI and Horovod begin."""

from __future__ import annotations


def mpi_agent() -> None:
    """What runs mpirun, to its end."""
    from trainer_launch.child import mpi_agent as agent

    agent.run()


def horovod_agent() -> None:
    """What runs horovodrun, to its end."""
    from trainer_launch.child import horovod_agent as agent
    from trainer_launch.child.mpi_agent import run

    run(agent.HorovodAgent)
