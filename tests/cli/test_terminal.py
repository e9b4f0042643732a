"""On a terminal, prefixes are coloured; in a pipe nothing is."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Iterator

import pytest

from tests.cli.launching import LAUNCHER, clean_env, launch

pytestmark = pytest.mark.process

WORDS = ("local", "--nodes", "2", "--engine", "plain", "--", "echo", "hello")


def on_a_terminal(words: tuple[str, ...], with_stderr: bool = False, /, **env: str) -> str:
    """Run a command line with a terminal as its output; what it shows."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        (*LAUNCHER, *words),
        env=clean_env({"TERM": "xterm"} | env),
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs if with_stderr else subprocess.DEVNULL,
    ) as process:
        os.close(theirs)
        shown = b"".join(_read(ours))
        process.wait(timeout=30)
    os.close(ours)
    return shown.decode()


def _read(fd: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(fd, 4096)
        except OSError:  # how Linux says that nobody has the other end any more
            return
        if not data:
            return
        yield data


def test_a_terminal_shows_each_pod_in_its_own_colour() -> None:
    assert sorted(on_a_terminal(WORDS).split("\r\n")) == [
        "",
        "\x1b[33m[1]\x1b[0m hello",
        "\x1b[36m[0]\x1b[0m hello",
    ]


def test_a_pipe_gets_plain_text() -> None:
    assert sorted(launch(*WORDS).stdout.splitlines()) == ["[0] hello", "[1] hello"]


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_color_gets_plain_text(env: dict[str, str]) -> None:
    words = ("run", "--engine", "plain", "--prefix", "--", "echo", "hello")
    assert "\x1b[" in on_a_terminal(words)
    assert "\x1b[" not in on_a_terminal(words, **env)
    assert "\x1b[" not in on_a_terminal(WORDS, **env)


def test_an_empty_no_color_says_nothing() -> None:
    assert "\x1b[" in on_a_terminal(("run", "--engine", "plain", "--prefix", "--", "echo", "x"), NO_COLOR="")
