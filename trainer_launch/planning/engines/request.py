"""What an engine is asked to plan: all values that a plan depends on."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from trainer_launch.model import Binding, Host, Job, PortRange, Topology
from trainer_launch.model.settings import Settings
from trainer_launch.model.signal_policy import SignalAction
from trainer_launch.planning.command import Command


class Request(Struct, frozen=True, kw_only=True):
    """Everything a plan is made of; `env` is the container's environment."""

    job: Job
    host: Host
    topology: Topology
    command: Command
    env: Mapping[str, str]
    python: str  # the interpreter that has trainer_launch
    python_is_ours: bool  # whether the interpreter typed in the command is that one
    settings: Settings
    grace_s: float
    signals: Mapping[int, SignalAction]  # where they are not what they are by default
    our_rendezvous: bool  # whether torch's nodes meet at our coordinator
    loopback_port: int  # a free one, where a single node's agent meets its launcher
    shrink_after_s: float  # how long a lost node is waited for where fewer may go on
    forward_env: tuple[str, ...] = ()  # variables that ranks on other hosts get whatever they are called
    port_range: PortRange | None = None
    secret_file: str | None = None
    preload: tuple[str, ...]  # what they find imported besides torch
    numa_binding: str = "off"  # torch's workers get CPUs near their GPUs
    bindings: tuple[tuple[Binding, ...], str] = ((), "")  # how, by local rank, and a sentence about it
    label: str | None = None  # this node's topology label, "" where none is found; None: ranks follow node numbers
    scratch: str  # a private folder for this run's files
    shims: str | None = None  # the folder of a torchrun and others that use the launcher, for scripts
    shm_is_short: bool = False  # /dev/shm is too small for what the engines take by themselves
    copies_are_refused: bool = False  # process_vm_readv, with which Open MPI's ranks copy from each other
    replace_launcher: bool = False  # --exec: nothing of ours stays in the pod
