"""Plain torchrun, in an environment in which this package is installed as `pyproject.toml` says."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import psutil

from tests.cli.launching import clean_env

ROOT = Path(__file__).parents[3]
DEADLINE_S = 120
_SECTION = re.compile(r'^\[project\.entry-points\."(.+)"\]\n((?:.+\n)+)', re.MULTILINE)
_LINE = re.compile(r'^(\S+) = "(\S+)"$', re.MULTILINE)


def installed(folder: Path) -> str:
    """A path that has this package's entry points, whether or not it was installed since they were written."""
    info = folder / "trainer_launch-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trainer-launch\nVersion: 0\n")
    lines = []
    for group, section in _SECTION.findall((ROOT / "pyproject.toml").read_text()):
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in _LINE.findall(section))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return f"{folder}:{ROOT}"


class Torchrun:
    """One torchrun and what it said."""

    def __init__(self, python_path: str, options: Sequence[str], train: str, env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            (sys.executable, "-m", "torch.distributed.run", *options, train),
            env=clean_env({"PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1", **env}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Wait for the end; exit code and all output."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, output

    def close(self) -> None:
        """Kill what a failed test left running."""
        if self.process.poll() is None:
            below = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self.process.communicate()


@contextlib.contextmanager
def torchruns(
    folder: Path, train: str, *each: Sequence[str], env: Mapping[str, str] = MappingProxyType({})
) -> Iterator[list[Torchrun]]:
    """Start one torchrun for each list of options; they are ended with the block at the latest."""
    with contextlib.ExitStack() as undo:
        path = installed(folder)
        started = []
        for options in each:
            started.append(Torchrun(path, options, train, env))
            undo.callback(started[-1].close)
        yield started
