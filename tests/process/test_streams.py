"""Output that goes to files, as torchrun's --redirects, --tee and filters ask for it; with real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.process.world import Launcher

pytestmark = pytest.mark.process

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


def test_our_own_prefix_comes_first(tmp_path: Path) -> None:
    launcher = ran(tmp_path, {1: {"file": str(tmp_path / "file"), "prefix": "[default0]:"}}, label="0:4")
    assert launcher.output().startswith(b"[0:4] [default0]:out\n")
    assert "[0:4] apple\n" in launcher.log()


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


def test_a_generation_of_the_same_attempt_is_appended(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for _ in range(2):
        ran(tmp_path, {1: {"file": str(file), "is_shown": False}}, program="echo out")
    assert file.read_bytes() == b"out\nout\n"
