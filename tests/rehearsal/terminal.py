"""A real terminal: tmux without a client, whose screen can be read."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.conftest import require
from tests.waiting import eventually


class Terminal:
    """One window of a tmux server of its own."""

    def __init__(self, folder: Path) -> None:
        require(shutil.which("tmux"), "needs tmux")
        self._socket = str(folder / "tmux")

    def start(self, argv: tuple[str, ...], env: Mapping[str, str]) -> None:
        """Run a program, then a shell's prompt."""
        command = "trap : INT; " + " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        command += f" {shlex.join(argv)}; echo ended with $?; trap - INT; exec cat"
        size = ("-x", "100", "-y", "30")
        clean = {name: value for name, value in os.environ.items() if name not in ("TMUX", "CI", "NO_COLOR")}
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, "sh", "-c", command, env=clean)

    def screen(self, *, history: bool = False) -> list[str]:
        """The lines that a person sees now, or all that scrolled by as well."""
        back = ("-S", "-") if history else ()
        return [line.rstrip() for line in self._tmux("capture-pane", "-p", *back).splitlines()]

    def type(self, *keys: str) -> None:
        """Press keys, such as C-c."""
        self._tmux("send-keys", *keys)

    def until(self, holds: Callable[[list[str]], bool], within_s: float = 60.0) -> list[str]:
        """The screen, once it is as it should be."""

        def shown() -> list[str] | None:
            lines = self.screen()
            return lines if holds(lines) else None

        return eventually(shown, lambda: "\n".join(self.screen()), within_s, pace_s=0.05) or []

    def close(self) -> None:
        """End the server and what runs in it."""
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True, timeout=30, check=False)

    def _tmux(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        argv = ["tmux", "-S", self._socket, *words]
        return subprocess.run(argv, env=env, text=True, capture_output=True, timeout=30, check=True).stdout
