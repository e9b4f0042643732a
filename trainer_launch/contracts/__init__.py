"""Which controller made this pod, and what it told us. A new contract is one file and one line here."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from trainer_launch.contracts import (
    bare,
    flyte_elastic,
    flyte_mpi,
    mpi_operator,
    mpi_rank,
    torchrun_child,
    trainer_flux,
    trainer_jax,
    trainer_mpi,
    trainer_plainml,
    trainer_status,
    trainer_torch,
    trainer_torchtune,
    trainer_xgboost,
    v1_jax,
    v1_mpi,
    v1_mxnet,
    v1_paddle,
    v1_pytorch,
    v1_pytorch_elastic,
    v1_tensorflow,
    v1_xgboost,
)
from trainer_launch.contracts.source import Marks, Pod, Source
from trainer_launch.model import Job
from trainer_launch.model.errors import ContractError, UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import shown


class Contract(Protocol):
    """What each contract's module offers. It may also declare WEAKER_THAN: the names of contracts it yields to."""

    NAME: str
    MARKS: Marks

    def read(self, source: Source) -> Job:
        """Read the pod."""


# Certain whatever else is there; each beats all that follow.
_CERTAIN: tuple[Contract, ...] = (torchrun_child, mpi_rank, trainer_flux)
# Two of these in one pod are ambiguous, unless one is declared weaker than the other.
_SPECIFIC: tuple[Contract, ...] = (
    flyte_mpi,
    mpi_operator,
    v1_mpi,
    trainer_mpi,
    v1_tensorflow,
    v1_mxnet,
    trainer_xgboost,
    trainer_jax,
    v1_jax,
    v1_paddle,
    flyte_elastic,
    v1_pytorch_elastic,
    trainer_torch,
    trainer_torchtune,
    v1_pytorch,
    v1_xgboost,
)
# What is left when nothing else fits; each yields to all before it.
_LEFT_OVER: tuple[Contract, ...] = (trainer_plainml, bare)

CONTRACTS: tuple[Contract, ...] = _CERTAIN + _SPECIFIC + _LEFT_OVER

_MARKS_SHOWN = 4  # per contract, in a message


def detect(source: Source) -> Contract:
    """The contract that the pod's marks tell; ambiguous marks raise, and no mark is `bare`."""
    for contract in _CERTAIN:
        if contract.MARKS.fit(source):
            return contract
    fitting = [contract for contract in _SPECIFIC if contract.MARKS.fit(source)]
    if fitting:
        return _strongest(fitting, source)
    return next(contract for contract in _LEFT_OVER if contract.MARKS.fit(source))


def find(name: str) -> Contract:
    """The contract called `name`."""
    by_name = {contract.NAME: contract for contract in CONTRACTS}
    if name in by_name:
        return by_name[name]
    advice = f"{did_you_mean(name, by_name)} The contracts are {', '.join(by_name)}".strip()
    raise UsageError(f"unknown contract {shown(name)}; {advice}")


def read_job(pod: Pod, contract: str | None = None) -> Job:
    """What the platform told this pod: by the contract named, else by the one detected."""
    chosen = find(contract) if contract else detect(Source(pod))
    source = Source(pod, chosen.NAME)
    job = chosen.read(source)
    status = trainer_status.read_status(source)
    index = source.index("JOB_COMPLETION_INDEX", default=None) if status else None
    details = {**job.details, **trainer_status.status_details(status, job, index)}
    return replace(
        job,
        contract=chosen.NAME,
        details=MappingProxyType(details),
        facts=source.facts,
        warnings=source.warnings,
    )


def _strongest(fitting: list[Contract], source: Source) -> Contract:
    for contract in fitting:
        if all(contract.NAME in _stronger(other) for other in fitting if other is not contract):
            return contract
    seen = "; ".join(f"{c.NAME} ({_marks(c, source)})" for c in fitting[:3])
    raise ContractError(
        f"several contracts fit this pod: {seen}; "
        f"unset the variables of the others, or set --contract (TRAINER_LAUNCH_CONTRACT)"
    )


def _stronger(contract: Contract) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(contract, "WEAKER_THAN", ())
    return names


def _marks(contract: Contract, source: Source) -> str:
    return ", ".join(contract.MARKS.seen(source)[:_MARKS_SHOWN])
