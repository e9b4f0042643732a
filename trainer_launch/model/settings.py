"""Every option of the launcher is a flag and a TRAINER_LAUNCH_* variable, declared here once.

Flags win over variables, variables over defaults. What is spelled plainly is read here; pydantic-settings parses
the rest and says what is wrong. Loading it takes PID 1 as long as loading all else does, and 12 MB.
"""

import operator
import os
import re
import typing
from collections.abc import Collection, Mapping
from typing import Any, Literal, NoReturn

from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import nearest
from trainer_launch.model.value_parsers import named

PREFIX = "TRAINER_LAUNCH_"
# What the launcher itself tells its children; not settings.
INTERNAL = frozenset({"RUN_DIR", "NODE_LABEL", "MPI_RUN", "INSIDE"})
OF_SHIMS = frozenset({"SHIM"})  # read by the shims of torchrun and others, not here
RENAMED = {"hang_dir": "incident_dir"}  # what 0.1 called a setting; works in 0.2, and each use is a warning


class Option:
    """One setting; on an object of `Settings` it is the value, the default where none was given."""

    def __init__(
        self,
        default: Any,
        description: str,
        gt: float | None = None,
        ge: float | None = None,
        le: float | None = None,
    ) -> None:
        self.default = default
        self.description = description
        self.gt, self.ge, self.le = gt, ge, le

    def __set_name__(self, owner: type, name: str) -> None:
        self.annotation: Any = owner.__annotations__[name]

    def __get__(self, settings: object, _: type) -> Any:
        return self if settings is None else self.default

    def read(self, value: object) -> Any:
        """A value that needs no parser: text, a choice, a switch, a decimal number within its bounds.

        Raises:
            ValueError: the parser has to see it.
        """
        kinds = typing.get_args(self.annotation) or (self.annotation,)  # choices, if it has some
        if kinds[0] in (int, float) and isinstance(value, str) and _DECIMAL.fullmatch(value):
            value = kinds[0](value)
        if kinds[0] is bool and isinstance(value, str):
            value = _SWITCH_WORDS.get(value.lower(), value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if (value in kinds or type(value) in kinds) and not (is_number and self._excludes(value)):
            return value
        raise ValueError

    def _excludes(self, value: Any) -> bool:
        bounds = (self.gt, operator.gt), (self.ge, operator.ge), (self.le, operator.le)
        return not all(bound is None or holds(value, bound) for bound, holds in bounds)


_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_SWITCH_WORDS = dict.fromkeys(("1", "true", "yes", "on", "t", "y"), True)
_SWITCH_WORDS |= dict.fromkeys(("0", "false", "no", "off", "f", "n"), False)


def _option(default: Any, **told: Any) -> Any:
    return Option(default, **told)


class Settings:
    """How this launcher behaves; frozen. `model_fields` has its options, `model_fields_set` those given."""

    model_fields: typing.ClassVar[dict[str, Option]]

    def __init__(self, given: Mapping[str, Any]) -> None:
        vars(self).update(given)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"settings are frozen: {name}")

    @property
    def model_fields_set(self) -> frozenset[str]:
        """What a flag or a variable has set."""
        return frozenset(vars(self))

    contract: str | None = _option(None, description="platform contract to read the pod as; default: detected")
    engine: Literal["auto", "torch", "torchrun", "mpi", "horovodrun", "plain"] = _option(
        "auto", description="what runs the command: torch elastic, mpirun, horovodrun, or the program as it is"
    )
    exec: bool = _option(
        False,
        description="replace the launcher with torchrun or the program: no supervision, no termination message",
    )
    hosts: str | None = _option(None, description="hosts and slots for mpirun; default: the platform's hostfile")
    host_discovery_script: str | None = _option(
        None,
        description="script that prints mpirun's current hosts, one per line, used with --min-nodes; default: the "
        "platform's discover_hosts.sh",
    )
    ssh_dir: str | None = _option(None, description="directory with the MPI job's SSH key")
    ssh_port: int | None = _option(
        None,
        ge=1,
        le=65535,
        description="port of sshd in the MPI pods; default: from the image's ssh configuration, else 22 for root, "
        "2222 for others",
    )
    listen_address: str | None = _option(None, description="addresses to listen on; default: all")
    insecure_host_keys: bool = _option(
        False, description="skip the check of host keys, for images whose sshd cannot present the job's key"
    )
    forward_env: str | None = _option(
        None, description="more environment variables for MPI ranks; a secret is passed only if it is named here"
    )
    nodes: str | None = _option(None, description="number of nodes, N or MIN:MAX")
    nproc_per_node: str | None = _option(None, description="workers per node: a number, auto, gpu or cpu")
    node_rank: str | None = _option(None, description="rank of this node, starting at 0")
    master_addr: str | None = _option(None, description="host name or address of node 0")
    master_port: str | None = _option(None, description="port on node 0 where the nodes meet")
    max_restarts: str | None = _option(
        None, description="maximum worker failures per job; default: 3, or the job's own setting"
    )
    restart_window: float | None = _option(
        None,
        gt=0,
        le=31_536_000,
        description="count only the failures of the last SECONDS against --max-restarts; default: all failures",
    )
    rejoin_timeout: float = _option(600.0, ge=0, le=604_800, description="seconds to wait for a lost node")
    min_nodes: int | None = _option(
        None,
        ge=1,
        le=65_536,
        description="continue with N or more nodes, even where the platform fixes their number",
    )
    shrink_after: float | None = _option(
        None,
        ge=0,
        le=604_800,
        description="seconds to wait for a lost node before continuing with fewer; default: 0 where the platform "
        "sets the minimum, 30 with --min-nodes",
    )
    spares: int | None = _option(
        None,
        ge=0,
        le=65_536,
        description="nodes that wait to replace a lost or faulty one; local adds them to --nodes, elsewhere they "
        "are among the platform's nodes; default: the platform's nodes beyond --nodes",
    )
    rendezvous: Literal["trainer-launch", "torch"] = _option(
        "trainer-launch",
        description="how torch nodes meet: at the launcher's coordinator, or through torch's own backend",
    )
    wait_timeout: float = _option(
        600.0, ge=0, le=86_400, description="seconds to wait for node 0's name to resolve, or for mpirun's hosts"
    )
    port_range: str | None = _option(
        None, description="open only these ports, besides the one where the nodes meet"
    )
    secret_file: str | None = _option(
        None,
        description="file with the job's secret, the same in all pods; a node with another secret is refused; "
        "default: /etc/trainer-launch/job-secret if mounted, else a hash of the MPI job's SSH key",
    )
    start_method: Literal["auto", "exec", "forkserver"] = _option(
        "auto",
        description="how torch workers start: forkserver forks them from a process that has imported torch, exec "
        "starts each on its own, auto forks where it is safe; forkserver is an error where it is not",
    )
    numa_binding: Literal["off", "auto", "node", "socket", "exclusive", "core-complex"] = _option(
        "off",
        description="CPUs and memory of each torch worker: those of the NUMA node or socket that its GPU is at, an "
        "exclusive share of that node, or a group of cores with one cache; auto: node if each GPU's node is known",
    )
    ranks_by: Literal["node", "topology"] = _option(
        "node",
        description="order of the nodes for the ranks: by node rank, or by topology label, so that ranks of one "
        "switch, rack or NVLink domain are neighbors",
    )
    topology_label: str = _option(
        "/etc/trainer-launch/topology",
        description="file or environment variable that holds this node's topology label, such as "
        "block-a/rack-3/nvl-1",
    )
    preload: str | None = _option(
        None, description="modules to import before workers are forked, besides torch, such as numpy,transformers"
    )
    grace: float = _option(
        25.0,
        ge=0,
        le=86_400,
        description="seconds from SIGTERM to SIGKILL; keep it below the pod's terminationGracePeriodSeconds",
    )
    stop_order: Literal["leader", "group"] = _option(
        "leader", description="who gets SIGTERM first: only each worker, or its whole process group"
    )
    signals: str | None = _option(
        None, description="action for a signal: forward, checkpoint, drain or terminate, as in USR1=checkpoint"
    )
    shm_size: str = _option(
        "auto",
        description="size of /dev/shm, such as 8Gi; auto: enlarge it for the workers where permitted; keep: never "
        "change it",
    )
    hang_timeout: str | None = _option(
        None,
        description="seconds without progress before workers count as hung; auto: learn the limit; default: off",
    )
    hang_report_after: str = _option(
        "auto",
        description="seconds without progress before a suspected hang is reported, with stacks and the rank that "
        "the others wait for; nobody is killed; auto: learn the limit, at least 60; off",
    )
    incident_dir: str | None = _option(
        None,
        description="directory for what is collected about failures and hangs; none: collect nothing; default: "
        "trainer-launch-incidents in $TMPDIR",
    )
    recorder: bool = _option(
        True,
        description="keep torch's flight recorder on, and ask forked workers for it when they fail or hang",
    )
    straggler_interval: int = _option(
        60,
        ge=0,
        le=86_400,
        description="seconds between two looks for stragglers: ranks that reach collectives late, again and again; "
        "one is named after three looks; 0: off",
    )
    progress_file: str | None = _option(
        None, description="file whose changes count as progress, besides output and report()"
    )
    preflight: Literal["enforce", "warn", "off"] = _option(
        "enforce",
        description="effect of a failed check: enforce ends the pod with 20 or 30, warn only reports, off runs no "
        "checks",
    )
    level: Literal["container", "quick", "standard", "deep"] = _option(
        "standard",
        description="depth of the checks. container: this container only; quick: also that all nodes are present; "
        "standard: also compare the nodes, test GPUs and pairs of nodes; deep: also all memory of each "
        "GPU, each path of a collective, and all nodes at once",
    )
    pair_test: Literal["auto", "socket", "gloo", "nccl"] = _option(
        "auto", description="transport for the tests of node pairs; auto: NCCL if all nodes have GPUs, else sockets"
    )
    threshold: str | None = _option(
        None,
        description="limits for passing: gemm, hbm and pcie as shares of the reference, peers as a share of "
        "the peers' median, pair as a share of all pairs' median, pair-mbps in MB/s; as in pair=0.3",
    )
    reference: str | None = _option(
        None,
        description="report of a healthy job (--report FILE.json) to compare GPUs with; default: a built-in table",
    )
    only: str | None = _option(None, description="run only these checks")
    skip: str | None = _option(None, description="skip these checks")
    fatal: str | None = _option(None, description="end with 30 if one of these checks fails or warns")
    storage: str | None = _option(
        None, description="directories to test for checkpoints; shared:PATH must be one directory for all nodes"
    )
    report: str | None = _option(None, description="file for the report: .html is a page, .json is data")
    state_dir: str | None = _option(
        None,
        description="directory shared by the pod's containers: preflight saves its results there for run",
    )
    prefix: bool = _option(
        False,
        description="prefix each worker's lines with [node:rank]; show a line once if 3 or more ranks write it",
    )
    output_limit: int = _option(
        0, ge=0, le=1_000_000, description="lines per second of each worker's stdout and stderr; 0: no limit"
    )
    color: Literal["auto", "always", "never"] = _option(
        "auto", description="color the prefixes; auto: if stdout is a terminal and NO_COLOR is not set"
    )
    termination_log: str = _option(
        "/dev/termination-log",
        description="file for the termination message; the default is used only if it exists",
    )
    events: str | None = _option(None, description="file for the event log, as JSON lines; -: stdout")
    metrics_port: int = _option(
        0, ge=0, le=65535, description="port for Prometheus metrics, on all addresses; 0: off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", description="lowest level of the launcher's own messages; local shows fewer unless it is given"
    )


Settings.model_fields = {name: option for name, option in vars(Settings).items() if isinstance(option, Option)}
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
    given = {**_told(os.environ if env is None else env), **flags}
    try:
        return Settings({name: Settings.model_fields[name].read(value) for name, value in given.items()})
    except ValueError:
        return Settings(parsed(given, flags))


def parsed(given: Mapping[str, Any], flags: Collection[str] = ()) -> dict[str, Any]:
    """The values of what flags (their names) and variables give, whatever their spelling.

    Raises:
        UsageError: a value does not fit; the sentence names the flag or variable.
    """
    from pydantic import Field, ValidationError, create_model  # seldom needed, and slow to load
    from pydantic_settings import BaseSettings

    options = {name: Settings.model_fields[name] for name in given}
    fields: dict[str, Any] = {
        name: (option.annotation, Field(option.default, gt=option.gt, ge=option.ge, le=option.le))
        for name, option in options.items()
    }
    try:
        return create_model("Settings", __base__=BaseSettings, **fields)(**given).model_dump()
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0])
        where = flag_of(name) if name in flags else variable_of(name)
        raise UsageError(
            f"invalid value {str(first['input'])[:60]!r} for {where}: {_expected(first['msg'])}"
        ) from None


def _expected(message: str) -> str:
    """Pydantic's message as the second half of our sentence."""
    rest = re.sub(r"^Input should be |\bvalid |, unable to parse .*$", "", message)
    return f"expected {rest}" if rest != message else message[0].lower() + message[1:]


def _told(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set, by the settings' names; not links to Services."""
    upper = {name.upper(): value for name, value in env.items()}
    fields = {**RENAMED, **{name: name for name in Settings.model_fields}}  # the new name counts where both are set
    given = {name: upper.get(variable_of(name)) for name in fields}
    return {fields[name]: value for name, value in given.items() if value and not is_link(name, value)}


def job_options(settings: Settings) -> dict[str, str]:
    """The settings that describe the job, by torchrun's option names."""
    values = {option: getattr(settings, name) for name, option in JOB_FLAGS.items()}
    return {option: value for option, value in values.items() if value is not None}


def unknown_variables(variables: Mapping[str, str]) -> list[str]:
    """One sentence for each TRAINER_LAUNCH_* variable that is unknown or renamed, with the real one."""
    known = {variable_of(name) for name in Settings.model_fields}
    sentences = []
    for name, value in sorted(variables.items()):
        rest = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or name in known or rest in INTERNAL | OF_SHIMS or is_link(rest, value):
            continue
        if new := RENAMED.get(rest.lower()):
            sentences.append(f"{name} is deprecated; use {variable_of(new)}")
            continue
        near = nearest(rest, (one.removeprefix(PREFIX) for one in known))
        advice = f"did you mean {PREFIX}{near}?" if near else "trainer-launch run --help-all lists all"
        sentences.append(f"unknown variable {named(name)}; {advice}")
    return sentences


def variable_of(name: str) -> str:
    """The variable of a setting."""
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


# -- service links -----------------------------------------------------------------------------


_SERVICE = re.compile(r"([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_[0-9]+_(TCP|UDP|SCTP).*)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+")


def is_link(name: str, value: object) -> bool:
    """Whether it is one for a Service called trainer-launch or trainer-launch-…; `name` is without our prefix."""
    linked = isinstance(value, str) and _ADDRESS.fullmatch(value) is not None
    is_port = name.upper().endswith("PORT")
    return (is_port and linked) or _SERVICE.fullmatch(name) is not None
