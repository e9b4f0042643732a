"""How `trainer_launch.launch` starts a function, with the field names of Flyte's Elastic task configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_TORCHS = (
    *("last_call_timeout", "close_timeout", "keep_alive_interval", "keep_alive_max_attempt"),
    *("heartbeat_timeout", "read_timeout", "store_type", "is_host", "local_addr", "rank"),
)


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
        names = [name for name in cls.__struct_fields__ if hasattr(given, name)]
        return cls(**{name: getattr(given, name) for name in names})

    def __post_init__(self) -> None:
        """Refuse what does not fit.

        Raises:
            UsageError: one sentence says which field and what was expected.
        """
        for name, (fits, expected) in _FITS.items():
            if not fits(getattr(self, name)):
                raise UsageError(f"Elastic({name}=) is {repr(getattr(self, name))[:60]}; expected {expected}")
        _check_meeting(self.rdzv_configs)

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
        if name not in (*_OURS, *_TORCHS):
            advice = did_you_mean(str(name), _OURS) or f"expected one of {', '.join(_OURS)}"
            raise UsageError(f"unknown key {name!r} in Elastic(rdzv_configs=); {advice}")
        if name in _OURS and not (_is_number(value) and value >= 0):
            raise UsageError(f"{name} of Elastic(rdzv_configs=) is {str(value)[:60]!r}; expected a number from 0")


def _parsed(parse: Any, value: object) -> bool:
    return isinstance(value, int | str) and not isinstance(value, bool) and parse(str(value)) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_limit(value: object) -> bool:
    return value is None or _is_count(value, 1)


# Whether a field's value fits, and what is expected.
_FITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "nnodes": (lambda v: v is None or _parsed(value_parsers.parse_node_range, v), "N or MIN:MAX"),
    "nproc_per_node": (
        lambda v: v is None or _parsed(value_parsers.parse_nproc, v),
        "a number from 1, or auto, gpu, cpu",
    ),
    "start_method": (START_METHODS.__contains__, f"one of {', '.join(START_METHODS)}"),
    "monitor_interval": (lambda v: _is_number(v) and v > 0, "seconds"),
    "max_restarts": (lambda v: v is None or _is_count(v), "a number from 0"),
    "rdzv_configs": (lambda v: isinstance(v, Mapping), "a dictionary"),
    "increase_shared_mem": (lambda v: isinstance(v, bool), "True or False"),
    "rdzv_backend": (_BACKENDS.__contains__, f"one of {', '.join(_BACKENDS)}"),
    "nccl_heartbeat_timeout_sec": (_is_limit, "whole seconds above 0"),
    "nccl_collective_timeout_sec": (_is_limit, "whole seconds above 0"),
    "run_policy": (
        lambda v: _is_limit(getattr(v, "active_deadline_seconds", None)),
        "active_deadline_seconds above 0",
    ),
}
