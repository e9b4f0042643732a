"""The ways between workers by which mpirun's daemons start each other in a large job: each is tried by ssh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainer_launch.host import deadline_subprocess
from trainer_launch.model.findings import Finding, Scope, Status
from trainer_launch.mpi.ssh_client import Client
from trainer_launch.mpi.ssh_config import AGENT
from trainer_launch.preflight.mpi import host_queries, verdicts

RADIX = 64  # of PRRTE's tree, and of Open MPI 4's: up to so many hosts the launcher starts all daemons itself
_TRY_S = 20.0
_SHOWN = 5
_MAX_CHARS = 200


def edges(n_hosts: int, radix: int = RADIX) -> tuple[tuple[int, int], ...]:
    """Hosts that start others' daemons, with each of those, by index; the launcher is the root of the tree."""
    return tuple(((node - 1) // radix - 1, node - 1) for node in range(radix + 1, n_hosts + 1))


def findings(
    hosts: Sequence[str], client: Client, env: Mapping[str, str], radix: int = RADIX
) -> tuple[Finding, ...]:
    """Try every edge of the tree, as many at once as mpirun would."""
    tried = edges(len(hosts), radix)
    if not tried:
        return ()

    def attempt(edge: tuple[int, int]) -> deadline_subprocess.Told:
        parent, child = (hosts[end] for end in edge)
        # Sessions of `trainer-launch sshd` find an ssh that has the job's key and configuration.
        with_port = f"-p {client.port} -o BatchMode=yes -o ConnectTimeout=5 {child} true"
        command = f"if command -v {AGENT} >/dev/null; then {AGENT} {with_port}; else ssh {with_port}; fi"
        return deadline_subprocess.run(client.argv(parent, command), env, _TRY_S)

    with ThreadPoolExecutor(max_workers=min(host_queries.AT_ONCE, len(tried))) as pool:
        told = dict(zip(tried, pool.map(attempt, tried), strict=True))
    bad = {edge: one for edge, one in told.items() if one.code != 0}
    if not bad:
        text = f"all {len(tried)} paths between workers that a tree of daemons uses are open"
        return (Finding(check=verdicts.TREE, status=Status.PASS, scope=Scope.JOB, text=text),)
    whys = [f"{hosts[one]} - {hosts[other]}: {_why(bad[one, other])}" for one, other in list(bad)[:_SHOWN]]
    one, other = next(iter(bad))
    more = f" and {len(bad) - 1} others" if len(bad) > 1 else ""
    return (
        Finding(
            check=verdicts.TREE,
            status=Status.WARN,
            scope=Scope.LINK,
            subject=f"{hosts[one]} - {hosts[other]}{more}",
            text=f"{hosts[one]} cannot log in to {hosts[other]}{more}: {_why(bad[one, other])}",
            evidence=tuple(whys),
            action=f"let workers reach each other's sshd with the job's key: of over {radix} daemons some start "
            "the others, unless this launcher runs mpirun, which starts all by itself",
        ),
    )


def _why(told: deadline_subprocess.Told) -> str:
    lines = [line.strip() for line in told.err.splitlines() if line.strip()]
    return lines[-1][:_MAX_CHARS] if lines else "no answer in time" if told.code is None else f"code {told.code}"
