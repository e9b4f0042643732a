"""Every option of the launcher is a flag and a TRAINER_LAUNCH_* variable, declared here once.

Flags win over variables, variables over defaults. A number is digits with an optional fraction, without blanks.
"""

import os
import re
import typing
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, NoReturn

from trainer_launch.model import removed
from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import nearest
from trainer_launch.model.value_parsers import DURATION, named, parse_duration

PREFIX = "TRAINER_LAUNCH_"
# What the launcher itself tells its children; not settings.
INTERNAL = frozenset({"RUN_DIR", "NODE_LABEL", "MPI_RUN", "INSIDE", "IN_COLOR", "LISTEN_AT", "GENERATION", "KEPT"})
OF_SHIMS = frozenset({"SHIM"})  # read by the shims of torchrun and others, not here


class Option:
    """A setting; on an object of `Settings` it is the value, the default where none was given.

    Its annotation says what it accepts: words (`Literal`), and one of text, a switch (bool), a whole number (int),
    and seconds (float), the numbers from `least` to `most`. `metavar` stands for such a value in a help.
    """

    def __init__(self, default: Any, description: str, metavar: str = "", least: int = 0, most: int = 0) -> None:
        self.default, self.description, self.metavar = default, description, metavar
        self.least, self.most = least, most

    def __set_name__(self, owner: type, name: str) -> None:
        annotation: Any = owner.__annotations__[name]
        is_union = typing.get_origin(annotation) not in (None, Literal)
        kinds: tuple[Any, ...] = typing.get_args(annotation) if is_union else (annotation,)
        self.choices = tuple(
            word for kind in kinds if typing.get_origin(kind) is Literal for word in typing.get_args(kind)
        )
        self.kind: type | None = next((kind for kind in kinds if kind in (bool, int, float, str)), None)
        self.metavar = self.metavar or ("N" if self.kind is int else "SECONDS" if self.kind is float else "")

    def __get__(self, settings: object, _: type) -> Any:
        return self if settings is None else self.default

    def read(self, value: object) -> Any:
        """The value of this setting that was typed; values of Python pass if they fit.

        Raises:
            ValueError: it does not fit; the text says what was expected.
        """
        if value in self.choices or (value is None and self.default is None):
            return value
        if self.kind is not None and isinstance(value, str):
            value = _PARSERS[self.kind](value)
        if self.kind is float and type(value) is int:
            value = float(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if type(value) is not self.kind or (is_number and not self.least <= value <= self.most):  # type: ignore[operator]
            raise ValueError(self.expected)
        return value

    @property
    def expected(self) -> str:
        """The values that this setting accepts, for people."""
        words = ", ".join(self.choices)
        if self.kind is None:
            return f"one of {words}"
        if self.kind is bool:
            return "true or false"
        what = DURATION if self.kind is float else "a whole number"
        return f"{what}, {self.least} to {self.most}{' s' * (self.kind is float)}{f', or {words}' * bool(words)}"


def _whole(text: str) -> int | None:
    return int(text) if _WHOLE.fullmatch(text) else None


def parse_switch(text: str) -> bool | None:
    """A flag's variable as it is written: on, 1, true or yes, and their opposites; None: it is none of them."""
    return _SWITCH_WORDS.get(text.lower())


_WHOLE = re.compile(r"[0-9]{1,12}")
_SWITCH_WORDS = dict.fromkeys(("1", "true", "yes", "on", "t", "y"), True)
_SWITCH_WORDS |= dict.fromkeys(("0", "false", "no", "off", "f", "n"), False)
_PARSERS: Mapping[type, Any] = {str: str, bool: parse_switch, int: _whole, float: parse_duration}


def _option(default: Any, **about: Any) -> Any:
    return Option(default, **about)


class Settings:
    """How this launcher behaves; frozen. `model_fields` has its options, `model_fields_set` those given."""

    model_fields: typing.ClassVar[dict[str, Option]]

    def __init__(self, given: Mapping[str, Any]) -> None:
        vars(self).update(given)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"settings are frozen: {name}")

    @property
    def model_fields_set(self) -> frozenset[str]:
        """The options that a flag or a variable has set."""
        return frozenset(vars(self))

    contract: str | None = _option(
        None, metavar="NAME", description="platform whose variables to read, such as slurm; default: detected"
    )
    engine: Literal["auto", "torch", "torchrun", "mpi", "horovodrun", "plain"] = _option(
        "auto",
        description="what runs the command. torch: workers of the launcher; torchrun: the image's torchrun with "
        "its own rendezvous; mpi: mpirun; horovodrun; plain: the program as it is",
    )
    ssh_dir: str | None = _option(None, metavar="PATH", description="directory with the MPI job's SSH key")
    ssh_port: int | None = _option(
        None,
        least=1,
        most=65535,
        metavar="PORT",
        description="port of sshd in the MPI pods; default: from the image's ssh configuration, else 22 for root, "
        "2222 for others",
    )
    insecure_host_keys: bool = _option(
        False, description="do not check host keys, for images whose sshd cannot present the job's key"
    )
    forward_env: str | None = _option(
        None,
        metavar="NAME[,...]",
        description="more environment variables for MPI ranks; a secret is passed only if it is named here",
    )
    nodes: str | None = _option(None, metavar="N[:MAX]", description="number of nodes, N or MIN:MAX")
    nproc_per_node: str | None = _option(
        None, metavar="N|auto", description="workers per node: a number, auto, gpu or cpu"
    )
    node_rank: str | None = _option(None, metavar="N", description="rank of this node, starting at 0")
    master_addr: str | None = _option(None, metavar="HOST", description="host name or address of node 0")
    master_port: str | None = _option(None, metavar="PORT", description="port on node 0 where the nodes meet")
    max_restarts: str | None = _option(
        None, metavar="N", description="maximum worker failures per job; default: 3, or the job's own setting"
    )
    min_nodes: int | None = _option(
        None,
        least=1,
        most=65_536,
        description="continue after a loss if at least N nodes are left, even in a job of fixed size",
    )
    shrink_after: float | None = _option(
        None,
        least=0,
        most=604_800,
        description="seconds to wait for a lost node before continuing with fewer; default: 0 where the platform "
        "sets the minimum, 30 with --min-nodes",
    )
    spares: int | None = _option(
        None,
        least=0,
        most=65_536,
        description="nodes that wait to replace a lost or faulty one; rehearse adds them to --nodes, on a platform "
        "they are among its nodes; default: the platform's nodes beyond --nodes",
    )
    wait_timeout: float = _option(
        600.0,
        most=604_800,
        description="seconds to wait for missing nodes, their names, mpirun's hosts, or the return of a lost node",
    )
    port_range: str | None = _option(
        None, metavar="LOW-HIGH", description="open only these ports, besides the one where the nodes meet"
    )
    secret_file: str | None = _option(
        None,
        metavar="PATH",
        description="file with the job's secret, the same in all pods; a node with another secret is refused; "
        "default: /etc/trainer-launch/job-secret if mounted, else a hash of the MPI job's SSH key",
    )
    start_method: Literal["auto", "exec"] = _option(
        "auto",
        description="how torch workers start. auto: forked from a process that has imported torch, where that is "
        "safe; exec: each as a new interpreter",
    )
    topology_label: str | None = _option(
        None,
        metavar="PATH|VARIABLE",
        description="file or environment variable that holds this node's topology label, such as "
        "block-a/rack-3/nvl-1; ranks then follow the labels, so that ranks of one switch, rack or NVLink domain "
        "are neighbors",
    )
    preload: str | None = _option(
        None,
        metavar="A,B",
        description="modules to import, besides torch, before workers are forked, such as numpy,transformers",
    )
    grace: float = _option(
        25.0,
        least=0,
        most=86_400,
        description="seconds from SIGTERM to SIGKILL; keep it below the pod's terminationGracePeriodSeconds",
    )
    signals: str | None = _option(
        None,
        metavar="NAME=ACTION[,...]",
        description="what a signal does: forward, checkpoint, drain or terminate; for example USR1=checkpoint",
    )
    shm_size: str = _option(
        "auto",
        metavar="SIZE|auto|keep",
        description="size of /dev/shm, such as 8Gi; auto: enlarge it for the workers where permitted; keep: never "
        "change it",
    )
    hang_timeout: float | Literal["auto"] | None = _option(
        None,
        least=1,
        most=604_800,
        description="seconds without progress before workers count as hung; auto: learn the limit; default: off",
    )
    hang_report_after: float | Literal["auto", "off"] = _option(
        "auto",
        least=1,
        most=604_800,
        description="seconds without progress before a suspected hang is reported, with stacks and the rank that "
        "the others wait for; nobody is killed; auto: learn the limit, at least 60; off: no reports, no flight "
        "recorder, no detection of stragglers",
    )
    incident_dir: str | None = _option(
        None,
        metavar="PATH",
        description="directory for what is collected about failures and hangs; none: collect nothing; default: "
        "trainer-launch-incidents in $TMPDIR",
    )
    policy: str | None = _option(
        None,
        metavar="CHECK=SEVERITY[,...]|FILE|observe|off",
        description="severity of checks: off, warn, fail (exit code 20) or fatal (30), such as clock=warn,cpu=off; "
        "or a file of them (.toml, .json); observe runs all checks and fails none, off runs none",
    )
    level: Literal["container", "quick", "standard"] = _option(
        "standard",
        description="depth of the checks. container: this container only; quick: also that all nodes are present; "
        "standard: also compare the nodes, test GPUs and pairs of nodes",
    )
    gpu_burn: float = _option(
        0.0,
        least=0,
        most=86_400,
        description="seconds of full load that heat all GPUs before they are judged; 0: only a short load",
    )
    reference: str | None = _option(
        None,
        metavar="PATH",
        description="report of a healthy job (--report FILE.json) to compare GPUs with; default: a built-in table",
    )
    only: str | None = _option(None, metavar="CHECK[,...]", description="run only these checks")
    external_check: str | None = _option(
        None,
        metavar="COMMAND",
        description="command that checks this machine first and prints its findings as JSON, such as a script "
        "around dcgmi diag; it has half of --wait-timeout",
    )
    skip_if_passed_within: float | None = _option(
        None,
        most=604_800,
        description="skip the load tests of GPUs and --external-check if this machine has passed them within this "
        "time, such as 6h; its stamp needs a hostPath at /var/lib/trainer-launch",
    )
    storage: str | None = _option(None, metavar="PATH[,...]", description="directories of checkpoints to test")
    report: str | None = _option(
        None,
        metavar="PATH",
        description="file of preflight's report: .html is a page for people, .json is data for programs and "
        "--reference; run reads the .json that preflight wrote in the pod's init container",
    )
    prefix: bool = _option(False, description="prefix each worker's lines with [node:rank]")
    output_limit: int = _option(
        0,
        least=0,
        most=1_000_000,
        metavar="LINES",
        description="most lines per second of each worker's stdout and stderr; 0: no limit",
    )
    termination_log: str = _option(
        "/dev/termination-log",
        metavar="PATH",
        description="file for the termination message; the default is used only if it exists",
    )
    events: str | None = _option(
        None, metavar="PATH|-", description="file for the event log, as JSON lines; -: stdout"
    )
    metrics_port: int = _option(
        0, least=0, most=65535, metavar="PORT", description="port for Prometheus metrics, on all addresses; 0: off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info",
        description="lowest level of the launcher's own messages; rehearsed pods show only warnings by default",
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
        UsageError: a value does not fit, or a variable was removed; the sentence names the flag or variable.
    """
    given = {**_from_variables(os.environ if env is None else env), **flags}
    try:
        return Settings({name: Settings.model_fields[name].read(value) for name, value in given.items()})
    except ValueError:
        return Settings(validated(given, flags))


def validated(given: Mapping[str, Any], flags: Collection[str] = ()) -> dict[str, Any]:
    """The values of what flags (their names) and variables give, as pydantic-settings validates them.

    Raises:
        UsageError: a value does not fit; the sentence names the flag or variable.
    """
    from pydantic import BeforeValidator, ValidationError, create_model  # slow to load, and needed for errors only
    from pydantic_settings import BaseSettings

    fields: dict[str, Any] = {
        name: (Annotated[Any, BeforeValidator(Settings.model_fields[name].read)], ...) for name in given
    }
    try:
        return create_model("Settings", __base__=BaseSettings, **fields)(**given).model_dump()
    except ValidationError as problem:
        first = problem.errors()[0]
        name = str(first["loc"][0])
        where = flag_of(name) if name in flags else variable_of(name)
        removed.refuse(f"{flag_of(name)} {first['input']}", f"{where} {first['input']}")
        expected = Settings.model_fields[name].expected
        raise UsageError(f"invalid value {str(first['input'])[:60]!r} for {where}: expected {expected}") from None


def _from_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set, by the settings' names; not links to Services.

    Raises:
        UsageError: a variable was removed: without it something else would run.
    """
    upper = {name.upper(): value for name, value in env.items()}
    for flag in removed.SUCCESSORS:
        variable = variable_of(flag.removeprefix("--").replace("-", "_"))
        if upper.get(variable):
            removed.refuse(flag, variable)
    given = {name: upper.get(variable_of(name)) for name in Settings.model_fields}
    return {name: value for name, value in given.items() if value and not is_link(name, value)}


def job_options(settings: Settings) -> dict[str, str]:
    """The settings that describe the job, by torchrun's option names."""
    values = {option: getattr(settings, name) for name, option in JOB_FLAGS.items()}
    return {option: value for option, value in values.items() if value is not None}


def in_words_of_variables(message: str, settings: Settings, flags: Collection[str]) -> str:
    """With the variable in place of an option that was set by it, and whose value the message repeats."""
    for name in settings.model_fields_set - set(flags):
        value, flag = (re.escape(text) for text in (f"{getattr(settings, name)}"[:_REPEATED], flag_of(name)))
        if re.search(rf"(?<!\w){value}(?!\w)", message):
            message = re.sub(rf"(?<!\S){flag}(?![\w-])", variable_of(name), message)
    return message


def unknown_variables(variables: Mapping[str, str]) -> list[str]:
    """Sentences about TRAINER_LAUNCH_* variables that are unknown, each with the nearest real one."""
    ours = {variable_of(name) for name in Settings.model_fields}
    sentences = []
    for name, value in sorted(variables.items()):
        rest = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or name in ours or rest in INTERNAL | OF_SHIMS or is_link(rest, value):
            continue
        near = nearest(rest, (variable.removeprefix(PREFIX) for variable in ours))
        advice = f"did you mean {PREFIX}{near}?" if near else "trainer-launch run --help-all lists all"
        sentences.append(f"unknown variable {named(name)}; {advice}")
    return sentences


def variable_of(name: str) -> str:
    """The variable of a setting."""
    return PREFIX + name.upper()


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


_REPEATED = 40  # characters of a value, which messages cut at 60
_SERVICE = re.compile(r"([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_[0-9]+_(TCP|UDP|SCTP).*)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+:[0-9]+")


def is_link(name: str, value: object) -> bool:
    """Whether a variable is for a Service called trainer-launch or trainer-launch-…; `name` lacks our prefix."""
    linked = isinstance(value, str) and _ADDRESS.fullmatch(value) is not None
    is_port = name.upper().endswith("PORT")
    return (is_port and linked) or _SERVICE.fullmatch(name) is not None
