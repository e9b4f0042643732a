"""What the agent and its workers know of each other: the files in the run's private folder, and their names."""

from __future__ import annotations

import json
import os

SERVER_SETTINGS = (
    "TRAINER_LAUNCH_FORKSERVER"  # what the fork-server shall import, as JSON, in its environment alone
)


def note_place(folder: str, *, pid: int, rank: int, local_rank: int, stacks: str | None) -> None:
    """Tell PID 1 which process trains as this local rank, and where its stacks go when it is asked for them."""
    path = os.path.join(folder, f"worker.{local_rank}")
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump({"pid": pid, "rank": rank, "local_rank": local_rank, "stacks": stacks}, file)
    os.replace(f"{path}.new", path)


def journal_of(folder: str, agent: int) -> str:
    """Where the forked workers of this agent note their starts and ends."""
    return os.path.join(folder, f"journal.{agent}")


def add_to(journal: str, word: str, pid: int, value: int) -> None:
    """Append one line at once: `start` and the program's pid, `end` and its exit code, or `cleared` and a count."""
    fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, f"{word} {pid} {value}\n".encode())
    finally:
        os.close(fd)
