"""The plans of mpirun and of horovodrun: one agent, and what it is told of the job."""

from __future__ import annotations

from collections.abc import Sequence

from trainer_launch.contracts.mpi_operator import DISCOVERY
from trainer_launch.host import runtime_directory
from trainer_launch.model import Fact, Forked, Job, Origin, Plan, Process, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.engines import child_env
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.mpi_launch_spec import KUBEXEC, OWN, SSH, JobSettings, Spec

_AGENTS = {"mpirun": "trainer_launch.mpi.agent", "horovodrun": "trainer_launch.mpi.horovod_agent"}
_MAX_RESTARTS = 3  # of failed ranks, unless the user says
# A user who has set one of these reaches the hosts in a way of his own.
_OWN_AGENTS = (
    *("OMPI_MCA_plm_rsh_agent", "OMPI_MCA_plm_ssh_agent", "PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm"),
    *("HYDRA_LAUNCHER", "HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC"),
)
_OWN_OPTIONS = frozenset(
    ("plm_rsh_agent", "plm_ssh_agent", "plm", "launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk")
)


def plan(
    request: Request, engine: str, program: str, command: Sequence[str], spec: Spec, reasons: tuple[str, ...]
) -> Plan:
    """One agent, which runs `command`, an mpirun or a horovodrun (`program`), over the job's hosts.

    Raises:
        UsageError: no signal is left to stop by.
    """
    env = child_env.plain(request)
    env[runtime_directory.VARIABLE] = request.scratch
    agent = Process(
        name=program,
        argv=tuple(command),
        env=env,
        label="launcher" if request.settings.prefix else None,
        forked=Forked(_AGENTS[program], spec),
    )
    return Plan(
        engine=engine,
        processes=(agent,),
        grace_s=request.grace_s,
        stop_signal=signal_policy.stop_signal(request.signals),
        signals=request.signals,
        restarts=child_env.AGENT_RESTARTS,
        failure_file=spec.failure_file,
        reasons=reasons,
    )


def of(request: Request, names: frozenset[str]) -> tuple[Spec, str]:
    """The job for the agent, and how its hosts are reached; `names` are those of mpirun's typed options.

    Raises:
        UsageError: nothing can be counted that slots are asked for by.
    """
    job, details, settings = request.job, request.job.details, request.settings
    slots, given = _slots(request)
    agent, why = _agent(request, names)
    nodes = request.topology.nodes
    is_elastic = nodes is not None and nodes.fixed is None
    hostfile = _text(details.get("hostfile_path"))
    restarts = request.topology.max_restarts
    spec = Spec(
        contract=job.contract,
        hostname=request.host.hostname,
        hostfile=hostfile,
        is_hydra_file=details.get("mpi_implementation") in ("Intel", "MPICH"),
        slots=slots,
        slots_are_given=given,
        discovery=DISCOVERY,
        agent=agent,
        agent_path=_text(details.get("launch_agent_path")),
        ssh_dir=_text(details.get("ssh_dir")),
        ssh_port=settings.ssh_port,
        check_host_keys=not settings.insecure_host_keys,
        settings=JobSettings(
            min_hosts=nodes.min if nodes is not None and is_elastic else None,
            max_hosts=nodes.max if nodes is not None and _flag(job, "nnodes") else None,
            wait_s=settings.wait_timeout,
            rejoin_s=settings.wait_timeout,
            shrink_s=request.shrink_after_s,
            max_restarts=_MAX_RESTARTS if restarts is None else restarts,
            grace_s=request.grace_s,
        ),
        signals=request.signals,
        scratch=request.scratch,
        failure_file=f"{request.scratch}/{runtime_directory.FAILURE}",
        forward=request.forward_env,
    )
    return spec, why


def _slots(request: Request) -> tuple[int | None, bool]:
    """Ranks per host where the list does not tell, and whether the user says so in spite of it."""
    job = request.job
    fact = _flag(job, "nproc_per_node")
    if fact is None:
        told = job.details.get("slots_env")
        return (told if isinstance(told, int) and told > 0 else None), False
    size = request.topology.local_world_size
    if size is None or (fact.value in ("auto", "gpu") and not request.host.gpus.count):
        raise UsageError(
            f"invalid value {fact.value!r} for --nproc-per-node: this launcher has no device to count "
            f"({request.host.gpus.reason}); set it to a number"
        )
    return size, True


def _agent(request: Request, names: frozenset[str]) -> tuple[str, str]:
    details = request.job.details
    if details.get("launch_agent") == "kubexec":
        return KUBEXEC, "hosts are reached by the platform's kubexec.sh"
    if not names.isdisjoint(_OWN_OPTIONS) or any(request.env.get(name) for name in _OWN_AGENTS):
        return OWN, "hosts are reached as the image or the command configures it"
    if details.get("ssh_dir") is None and details.get("launch_agent") != "ssh":
        return OWN, "the job has no ssh key: hosts are reached with the image's ssh configuration"
    return SSH, "hosts are reached by ssh; both sides authenticate with the job's key"


def _flag(job: Job, field: str) -> Fact | None:
    """What the user himself said about the job."""
    found = (fact for fact in reversed(job.facts) if fact.field == field and fact.origin is Origin.FLAG)
    return next(found, None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
