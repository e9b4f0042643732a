"""torchrun's options about the workers' output: --log-dir, --redirects, --tee and the filters. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Template

from trainer_launch.model import Destination
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.torchrun_options import OPTIONS

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
