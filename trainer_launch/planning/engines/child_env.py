"""What a child's environment is: ours, with the platform's known traps repaired."""

from __future__ import annotations

from collections.abc import Mapping

from trainer_launch.model import Job, Topology
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.topology import usable_threads
from trainer_launch.planning.torchrun_options import OPTIONS, check_value

AGENT_RESTARTS = 3  # an hour, when PID 1 starts a killed agent again; its own exit code is final
_MPI = ("mpirun", "sshd")
_OPEN_MPI = "OMPI_MCA_btl_"
# Large messages go through shared memory, without process_vm_readv. Open MPI 3 and 4 would log "Read -1, expected
# N, errno = 1" for each message (open-mpi/ompi#4948). From 5.0, CMA is a component of its own.
# On mpirun's command line the same parameters take precedence.
_TWO_COPIES = {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_smsc": "^cma"}


def workers(request: Request) -> dict[str, str]:
    """What torch workers have in common, but for what torchrun's options and a generation add."""
    env = repaired(request.env)
    threads, _ = usable_threads(request.host, request.topology.local_world_size, env.get("OMP_NUM_THREADS"))
    if threads is not None:
        env["OMP_NUM_THREADS"] = threads
    return _unbuffered(request, sparing(request, env))


def agent(request: Request) -> dict[str, str]:
    """The environment of torch elastic's agent, which its workers inherit."""
    # With the agents' store shared, torch 2.13 breaks restarts: the new group reads its dead predecessor's keys.
    return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **workers(request)}


def plain(request: Request) -> dict[str, str]:
    """The environment of a program; a torchrun inside it finds PET_* values that it does not crash on."""
    return _unbuffered(request, sparing(request, _plain(request.env, request.job, request.topology)))


def _unbuffered(request: Request, env: dict[str, str]) -> dict[str, str]:
    """Who is watched for output must not keep it in a buffer."""
    return {"PYTHONUNBUFFERED": "1", **env} if request.settings.hang_timeout is not None else env


def sparing(request: Request, env: dict[str, str]) -> dict[str, str]:
    """What makes engines do without what this container lacks; the user's own words stand.

    Where /dev/shm is too small, NCCL goes through sockets or InfiniBand instead where GPUs cannot reach each other
    directly (its user guide, NCCL_SHM_DISABLE; NVIDIA/nccl#525). Open MPI puts the files that it maps elsewhere
    (vader's in 3.1 to 4.x, open-mpi/ompi#5422; sm's from 5.0, which has vader's name as an alias), and so does UCX.
    """
    if request.shm_is_short:
        if request.host.gpus.cuda:
            env.setdefault("NCCL_SHM_DISABLE", "1")
        if request.job.engine in _MPI and not any(name.startswith(_OPEN_MPI) for name in env):
            env |= {f"{_OPEN_MPI}{name}_backing_directory": "/tmp" for name in ("vader", "sm")}
        if request.job.engine in _MPI:
            env.setdefault("UCX_POSIX_DIR", "/tmp")
    if request.copies_are_refused and env.keys().isdisjoint(_TWO_COPIES):
        env |= _TWO_COPIES
    return env


def _plain(env: Mapping[str, str], job: Job, topology: Topology) -> dict[str, str]:
    if job.engine != "torchrun":
        return dict(env)
    fixed = repaired(env)
    # torchrun's own `auto` and `cpu` do not see the cgroup's quota.
    size = topology.local_world_size
    if "PET_NPROC_PER_NODE" in env and size is not None:
        fixed["PET_NPROC_PER_NODE"] = str(size)
    return fixed


def repaired(env: Mapping[str, str]) -> dict[str, str]:
    """PET_<FLAG> as 1 or 0: torchrun calls int() on them, and the v1 operator writes PET_STANDALONE=""."""
    fixed = dict(env)
    for option in OPTIONS.values():
        if option.form == "flag" and option.variable in fixed:
            fixed[option.variable] = check_value(option, fixed[option.variable], option.variable)
    return fixed
