"""Bad input is one sentence on stderr and exit code 2 (126 and 127 as the shell has them); never a traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.launching import launch

V2 = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "1",
}


@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (["run"], {}, 2, "no command"),
        (["run", "--grace", "soon", "--", "true"], {}, 2, "--grace is 'soon'"),
        (["run", "--graze", "1", "--", "true"], {}, 2, "--graze"),
        (["walk"], {}, 2, "walk"),
        ([], {}, 2, "COMMAND"),
        (["run", "--", "true"], {"TRAINER_LAUNCH_GRACE": "soon"}, 2, "TRAINER_LAUNCH_GRACE"),
        (["run", "--contract", "trainer-v2-troch", "--", "true"], {}, 2, "did you mean trainer-v2-torch"),
        (["run", "--", "true"], V2 | {"PET_NNODES": "many"}, 2, "PET_NNODES"),
        (["run", "--", "true"], V2 | {"PET_NODE_RANK": "2"}, 2, "PET_NODE_RANK"),
        (["run", "--", "true"], V2 | {"PET_MASTER_PORT": "99999"}, 2, "PET_MASTER_PORT"),
        (["run", "--", "true"], {"TF_CONFIG": "{broken"}, 2, "TF_CONFIG"),
        (["run", "--", "true"], V2 | {"TF_CONFIG": "{}"}, 2, "--contract"),
        (["run", "--engine", "torchrun", "--", "x.py"], {}, 127, "x.py"),
        (["run", "--", "torchrun", "--nnodes=2:1", "x.py"], {}, 2, "--nnodes"),
        (["run", "--", "no-such-program"], {}, 127, "no-such-program"),
        (["run", "--", "/etc/passwd"], {}, 126, "/etc/passwd"),
        (["local", "--nodes", "0", "--", "true"], {}, 2, "--nodes"),
        (["local", "--nodes", "1:3", "--", "true"], {}, 2, "--nodes"),
        (["local", "--nproc-per-node", "lots", "--", "true"], {}, 2, "--nproc-per-node"),
        (["explain", "--pod", "/no/such/file"], {}, 2, "/no/such/file"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], env: dict[str, str], code: int, said: str) -> None:
    ended = launch(*words, env=env)
    assert ended.returncode == code, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("trainer-launch: error: ")
    assert said in line
    assert ended.stdout == ""


def test_a_value_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    import os
    import subprocess

    from tests.cli.launching import LAUNCHER, clean_env

    env = {os.fsencode(k): os.fsencode(v) for k, v in clean_env(V2).items()} | {b"PET_NNODES": b"\xff\xfe2"}
    ended = subprocess.run([*LAUNCHER, "explain"], env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "PET_NNODES" in ended.stderr
    assert "UTF-8" in ended.stderr


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"env": 1}', '{"env": {"A": 1}}', '{"env": {}, "more": 1}', "\x00", "[" * 100_000]
)
def test_a_snapshot_of_another_shape_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pod.json"
    path.write_text(text)
    ended = launch("explain", "--pod", str(path))
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


def test_a_ten_megabyte_value_is_one_short_sentence(tmp_path: Path) -> None:
    path = tmp_path / "pod.json"
    path.write_text(json.dumps({"env": V2 | {"PET_NNODES": "9" * 10_000_000}, "files": {}, "hostname": ""}))
    ended = launch("explain", "--pod", str(path))
    assert ended.returncode == 2
    assert len(ended.stderr) < 600


def test_a_refused_run_says_why_in_the_termination_message_too(tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    words.touch()
    ended = launch("run", "--termination-log", str(words), "--", "true", env=V2 | {"PET_NNODES": "many"})
    assert ended.returncode == 2
    assert "PET_NNODES" in words.read_text().splitlines()[0]


def test_a_bad_setting_says_so_in_the_termination_message_too(tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    env = {"TRAINER_LAUNCH_GRACE": "soon", "TRAINER_LAUNCH_TERMINATION_LOG": str(words)}
    assert launch("run", "--", "true", env=env).returncode == 2
    assert "TRAINER_LAUNCH_GRACE" in words.read_text()


def test_an_unknown_setting_is_reported_and_the_run_goes_on() -> None:
    ended = launch("run", "--", "true", env={"TRAINER_LAUNCH_GRASE": "1"})
    assert ended.returncode == 0
    assert "did you mean TRAINER_LAUNCH_GRACE?" in ended.stderr
