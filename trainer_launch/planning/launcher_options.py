"""The grammar of torchrun's and horovodrun's command lines: options as argparse takes them, then the program.

PID 1 imports neither of the two, nor argparse: a table of options is all there is to know of a launcher.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from trainer_launch.model.errors import UsageError

_SHORT = 2  # letters of `-p`, to which a value may be joined


class Option(Struct, frozen=True):
    """One option: its name with underscores, how it is written (the first way is ours), how many values."""

    name: str
    flags: tuple[str, ...]
    values: int = 1
    form: str = "text"  # of the value: text, number, decimal, flag, or a choice "a|b|c"
    env: bool = False  # whether torchrun reads PET_<NAME>

    @property
    def variable(self) -> str:
        """The environment variable that torchrun reads for it."""
        return f"PET_{self.name.upper()}"

    @property
    def flag(self) -> str:
        """The long option as people write it."""
        return self.flags[0]


class Split(Struct, frozen=True):
    """A command line taken apart: options in the order they were typed, then the program."""

    typed: tuple[tuple[str, tuple[str, ...]], ...]  # name and values
    program: tuple[str, ...]
    unknown: tuple[str, ...]  # --name=value words of a newer launcher, handed on as they are


def split(argv: Sequence[str], options: Iterable[Option], launcher: str) -> Split:
    """Take a command line apart, without the launcher's own name.

    Raises:
        UsageError: an option that the launcher does not know, or one without its values.
    """
    by_flag = {flag: option for option in options for flag in option.flags}
    typed: list[tuple[str, tuple[str, ...]]] = []
    unknown: list[str] = []
    rest = list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        option, joined = _recognise(word, by_flag, launcher)
        if option is None:
            unknown.append(word)
            continue
        if joined is not None and option.values != 1:
            raise UsageError(f"{word[:60]}: {launcher}'s {option.flag} takes {option.values or 'no'} values here")
        values = [joined] if joined is not None else rest[: option.values]
        if len(values) < option.values:
            raise UsageError(f"{word[:60]} needs a value; write it before the program")
        if joined is None:
            del rest[: option.values]
        typed.append((option.name, tuple(values)))
    return Split(tuple(typed), tuple(rest), tuple(unknown))


def _recognise(word: str, by_flag: Mapping[str, Option], launcher: str) -> tuple[Option | None, str | None]:
    """The option that a word names, and the value joined to it.

    None stands for an option that only a newer launcher may know: where its value ends is plain only with `=`.
    """
    flag, equals, value = word.partition("=")
    joined = value if equals else None
    if flag in by_flag:
        return by_flag[flag], joined
    is_long = word.startswith("--")
    short = by_flag.get(word[:_SHORT])
    if short is not None and short.values == 1 and not is_long:
        return short, word[_SHORT:]
    meant = {option.name: option for full, option in by_flag.items() if is_long and full.startswith(flag)}
    if len(meant) == 1:
        return next(iter(meant.values())), joined
    if meant:
        names = ", ".join(sorted(option.flag for option in meant.values()))
        raise UsageError(f"ambiguous option {flag[:60]}: {launcher} has {names}; write it in full")
    if is_long and equals:
        return None, None
    raise UsageError(
        f"unknown option of {launcher}: {word[:60]}; check the spelling, put options of the program after the "
        f"program, or write one of a newer {launcher} as --name=value"
    )
