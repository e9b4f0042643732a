"""Short ways to ask an engine for a plan in tests."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from trainer_launch.model import Cpus, Gpus, Host, Job, Origin
from trainer_launch.model.settings import Settings
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.engines.request import Request
from trainer_launch.planning.flag_overrides import overlay
from trainer_launch.planning.topology import place

MACHINE = Host(
    hostname="here",
    cpus=Cpus(affinity=8, quota=None),
    gpus=Gpus(count=0, reason="none"),
    memory_limit_bytes=None,
    shm_bytes=None,
)

GPU_MACHINE = replace(MACHINE, gpus=Gpus(count=4, reason="4 in /dev"))


_OPTIONS = Settings.model_fields.keys() - {field.name for field in dataclasses.fields(Request)}


def request(line: str, job: Job, env: Mapping[str, str] | None = None, **changes: Any) -> Request:
    """A request for the command `line` in `job`, with torchrun's typed options laid over it."""
    machine = changes.get("host", MACHINE)
    command = parse_command(shlex.split(line))
    if command.torchrun is not None:
        job = overlay(job, command.torchrun.options, Origin.COMMAND)
    options = {name: changes.pop(name) for name in changes.keys() & _OPTIONS}
    fields: dict[str, Any] = {
        "settings": Settings({"start_method": "exec", "hang_report_after": "off", **options}),
        "job": job,
        "host": MACHINE,
        "topology": place(job, machine),
        "command": command,
        "env": dict(env or {}),
        "python": "/venv/bin/python",
        "python_is_ours": True,
        "grace_s": 25.0,
        "signals": {},
        "our_rendezvous": False,
        "loopback_port": 4242,
        "shrink_after_s": 0.0,
        "preload": (),
        "scratch": "/scratch",
    }
    return Request(**(fields | changes))
