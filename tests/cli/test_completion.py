"""Shell completion, in the shells themselves: commands, options, what they take, files, the wrapped command."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.conftest import require
from tests.rehearsal.terminal import Terminal
from trainer_launch.commands import options
from trainer_launch.model.settings import Settings

pytestmark = pytest.mark.process
PROMPT = "ready>"
STARTS = {
    "bash": ("bash", "--norc", "--noprofile", "-i"),
    "zsh": ("zsh", "-f", "-i"),
}
LOADS = {"bash": "source ./script", "zsh": "autoload -U compinit; compinit -u -D; source ./script"}
# What is typed before TAB, and what stands there afterwards: each has one way on.
TYPED = [
    ("trainer-launch expl", "trainer-launch explain"),
    ("trainer-launch run --eng", "trainer-launch run --engine"),
    ("trainer-launch run --engine torchr", "trainer-launch run --engine torchrun"),
    ("trainer-launch run --engine=torchr", "trainer-launch run --engine=torchrun"),
    ("trainer-launch preflight --level contain", "trainer-launch preflight --level container"),
    ("trainer-launch run --contract mpijob-v2", "trainer-launch run --contract mpijob-v2beta1"),
    ("trainer-launch rehearse -f only-jo", "trainer-launch rehearse -f only-job.yaml"),
    ("trainer-launch rehearse --log-level deb", "trainer-launch rehearse --log-level debug"),
    ("trainer-launch run --grace 9 -- only-tr", "trainer-launch run --grace 9 -- only-train.py"),
    ("trainer-launch run only-tr", "trainer-launch run only-train.py"),
    ("trainer-launch run -- cat only-tr", "trainer-launch run -- cat only-train.py"),
    (
        "trainer-launch run -- ./only-train.py --engine only-jo",
        "trainer-launch run -- ./only-train.py --engine only-job.yaml",
    ),
    ("trainer-launch completion zs", "trainer-launch completion zsh"),
    ("trainer-launch vers", "trainer-launch version"),
    ("trainer-launch help pref", "trainer-launch help preflight"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require(importlib.util.find_spec("argcomplete"), "needs argcomplete")
    folder = tmp_path_factory.mktemp("completion")
    (folder / "bin").mkdir()
    program = folder / "bin" / "trainer-launch"  # the shell asks it at each TAB
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trainer_launch "$@"\n')
    program.chmod(0o755)
    for name in ("only-job.yaml", "only-train.py"):
        (folder / name).touch()
    return folder


def asks(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def shown(line: str, screen: list[str]) -> bool:
    return any(f"{PROMPT}{line}" in one for one in screen)


@pytest.mark.parametrize("shell", STARTS)
def test_tab_completes_what_was_begun(shell: str, folder: Path) -> None:
    require(shutil.which(shell), f"needs {shell}")
    (folder / "script").write_text(launch("completion", shell).stdout)
    (folder / "go").write_text(f"cd '{folder}'; exec {' '.join(STARTS[shell])}\n")
    terminal = Terminal(folder, columns=150, rows=60)
    try:
        terminal.start(("sh", str(folder / "go")), {**asks(folder), "PS1": PROMPT, "TERM": "screen"})
        terminal.until(lambda lines: PROMPT in lines[-1] or any(PROMPT in line for line in lines))
        terminal.type(LOADS[shell], "Enter")
        for typed, there in TYPED:
            terminal.type("clear", "Enter")
            terminal.type(typed, "Tab")
            terminal.until(partial(shown, there))
            terminal.type("C-u")
    finally:
        terminal.close()


@pytest.mark.long("tests/cli/test_completion.py")
def test_fish_offers_the_same(folder: Path) -> None:
    fish = shutil.which("fish")
    require(fish, "needs fish")
    assert fish
    (folder / "script.fish").write_text(launch("completion", "fish").stdout)
    lines = [(typed, there.rpartition(" ")[2]) for typed, there in TYPED]
    asked = "; ".join(f"echo '== {typed}'; complete -C '{typed}'" for typed, _ in lines)
    env = {**os.environ, **asks(folder)}
    argv = (fish, "--no-config", "-c", f"source script.fish; {asked}")
    told = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert told.stderr == ""
    answers = {part.partition("\n")[0]: part for part in told.stdout.split("== ")[1:]}
    for typed, word in lines:
        assert word in [line.partition("\t")[0] for line in answers[typed].splitlines()[1:]], typed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_offered(folder: Path, shell: str) -> None:
    commands = answer(folder, shell, "trainer-launch ")
    for name in options.COMMANDS:
        assert name in commands
    offered = "".join(answer(folder, shell, f"trainer-launch {name} --") for name in ("run", "preflight", "sshd"))
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_former_name_of_a_command_completes_as_its_new_name(folder: Path, shell: str) -> None:
    assert "--fault" in answer(folder, shell, "trainer-launch rehearse --f")
    assert "--fault" in answer(folder, shell, "trainer-launch local --f")
    assert "local" not in answer(folder, shell, "trainer-launch lo")


def answer(folder: Path, shell: str, line: str) -> str:
    """What the program says to the shell that asks how a line may go on."""
    env = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": shell, "COMP_LINE": line, "COMP_POINT": str(len(line))}
    place = folder / "answer"
    ended = launch(env={**env, "_ARGCOMPLETE_STDOUT_FILENAME": str(place)})
    assert ended.returncode == 0, ended.stderr
    return place.read_text()


def test_without_argcomplete_one_sentence_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "argcomplete.py").write_text("raise ImportError")
    ended = launch("completion", "bash", env={"PYTHONPATH": str(tmp_path)})
    assert ended.returncode == 2
    assert ended.stderr == (
        "trainer-launch: error: completion needs argcomplete: pip install 'trainer-launch[local]'\n"
    )


@pytest.mark.parametrize(
    ("words", "own", "said"),
    [
        (
            [],
            "/bin/zsh",
            "missing shell; expected bash, zsh, fish; for zsh: source <(trainer-launch completion zsh)",
        ),
        ([], "/bin/ksh", "missing shell; expected bash, zsh, fish; see trainer-launch completion --help"),
        (["ksh"], "/bin/bash", "unknown shell 'ksh'; expected one of bash, zsh, fish"),
    ],
)
def test_a_missing_or_unknown_shell_is_one_sentence_with_what_to_type(
    words: list[str], own: str, said: str
) -> None:
    ended = launch("completion", *words, env={"SHELL": own})
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert said in line


def test_every_setting_has_a_heading_in_help() -> None:
    headed = [name for group in options.GROUPS.values() for name in group]
    assert sorted(headed) == sorted(Settings.model_fields)
