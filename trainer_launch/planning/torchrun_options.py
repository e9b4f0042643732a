"""torchrun's options as plain data: names, what they take, and where the training script begins.

PID 1 never imports torch, so it reads a command line with this table (compared with torch's own parser by a test).
Written for torch 2.4 to 2.13.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from trainer_launch.model.errors import UsageError
from trainer_launch.model.frozen import dataclass

_NUMBER = re.compile(r"[0-9]{1,9}")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?")


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its name with underscores, its short form, and the form of its value."""

    name: str
    form: str = "text"  # text, number, decimal, flag, or a choice "a|b|c"
    short: str | None = None
    env: bool = True  # whether torchrun reads PET_<NAME>

    @property
    def variable(self) -> str:
        """The environment variable that torchrun reads for it."""
        return f"PET_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The long option as people write it."""
        return "--" + self.name.replace("_", "-")


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        option.name: option
        for option in (
            Option("nnodes"),
            Option("nproc_per_node"),
            Option("rdzv_backend"),
            Option("rdzv_endpoint"),
            Option("rdzv_id"),
            Option("rdzv_conf"),
            Option("standalone", "flag"),
            Option("max_restarts", "number"),
            Option("monitor_interval", "decimal"),
            Option("start_method", "spawn|fork|forkserver"),
            Option("event_log_handler"),
            Option("role"),
            Option("module", "flag", "m"),
            Option("no_python", "flag"),
            Option("run_path", "flag"),
            Option("log_dir"),
            Option("redirects", short="r"),
            Option("tee", short="t"),
            Option("local_ranks_filter"),
            Option("duplicate_stdout_filters"),
            Option("duplicate_stderr_filters"),
            Option("node_rank", "number"),
            Option("master_addr"),
            Option("master_port", "number"),
            Option("local_addr"),
            Option("logs_specs", env=False),
            Option("numa_binding", "node|socket|exclusive|core-complex", env=False),
            Option("signals_to_handle"),
            Option("shutdown_timeout", "number"),
            Option("virtual_local_rank", "flag"),
        )
    }
)
_SHORT = {option.short: option for option in OPTIONS.values() if option.short}
DEVICES = "CUDA_VISIBLE_DEVICES"
_TRUE, _FALSE = ("1", "true", "yes", "on", ""), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class TorchrunCommand:
    """A torchrun command line taken apart: options by name (flags are "1"), then the program."""

    options: Mapping[str, str]
    program: tuple[str, ...]
    unknown: tuple[str, ...] = ()  # --name=value words of a newer torch, handed on as they are


def split_command(argv: Sequence[str]) -> TorchrunCommand:
    """Take `torchrun [options] script args` apart, without the leading `torchrun`.

    Raises:
        UsageError: an option that torchrun does not know, one without its value, or no program.
    """
    options: dict[str, str] = {}
    unknown: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, value = _recognise(word)
        if option is None:
            unknown.append(word)
        elif option.form == "flag":
            if value is not None:
                raise UsageError(f"{word}: torchrun's {option.flag} takes no value; drop everything after the =")
            options[option.name] = "1"
        elif value is not None:
            options[option.name] = value
        elif rest:
            options[option.name] = rest.pop(0)
        else:
            raise UsageError(f"missing value for {word}; write {option.flag}=VALUE before the training script")
    if not rest:
        raise UsageError("the torchrun command names no training script; write: torchrun [options] train.py [args]")
    return TorchrunCommand(MappingProxyType(options), tuple(rest), tuple(unknown))


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


def _recognise(word: str) -> tuple[Option | None, str | None]:
    """The option a word names and the value joined to it; abbreviations as argparse takes them.

    None stands for an option that only a newer torch may know: where its value ends is plain only with `=`.
    """
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        option = _by_name(name.replace("-", "_"), word)
        if option is None and not equals:
            raise _unknown(word)
        return option, value if equals else None
    option = _SHORT.get(word[1])
    if option is None or (option.form == "flag" and len(word) > 2):
        raise _unknown(word)
    joined = word[2:].removeprefix("=")
    return option, joined or None


def _by_name(name: str, word: str) -> Option | None:
    if name in OPTIONS:
        return OPTIONS[name]
    matches = [option for full, option in OPTIONS.items() if name and full.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(option.flag for option in matches)
        raise UsageError(f"ambiguous option {word}: torchrun has {names}; write it in full")
    return None


def _unknown(word: str) -> UsageError:
    return UsageError(
        f"unknown option of torchrun: {word}; check the spelling, put options of the "
        f"training script after the script, or write one of a newer torch as --name=value"
    )


def visible_devices(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The devices that --virtual-local-rank gives to the workers, in their order; None: all of the machine's."""
    return tuple(device.strip() for device in env[DEVICES].split(",")) if DEVICES in env else None
