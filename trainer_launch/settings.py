"""Our own knobs: every option is a flag and a TRAINER_LAUNCH_* variable, declared here once.

Flags win over variables, variables over defaults.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from trainer_launch.errors import UsageError
from trainer_launch.grammar import named
from trainer_launch.links import is_link

PREFIX = "TRAINER_LAUNCH_"
_LONGEST = 60  # characters of a name that is compared with ours
# What the launcher itself tells its children; not settings.
INTERNAL = frozenset(
    {
        *("RANK_OUTPUT", "FAILURE_FILE", "RUN_DIR", "STOP_ORDER_OF_WORKERS", "SIGNALS_OF_WORKERS", "NODE_LABEL"),
        *("WARM", "FORKSERVER", "MPI", "MPI_RUN", "INSIDE"),
    }
)


class _Variables(EnvSettingsSource):
    """The environment without links to Services; that to trainer-launch-metrics is called as --metrics-port is."""

    def __call__(self) -> dict[str, Any]:
        """Read the variables, as pydantic does."""
        return {name: value for name, value in super().__call__().items() if not is_link(name, value)}


class Settings(BaseSettings):
    """How this launcher behaves."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True, case_sensitive=False
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags over variables; pydantic's own hook."""
        return init_settings, _Variables(settings_cls)

    contract: str | None = Field(None, description="read the pod as this contract instead of detecting it")
    engine: Literal["auto", "torchrun", "mpi", "horovodrun", "plain"] = Field(
        "auto", description="what runs the command: torch elastic, mpirun, horovodrun, or the program as it is"
    )
    exec: bool = Field(False, description="become torchrun or the program itself; no supervision, no last words")
    hosts: str | None = Field(
        None, description="hosts that mpirun starts ranks on, and how many on each; default: the platform's list"
    )
    host_discovery_script: str | None = Field(
        None,
        description="program that prints mpirun's hosts of now, a line each, asked where --min-nodes is given; "
        "default: the platform's discover_hosts.sh",
    )
    ssh_dir: str | None = Field(None, description="folder that an MPI job's ssh key is mounted at")
    ssh_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="port of the MPI pods' sshd; default: the one of the image's ssh configuration, else 22 for "
        "root and 2222 for others",
    )
    listen_address: str | None = Field(None, description="listen at these addresses; default: everywhere")
    insecure_host_keys: bool = Field(
        False, description="do not check that an MPI pod shows the job's key, for images whose sshd cannot show it"
    )
    forward_env: str | None = Field(
        None, description="variables that MPI ranks get besides those that libraries read; secrets only if named"
    )
    nodes: str | None = Field(None, description="number of nodes, N or MIN:MAX")
    nproc_per_node: str | None = Field(None, description="workers per node: a number, auto, gpu or cpu")
    node_rank: str | None = Field(None, description="index of this node, from 0")
    master_addr: str | None = Field(None, description="host name or address of node 0")
    master_port: str | None = Field(None, description="port of node 0 that the nodes meet at")
    max_restarts: str | None = Field(
        None, description="failures that the whole job's workers may have; 3 unless the job says"
    )
    restart_window: float | None = Field(
        None, gt=0, le=31_536_000, description="count only the failures of so many seconds against --max-restarts"
    )
    rejoin_timeout: float = Field(
        600.0, ge=0, le=604_800, description="seconds that the other nodes wait for one that was lost"
    )
    min_nodes: int | None = Field(
        None,
        ge=1,
        le=65_536,
        description="how many nodes the job may go on with, also where the platform fixes them",
    )
    shrink_after: float | None = Field(
        None,
        ge=0,
        le=604_800,
        description="seconds to wait for a lost node before going on with fewer, where the minimum allows; "
        "0 where the platform gives the minimum, 30 where --min-nodes does",
    )
    rendezvous: Literal["trainer-launch", "torch"] = Field(
        "trainer-launch", description="how torch's nodes meet: at our coordinator, or by torch's own backend"
    )
    wait_timeout: float = Field(
        600.0,
        ge=0,
        le=86_400,
        description="seconds to wait for the coordinator's name to resolve, or for all of mpirun's hosts",
    )
    port_range: str | None = Field(
        None, description="open no other ports than these beside the one the nodes meet at"
    )
    secret_file: str | None = Field(
        None, description="file with the job's secret, the same in all pods; without it a node is not let in"
    )
    start_method: Literal["auto", "exec", "forkserver"] = Field(
        "auto", description="how torch's workers start: forked from a process that has imported torch, or each anew"
    )
    preload: str | None = Field(
        None, description="modules to import, besides torch, before workers are forked, such as numpy,transformers"
    )
    grace: float = Field(
        25.0, ge=0, le=86_400, description="seconds from a request to stop until SIGKILL; keep below the pod's"
    )
    stop_order: Literal["leader", "group"] = Field(
        "leader", description="whom SIGTERM reaches first: each worker alone, or its whole process group"
    )
    signals: str | None = Field(
        None, description="what a signal is for: forward, checkpoint, drain or terminate; as in USR1=checkpoint"
    )
    shm_size: str = Field(
        "auto",
        description="size of /dev/shm, such as 8Gi; auto: enlarge it for the workers if allowed; keep: never",
    )
    hang_timeout: str | None = Field(
        None,
        description="seconds without any sign of life after which workers hang, or auto: learned; default: off",
    )
    hang_dir: str | None = Field(
        None, description="folder for the stacks of workers that hang; default: the system's temporary one"
    )
    progress_file: str | None = Field(
        None, description="file whose change is a sign of progress, beside output and report()"
    )
    preflight: Literal["enforce", "warn", "off"] = Field(
        "enforce",
        description="what a failed check means: the pod ends with 20 or 30; it is only told; nothing is checked",
    )
    level: Literal["container", "quick", "standard", "deep"] = Field(
        "standard",
        description="how far to look: this container; also whether all nodes are there; also compare them and test "
        "GPUs and pairs; also all of each GPU's memory, each way that a reduction takes, all nodes at once",
    )
    pair_test: Literal["auto", "socket", "gloo", "nccl"] = Field(
        "auto",
        description="what pairs of nodes are tested with; auto: NCCL where all nodes have GPUs, else plain sockets",
    )
    threshold: str | None = Field(
        None,
        description="what is enough: gemm, hbm, pcie, nccl as shares of the reference, peers of the peers' median; "
        "pair=0.3 of all pairs' median, pair-mbps=10 in MB/s",
    )
    reference: str | None = Field(
        None, description="file with what healthy GPUs deliver, instead of the table that comes with this program"
    )
    write_reference: str | None = Field(
        None, description="node 0 writes there what this job has measured, in the form that --reference reads"
    )
    only: str | None = Field(None, description="run only these checks")
    skip: str | None = Field(None, description="do not run these checks")
    fatal: str | None = Field(None, description="what these checks find ends the pod with 30, warnings too")
    deadline: float = Field(
        120.0,
        ge=0,
        le=86_400,
        description="seconds within which all nodes have to come, and their names to resolve",
    )
    storage: str | None = Field(
        None, description="folders that a checkpoint is tried in; shared:PATH has to be one folder for all nodes"
    )
    image: str | None = Field(None, description="the image's name or digest, to be compared with the other nodes'")
    exit_warning: bool = Field(False, description="end with 10 where there are only warnings")
    report: str | None = Field(None, description="write the report there, as JSON")
    plot: str | None = Field(
        None, description="draw how fast pairs of nodes are, on node 0: a PNG, SVG or PDF file; needs matplotlib"
    )
    prometheus_file: str | None = Field(
        None, description="write the report there, for the textfile collector of Prometheus"
    )
    state_dir: str | None = Field(
        None,
        description="folder that the pod's containers share: preflight leaves there what it found, run compares",
    )
    prefix: bool = Field(False, description="prefix each worker's lines with [node:rank]")
    color: Literal["auto", "always", "never"] = Field("auto", description="colour the prefixes")
    termination_log: str = Field(
        "/dev/termination-log", description="file for the last words; the default only where it exists"
    )
    events: str | None = Field(None, description="write the job's life as JSON lines to this file, or - for stdout")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="serve Prometheus metrics on this port of every address; 0: off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="how much the launcher itself says"
    )


class _OfAnother(Settings):
    """Of another pod, whose variables are told: those of this process do not count."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but what is given."""
        return (init_settings,)


JOB_FLAGS: Mapping[str, str] = {
    "nodes": "nnodes",
    "nproc_per_node": "nproc_per_node",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
    "max_restarts": "max_restarts",
}


def load(flags: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Settings:
    """Settings from flags that were given, TRAINER_LAUNCH_* (of another pod: its `env`) and defaults.

    Raises:
        UsageError: a value does not fit; the sentence names the flag or variable.
    """
    try:
        return Settings(**flags) if env is None else _OfAnother(**{**_told(env), **flags})
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0]).lower()
        where = flag_of(name) if name in flags else PREFIX + name.upper()
        raise UsageError(f"{where} is {str(first['input'])[:60]!r}; {_expected(first['msg'])}") from None


def _told(env: Mapping[str, str]) -> dict[str, str]:
    given = {name: env.get(PREFIX + name.upper()) for name in Settings.model_fields}
    return {name: value for name, value in given.items() if value and not is_link(name, value)}


def job_options(settings: Settings) -> dict[str, str]:
    """The settings that describe the job, by torchrun's option names."""
    values = settings.model_dump(include=set(JOB_FLAGS))
    return {JOB_FLAGS[name]: value for name, value in values.items() if value is not None}


def unknown_variables(variables: Mapping[str, str]) -> list[str]:
    """One sentence for each TRAINER_LAUNCH_* variable that is no setting, with the nearest real one."""
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    sentences = []
    for name, value in sorted(variables.items()):
        rest = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or name in known or rest in INTERNAL or is_link(rest, value):
            continue
        near = difflib.get_close_matches(name[:_LONGEST], known, n=1)
        advice = f"did you mean {near[0]}?" if near else "see trainer-launch run --help for all"
        sentences.append(f"{named(name)} is no setting; {advice}")
    return sentences


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def _expected(message: str) -> str:
    """Pydantic's message as the second half of our sentence."""
    told = re.sub(r"^Input should be |, unable to parse .*$", "", message)
    return f"expected {told}" if told != message else message[0].lower() + message[1:]
