"""Bad input is one sentence on stderr and exit code 2 (126 and 127 as the shell has them); never a traceback."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.architecture.package import ROOT
from tests.cli.launching import LAUNCHER, clean_env, launch, launched
from tests.contracts.pods import V2_TORCH
from tests.refusals import refusal
from trainer_launch.commands import options


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run --grace soon -- true", "'soon' for --grace: expected a time such as 60"),
        ("run --graze 1 -- true", "--graze"),
        ("run --nproc 2 -- true", "unknown option --nproc; did you mean --nproc-per-node?"),
        ("local --faults oom -- true", "did you mean --fault? see trainer-launch rehearse --help"),
        ("run --nodes", "missing value for --nodes; see trainer-launch run --help"),
        ("rehearse -f job.yaml --render=", "missing value for --render; is a variable empty?"),
        ("explain --pod=", "missing value for --pod; is a variable empty?"),
        ("run --prefix=3 -- true", "--prefix takes no value, found '3'"),
        ("status --pid x", "invalid value 'x' for --pid: expected a whole number"),
        ("status train.py", "unexpected 'train.py'; see trainer-launch status --help"),
        ("help reherse", "unknown command 'reherse'; did you mean rehearse?"),
        ("run --engine tourch -- true", "expected one of auto, torch, torchrun"),
        ("walk", "trainer-launch run -- walk"),
        ("rehe -- true", "unknown command 'rehe'; did you mean rehearse?"),
        ("", "missing command; expected one of run, preflight, "),
    ],
)
def test_a_bad_command_line_is_refused_with_what_is_right(line: str, says: str) -> None:
    assert says in refusal(lambda: options.parse("trainer-launch", line.split()))


@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (["run"], {}, 2, "missing command; write it after --"),
        (["run", "--graze", "1", "--", "true"], {}, 2, "--graze"),
        (["local"], {}, 2, "missing command; write one after --, or add a manifest with -f"),
        (["run", "--", "true"], {"TRAINER_LAUNCH_GRACE": "soon"}, 2, "TRAINER_LAUNCH_GRACE"),
        (
            ["run", "--", "true"],
            {"TRAINER_LAUNCH_NODES": "two"},
            2,
            "TRAINER_LAUNCH_NODES is 'two'; expected N or MIN",
        ),
        (["run", "--nodes", "two", "--", "true"], {}, 2, "--nodes is 'two'; expected N or MIN:MAX"),
        (
            ["run", "--nodes", "9999999", "--", "true"],
            {},
            2,
            "expected N or MIN:MAX with 0 < MIN <= MAX <= 1000000",
        ),
        (
            ["run", "--", "torchrun", "--max-restarts=x", "t"],
            {"TRAINER_LAUNCH_MAX_RESTARTS": "1"},
            2,
            " --max-restarts",
        ),
        (["run", "--", "true"], {"TRAINER_LAUNCH_SIGNALS": "USR1"}, 2, "TRAINER_LAUNCH_SIGNALS has 'USR1'"),
        (["preflight", "--", "true"], {"TRAINER_LAUNCH_ONLY": "x"}, 2, "error: TRAINER_LAUNCH_ONLY names 'x'"),
        (["run", "--contract", "trainer-v2-troch", "--", "true"], {}, 2, "did you mean trainer-v2-torch"),
        (["run", "--", "true"], V2_TORCH | {"PET_NODE_RANK": "2"}, 2, "PET_NODE_RANK"),
        (["run", "--", "true"], {"TF_CONFIG": "{broken"}, 2, "TF_CONFIG"),
        (["run", "--", "true"], V2_TORCH | {"TF_CONFIG": "{}"}, 2, "--contract"),
        (["run", "--engine", "torchrun", "--", "x.py"], {}, 127, "x.py"),
        (["run", "--", "torchrun", "--nnodes=2:1", "x.py"], {}, 2, "--nnodes"),
        (["run", "--", "python train.py"], {}, 127, "make each argument a word of its own"),
        (["run", "--", "train.py --lr 1"], {}, 127, "make each argument a word of its own"),
        (["run", "--", "no-such-program"], {}, 127, "no-such-program"),
        (["run", "--", "/etc/passwd"], {}, 126, "/etc/passwd"),
        (["local", "--nodes", "3:1", "--", "true"], {}, 2, "--nodes"),
        (["local", "--nproc-per-node", "lots", "--", "true"], {}, 2, "--nproc-per-node"),
        (["explain", "--pod", "/no/such/file"], {}, 2, "/no/such/file"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], env: dict[str, str], code: int, said: str) -> None:
    ended = launched(*words, env=env, code=code)
    (line,) = ended.stderr.splitlines()
    assert line.startswith("trainer-launch: error: ")
    assert said in line
    assert ended.stdout == ""


TOKEN = "hf_" + "aB3" * 9


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (f"run -- {TOKEN}", 127),
        (f"run -- HF_TOKEN={TOKEN[3:]} train.py", 127),
        (f"run --grace {TOKEN} -- true", 2),
        (f"run --signals {TOKEN} -- true", 2),
        (f"run -- torchrun --standalone={TOKEN} train.py", 2),
        (f"run {TOKEN} -- true", 2),
    ],
)
def test_a_secret_in_the_wrong_place_is_not_repeated(line: str, code: int, tmp_path: Path) -> None:
    message = tmp_path / "termination-log"
    message.touch()
    ended = launched(*line.split(), env={"TRAINER_LAUNCH_TERMINATION_LOG": str(message)}, code=code)
    for text in (ended.stderr, message.read_text()):
        assert "[redacted]" in text
        assert TOKEN[3:] not in text


def test_a_python_without_torch_is_one_sentence_for_all_pods(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "genuine = util.find_spec\n"
        "util.find_spec = lambda name, package=None: None if name == 'torch' else genuine(name, package)\n"
    )
    for words in (["local", "--nodes", "3"], ["run", "--nproc-per-node", "2"]):
        ended = launched(*words, "--", "train.py", cwd=tmp_path, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}, code=127)
        (line,) = ended.stderr.splitlines()
        assert "torch is not installed for" in line
        assert "--engine plain" in line


def test_without_a_platform_a_python_program_hears_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    assert "--nproc-per-node N" in launch("run", "--", "train.py", cwd=tmp_path).stderr
    assert "--nproc-per-node N" not in launch("run", "--", "true", cwd=tmp_path).stderr


def test_how_to_mend_it_is_in_the_log_as_well() -> None:
    assert "what to do: install the command" in launch("run", "--", "sh", "-c", "exit 127").stderr


def test_a_value_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    env = {os.fsencode(k): os.fsencode(v) for k, v in clean_env(V2_TORCH).items()} | {b"PET_NNODES": b"\xff\xfe2"}
    ended = subprocess.run([*LAUNCHER, "explain"], env=env, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "PET_NNODES" in ended.stderr
    assert "UTF-8" in ended.stderr


@pytest.mark.parametrize(
    "env", [V2_TORCH | {"PET_NNODES": "many"}, {"TRAINER_LAUNCH_GRACE": "soon"}], ids=["pod", "setting"]
)
def test_a_refused_run_says_why_in_the_termination_message_too(tmp_path: Path, env: dict[str, str]) -> None:
    message = tmp_path / "termination-log"
    message.touch()
    launched("run", "--", "true", env={**env, "TRAINER_LAUNCH_TERMINATION_LOG": str(message)}, code=2)
    assert list(env)[-1 if "TRAINER_LAUNCH_GRACE" in env else 0] in message.read_text().splitlines()[0]


def test_an_unknown_setting_is_reported_and_the_run_goes_on() -> None:
    ended = launched("run", "--", "true", env={"TRAINER_LAUNCH_GRASE": "1"})
    assert "did you mean TRAINER_LAUNCH_GRACE?" in ended.stderr


def test_a_rehearsal_says_below_its_table_what_to_do() -> None:
    ended = launched("local", "--", "sh", "-c", "exit 127", code=127)
    assert "What to do (local-node-0-0): install the command that the program calls" in ended.stderr
