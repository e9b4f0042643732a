"""Which controller made this pod, and what it told us. A new contract is a value in a module, and a line here."""

from __future__ import annotations

from types import MappingProxyType

from msgspec.structs import replace

from trainer_launch.contracts import (
    flat_platforms,
    mpi_operator,
    rank_process,
    torchrun_env,
    trainer_status,
    trainer_v2_runtimes,
    v1_jax_xgboost_paddle,
    v1_pytorch,
    v1_tensorflow_mxnet,
)
from trainer_launch.contracts.source import Contract, Marks, Pod, Source
from trainer_launch.model import Job
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import shown

# No platform: nothing but flags, and torchrun's own variables where somebody set them.
UNKNOWN = Contract("unknown", Marks(), torchrun_env.by_hand)

# Certain whatever else is there; each beats all that follow.
_CERTAIN = (rank_process.TORCHRUN, rank_process.MPI, trainer_v2_runtimes.FLUX, *flat_platforms.CONTRACTS)
# Two of these in one pod are ambiguous, unless one is declared weaker than the other.
_SPECIFIC = (
    mpi_operator.FLYTE,
    mpi_operator.V2BETA1,
    mpi_operator.V1,
    mpi_operator.TRAINER_V2,
    v1_tensorflow_mxnet.TENSORFLOW,
    v1_tensorflow_mxnet.MXNET,
    trainer_v2_runtimes.XGBOOST,
    trainer_v2_runtimes.JAX,
    v1_jax_xgboost_paddle.JAX,
    v1_jax_xgboost_paddle.PADDLE,
    v1_pytorch.FLYTE,
    v1_pytorch.ELASTIC,
    trainer_v2_runtimes.TORCH,
    trainer_v2_runtimes.TORCHTUNE,
    v1_pytorch.FIXED,
    v1_jax_xgboost_paddle.XGBOOST,
)
# What is left when nothing else fits; each yields to all before it.
_LEFT_OVER = (flat_platforms.INDEXED_JOB, trainer_v2_runtimes.PLAINML, UNKNOWN)

CONTRACTS = _CERTAIN + _SPECIFIC + _LEFT_OVER

_MARKS_SHOWN = 4  # per contract, in a message


def detect(source: Source) -> Contract:
    """The contract that the pod's marks tell; ambiguous marks raise, and no mark is `UNKNOWN`."""
    for contract in _CERTAIN:
        if contract.marks.fit(source):
            return contract
    fitting = [contract for contract in _SPECIFIC if contract.marks.fit(source)]
    if fitting:
        return _strongest(fitting, source)
    return next(contract for contract in _LEFT_OVER if contract.marks.fit(source))


def find(name: str) -> Contract:
    """The contract called `name`."""
    by_name = {contract.name: contract for contract in CONTRACTS}
    if name in by_name:
        return by_name[name]
    advice = f"{did_you_mean(name, by_name)} The contracts are {', '.join(by_name)}".strip()
    raise UsageError(f"unknown contract {shown(name)}; {advice}")


def read_job(pod: Pod, contract: str | None = None) -> Job:
    """What the platform told this pod: by the contract named, else by the one detected."""
    chosen = find(contract) if contract else detect(Source(pod))
    source = Source(pod, chosen.name)
    job = chosen.read(source)
    status = trainer_status.read_status(source)
    index = source.index("JOB_COMPLETION_INDEX", default=None) if status else None
    details = {**job.details, **trainer_status.status_details(status, job, index)}
    return replace(
        job,
        contract=chosen.name,
        details=MappingProxyType(details),
        facts=source.facts,
        warnings=source.warnings,
    )


def _strongest(fitting: list[Contract], source: Source) -> Contract:
    for contract in fitting:
        if all(contract.name in other.weaker_than for other in fitting if other is not contract):
            return contract
    seen = "; ".join(f"{c.name} ({_marks(c, source)})" for c in fitting[:3])
    raise ContractError(
        f"several contracts fit this pod: {seen}; "
        f"unset the variables of the others, or set --contract (TRAINER_LAUNCH_CONTRACT)"
    )


def _marks(contract: Contract, source: Source) -> str:
    return ", ".join(contract.marks.seen(source)[:_MARKS_SHOWN])
