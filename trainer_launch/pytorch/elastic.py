"""How `trainer_launch.launch` starts a function, with the field names of Flyte's Elastic task configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from msgspec import Struct, field

from trainer_launch.model import value_parsers
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean

START_METHODS = ("spawn", "fork", "forkserver")
_BACKENDS = ("c10d", "static")
PATIENCE_S = 900.0  # that nodes wait for each other, as in Flyte, where nothing else is set
_WAITS = ("patience", "join_timeout", "timeout")  # the first that is there
_OURS = ("node_rank", *_WAITS)
# Options of torch's own backends; they mean nothing here, and configurations made for Flyte carry them.
_TORCHS = ("last_call_timeout", "close_timeout", "keep_alive_interval", "keep_alive_max_attempt")
_TORCHS_TOO = ("heartbeat_timeout", "read_timeout", "store_type", "is_host", "local_addr", "rank")


class WorkerFailedError(RuntimeError):
    """A worker failed and no restart was left; the text ends with the traceback of the first that did."""

    def __init__(self, text: str, rank: int | None, exit_code: int | None, signal: int | None) -> None:
        super().__init__(text)
        self.rank = rank  # None: nobody saw which
        self.exit_code = exit_code
        self.signal = signal


class RunPolicy(Struct, frozen=True):
    """Kubeflow's run policy: inside the pod only `active_deadline_seconds` is kept, else is the controller's."""

    clean_pod_policy: Any = None
    ttl_seconds_after_finished: int | None = None
    active_deadline_seconds: int | None = None
    backoff_limit: int | None = None


class Elastic(Struct, frozen=True):
    """How many workers start, where and how. None takes the pod's own value; without a platform 1, 1 and 0.

    The fields have the names of Flyte 1's and Flyte 2's Elastic.
    """

    nnodes: int | str | None = None  # a number, or MIN:MAX
    nproc_per_node: int | str | None = None  # a number, or auto, gpu, cpu
    start_method: str = "spawn"
    monitor_interval: float = 5  # accepted; the end of a worker is seen at once
    max_restarts: int | None = None  # worker failures of the whole job
    rdzv_configs: Mapping[str, Any] = field(default_factory=dict)  # patience or join_timeout, node_rank
    increase_shared_mem: bool = True
    run_policy: RunPolicy | Any = None  # ours, Flyte's, or anything with its fields
    rdzv_backend: str = "c10d"  # the nodes meet at the launcher's coordinator in its place
    nccl_heartbeat_timeout_sec: int | None = None  # None leaves torch's default, here and below
    nccl_async_error_handling: bool = False
    nccl_collective_timeout_sec: int | None = None
    nccl_enable_monitoring: bool = False

    @classmethod
    def of(cls, given: object) -> Elastic:
        """`given` itself, or an Elastic with the values of any object that has its fields, such as Flyte's.

        Raises:
            UsageError: it does not have them, or a value does not fit.
        """
        if isinstance(given, Elastic):
            return given
        if isinstance(given, type) or not (hasattr(given, "nnodes") and hasattr(given, "nproc_per_node")):
            raise UsageError(
                f"launch got {repr(given)[:60]} as its second argument; "
                f"expected trainer_launch.Elastic, or an object with the same fields"
            )
        names = [one.name for one in fields(cls) if hasattr(given, one.name)]
        return cls(**{name: getattr(given, name) for name in names})

    def __post_init__(self) -> None:
        """Refuse what does not fit.

        Raises:
            UsageError: one sentence says which field and what was expected.
        """
        _need(
            self.nnodes is None or _parsed(value_parsers.parse_node_range, self.nnodes),
            self,
            "nnodes",
            "N or MIN:MAX",
        )
        _need(
            self.nproc_per_node is None or _parsed(value_parsers.parse_nproc, self.nproc_per_node),
            self,
            "nproc_per_node",
            "a number from 1, or auto, gpu, cpu",
        )
        _need(self.start_method in START_METHODS, self, "start_method", f"one of {', '.join(START_METHODS)}")
        _need(_is_number(self.monitor_interval) and self.monitor_interval > 0, self, "monitor_interval", "seconds")
        _need(self.max_restarts is None or _is_count(self.max_restarts), self, "max_restarts", "a number from 0")
        _need(isinstance(self.rdzv_configs, Mapping), self, "rdzv_configs", "a dictionary")
        _need(isinstance(self.increase_shared_mem, bool), self, "increase_shared_mem", "True or False")
        _need(self.rdzv_backend in _BACKENDS, self, "rdzv_backend", f"one of {', '.join(_BACKENDS)}")
        for name in ("nccl_heartbeat_timeout_sec", "nccl_collective_timeout_sec"):
            value = getattr(self, name)
            _need(value is None or (_is_count(value) and value > 0), self, name, "whole seconds above 0")
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
        """How long the nodes wait for each other: torch's `timeout` is that where nothing else is said."""
        found = [self.rdzv_configs[name] for name in _WAITS if name in self.rdzv_configs]
        return float(found[0]) if found else None

    def variables(self) -> dict[str, str]:
        """What the workers' NCCL reads from the environment."""
        said = {
            "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": self.nccl_heartbeat_timeout_sec,
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1 if self.nccl_async_error_handling else None,
            "TORCH_NCCL_ENABLE_MONITORING": 1 if self.nccl_enable_monitoring else None,
        }
        return {name: str(value) for name, value in said.items() if value is not None}

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
            raise UsageError(f"unknown key {name!r} in Elastic(rdzv_configs=); {advice}")
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
