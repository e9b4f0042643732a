"""Text for Prometheus, and the small server that hands it out."""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.observability.exposition import parse
from tests.waiting import eventually
from trainer_launch.observability import metrics_server
from trainer_launch.observability import observer as prometheus
from trainer_launch.observability.event_log import Standing
from trainer_launch.observability.node_view import View
from trainer_launch.observability.observer import Observer
from trainer_launch.observability.progress import Progress

VIEW = View(
    version="1", pid=7, started_ticks=1, run_dir="/r", host="pod-1", node_rank=1, contract="c", engine="torchrun",
    phase="running", since_s=90.0, started_s=80.0, attempt=2, processes=(("agent", 8),), exits=(("agent", 137),),
    ended=23,
)  # fmt: skip


def reported(
    rank: int | None = 4, metrics: dict[str, float] | None = None, progress: float | None = 0.5
) -> Progress:
    return Progress(
        rank=rank,
        local_rank=0,
        pid=9,
        at_s=10.0,
        time_s=95.0,
        step=40,
        progress=progress,
        eta_s=60.0,
        metrics=metrics or {},
    )


def text(*reports: Progress, standing: Standing | None = None) -> str:
    return prometheus.metrics_text(VIEW, standing or Standing(), reports, now_s=100.0, at_s=12.5)


def test_what_is_known_has_a_metric() -> None:
    standing = Standing(generation=3, nodes=2, restarts=1, workers=8)
    found = parse(text(reported(metrics={"loss": 0.25}), standing=standing))
    plain = {name: values[frozenset()] for name, values in found.items() if frozenset() in values}
    assert plain == {
        "trainer_launch_start_time_seconds": 80.0,
        "trainer_launch_uptime_seconds": 20.0,
        "trainer_launch_attempts_total": 2.0,
        "trainer_launch_processes": 1.0,
        "trainer_launch_exits_total": 23.0,
        "trainer_launch_workers": 8.0,
        "trainer_launch_generation": 3.0,
        "trainer_launch_nodes": 2.0,
        "trainer_launch_restarts_total": 1.0,
    }
    rank = ("rank", "4")
    assert found["trainer_launch_step"] == {frozenset({rank}): 40.0}
    assert found["trainer_launch_progress_ratio"] == {frozenset({rank}): 0.5}
    assert found["trainer_launch_progress_age_seconds"] == {frozenset({rank}): 2.5}
    assert found["trainer_launch_eta_seconds"] == {frozenset({rank}): 60.0}
    assert found["trainer_launch_metric"] == {frozenset({rank, ("name", "loss")}): 0.25}
    assert found["trainer_launch_exit_code"] == {frozenset({("process", "agent")}): 137.0}
    assert [dict(key)["phase"] for key, value in found["trainer_launch_phase"].items() if value] == ["running"]


def test_ends_are_counted_also_beyond_those_that_are_shown(tmp_path: Path) -> None:
    observer = Observer(replace(VIEW, run_dir=str(tmp_path), ended=0))
    for _ in range(25):
        observer.tell("exited", process="a", exit_code=137, signal=9)
    assert (len(observer.view.exits), observer.view.ended) == (20, 25)


def test_what_is_not_known_has_none() -> None:
    found = parse(text(reported(progress=None)))
    assert not {
        "trainer_launch_generation",
        "trainer_launch_restarts_total",
        "trainer_launch_progress_ratio",
    } & set(found)


@given(st.dictionaries(st.text(min_size=1, max_size=64), st.floats(), max_size=20))
def test_any_name_and_any_number_survive(metrics: dict[str, float]) -> None:
    found = parse(text(reported(metrics=metrics))).get("trainer_launch_metric", {})
    back = {dict(key)["name"]: value for key, value in found.items()}
    assert back.keys() == metrics.keys()
    assert all(math.isclose(back[name], value) or math.isnan(value) for name, value in metrics.items())


# -- the server -------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    server = metrics_server.Server(0, lambda: "# HELP a b\n")
    found = server.start()
    assert found is not None
    yield found
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", found), timeout=5)


def ask(port: int, method: str = "GET", path: str = "/metrics") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    answer.content = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


@pytest.mark.parametrize(
    ("method", "path", "status", "content"),
    [
        ("GET", "/metrics", 200, b"# HELP a b\n"),
        ("GET", "/metrics?name[]=a", 200, b"# HELP a b\n"),
        ("HEAD", "/metrics", 200, b""),
        ("GET", "/", 404, b"see /metrics\n"),
        ("POST", "/metrics", 405, b"only GET\n"),
    ],
)
def test_the_server_answers_one_question(port: int, method: str, path: str, status: int, content: bytes) -> None:
    answer = ask(port, method, path)
    assert (answer.status, answer.content) == (status, content)  # type: ignore[attr-defined]
    assert answer.getheader("Connection") == "close"
    if status == 200:
        assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
        assert answer.getheader("Content-Length") == "11"


@pytest.mark.parametrize("said", [b"\x16\x03\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET /metrics SPDY/9\r\n\r\n"])
def test_what_is_not_http_is_told_so(port: int, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(said)
        assert sock.makefile("rb").readline() == b"HTTP/1.1 400 Bad Request\r\n"


def test_a_request_without_end_is_refused(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 20_000)
        assert sock.makefile("rb").readline().startswith(b"HTTP/1.1 431 ")


def test_silent_clients_keep_nobody_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "PATIENCE_S", 0.3)
    with contextlib.ExitStack() as stack:
        for _ in range(2 * metrics_server.AT_ONCE):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)).sendall(b"GET /met")

        def answers() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return ask(port).status == 200
            return False

        eventually(answers, "an answer for who does ask")


def test_a_port_that_is_taken_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("", 0)) as taken:
        server = metrics_server.Server(taken.getsockname()[1], str)
        assert server.start() is None
        server.close()
    assert "the job continues without metrics" in caplog.text
