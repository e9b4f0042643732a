"""The platform that made this pod, and its job. A new contract is a value in a module, and a line here."""

from __future__ import annotations

from msgspec.structs import replace

from trainer_launch.contracts import (
    flat_platforms,
    mpi_operator,
    torchrun_env,
    trainer_v2_runtimes,
    v1_jobs,
)
from trainer_launch.contracts.source import Contract, Marks, PodInput, Source
from trainer_launch.model import Job
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import shown

# No platform: nothing but flags, and torchrun's own variables where somebody set them.
UNKNOWN = Contract("unknown", Marks(), torchrun_env.by_hand)

# In order: the first that fits a pod reads it.
CONTRACTS: tuple[Contract, ...] = (
    flat_platforms.TORCHRUN_CHILD,
    flat_platforms.MPI_RANK,
    trainer_v2_runtimes.FLUX,
    flat_platforms.KUBERAY,
    flat_platforms.FLYTE_2,
    flat_platforms.LEADER_WORKER_SET,
    flat_platforms.SKYPILOT,
    flat_platforms.DSTACK,
    flat_platforms.SAGEMAKER,
    flat_platforms.AZURE_ML,
    flat_platforms.VERTEX_AI,
    flat_platforms.VOLCANO,
    flat_platforms.SLURM,
    mpi_operator.V2BETA1,
    mpi_operator.V1,
    mpi_operator.TRAINER_V2,
    v1_jobs.TENSORFLOW,
    trainer_v2_runtimes.XGBOOST,
    trainer_v2_runtimes.JAX,
    v1_jobs.JAX,
    v1_jobs.PADDLE,
    v1_jobs.FLYTE_ELASTIC,
    v1_jobs.PYTORCH_ELASTIC,
    trainer_v2_runtimes.TORCH,
    trainer_v2_runtimes.TORCHTUNE,
    v1_jobs.PYTORCH,
    v1_jobs.XGBOOST,
    flat_platforms.INDEXED_JOB,
    trainer_v2_runtimes.PLAINML,
    UNKNOWN,
)


def detect(source: Source) -> Contract:
    """The first contract whose marks the pod has. Raises ContractError: it has the marks of two kinds of job."""
    first = next(contract for contract in CONTRACTS if contract.marks.fit(source))
    if not first.kind:
        return first
    rivals = [contract for contract in CONTRACTS if contract.kind and contract.marks.fit(source)]
    if any(contract.kind != first.kind for contract in rivals):
        names = " and ".join(contract.name for contract in rivals[:3])
        raise ContractError(
            f"several contracts fit this pod: {names}; set --contract (TRAINER_LAUNCH_CONTRACT), or unset the "
            f"variables of the other platform"
        )
    return first


def find(name: str) -> Contract:
    """The contract called `name`."""
    by_name = {contract.name: contract for contract in CONTRACTS}
    if name in by_name:
        return by_name[name]
    advice = f"{did_you_mean(name, by_name)} expected one of {', '.join(by_name)}".strip()
    raise UsageError(f"unknown contract {shown(name)}; {advice}")


def read_job(pod: PodInput, contract: str | None = None) -> Job:
    """The job as the platform told it to this pod: by the contract named, else by the one detected."""
    chosen = find(contract) if contract else detect(Source(pod))
    source = Source(pod, chosen.name)
    job = trainer_v2_runtimes.with_status(source, chosen.read(source))
    return replace(job, contract=chosen.name, facts=source.facts, warnings=source.warnings)
