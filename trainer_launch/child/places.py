"""Files of the fork-server and its workers in the run's folder: the journal of starts and ends, who each one is."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from trainer_launch import run_folder

# What the fork-server shall import, as JSON, in its environment alone.
SERVER_SETTINGS = "TRAINER_LAUNCH_FORKSERVER"
_MAX_PID = 2**22  # the kernel's own limit; any other would be no process, or all of them


def note_place(folder: str, *, pid: int, rank: int, local_rank: int, stacks: str | None) -> None:
    """Tell PID 1 which process trains as this local rank, and where its stacks go when it is asked for them."""
    values = {"pid": pid, "rank": rank, "local_rank": local_rank, "stacks": stacks}
    with contextlib.suppress(OSError):  # a full disk ends no job: PID 1 only knows less of a worker that hangs
        run_folder.replace(f"{folder}/{run_folder.WORKER}{local_rank}", values)


def journal_of(folder: str, agent: int) -> str:
    """Where the forked workers of this agent note their starts and ends."""
    return os.path.join(folder, f"journal.{agent}")


def forget_predecessor(folder: str) -> None:
    """Remove what an agent that was killed has left of its fork-server: a journal, an answer, a socket's folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.name.startswith("pymp-"):  # multiprocessing removes it only at an ordinary exit
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.startswith(("journal.", "warm.")):
                os.unlink(entry.path)


def forget_attempts(folder: str) -> None:
    """Remove the error files of earlier starts: torch keeps one of each failure, and nobody reads it again."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in list(entries):
            shutil.rmtree(entry.path, ignore_errors=True)


def add_to(journal: str, word: str, pid: int, value: int) -> None:
    """Append one line at once: `start` and the program's pid, `end` and its exit code, or `cleared` and a count."""
    run_folder.append(journal, f"{word} {pid} {value}")


def noted(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """The lines of a journal: word, pid, value. What a full disk has cut short, or is none of ours, is left out."""
    for line in data.splitlines():
        with contextlib.suppress(ValueError):
            word, pid, value = line.split()
            numbers = int(pid), int(value)
            if all(0 < number <= _MAX_PID for number in (numbers if word == b"start" else numbers[:1])):
                yield word, *numbers
