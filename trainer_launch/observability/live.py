"""A picture that rich draws on a terminal while a command runs: a table that is redrawn, or a list of steps.

What is written to stdout and stderr meanwhile appears above it: both lead into a pipe. One thread reads it, prints
and draws: rich's own for drawing would tear lines that another prints. No launcher in a pod imports rich.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_STDOUT, _STDERR = 1, 2
_PER_S, _PATIENCE_S = 5, 1.0  # drawings; with a terminal that was stopped (Ctrl-S)
_PAUSE_S = 0.02  # what is written within it is printed together
RUNNING = "running"  # the state of a step with a spinner
_STYLES = {
    **dict.fromkeys(("Running", "Succeeded", "Completed", "PASS"), "green"),
    **dict.fromkeys(("Pending", "Init", "Restarting", "Terminating", "WARN", "UNKNOWN"), "yellow"),
    **dict.fromkeys(("Failed", "Terminated", "FAIL"), "red"),
}


def is_wanted() -> bool:
    """Whether somebody looks at a terminal, and rich is installed to draw on it."""
    is_dumb = os.environ.get("CI") or os.environ.get("TERM", "dumb") == "dumb"
    return not is_dumb and all(map(os.isatty, (_STDOUT, _STDERR))) and find_spec("rich") is not None


def table(rows: Callable[[int], tuple[str, Sequence[Sequence[str]]]]) -> contextlib.AbstractContextManager[None]:
    """A table until the block ends; another thread asks `rows` for a title, a heading and at most so many rows."""

    def picture(most: int) -> RenderableType:
        from rich.console import Group
        from rich.table import Column, Table
        from rich.text import Text

        title, (heading, *body) = rows(most)
        columns = (Column(word, no_wrap=True, overflow="ellipsis") for word in heading)
        made = Table(*columns, box=None, pad_edge=False)
        for row in body:
            made.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
        return Group(Text(title, no_wrap=True, overflow="ellipsis"), made)

    return _drawn(picture)


def progress(steps: Callable[[], Sequence[tuple[str, str, str]]]) -> contextlib.AbstractContextManager[None]:
    """A list until the block ends; another thread asks `steps` for name, state (such as RUNNING) and remark."""
    spinners: dict[str, RenderableType] = {}

    def picture(_: int) -> RenderableType:
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        made = Table.grid(padding=(0, 2))
        for name, state, remark in steps():
            spinner = spinners.setdefault(name, Spinner("dots")) if state == RUNNING else ""
            made.add_row(Text(name), spinner or Text(state, _STYLES.get(state, "")), Text(remark))
        return made

    return _drawn(picture)


@contextlib.contextmanager
def _drawn(picture: Callable[[int], RenderableType]) -> Iterator[None]:
    from rich.console import Console
    from rich.live import Live

    with os.fdopen(os.dup(_STDERR), "w", errors="replace") as terminal:
        console = Console(file=terminal, force_terminal=True, markup=False, emoji=False, highlight=False)

        def frame() -> RenderableType:
            with contextlib.suppress(OSError):  # the terminal is gone
                console.size = os.get_terminal_size(terminal.fileno())
            return picture(max(3, console.height // 3 - 2))

        live = Live(
            get_renderable=frame, console=console, transient=True, auto_refresh=False,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        with live, _above(live):
            yield


@contextlib.contextmanager
def _above(live: Live) -> Iterator[None]:
    """Send what the process writes through the console of the picture."""
    own, (read_end, write_end) = {fd: os.dup(fd) for fd in (_STDOUT, _STDERR)}, os.pipe2(os.O_CLOEXEC)
    relay = threading.Thread(target=_relay, args=(read_end, live), name="live", daemon=True)
    for fd in own:
        os.dup2(write_end, fd)
    os.close(write_end)
    relay.start()
    try:
        yield
    finally:
        sys.stdout.flush()
        for fd, was in own.items():
            os.dup2(was, fd)
            os.close(was)
        relay.join(_PATIENCE_S)


def _relay(read_end: int, live: Live) -> None:
    """Draw, and print whole lines, many at once where many come. Goes on reading when the terminal is gone."""
    rest, draws_at_s = b"", 0.0
    written = select.poll()  # takes any descriptor, unlike select
    with os.fdopen(read_end, "rb", buffering=0) as pipe:
        written.register(pipe, select.POLLIN)
        while True:
            now_s = time.monotonic()
            if now_s >= draws_at_s:
                draws_at_s = now_s + 1 / _PER_S
                with contextlib.suppress(Exception):  # what it shows changes meanwhile
                    live.refresh()
            if not written.poll(max(0.0, draws_at_s - time.monotonic()) * 1000):
                continue
            data = pipe.read(1 << 16)
            lines, newline, rest = (rest + (data or b"\n" * bool(rest))).rpartition(b"\n")
            if newline:
                time.sleep(_PAUSE_S)
                with contextlib.suppress(OSError):
                    live.console.out(lines.decode(errors="replace"))
            if not data:
                return
