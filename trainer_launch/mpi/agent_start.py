"""How the agents of MPI and Horovod begin."""

from __future__ import annotations


def mpi_agent() -> None:
    """What runs mpirun, to its end."""
    from trainer_launch.mpi import agent

    agent.run()


def horovod_agent() -> None:
    """What runs horovodrun, to its end."""
    from trainer_launch.mpi import horovod_agent as agent
    from trainer_launch.mpi.agent import run

    run(agent.HorovodAgent)
