"""Completions in the languages of bash, zsh and fish. Pure: commands with their flags in, a script out.

All three complete commands, options, what options take, and after `--` the wrapped command: its name, or a script,
and then whatever the shell itself knows of that command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Takes(Enum):
    """What stands after an option."""

    NOTHING = "nothing"
    WORDS = "one of its words"
    FILE = "a file or folder"
    VALUE = "what nobody can guess"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """An option, by all its names."""

    names: tuple[str, ...]
    told: str
    takes: Takes
    words: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One of our commands."""

    name: str
    told: str
    flags: tuple[Flag, ...]
    words: Sequence[str] = ()  # what its own argument may be
    is_wrapping: bool  # whether a command to run may follow


_BASH = r"""# bash completion of trainer-launch
_trainer_launch() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} at=0 i word
    local options="" words="" wraps=0
    COMPREPLY=()
    [[ $cur == = ]] && cur="" || { [[ $prev == = ]] && prev=${COMP_WORDS[COMP_CWORD-2]}; }
    if (( COMP_CWORD == 1 )); then
        mapfile -t COMPREPLY < <(compgen -W "@NAMES@ --help --version" -- "$cur")
        return
    fi
    case $command in
@COMMANDS@
    esac
    for (( i = 2; i < COMP_CWORD; i++ )); do
        word=${COMP_WORDS[i]}
        if [[ $word == -- ]]; then at=$((i + 1)); break; fi
        case $word in
            @VALUED@) [[ ${COMP_WORDS[i+1]} == = ]] && ((i++)); ((i++)) ;;
            -*) ;;
            *) at=$i; break ;;
        esac
    done
    if (( wraps && at && COMP_CWORD > at )) && declare -F _command_offset >/dev/null; then
        _command_offset "$at"
        return
    elif (( wraps && at )); then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$cur"; (( COMP_CWORD == at )) && compgen -c -- "$cur")
        return
    fi
    case $prev in
@VALUES@
    esac
    if (( wraps )) && [[ $cur && $cur != -* ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$cur"; compgen -c -- "$cur")
        return
    fi
    mapfile -t COMPREPLY < <(compgen -W "$options $words" -- "$cur")
}
complete -F _trainer_launch trainer-launch
"""
_ZSH = r"""#compdef trainer-launch
# zsh completion of trainer-launch
_trainer_launch_program() {
  _alternative 'files:file:_files' 'commands:command:_command_names -e'
}
_trainer_launch() {
  local curcontext=$curcontext
  local -a ours  # `commands` is zsh's own
  ours=(
@NAMES@
  )
  if (( CURRENT == 2 )); then
    _describe -t commands command ours
    return
  fi
  shift words
  (( CURRENT-- ))
  case $words[1] in
@COMMANDS@
  esac
}
if [[ $funcstack[1] == _trainer-launch ]]; then
  _trainer_launch "$@"
else
  (( $+functions[compdef] )) || { autoload -U compinit && compinit }
  compdef _trainer_launch trainer-launch
fi
"""
_FISH = r"""# fish completion of trainer-launch
function __trainer_launch_wrapped
    contains -- -- (commandline -opc)
end
function __trainer_launch_program
    set -l words (commandline -opc)
    set -e words[1..(contains -i -- -- $words)]
    complete -C (string join ' ' -- (string escape -- $words) (commandline -ct))
end
function __trainer_launch_in
    not __trainer_launch_wrapped; and __fish_seen_subcommand_from $argv
end
complete -c trainer-launch -e
complete -c trainer-launch -f
complete -c trainer-launch -n __trainer_launch_wrapped -F -a '(__trainer_launch_program)'
@COMMANDS@
"""


def _bash(commands: Sequence[Command]) -> str:
    flags = {name: flag for command in commands for flag in command.flags for name in flag.names}
    cases = [
        f'        {one.name}) options="{" ".join(_names(one))}" words="{" ".join(one.words)}" '
        f"wraps={int(one.is_wrapping)} ;;"
        for one in commands
    ]
    values = []
    for name, flag in sorted(flags.items()):
        if flag.takes is Takes.WORDS:
            told = f'mapfile -t COMPREPLY < <(compgen -W "{" ".join(flag.words)}" -- "$cur"); return'
        elif flag.takes is Takes.FILE:
            told = 'compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$cur"); return'
        elif flag.takes is Takes.VALUE:
            told = "return"
        else:
            continue
        values.append(f"        {name}) {told} ;;")
    valued = "|".join(sorted(name for name, flag in flags.items() if flag.takes is not Takes.NOTHING))
    names = " ".join(one.name for one in commands)
    return _filled(_BASH, NAMES=names, COMMANDS="\n".join(cases), VALUED=valued, VALUES="\n".join(values))


def _names(command: Command) -> list[str]:
    return [name for flag in command.flags for name in flag.names]


def _zsh(commands: Sequence[Command]) -> str:
    names = "\n".join(f"    {_quoted(f'{one.name}:{one.told}')}" for one in commands)
    return _filled(_ZSH, NAMES=names, COMMANDS="\n".join(map(_zsh_case, commands)))


def _zsh_case(command: Command) -> str:
    specs = []
    for flag in command.flags:
        told = "".join(f"\\{sign}" if sign in "[]:\\" else sign for sign in flag.told)
        others = f"({' '.join(flag.names)})" if len(flag.names) > 1 else ""
        action = {Takes.NOTHING: "", Takes.WORDS: f":value:({' '.join(flag.words)})", Takes.FILE: ":file:_files"}
        for name in flag.names:
            equals = "=" if name.startswith("--") and flag.takes is not Takes.NOTHING else ""
            specs.append(_quoted(f"{others}{name}{equals}[{told}]{action.get(flag.takes, ':value: ')}"))
    if command.words:
        specs.append(_quoted(f"1:word:({' '.join(command.words)})"))
    if command.is_wrapping:
        specs += [_quoted("(-)1:command:_trainer_launch_program"), _quoted("*::arguments:_normal")]
    return f"    {command.name}) _arguments -S " + " \\\n      ".join(specs) + " ;;"


def _fish(commands: Sequence[Command]) -> str:
    lines = []
    for one in commands:
        said = f"-a {one.name} -d {_quoted(one.told)}"
        lines.append(f"complete -c trainer-launch -n __fish_use_subcommand {said}")
        here = f"complete -c trainer-launch -n '__trainer_launch_in {one.name}'"
        if one.words:
            lines.append(f"{here} -a {_quoted(' '.join(one.words))}")
        if one.is_wrapping:
            lines.append(f"{here} -F -a '(__fish_complete_command)'")
        for flag in one.flags:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names)
            words = _quoted(" ".join(flag.words))
            takes = {Takes.WORDS: f" -x -a {words}", Takes.FILE: " -r -F", Takes.VALUE: " -x"}
            lines.append(f"{here} {names}{takes.get(flag.takes, '')} -d {_quoted(flag.told)}")
    return _filled(_FISH, COMMANDS="\n".join(lines))


def _quoted(text: str) -> str:
    """One word in single quotes, as all three shells read them."""
    return "'" + text.replace("'", "'\\''") + "'"


def _filled(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


SHELLS: Mapping[str, Callable[[Sequence[Command]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
