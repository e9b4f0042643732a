"""`trainer_launch.launch`: a function as the workers of this pod's job, from a script or a Flyte task."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainer_launch.commands import ground
from trainer_launch.commands.gather import live_pod, read, request_of
from trainer_launch.elastic import PATIENCE_S, Elastic
from trainer_launch.engines import child_env, meeting
from trainer_launch.engines.request import Request
from trainer_launch.errors import UsageError
from trainer_launch.model import Job, Origin
from trainer_launch.overlay import overlay
from trainer_launch.settings import load
from trainer_launch.topology import place


def launch(fn: Callable[..., Any], elastic: Elastic | Any, /, *args: Any, **kwargs: Any) -> dict[int, Any]:
    """Run `fn(*args, **kwargs)` in every worker of this node; what each returned, by its rank in the job.

    In a job of several nodes every node calls this, and each gets the results of its own ranks. `elastic` is ours,
    Flyte's, or any object with the same fields.

    Raises:
        WorkerFailedError: a worker failed and no restart was left.
        FlyteRecoverableException: the same, and the worker raised one, or one of its kind.
        LaunchError: the job could not start or meet; see trainer_launch.errors.
        SystemExit: SIGTERM came; the workers had their grace.
    """
    if not callable(fn):
        raise UsageError(f"launch got {repr(fn)[:60]}; expected a function")
    elastic = Elastic.of(elastic)
    request = _request(elastic)
    nodes = meeting.nodes_of(request)
    options = meeting.options(request, nodes)
    if options.get("rdzv_backend") != "trainer-launch":
        backend = request.topology.rendezvous and request.topology.rendezvous.backend
        raise UsageError(f"launch uses its own coordinator, not the backend {backend}; unset PET_RDZV_BACKEND")
    workers = request.topology.local_world_size
    if workers is None:
        raise UsageError(
            f"nproc_per_node is '{request.job.nproc_per_node}', but this container shows no such device "
            f"({request.host.gpus.reason}); set Elastic(nproc_per_node=) to a number"
        )
    env = {**elastic.variables(), **child_env.agent(request)}  # what is set already wins, as in Flyte
    from trainer_launch.child import function  # torch comes with it

    how = function.Launching(
        options=options,
        nodes=nodes,
        workers=workers,
        start_method=elastic.start_method,
        monitor_interval_s=elastic.monitor_interval,
        grace_s=request.grace_s,
        env={name: value for name, value in env.items() if request.env.get(name) != value},
        hosting=meeting.hosting(request),
        secret_file=request.secret_file,
        deadline_s=elastic.deadline_s,
        collective_timeout_s=elastic.nccl_collective_timeout_sec,
    )
    return function.run(fn, args, kwargs, how)


def _request(elastic: Elastic) -> Request:
    """This pod, read as `run` reads it, under what was said explicitly."""
    settings = load({})
    reading = read(live_pod(("python", sys.argv[0] or "-")), settings)
    if reading.job.role == "rank":
        raise UsageError(
            "this process is already a worker of a torchrun job; call the function directly, without launch"
        )
    reading = replace(reading, job=_job(reading.job, elastic))
    topology = place(reading.job, reading.host)
    memory = (ground.enlarged if elastic.increase_shared_mem else ground.decided)(reading, topology, settings)
    request = request_of(reading, topology, settings, scratch="")
    default_s = settings.rejoin_timeout if "rejoin_timeout" in settings.model_fields_set else PATIENCE_S
    patience_s = default_s if elastic.patience_s is None else elastic.patience_s
    return replace(request, rejoin_timeout_s=patience_s, our_rendezvous=True, shm_is_short=memory.is_short)


def _job(job: Job, elastic: Elastic) -> Job:
    said = elastic.options()
    if job.max_restarts is None:
        said.setdefault("max_restarts", "0")
    return overlay(job, said, Origin.COMMAND)
