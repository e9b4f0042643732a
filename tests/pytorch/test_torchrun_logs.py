"""Where torchrun's options send the workers' output: every destination that the installed torch would choose."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_launch.model import Destination, Workers
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.planning.torchrun_options import destinations
from trainer_launch.pytorch.worker_processes import LogFolders

REDIRECTS = ["0", "1", "2", "3", "0:3,1:2", "1:1"]
TEES = ["0", "1", "3", "0:2,2:3"]
FILTERS = ["", "1", "0,2"]

_ASK_TORCH = """
import itertools, json, os, sys
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
said = []
for redirects, tee, ranks, log_dir in json.load(sys.stdin):
    chosen = set(map(int, ranks.split(","))) if ranks else None
    specs = DefaultLogsSpecs(log_dir, Std.from_str(redirects), Std.from_str(tee), chosen)
    to = specs.reify({rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"} for rank in range(3)})
    base = os.path.dirname(to.filtered_stdout)
    said.append([base, to.stdouts, to.stderrs, to.tee_stdouts, to.tee_stderrs])
print(json.dumps(said))
"""


@pytest.mark.torch
def test_every_combination_of_options_goes_where_torch_sends_it(tmp_path: Path) -> None:
    asked = [(*words, str(tmp_path)) for words in itertools.product(REDIRECTS, TEES, FILTERS)]
    asked += [("3", "1", "", "/dev/null"), ("0", "0", "1", "/dev/null")]
    answer = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for (redirects, tee, ranks, log_dir), (base, *theirs) in zip(asked, json.loads(answer.stdout), strict=True):
        options = {"redirects": redirects, "tee": tee, "local_ranks_filter": ranks, "log_dir": log_dir}
        folder = "" if log_dir == "/dev/null" else base
        found = destinations(options, {}, "default", {0: 4, 1: 5, 2: 6}, folder)
        for local_rank, stream in itertools.product(range(3), (1, 2)):
            file = theirs[stream - 1][str(local_rank)]
            tees = theirs[stream + 1].get(str(local_rank)) not in (None, "/dev/null")
            ours = found.get(local_rank, {}).get(stream, Destination())
            assert (ours.file or "") == ("" if file == "/dev/null" else file), options
            assert ours.is_shown == (tees or file == ""), options
            assert bool(ours.prefix) == tees, options


def test_the_template_of_torchs_prefix_is_used() -> None:
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${role_name}/${rank}/${local_rank}/$other]"}
    found = destinations({"tee": "1"}, env, "trainer", {0: 4}, "/logs")
    assert found[0][1].prefix == "[trainer/4/0/$other]"


def workers(tmp_path: Path, **logs: str) -> Workers:
    return Workers(count=2, argv=("true",), env={}, errors=str(tmp_path / "errors"), logs=logs)


def test_a_membership_change_keeps_the_logs_but_no_error_file(tmp_path: Path) -> None:
    folders = LogFolders(workers(tmp_path, log_dir=str(tmp_path)), "my-job")
    folders.begin(1)
    attempt = Path(folders.folder)
    for name in ("stdout.log", "error.json"):
        (attempt / "0" / name).write_text("x")
    folders.begin(1)
    assert folders.folder == str(attempt)
    assert [path.name for path in (attempt / "0").iterdir()] == ["stdout.log"]


@pytest.mark.parametrize("job", ["team/job", "x" * 253])
def test_the_jobs_id_may_be_no_name_of_a_folder(tmp_path: Path, job: str) -> None:
    folders = LogFolders(workers(tmp_path, log_dir=str(tmp_path)), job)
    folders.begin(0)
    assert Path(folders.folder).parents[1] == tmp_path


def test_no_folder_is_made_where_torchrun_makes_none(tmp_path: Path) -> None:
    folders = LogFolders(workers(tmp_path, log_dir="/dev/null"), "my-job")
    folders.begin(0)
    assert folders.folder == ""
    assert list(tmp_path.iterdir()) == []


def test_a_log_dir_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--log-dir .*/file: cannot create .*/file: File exists; set --log-dir"):
        LogFolders(workers(tmp_path, log_dir=str(tmp_path / "file")), "my-job").begin(0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_or_fails_is_a_failure_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folders = LogFolders(workers(tmp_path, log_dir=str(tmp_path)), "my-job")
    folders.begin(0)

    def full(path: str, **_: object) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "makedirs", full)
    with pytest.raises(NodeError, match=rf"--log-dir {tmp_path}: .*/attempt_1/0: {os.strerror(number)}; free"):
        folders.begin(1)
