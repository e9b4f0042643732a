"""The options of torchrun and of `deepspeed` as plain data, and the grammar of such command lines.

PID 1 imports neither of them, nor argparse: a table of options (compared with torch's own parser by a test) is all
there is to know of a launcher. Written for torch 2.4 to 2.15.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from string import Template
from types import MappingProxyType

from msgspec import Struct

from trainer_launch.model import Destination, removed, signal_policy
from trainer_launch.model.errors import UsageError

_SHORT = 2  # letters of `-p`, to which a value may be joined
_OPTION_LIKE = re.compile(r"-(?!\d+$|\d*\.\d+$)[^ ]+")  # what argparse takes for no option's value
# What a value has to be, by its option's form: a pattern, and the words for it.
_EXPECTED = {
    "number": (re.compile(r"[0-9]{1,9}"), "a whole number from 0 to 999999999"),
    "decimal": (
        re.compile(r"([0-9]{1,9}\.?[0-9]{0,9}|\.[0-9]{1,9})([eE][+-]?[0-9]{1,2})?"),
        "a number of seconds",
    ),
    "streams": (
        re.compile(r"[0-3]|\d{1,5}:[0-3](,\d{1,5}:[0-3])*"),
        "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:N,LOCAL_RANK:N",
    ),
    "ranks": (re.compile(r"(\d{1,5}( *, *\d{1,5})*)?"), "local ranks, such as 0,1,2"),
}


class TorchrunOption(Struct, frozen=True):
    """An option of torchrun, by its name with underscores."""

    name: str
    # Of the value: text, number, decimal, streams, ranks, flag (which takes none), or a choice "a|b|c".
    form: str = "text"
    short: str = ""  # such as -m
    env: bool = True  # whether torchrun reads PET_<NAME>

    @property
    def variable(self) -> str:
        """The environment variable that torchrun reads for it."""
        return f"PET_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The long option as people write it."""
        return "--" + self.name.replace("_", "-")


OPTIONS: Mapping[str, TorchrunOption] = MappingProxyType(
    {
        option.name: option
        for option in (
            TorchrunOption("nnodes"),
            TorchrunOption("nproc_per_node"),
            TorchrunOption("rdzv_backend"),
            TorchrunOption("rdzv_endpoint"),
            TorchrunOption("rdzv_id"),
            TorchrunOption("rdzv_conf"),
            TorchrunOption("standalone", "flag"),
            TorchrunOption("max_restarts", "number"),
            TorchrunOption("monitor_interval", "decimal"),
            TorchrunOption("start_method", "spawn|fork|forkserver"),
            TorchrunOption("event_log_handler"),
            TorchrunOption("role"),
            TorchrunOption("module", "flag", "-m"),
            TorchrunOption("no_python", "flag"),
            TorchrunOption("run_path", "flag"),
            TorchrunOption("log_dir"),
            TorchrunOption("redirects", "streams", "-r"),
            TorchrunOption("tee", "streams", "-t"),
            TorchrunOption("local_ranks_filter", "ranks"),
            TorchrunOption("duplicate_stdout_filters"),
            TorchrunOption("duplicate_stderr_filters"),
            TorchrunOption("node_rank", "number"),
            TorchrunOption("master_addr"),
            TorchrunOption("master_port", "number"),
            TorchrunOption("local_addr"),
            TorchrunOption("logs_specs", env=False),
            TorchrunOption("numa_binding", "node|socket|exclusive|core-complex"),
            TorchrunOption("signals_to_handle"),
            TorchrunOption("shutdown_timeout", "number"),
            TorchrunOption("virtual_local_rank", "flag"),
            TorchrunOption("log_line_prefix_template"),
        )
    }
)
_BY_FLAG = {
    flag: option
    for option in OPTIONS.values()
    for flag in (option.flag, f"--{option.name}", *filter(None, [option.short]))
}
QUESTIONS = frozenset({"-h", "--help", "--print-completion"})  # about torchrun itself
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
    options, unknown, rest = dict[str, str](), list[str](), list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, joined = _recognise(word)
        if option is None:
            unknown.append(word)
        elif option.form == "flag":
            if joined is not None:
                raise UsageError(f"{word[:60]}: torchrun's {option.flag} takes no values here")
            options[option.name] = "1"
        else:
            if joined is None and not rest:
                raise UsageError(f"{word[:60]} needs a value; write it before the program")
            if joined is None and _OPTION_LIKE.fullmatch(rest[0]):
                raise UsageError(f"{word[:60]} needs a value, found {rest[0][:60]!r}; is a variable empty?")
            options[option.name] = rest.pop(0) if joined is None else joined
    if not rest:
        raise UsageError("the torchrun command names no training script; write: torchrun [options] train.py [args]")
    check_form(options)
    return TorchrunCommand(MappingProxyType(options), tuple(rest), tuple(unknown))


def check_form(options: Mapping[str, str]) -> None:
    """See that no two options exclude each other.

    Raises:
        UsageError: two do.
    """
    if {"no_python", "module"} <= options.keys():
        raise UsageError("--no-python runs a program, and --module a module of Python; remove one of them")


def _recognise(word: str) -> tuple[TorchrunOption | None, str | None]:
    """The option that a word names, and the value joined to it.

    None stands for an option that only a newer torchrun may know: where its value ends is plain only with `=`.
    """
    flag, equals, value = word.partition("=")
    joined = value if equals else None
    if flag in _BY_FLAG:
        return _BY_FLAG[flag], joined
    is_long = word.startswith("--")
    short = _BY_FLAG.get(word[:_SHORT])
    if short is not None and short.form != "flag" and not is_long:
        return short, word[_SHORT:]
    meant = {option.name: option for full, option in _BY_FLAG.items() if is_long and full.startswith(flag)}
    if len(meant) == 1:
        return next(iter(meant.values())), joined
    if meant:
        names = ", ".join(sorted(option.flag for option in meant.values()))
        raise UsageError(f"ambiguous option {flag[:60]}: torchrun has {names}; write it in full")
    if is_long and equals:
        return None, None
    raise UsageError(
        f"unknown option of torchrun: {word[:60]}; check the spelling, put options of the program after the "
        f"program, or write one of a newer torchrun as --name=value"
    )


# `deepspeed`'s options that torchrun has, too; one without a name of torchrun's has no effect here.
_OF_DEEPSPEED = {
    "--num_gpus": "nproc_per_node",
    "--num_nodes": "nnodes",
    "--node_rank": "node_rank",
    "--master_addr": "master_addr",
    "--master_port": "master_port",
    "--module": "module",
    "--no_python": "no_python",
    "--no_local_rank": None,
    "--no_ssh": None,
    "--force_multi": None,
}
_MOST = re.compile(r"[1-9]\d{0,5}")


def deepspeed_as_torchrun(argv: Sequence[str]) -> TorchrunCommand | None:
    """`deepspeed [options] script args` as torchrun has it, without the leading `deepspeed`.

    None: an option has no equivalent, or the number of workers is not typed.
    """
    options, words = dict[str, str](), list(argv)
    flags = set[str]()
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).partition("=")
        name = _OF_DEEPSPEED.get(flag, "")
        if name == "" or (not equals and not words):
            return None
        if name is None or OPTIONS[name].form == "flag":
            flags.add(flag)
            value = "1"
        elif not equals:
            value = words.pop(0)
        if name is not None:
            options[name] = value
    if not words or not _MOST.fullmatch(options.get("nproc_per_node", "")):
        return None
    if "--no_local_rank" not in flags:
        words.insert(1, "--local_rank=${local_rank}")  # torchrun replaces it for each worker
    return TorchrunCommand(MappingProxyType(options), tuple(words))


def check_value(option: TorchrunOption, value: str, where: str) -> str:
    """The value in the form torchrun's parser takes; `where` names the flag or variable in messages.

    A flag's variable may say true or false in words and may be empty (the v1 operator writes PET_STANDALONE=""
    for true), on all of which torchrun itself crashes.
    """
    text = value.strip()
    if option.name == "rdzv_backend" and text == "trainer-launch":
        removed.refuse("--rdzv-backend trainer-launch", f"the rendezvous backend trainer-launch ({where})")
    if option.form == "flag":
        if text.lower() in _TRUE:
            return "1"
        if text.lower() in _FALSE:
            return "0"
        raise UsageError(f"invalid value {value[:60]!r} for {where}: expected 1 or 0")
    if option.name == "signals_to_handle":
        signal_policy.numbers(text, where)
    if expected := _EXPECTED.get(option.form):
        form, what = expected
        value, fits = text, form.fullmatch(text) is not None
    else:
        choices = option.form.split("|")
        fits, what = "|" not in option.form or text in choices, f"one of {', '.join(choices)}"
    if not fits:
        raise UsageError(f"invalid value {value[:60]!r} for {where}: expected {what}")
    return value


def from_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Every PET_<OPTION> that torchrun reads, checked, by option name."""
    options: dict[str, str] = {}
    for option in OPTIONS.values():
        value = env.get(option.variable) if option.env else None
        if value is None or (not value.strip() and option.form in ("text", "streams", "ranks")):
            continue
        checked = check_value(option, value, option.variable)
        if not (option.form == "flag" and checked == "0"):
            options[option.name] = checked
    return options


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


_TEMPLATE = "log_line_prefix_template"
NAMES = ("log_dir", "redirects", "tee", "local_ranks_filter", _TEMPLATE)
NOWHERE = "/dev/null"  # as --log-dir: torchrun writes no file at all
PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_STREAMS = {1: "stdout", 2: "stderr"}


PLAIN = Destination()


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
    by_rank = {}
    for local_rank, rank in ranks.items():
        prefix = _prefix(options.get(_TEMPLATE) or env.get(PREFIX_VARIABLE), role, local_rank, rank)
        both = {stream: _destination(options, attempt_folder, local_rank, stream, prefix) for stream in _STREAMS}
        by_rank[local_rank] = {stream: to for stream, to in both.items() if to != PLAIN}
    return {local_rank: streams for local_rank, streams in by_rank.items() if streams}


def _destination(
    options: Mapping[str, str], attempt_folder: str, local_rank: int, stream: int, prefix: str
) -> Destination:
    tee = bool(_chosen(options.get("tee", "0"), local_rank) & stream)
    redirect = bool(_chosen(options.get("redirects", "0"), local_rank) & stream)
    is_wanted = _is_wanted(options.get("local_ranks_filter", ""), local_rank)
    return Destination(
        file=f"{attempt_folder}/{local_rank}/{_STREAMS[stream]}.log" if tee or redirect else None,
        is_shown=is_wanted and (tee or not redirect),
        prefix=prefix if tee and is_wanted else "",
    )


def _chosen(value: str, local_rank: int) -> int:
    """1 for stdout, 2 for stderr, 3 for both, 0 for none."""
    if ":" not in value:
        return int(value)
    by_rank = dict(word.split(":") for word in value.split(","))
    return next((int(chosen) for rank, chosen in by_rank.items() if int(rank) == local_rank), 0)


def _is_wanted(ranks: str, local_rank: int) -> bool:
    return not ranks or local_rank in [int(rank) for rank in ranks.split(",")]


def _prefix(template: str | None, role: str, local_rank: int, rank: int) -> str:
    if not template:
        return f"[{role}{local_rank}]:"
    names = {"role_name": role, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
    return Template(template).safe_substitute(names)
