"""How `trainer_launch.launch` starts a function, by the names of Flyte's Elastic task configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer_launch import grammar
from trainer_launch.errors import UsageError
from trainer_launch.nearest import did_you_mean

START_METHODS = ("spawn", "fork", "forkserver")
_OURS = ("node_rank", "patience", "join_timeout")
# Options of torch's own backends; they mean nothing here, and configurations made for Flyte carry them.
_TORCHS = ("timeout", "last_call_timeout", "close_timeout", "keep_alive_interval", "keep_alive_max_attempt")
_TORCHS_TOO = ("heartbeat_timeout", "read_timeout", "store_type", "is_host", "local_addr", "rank")


class WorkerFailedError(RuntimeError):
    """A worker failed and no restart was left; the text ends with the traceback of the first that did."""

    def __init__(self, text: str, rank: int | None, exit_code: int | None, signal: int | None) -> None:
        super().__init__(text)
        self.rank = rank  # None: nobody saw which
        self.exit_code = exit_code
        self.signal = signal


@dataclass(frozen=True, slots=True)
class RunPolicy:
    """Kubeflow's run policy: inside the pod only `active_deadline_seconds` is kept, else is the controller's."""

    clean_pod_policy: Any = None
    ttl_seconds_after_finished: int | None = None
    active_deadline_seconds: int | None = None
    backoff_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Elastic:
    """How many workers start, where and how. None takes what the pod was told, without a platform 1, 1 and 0."""

    nnodes: int | str | None = None  # a number, or MIN:MAX
    nproc_per_node: int | str | None = None  # a number, or auto, gpu, cpu
    start_method: str = "spawn"
    monitor_interval: float = 5  # seconds between two looks at the workers, as Flyte has it
    max_restarts: int | None = None  # failures that the whole job may have
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)  # patience or join_timeout, node_rank
    increase_shared_mem: bool = True
    run_policy: RunPolicy | Any = None  # ours, Flyte's, or anything with its fields

    def __post_init__(self) -> None:
        """Refuse what does not fit.

        Raises:
            UsageError: one sentence says which field and what was expected.
        """
        _need(self.nnodes is None or _parsed(grammar.parse_node_range, self.nnodes), self, "nnodes", "N or MIN:MAX")
        _need(
            self.nproc_per_node is None or _parsed(grammar.parse_nproc, self.nproc_per_node),
            self,
            "nproc_per_node",
            "a number from 1, or auto, gpu, cpu",
        )
        _need(self.start_method in START_METHODS, self, "start_method", f"one of {', '.join(START_METHODS)}")
        _need(_is_number(self.monitor_interval) and self.monitor_interval > 0, self, "monitor_interval", "seconds")
        _need(self.max_restarts is None or _is_count(self.max_restarts), self, "max_restarts", "a number from 0")
        _need(isinstance(self.rdzv_configs, Mapping), self, "rdzv_configs", "a dictionary")
        _need(isinstance(self.increase_shared_mem, bool), self, "increase_shared_mem", "True or False")
        _check_meeting(self.rdzv_configs)
        limit = getattr(self.run_policy, "active_deadline_seconds", None)
        _need(
            limit is None or (_is_count(limit) and limit > 0), self, "run_policy", "active_deadline_seconds above 0"
        )

    @property
    def deadline_s(self) -> float | None:
        """How long the job may take."""
        return getattr(self.run_policy, "active_deadline_seconds", None)

    @property
    def patience_s(self) -> float | None:
        """How long the nodes wait for each other."""
        found = self.rdzv_configs.get("patience", self.rdzv_configs.get("join_timeout"))
        return None if found is None else float(found)

    def options(self) -> dict[str, str]:
        """What was said about the job, by torchrun's option names."""
        said = {
            "nnodes": self.nnodes,
            "nproc_per_node": self.nproc_per_node,
            "max_restarts": self.max_restarts,
            "node_rank": self.rdzv_configs.get("node_rank"),
        }
        return {name: str(value) for name, value in said.items() if value is not None}


def _check_meeting(configs: Mapping[str, Any]) -> None:
    for name, value in configs.items():
        if name not in (*_OURS, *_TORCHS, *_TORCHS_TOO):
            advice = did_you_mean(str(name), _OURS) or f"expected one of {', '.join(_OURS)}"
            raise UsageError(f"Elastic(rdzv_configs=) has {name!r}, which means nothing here; {advice}")
        if name in _OURS and not (_is_number(value) and value >= 0):
            raise UsageError(f"{name} of Elastic(rdzv_configs=) is {str(value)[:60]!r}; expected a number from 0")


def _need(fits: object, elastic: Elastic, name: str, expected: str) -> None:
    if not fits:
        raise UsageError(f"Elastic({name}=) is {repr(getattr(elastic, name))[:60]}; expected {expected}")


def _parsed(parse: Any, value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool) and parse(str(value)) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
