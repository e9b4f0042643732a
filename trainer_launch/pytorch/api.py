"""`trainer_launch.launch`: a function as the workers of this pod's job, from a script or a Flyte task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_launch.model.errors import UsageError
from trainer_launch.pytorch import function_launch
from trainer_launch.pytorch.elastic import Elastic


def launch(fn: Callable[..., Any], elastic: Elastic | Any, /, *args: Any, **kwargs: Any) -> dict[int, Any]:
    """Run `fn(*args, **kwargs)` in every worker of this node; what each returned, by its rank in the job.

    In a job of several nodes every node calls this, and each gets the results of its own ranks. `elastic` is ours,
    Flyte's, or any object with the same fields.

    Raises:
        WorkerFailedError: a worker failed and no restart was left.
        FlyteRecoverableException: the same, and the worker raised one, or one of its kind.
        LaunchError: the job could not start or meet; see trainer_launch.model.errors.
        SystemExit: SIGTERM came; the workers had their grace.
    """
    if not callable(fn):
        raise UsageError(f"launch got {repr(fn)[:60]}; expected a function")
    return function_launch.run(fn, args, kwargs, Elastic.of(elastic))
