"""Horovod itself, as built here, and our table of its options beside its own parser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.frameworks import building
from trainer_launch.planning.mpi_options import OPTIONS

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(building.BUILD_S),
    pytest.mark.long(only="horovodrun itself, built here: its options, its ends"),
]

LIST_OPTIONS = """
import argparse, json, sys
from horovod.runner import launch

def listed(parser):
    found = {}
    for action in parser._actions:
        if action.option_strings:
            takes = 1 if action.nargs is None else int(action.nargs)
            found.update(dict.fromkeys(action.option_strings, takes))
    print(json.dumps(found))
    sys.exit(0)

argparse.ArgumentParser.parse_args = listed
launch.parse_args()
"""


def test_without_any_hosts_it_runs_here_and_the_first_failing_ranks_code_is_the_pods(tmp_path: Path) -> None:
    building.command(tmp_path / "bin")
    (tmp_path / "train.py").write_text("import os, sys\nsys.exit(42 if os.environ['HOROVOD_RANK'] == '1' else 0)\n")
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    ended = subprocess.run(
        [*LAUNCHER, "run", "--max-restarts", "0", "--", "horovodrun", "-np", "2", building.python(), "train.py"],
        env=clean_env({**building.env(), "PATH": path}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == 42, ended.stdout + ended.stderr
    assert "rank 1 ended with exit code 42" in ended.stderr


def test_our_table_has_horovods_own_options() -> None:
    told = subprocess.run(
        [sys.executable, "-c", LIST_OPTIONS], env=clean_env(building.env()), capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    theirs = json.loads(told.stdout)
    ours = {flag: option.values for option in OPTIONS for flag in option.flags}
    assert ours == {flag: takes for flag, takes in theirs.items() if flag not in ("-h", "--help")}
