"""Flags of all commands, made from the settings, so that each is declared once and has its variable.

Everything after the first `--` is the command to run; without `--` the first word that is not an option begins it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from trainer_launch import __version__
from trainer_launch.commands.catalog import CATALOG
from trainer_launch.host import logs, runtime_directory
from trainer_launch.model import removed, settings
from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import PREFIX, Settings
from trainer_launch.model.suggestions import did_you_mean

_WIDTH = 78  # of what argparse does not wrap itself
_FEW = 3  # words that are all named
_SHORT = 12  # settings that a help shows all of
_ABOUT = """Run distributed training in Kubernetes pods. The launcher is PID 1: it reads the
platform's variables, checks the nodes, starts the workers, restarts them after
failures and reports why a job stopped."""
_EXAMPLES = """examples:
  trainer-launch rehearse --nodes 2 -- train.py  # rehearse the job on a laptop
  trainer-launch rehearse -f job.yaml            # or from its manifest
  trainer-launch explain -- train.py             # in a pod: show what would run
  trainer-launch run -- train.py --lr 1e-3       # run it"""
_MORE = f"""'trainer-launch COMMAND --help' shows the options that most people need;
--help-all shows all. The variable of an option is in brackets: --grace 60 is
{PREFIX}GRACE=60. An option on the command line takes precedence. Times
are seconds, or have units: 90s, 10m, 1h30m."""
_COMMANDS = {  # as the help lists them
    "in the pod": ("run", "preflight", "sshd", "explain", "status", "incidents"),
    "on your machine": ("rehearse",),
    "in an image": ("install-shims",),
}
_ABOUT_ITSELF = "other:\n  help           print the help of a command\n  version        print the version"
# argparse's own messages, and how we say them.
_REWORDED = (
    (r"argument (\S+?)(?:/\S+)?: expected one argument", r"missing value for \1"),
    (r"argument (\S+?)(?:/\S+)?: ignored explicit argument (.*)", r"\1 takes no value, found \2"),
    (r"argument (\S+?)(?:/\S+)?: invalid int value: (.*)", r"invalid value \2 for \1: expected a whole number"),
)


class Parsed(Struct, frozen=True, kw_only=True):
    """A command line, understood."""

    command: str
    settings: Settings
    argv: tuple[str, ...]  # the command to run
    flags: Mapping[str, Any]  # what only one command knows, such as --json
    given: Mapping[str, Any]  # the settings that were typed


class _AllHelp(argparse.RawDescriptionHelpFormatter):
    """Each option on a line of its own, and its text below; nothing is broken at a hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=8)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Help(_AllHelp):
    """The same without the settings that few people change."""

    def add_argument(self, action: argparse.Action) -> None:
        if action.dest in COMMON or action.dest not in Settings.model_fields:
            super().add_argument(action)


class _ShowAll(argparse.Action):
    """`--help-all`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        if parser.formatter_class is _Help:
            parser.formatter_class = _AllHelp
        parser.print_help()
        parser.exit()


class _Standalone(argparse.Action):
    """`--standalone`: this node alone, whatever the platform says of others."""

    def __call__(self, _: object, namespace: argparse.Namespace, *__: object) -> None:
        for name, value in self.const.items():
            setattr(namespace, name, value)


class _Parser(argparse.ArgumentParser):
    is_wrapping = False  # a command to run may follow, and `-m MODULE` begins it

    def _parse_optional(self, arg_string: str) -> Any:
        if self.is_wrapping and arg_string.startswith("-m"):
            return None
        return super()._parse_optional(_with_hyphens(arg_string))

    def error(self, message: str) -> typing.NoReturn:
        for pattern, wording in _REWORDED:
            message = re.sub(f"^{pattern}$", wording, message)
        raise UsageError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what, words = str(action.metavar).lower(), list(action.choices)
            near = did_you_mean(value, words) if len(words) > _FEW else ""
            advice = near or f"expected one of {', '.join(words)};"
            raise UsageError(f"unknown {what} {value!r}; {advice} see {self.prog} --help")

    def refuse_unknown(self, word: str) -> typing.NoReturn:
        """Say so of an option that this command does not have."""
        _refuse_removed(word)
        flag = word.partition("=")[0]
        options = [name for name in self._option_string_actions if name.startswith("--")]
        near = did_you_mean(flag, options)
        raise UsageError(f"unknown option {flag}; {near}{' ' if near else ''}see {self.prog} --help")


def parse(program: str, argv: Sequence[str]) -> Parsed:
    """Understand a command line, with TRAINER_LAUNCH_* behind it.

    Raises:
        UsageError: a flag or variable does not fit.
    """
    command, given, words, flags = typed(program, argv)
    loaded = settings.load(given)
    logs.set_up(loaded.log_level, os.environ.get(runtime_directory.NODE_LABEL))
    for sentence in settings.unknown_variables(os.environ):
        logs.warn(sentence)
    return Parsed(command=command, settings=loaded, argv=words, flags=flags, given=given)


def typed(program: str, argv: Sequence[str]) -> tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]:
    """A command line's command, the settings that it gives, the words to run, and the flags of that command alone.

    Raises:
        UsageError: it is none of ours.
    """
    own, rest = _split(list(argv))
    own = _as_options(own)
    name = COMMAND_ALIASES.get(own[0], own[0]) if own else ""
    if name not in COMMANDS:
        if not name.startswith("-"):
            raise UsageError(_no_command(program, own))
        about = _about(program)
        about.parse_known_args(own[:1])  # does not return from an option of its own
        about.refuse_unknown(name)
    if not is_wrapping(name):
        for word in own:  # what follows one may be taken for something else, and refused first
            _refuse_removed(word)
    parser = parser_of(program, name)
    namespace, unknown = parser.parse_known_args(own[1:])
    flags = vars(namespace)
    if unknown:
        parser.refuse_unknown(unknown[0])
    words: list[str] = flags.pop("words")
    if words and rest is None and not is_wrapping(name):
        raise UsageError(f"unexpected {words[0]!r}; see {program} {name} --help")
    if rest is not None and words:
        raise UsageError(f"unexpected {words[0]!r} before --; put the whole command after --")
    given = {field: flags.pop(field) for field in list(flags) if field in Settings.model_fields}
    given = {field: value for field, value in given.items() if value is not None}
    for action in parser._actions:  # not what stands for none of them: --render would run the job
        if action.option_strings and flags.get(action.dest) == "":
            raise UsageError(f"missing value for {action.option_strings[-1]}; is a variable empty?")
    return name, given, tuple(words if rest is None else rest), flags


def _about(program: str) -> _Parser:
    """The parser of a line without a command: help and version."""
    parser = _Parser(
        prog=program,
        usage=f"{program} COMMAND [options]",
        description="\n\n".join((_ABOUT, *_sections(), _EXAMPLES)),
        epilog=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    parser.add_argument(
        "-V", "--version", action="version", version=f"{program} {__version__}", help="show the version"
    )
    return parser


def parser_of(program: str, name: str) -> _Parser:
    """The parser of a command's own words."""
    about, own = CATALOG[name], frozenset(COMMANDS[name])
    has_rare = len(own) > _SHORT
    about_it = textwrap.fill(f"{about.help[0].upper()}{about.help[1:]}. {about.about}", _WIDTH)
    parser = _Parser(
        prog=f"{program} {name}",
        description=f"{about_it}\n\n{about.examples}",
        usage=f"{program} {name} {about.usage}",
        formatter_class=_Help if has_rare else _AllHelp if own else argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="show this help")
    all_help = f"show all options; {len(own - COMMON)} are not shown here" if has_rare else argparse.SUPPRESS
    parser.add_argument("--help-all", action=_ShowAll, nargs=0, help=all_help)
    for names, flag in about.flags:
        parser.add_argument(*names, **flag)
    for title, fields in GROUPS.items():
        headed = [field for field in fields if field in own]
        group = parser.add_argument_group(title) if headed else parser
        for field in headed:
            _add(group, field, Settings.model_fields[field])
        if "nodes" in headed:
            alone = {field: value for field, value in _STANDALONE.items() if field in own}
            group.add_argument("--standalone", action=_Standalone, nargs=0, const=alone, dest="nodes", **_ALONE)
    rest = argparse.REMAINDER if is_wrapping(name) else "*"
    parser.add_argument("words", nargs=rest, help=argparse.SUPPRESS)
    parser.is_wrapping = is_wrapping(name)
    return parser


def _sections() -> Iterator[str]:
    for title, names in _COMMANDS.items():
        yield "\n".join((f"{title}:", *(f"  {name:<13}  {CATALOG[name].help}" for name in names)))
    yield _ABOUT_ITSELF


def is_wrapping(name: str) -> bool:
    """Whether a command to run may follow."""
    return "-- COMMAND" in CATALOG[name].usage


def run(parsed: Parsed) -> int:
    """Run the command, whose module is loaded only now; return the exit code."""
    module = importlib.import_module(f"trainer_launch.commands.{parsed.command.replace('-', '_')}")
    code: int = module.main(parsed)
    return code


def _no_command(program: str, words: Sequence[str]) -> str:
    if not words:
        return f"missing command; expected one of {', '.join(COMMANDS)}; see {program} --help"
    near = did_you_mean(words[0], COMMANDS) or f"to run a program: {program} run -- {words[0]} …;"
    return f"unknown command {words[0]!r}; {near} see {program} --help"


def _refuse_removed(word: str) -> None:
    flag = _with_hyphens(word).partition("=")[0]
    for name in (flag, flag.replace("--no-", "--", 1)):
        removed.refuse(name, flag)


def _with_hyphens(word: str) -> str:
    """An option as it is declared: torchrun's `--nproc_per_node=2` is `--nproc-per-node=2`."""
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def _as_options(words: list[str]) -> list[str]:
    """`help [COMMAND]` and `version` are the options of the same names."""
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help", *words[2:]]
    if words[:1] in (["help"], ["version"]):  # which have no help of their own
        return ["--version" if {"--help", "-h"}.isdisjoint(words) else "--help"]
    return words


def _split(argv: list[str]) -> tuple[list[str], list[str] | None]:
    """Our own words, and those after the first `--`."""
    if "--" not in argv:
        return argv, None
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _add(parser: argparse._ActionsContainer, name: str, field: Any) -> None:
    """Add a setting as a flag; its value stays text, and the settings check it."""
    default = "" if field.default in (None, False) else f" (default: {_shown(field.default)})"
    words: dict[str, Any] = {
        "default": None,
        "help": f"{field.description}{default} [{PREFIX}{name.upper()}]".replace("%", "%%"),
    }
    names = (settings.flag_of(name), *ALIASES.get(name, ()))
    if field.kind is bool:
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **words)
        return
    parser.add_argument(*names, metavar="|".join(filter(None, (field.metavar, *field.choices))), **words)


def _shown(default: object) -> str:
    return f"{default:g}" if isinstance(default, float) else str(default).lower()


_JOB = ("nodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "max_restarts")
_STANDALONE = {"nodes": "1", "node_rank": "0"}
_ALONE: Mapping[str, Any] = {
    "default": None,
    "help": "run on this node alone, whatever the platform says: --nodes 1 --node-rank 0",
}
_CHECKING = (
    *("policy", "level", "gpu_burn", "reference", "only", "external_check"),
    *("skip_if_passed_within", "storage", "report"),
)
_RUN = tuple(name for name in Settings.model_fields if name not in _CHECKING or name == "report")
_NOT_EXPLAINED = ("termination_log", "events", "metrics_port", "report")
_EXPLAIN = tuple(name for name in _RUN if name not in _NOT_EXPLAINED)
_PREFLIGHT = (
    *(*_CHECKING, "contract", "engine", *(name for name in _JOB if name != "max_restarts")),
    *("min_nodes", "spares", "port_range", "secret_file", "ssh_dir", "ssh_port", "insecure_host_keys", "shm_size"),
    *("wait_timeout", "termination_log", "log_level"),
)
_REHEARSE = (
    *("engine", "nodes", "spares", "nproc_per_node", "max_restarts", "start_method", "preload", "grace", "signals"),
    *("hang_timeout", "hang_report_after", "incident_dir", "prefix", "events", "log_level"),
)
_SSHD = (
    *("ssh_dir", "ssh_port", "insecure_host_keys", "forward_env", "contract", "grace", "signals", "shm_size"),
    *("termination_log", "events", "metrics_port", "log_level"),
)
# The settings of each command.
COMMANDS = {
    "run": _RUN,
    "preflight": _PREFLIGHT,
    "explain": _EXPLAIN,
    "sshd": _SSHD,
    "rehearse": _REHEARSE,
    "status": ("log_level",),
    "incidents": ("incident_dir", "log_level"),
    "install-shims": (),
}
COMMAND_ALIASES = {"local": "rehearse"}  # what 0.2 called a command
COMMON = {  # what --help shows where a command has many settings
    *("nodes", "nproc_per_node", "engine", "max_restarts", "min_nodes", "spares", "wait_timeout", "grace"),
    *("hang_timeout", "incident_dir", "metrics_port", "events", "log_level"),
    *("policy", "level", "only", "storage", "report"),
}
ALIASES = {"nodes": ("--nnodes",)}  # torchrun's word
# The headings, in their order; a command shows those of its own settings.
GROUPS = {
    "checks": tuple(name for name in _CHECKING if name != "report"),
    "command": ("contract", "engine", "start_method", "preload"),
    "job (default: what the platform injected)": (*_JOB[:-1], "port_range", "secret_file", "topology_label"),
    "restarts": ("max_restarts", "wait_timeout", "min_nodes", "shrink_after", "spares"),
    "hangs and incidents": ("hang_timeout", "hang_report_after", "incident_dir"),
    "stopping": ("grace", "signals", "termination_log"),
    "MPI": ("ssh_dir", "ssh_port", "insecure_host_keys", "forward_env"),
    "container": ("shm_size",),
    "output and monitoring": ("report", "prefix", "output_limit", "events", "metrics_port", "log_level"),
}
