"""Labelled output and output that goes to files, with real pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.world import (
    DEADLINE_S,
    DRIVER,
    PYTHON,
    ROOT,
    Launcher,
    worker,
)
from tests.waiting import eventually

pytestmark = pytest.mark.process


MANY_WRITERS = """
import json, os, sys
from trainer_launch.model import Process
from trainer_launch.supervisor.system import System

system, argvs = System(), json.loads(sys.argv[1])
env = dict(os.environ)
pids = {system.spawn(Process(name=mark, label=mark, argv=argv, env=env)) for mark, argv in argvs.items()}
while pids:
    pids -= {pid for pid, _ in system.wait(None).ended}
system.drain(10.0)
system.close()
"""


def test_lines_of_many_writers_are_never_torn():
    marks = "abcdefgh"
    argvs = json.dumps({mark: worker(f"lines:3000:{mark}") for mark in marks})
    words = (sys.executable, "-c", MANY_WRITERS, argvs)
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert len(lines) == 3000 * len(marks)
    seen = dict.fromkeys(marks, 0)
    for line in lines:
        found = re.fullmatch(r"\[(.)\] (.):(\d+):(.)\4{19}", line)
        assert found, line
        label, mark, number, _ = found.groups()
        assert label == mark
        assert int(number) == seen[mark]
        seen[mark] += 1


def test_without_a_label_output_is_untouched(tmp_path):
    with Launcher(tmp_path, ["sh", "-c", "printf 'a\\rb'; readlink /proc/self/fd/1"]) as launcher:
        assert launcher.wait() == 0
        assert launcher.output().startswith(b"a\rb" + str(tmp_path).encode())


def test_stderr_without_a_label_is_passed_on_byte_for_byte_as_it_comes(tmp_path):
    text = "bytes(range(256)) + b'10%\\r20%\\r\\n' + b'x' * 300_000 + b'\\n\\n?'"
    program = f"import sys;e=open(2,'wb',0);e.write({text});sys.stdin.read();e.write(b' end')"
    told, err = eval(text), tmp_path / "err"
    with err.open("wb") as file:
        launcher = subprocess.Popen(
            [sys.executable, str(DRIVER), json.dumps({"processes": [{"argv": [*PYTHON, "-c", program]}]})],
            env={**os.environ, "PYTHONPATH": str(ROOT), "LEVEL": "CRITICAL"},
            stdin=subprocess.PIPE,
            stderr=file,
        )
    with launcher:
        eventually(lambda: err.read_bytes() == told, "an unfinished line is shown at once")
        assert launcher.stdin
        launcher.stdin.close()
        assert launcher.wait(DEADLINE_S) == 0
    assert err.read_bytes() == told + b" end"


def test_what_goes_to_one_file_keeps_its_order(tmp_path):
    program = "import os\nfor n in range(2000): os.write(1 + n % 2, b'%d\\n' % n)"
    merged = ("sh", "-c", 'exec "$@" 2>&1', "sh")
    with Launcher(tmp_path, {"argv": [*PYTHON, "-c", program]}, wrap=merged) as launcher:
        assert launcher.wait() == 0
        numbers = [int(line) for line in launcher.output().split(b"\n") if line.isdigit()]
    assert numbers == list(range(2000))


def test_a_program_sees_the_terminal_that_we_have(tmp_path):
    ours, theirs = pty.openpty()
    program = "import os;print([os.isatty(fd) for fd in (0, 1, 2)], file=open(os.environ['SEEN'], 'w'))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SEEN": str(tmp_path / "seen")}
    spec = json.dumps({"processes": [{"argv": [*PYTHON, "-c", program]}]})
    argv = [sys.executable, str(DRIVER), spec]
    with subprocess.Popen(argv, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as launcher:
        assert launcher.wait(DEADLINE_S) == 0
    os.close(ours)
    os.close(theirs)
    assert (tmp_path / "seen").read_text() == "[True, True, True]\n"


@pytest.mark.parametrize("lines", [1, 5000])
def test_the_termination_message_holds_the_last_lines_of_a_program_without_a_label(tmp_path, lines):
    words = tmp_path / "words"
    words.touch()
    program = f"import sys;[print('line', n, file=sys.stderr) for n in range({lines})];sys.exit('ValueError: bad')"
    with Launcher(tmp_path, [*PYTHON, "-c", program], last_words=str(words)) as launcher:
        assert launcher.wait() == 1
    first, *rest = words.read_text().splitlines()
    assert first.endswith("| main ended with exit code 1: ValueError: bad")
    assert rest[-2:] == [f"line {lines - 1}", "ValueError: bad"]


def test_the_reader_of_our_output_goes_away(tmp_path):
    with Launcher(
        tmp_path, {"argv": worker("lines:20000:x", "note:done"), "label": "w"}, stdout=subprocess.PIPE
    ) as it:
        it.popen.stdout.close()
        assert it.wait() == 0
        assert it.notes() == ["done"]
        assert it.log().count("cannot write to stdout") == 1


PROGRAM = "echo out; echo apple >&2; printf 'an apple\\r\\nno end'; echo err >&2"


def ran(tmp_path: Path, streams: dict[int, dict[str, Any]], program: str = PROGRAM, **process: Any) -> Any:
    with Launcher(tmp_path, {"argv": ["sh", "-c", program], "streams": streams, **process}) as launcher:
        assert launcher.wait() == 0, launcher.log()
    return launcher


def test_a_stream_that_is_redirected_is_only_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "stdout.log"
    launcher = ran(tmp_path, {1: {"file": str(file), "is_shown": False}})
    assert file.read_bytes() == b"out\nan apple\r\nno end"
    assert launcher.output() == b""
    lines = launcher.log().splitlines()  # the launcher's own may stand between them
    assert [line for line in lines if not line.startswith("[launcher] ")] == ["apple", "err"]


def test_a_stream_that_is_teed_is_in_both_with_a_prefix_on_the_console(tmp_path: Path) -> None:
    file = tmp_path / "stdout.log"
    launcher = ran(tmp_path, {1: {"file": str(file), "prefix": "[default0]:"}})
    assert file.read_bytes() == b"out\nan apple\r\nno end"
    assert launcher.output() == b"[default0]:out\n[default0]:an apple\n[default0]:no end\n"


def test_a_stream_that_is_not_shown_is_remembered_for_the_termination_message(tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.touch()
    process = {"argv": ["sh", "-c", "echo ValueError: bad >&2; exit 3"], "streams": {2: {"is_shown": False}}}
    with Launcher(tmp_path, process, last_words=str(words)) as launcher:
        assert launcher.wait() == 3
        assert "ValueError: bad" in words.read_text()
        assert "\nValueError: bad\n" not in launcher.log()


def test_a_full_disk_ends_the_file_not_the_job(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    process = {"argv": ["sh", "-c", "for i in 1 2 3; do echo $i; done"], "streams": {1: {"file": str(file)}}}
    no_larger = ("sh", "-c", 'ulimit -f 2048; exec "$@"', "sh")  # blocks of 512 bytes
    with Launcher(tmp_path, process, wrap=no_larger) as launcher:
        assert launcher.wait() == 0, launcher.log()
    assert launcher.output() == b"1\n2\n3\n"
    assert launcher.log().count(f"cannot write to {file}: File too large; the job continues") == 1
