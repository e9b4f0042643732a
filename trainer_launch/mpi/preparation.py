"""What an MPI job needs before it can begin: hosts, a way to them, the program. It starts children and waits."""

from __future__ import annotations

from msgspec import Struct

from trainer_launch.host import deadline_subprocess, runtime_directory
from trainer_launch.model import Process
from trainer_launch.model.errors import UsageError
from trainer_launch.mpi import host_access
from trainer_launch.mpi.horovod import Horovodrun
from trainer_launch.mpi.host_access import HostAccess
from trainer_launch.mpi.host_list import HostList
from trainer_launch.mpi.host_readiness import Threads
from trainer_launch.mpi.hosted_program import HostedProgram, Mpirun
from trainer_launch.mpi.mpi_job import HostedJob
from trainer_launch.mpi.mpirun_command import Dialect, recognised
from trainer_launch.mpi.remote_hosts import RemoteHosts
from trainer_launch.planning import mpi_options
from trainer_launch.planning.mpi import Spec, spec_of
from trainer_launch.planning.task import Task
from trainer_launch.supervisor.system import System

_THREADS = 64
_VERSION_S = 20.0


class Preparation(Struct, frozen=True):
    """A job that can begin."""

    spec: Spec
    access: HostAccess
    hosts: HostList
    threads: Threads
    program: HostedProgram

    def begin(self, system: System) -> HostedJob:
        """Begin to look at the hosts. Commands on hosts are no ranks, so they bear no mark."""
        system.mark = runtime_directory.MPI_RUN, self.access.mark
        return HostedJob(self.spec, self.program, RemoteHosts(self.access, self.hosts, self.threads, system))


def prepared(task: Task, process: Process) -> Preparation:
    """Make ready what runs `process`, an mpirun or horovodrun, over the job's hosts.

    Raises:
        LaunchError: the list of hosts makes no sense, there is no key, no ssh, or no mpirun that is known.
    """
    spec, typed, threads = spec_of(task, process), mpi_options.parse(process.argv), Threads(_THREADS)
    hosts = HostList(spec, typed)
    access = host_access.prepared(spec, typed, process.env, hosts)
    if mpi_options.is_horovodrun(process.argv):
        program: HostedProgram = Horovodrun(process, typed, access, hosts.members, threads.wake)
    else:
        program = Mpirun(process, typed, access, _dialect(process), threads.wake)
    return Preparation(spec, access, hosts, threads, program)


def _dialect(process: Process) -> Dialect:
    mpirun = process.argv[0]
    ended = deadline_subprocess.run((mpirun, "--version"), process.env, _VERSION_S)
    if ended.problem is not None:
        raise UsageError(f"{mpirun!r} cannot be run ({ended.problem.strerror}); install an MPI in this image")
    dialect = recognised(ended.out + ended.err)
    if dialect is None:
        raise UsageError(
            f"{mpirun} --version says neither Open MPI nor MPICH nor Intel MPI; "
            f"set --engine plain to run it as it is"
        )
    return dialect
