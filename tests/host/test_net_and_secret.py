"""Free ports within a range, and the job's secret."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trainer_launch.host.files import MAX_SECRET_BYTES, read_secret
from trainer_launch.host.network import free_port
from trainer_launch.model import PortRange
from trainer_launch.model.errors import NodeError, UsageError


def test_a_free_port_is_one_of_the_range_that_nobody_uses() -> None:
    with socket.create_server(("", 0)) as taken:
        low = taken.getsockname()[1]
        with pytest.raises(NodeError, match=f"--port-range {low}-{low} is taken"):
            free_port(PortRange(low, low))
        wide = PortRange(low, min(65535, low + 20))
        assert {free_port(wide) for _ in range(20)} <= set(range(low + 1, low + 21))


def test_a_secret_is_what_stands_between_the_blanks(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n  hunter2 \n")
    assert read_secret(str(path)) == b"hunter2"


def test_a_secret_that_is_none_is_one_sentence_that_names_the_file(tmp_path: Path) -> None:
    for content, word in ((b"", "empty"), (b" \n", "empty"), (b"x" * (MAX_SECRET_BYTES + 1), "larger than")):
        path = tmp_path / "secret"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=word) as refused:
            read_secret(str(path))
        assert str(path) in str(refused.value)
    os.mkfifo(tmp_path / "fifo")
    for name in ("absent", "fifo"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_secret(str(tmp_path / name))
