"""Short ways to ask an engine for a plan in tests."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec.structs import replace

from trainer_launch.model import Cpus, Gpus, Host, Job, Origin
from trainer_launch.model.settings import Settings
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.job import overlay, place
from trainer_launch.planning.task import Task

MACHINE = Host(
    hostname="here",
    cpus=Cpus(affinity=8, quota=None),
    gpus=Gpus(count=0, reason="none"),
    memory_limit_bytes=None,
    shm_bytes=None,
)
GPU_MACHINE = replace(MACHINE, gpus=Gpus(count=4, reason="4 in /dev"))
Value = TypeVar("Value")
_OF_TASK = set(Task.__annotations__) - {"command", "env", "settings"}


def request(line: str, job: Job, env: Mapping[str, str] | None = None, **changes: Any) -> Task:
    """The task of the command `line` in `job`, with torchrun's typed options laid over it; changes are options."""
    machine = changes.pop("host", MACHINE)
    command = parse_command(shlex.split(line))
    if command.torchrun is not None:
        job = overlay(job, command.torchrun.options, Origin.COMMAND)
    tried = {name: changes.pop(name) for name in changes.keys() & _OF_TASK}
    own = {"scratch": "/scratch", "python": "/venv/bin/python", "python_is_ours": True, "loopback_port": 4242}
    return Task(
        job=job,
        host=machine,
        topology=place(job, machine),
        command=command,
        env=dict(env or {}),
        settings=Settings({"start_method": "exec", **changes}),
        **{**own, **tried},
    )


def given(value: Value | None) -> Value:
    """What has to be there."""
    assert value is not None
    return value
