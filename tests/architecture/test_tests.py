"""`make test` leaves out what takes long; a test that hangs fails alone; `make spec` prints all as sentences."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.package import ROOT

MARK = "pytest.mark.long"
FILES = sorted((ROOT / "tests").rglob("test_*.py"))
SUITE = """
import contextlib, os, subprocess, threading, time
import pytest
from trainer_launch.supervisor.system import System

@pytest.fixture
def child():
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()
        open("killed", "w").write(str(process.pid))

def test_it_sleeps(child):
    time.sleep(600)

def test_it_waits_for_a_process(child):
    child.wait()

def test_it_waits_for_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_it_reads():
    os.read(os.pipe()[0], 1)

def test_it_computes():
    while True:
        pass

def test_it_supervises():
    with contextlib.closing(System()) as system:
        while True:
            system.wait(None)

def test_the_next_one_passes():
    pass
"""


def test_the_specification_is_printed_by_folder() -> None:
    argv = (sys.executable, str(ROOT / "tests" / "spec.py"), "architecture")
    printed = subprocess.run(argv, text=True, capture_output=True, timeout=30, check=True).stdout
    assert printed.startswith("\n# architecture\n")
    assert "  - the specification is printed by folder\n" in printed


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def marks() -> Iterator[tuple[str, ast.Call]]:
    for path in FILES:
        if MARK in text_of(path):
            for node in ast.walk(ast.parse(text_of(path))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == MARK:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@cache
def is_long(path: Path) -> bool:
    """Whether all tests of a file are long."""
    assignments = [node for node in ast.parse(text_of(path)).body if isinstance(node, ast.Assign)]
    marked = [node for node in assignments if ast.unparse(node.targets[0]) == "pytestmark"]
    return any(MARK in ast.unparse(node) for node in marked)


def test_a_long_test_names_a_quick_one_of_its_kind_or_says_what_only_it_shows() -> None:
    for where, mark in marks():
        words = [ast.literal_eval(value) for value in mark.args]
        only = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
        assert len(words) + len(only) == 1, f"{where}: name a quick test, or say only=..."
        if only:
            assert only["only"].strip(), where
        else:
            assert (ROOT / words[0]).is_file(), f"{where}: there is no {words[0]}"
            assert not is_long(ROOT / words[0]), f"{where}: {words[0]} is long itself"


def test_every_mark_is_a_call() -> None:
    for path in FILES:
        if path != Path(__file__):
            assert text_of(path).count(MARK) == text_of(path).count(f"{MARK}("), path


def test_a_test_that_hangs_fails_alone_and_its_fixtures_end(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "conftest.py").write_text("from tests.timeouts import pytest_timeout_set_timer\n")
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n0",
        "--timeout",
        "0.5",
        str(tmp_path),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"6 failed, 1 passed", ended.stdout), ended.stdout
    assert ended.stdout.count("the test hung") >= 6
    assert "test_it_reads" in ended.stdout
    assert (tmp_path / "killed").exists()
