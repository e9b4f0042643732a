"""torchrun's options as plain data: names, what they take, and where the training script begins.

PID 1 never imports torch, so it reads a command line with this table (compared with torch's own parser by a test).
Written for torch 2.4 to 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Template
from types import MappingProxyType

from msgspec import Struct

from trainer_launch.model import Destination
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.launcher_options import Option, split

_NUMBER = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?")


def _option(name: str, form: str = "text", short: str | None = None, *, env: bool = True) -> Option:
    """One option; the parser knows both spellings of its name."""
    flags = ("--" + name.replace("_", "-"), f"--{name}", *([f"-{short}"] if short else ()))
    return Option(name, flags, 0 if form == "flag" else 1, form, env)


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        option.name: option
        for option in (
            _option("nnodes"),
            _option("nproc_per_node"),
            _option("rdzv_backend"),
            _option("rdzv_endpoint"),
            _option("rdzv_id"),
            _option("rdzv_conf"),
            _option("standalone", "flag"),
            _option("max_restarts", "number"),
            _option("monitor_interval", "decimal"),
            _option("start_method", "spawn|fork|forkserver"),
            _option("event_log_handler"),
            _option("role"),
            _option("module", "flag", "m"),
            _option("no_python", "flag"),
            _option("run_path", "flag"),
            _option("log_dir"),
            _option("redirects", short="r"),
            _option("tee", short="t"),
            _option("local_ranks_filter"),
            _option("duplicate_stdout_filters"),
            _option("duplicate_stderr_filters"),
            _option("node_rank", "number"),
            _option("master_addr"),
            _option("master_port", "number"),
            _option("local_addr"),
            _option("logs_specs", env=False),
            _option("numa_binding", "node|socket|exclusive|core-complex"),
            _option("signals_to_handle"),
            _option("shutdown_timeout", "number"),
            _option("virtual_local_rank", "flag"),
        )
    }
)
DEVICES = "CUDA_VISIBLE_DEVICES"
_TRUE, _FALSE = ("1", "true", "yes", "on", ""), ("0", "false", "no", "off")


class TorchrunCommand(Struct, frozen=True):
    """A torchrun command line taken apart: options by name (flags are "1"), then the program."""

    options: Mapping[str, str]
    program: tuple[str, ...]
    unknown: tuple[str, ...] = ()  # --name=value words of a newer torch, handed on as they are


def split_command(argv: Sequence[str]) -> TorchrunCommand:
    """Take `torchrun [options] script args` apart, without the leading `torchrun`.

    Raises:
        UsageError: an option that torchrun does not know, one without its value, or no program.
    """
    found = split(argv, OPTIONS.values(), "torchrun")
    if not found.program:
        raise UsageError("the torchrun command names no training script; write: torchrun [options] train.py [args]")
    options = {name: values[0] if values else "1" for name, values in found.typed}
    return TorchrunCommand(MappingProxyType(options), found.program, found.unknown)


def check_value(option: Option, value: str, where: str) -> str:
    """The value in the form torchrun's parser takes; `where` names the flag or variable in messages.

    A flag's variable may say true or false in words and may be empty (the v1 operator writes PET_STANDALONE=""
    for true), on all of which torchrun itself crashes.
    """
    text = value.strip()
    if option.form == "flag":
        if text.lower() in _TRUE:
            return "1"
        if text.lower() in _FALSE:
            return "0"
        raise UsageError(f"{where} is {value[:60]!r}; expected 1 or 0")
    if option.form == "number" and not _NUMBER.fullmatch(text):
        raise UsageError(f"{where} is {value[:60]!r}; expected a whole number of at least 0")
    if option.form == "decimal" and not _DECIMAL.fullmatch(text):
        raise UsageError(f"{where} is {value[:60]!r}; expected a number of seconds")
    if "|" in option.form and text not in option.form.split("|"):
        raise UsageError(f"{where} is {value[:60]!r}; expected one of {option.form.replace('|', ', ')}")
    return value


def from_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Every PET_<OPTION> that torchrun reads, checked, by option name."""
    found: dict[str, str] = {}
    for option in OPTIONS.values():
        value = env.get(option.variable) if option.env else None
        if value is None:
            continue
        checked = check_value(option, value, option.variable)
        if checked != "" and not (option.form == "flag" and checked == "0"):
            found[option.name] = checked
    return found


def render(options: Mapping[str, str]) -> tuple[str, ...]:
    """Options as an argument list, in the table's order."""
    words: list[str] = []
    for option in OPTIONS.values():
        if option.name in options:
            value = options[option.name]
            words.append(option.flag if option.form == "flag" else f"{option.flag}={value}")
    return tuple(words)


def visible_devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The devices that --virtual-local-rank gives to the workers, in their order; None: all of the machine's."""
    return tuple(device.strip() for device in env[DEVICES].split(",")) if DEVICES in env else None


# -- where torchrun sends its workers' output --------------------------------------------------


NAMES = (
    "log_dir",
    "redirects",
    "tee",
    "local_ranks_filter",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
)
NOWHERE = "/dev/null"  # as --log-dir: torchrun writes no file at all
_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_STREAMS = {1: "stdout", 2: "stderr"}
_ALL = re.compile(r"[0-3]")
_EACH = re.compile(r"\d{1,5}:[0-3](,\d{1,5}:[0-3])*")
_RANKS = re.compile(r"\d{1,5}(,\d{1,5})*")


PLAIN = Destination()


def check(options: Mapping[str, str]) -> None:
    """See that torchrun would take the options' values.

    Raises:
        UsageError: one is out of its form.
    """
    for name in ("redirects", "tee"):
        value = options.get(name, "0")
        if not (_ALL.fullmatch(value) or _EACH.fullmatch(value)):
            raise UsageError(
                f"invalid value {value[:60]!r} for {OPTIONS[name].flag}: expected 0 (none), 1 (stdout), 2 (stderr) "
                f"or 3 (both), or LOCAL_RANK:N,LOCAL_RANK:N"
            )
    value = options.get("local_ranks_filter", "")
    if value and not _RANKS.fullmatch(value.replace(" ", "")):
        raise UsageError(
            f"invalid value {value[:60]!r} for --local-ranks-filter: expected local ranks, such as 0,1,2"
        )


def writes_files(options: Mapping[str, str]) -> bool:
    """Whether the user asks for files of the workers' output."""
    return not options.keys().isdisjoint(("log_dir", "redirects", "tee"))


def destinations(
    options: Mapping[str, str], env: Mapping[str, str], role: str, ranks: Mapping[int, int], attempt_folder: str
) -> dict[int, dict[int, Destination]]:
    """Where each worker's stdout (1) and stderr (2) go; `ranks` are the ranks in the job by local rank.

    Streams that go where they would go without any of the options are left out. The files are in a folder for each
    worker in `attempt_folder`; "" stands for --log-dir /dev/null, with which torchrun does nothing of this.
    """
    if not attempt_folder:
        return {}
    found = {}
    for local_rank, rank in ranks.items():
        prefix = _prefix(env, role, local_rank, rank)
        both = {stream: _destination(options, attempt_folder, local_rank, stream, prefix) for stream in _STREAMS}
        found[local_rank] = {stream: to for stream, to in both.items() if to != PLAIN}
    return {local_rank: streams for local_rank, streams in found.items() if streams}


def copies(options: Mapping[str, str], attempt_folder: str) -> tuple[str, ...]:
    """The files that torchrun makes for filtered lines, even where no line ever comes."""
    if not attempt_folder:
        return ()
    return tuple(_copy(attempt_folder, stream) for stream in _STREAMS if _needles(options, stream))


def _destination(
    options: Mapping[str, str], attempt_folder: str, local_rank: int, stream: int, prefix: str
) -> Destination:
    tee = bool(_chosen(options.get("tee", "0"), local_rank) & stream)
    redirect = bool(_chosen(options.get("redirects", "0"), local_rank) & stream)
    is_wanted = _is_wanted(options.get("local_ranks_filter", ""), local_rank)
    needles = _needles(options, stream) if tee and is_wanted else ()
    return Destination(
        file=f"{attempt_folder}/{local_rank}/{_STREAMS[stream]}.log" if tee or redirect else None,
        is_shown=is_wanted and (tee or not redirect),
        prefix=prefix if tee and is_wanted else "",
        copy=_copy(attempt_folder, stream) if needles else None,
        needles=needles,
    )


def _chosen(value: str, local_rank: int) -> int:
    """1 for stdout, 2 for stderr, 3 for both, 0 for none."""
    if ":" not in value:
        return int(value)
    by_rank = dict(word.split(":") for word in value.split(","))
    return next((int(chosen) for rank, chosen in by_rank.items() if int(rank) == local_rank), 0)


def _is_wanted(ranks: str, local_rank: int) -> bool:
    return not ranks or local_rank in [int(rank) for rank in ranks.split(",")]


def _needles(options: Mapping[str, str], stream: int) -> tuple[str, ...]:
    """The words of --duplicate-stdout-filters; two commas stand for one that is part of a word."""
    value = options.get(f"duplicate_{_STREAMS[stream]}_filters", "")
    return tuple(word.replace("\0", ",") for word in value.replace(",,", "\0").split(",")) if value else ()


def _copy(attempt_folder: str, stream: int) -> str:
    return f"{attempt_folder}/filtered_{_STREAMS[stream]}.log"


def _prefix(env: Mapping[str, str], role: str, local_rank: int, rank: int) -> str:
    template = env.get(_PREFIX)
    if not template:
        return f"[{role}{local_rank}]:"
    return Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)
