"""Text for Prometheus, and the small server that hands it out."""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.observability.exposition import parse
from trainer_launch.observability import metrics
from trainer_launch.observability.event_log import Standing
from trainer_launch.observability.node_view import View
from trainer_launch.observability.progress import Progress
from trainer_launch.supervisor.run_observer import TimeKind

VIEW = View(
    version="1", pid=7, started_ticks=1, run_dir="/r", host="pod-1", node_rank=1, contract="c", engine="torchrun",
    phase="running", since_s=90.0, started_s=80.0, attempt=2, processes=(("agent", 8),), exits=(("agent", 137),),
)  # fmt: skip


def reported(metrics: dict[str, float], progress: float | None = 0.5) -> Progress:
    return Progress(
        rank=4,
        local_rank=0,
        pid=9,
        at_s=10.0,
        time_s=95.0,
        step=40,
        progress=progress,
        eta_s=60.0,
        metrics=metrics,
    )


def text(*reports: Progress, standing: Standing | None = None, spent: dict[TimeKind, float] | None = None) -> str:
    return metrics.metrics_text(VIEW, standing or Standing(), reports, spent, at_s=12.5)


def test_what_is_known_has_a_metric() -> None:
    standing = Standing(generation=3, nodes=2, restarts=1, workers=8)
    spent = {TimeKind.TRAINING: 70.0, TimeKind.STARTING: 10.0}
    found = parse(text(reported({"loss": 0.25}), standing=standing, spent=spent))
    plain = {name: values[frozenset()] for name, values in found.items() if frozenset() in values}
    assert plain == {
        "trainer_launch_start_time_seconds": 80.0,
        "trainer_launch_attempts_total": 2.0,
        "trainer_launch_workers": 8.0,
        "trainer_launch_generation": 3.0,
        "trainer_launch_nodes": 2.0,
        "trainer_launch_restarts_total": 1.0,
        "trainer_launch_state_kept_total": 0.0,
        "trainer_launch_goodput_ratio": 0.875,
    }
    seconds = found["trainer_launch_goodput_seconds_total"]
    assert {dict(key)["phase"] for key in seconds} == {kind.value for kind in TimeKind}
    assert seconds[frozenset({("phase", "training")})] == 70.0
    rank = ("rank", "4")
    assert found["trainer_launch_step"] == {frozenset({rank}): 40.0}
    assert found["trainer_launch_progress_ratio"] == {frozenset({rank}): 0.5}
    assert found["trainer_launch_progress_age_seconds"] == {frozenset({rank}): 2.5}
    assert found["trainer_launch_eta_seconds"] == {frozenset({rank}): 60.0}
    assert found["trainer_launch_metric"] == {frozenset({rank, ("name", "loss")}): 0.25}
    assert [dict(key)["phase"] for key, value in found["trainer_launch_phase"].items() if value] == ["running"]


def test_what_is_not_known_has_none() -> None:
    unknown = {"generation", "restarts_total", "progress_ratio", "goodput_ratio"}
    assert not {f"trainer_launch_{name}" for name in unknown} & set(parse(text(reported({}, progress=None))))


@given(st.dictionaries(st.text(min_size=1, max_size=64), st.floats(), max_size=20))
def test_any_name_and_any_number_survive(values: dict[str, float]) -> None:
    found = parse(text(reported(values))).get("trainer_launch_metric", {})
    back = {dict(key)["name"]: value for key, value in found.items()}
    assert back.keys() == values.keys()
    assert all(math.isclose(back[name], value) or math.isnan(value) for name, value in values.items())


# -- the server -------------------------------------------------------------------------------


@pytest.fixture
def port() -> Iterator[int]:
    server = metrics.MetricsServer(0, lambda: "# HELP a b\n")
    found = server.start()
    assert found is not None
    yield found
    server.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", found), timeout=5)


def ask(port: int, method: str = "GET", path: str = "/metrics") -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "/metrics", b"# HELP a b\n"),
        ("GET", "/metrics?name[]=a", b"# HELP a b\n"),
    ],
)
def test_the_server_answers_one_question(port: int, method: str, path: str, content: bytes) -> None:
    answer, received = ask(port, method, path)
    assert (answer.status, received) == (200, content)
    assert answer.getheader("Connection") == "close"
    assert answer.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    assert answer.getheader("Content-Length") == "11"


def test_other_questions_are_refused(port: int) -> None:
    answer, content = ask(port, "GET", "/")
    assert answer.status == 404
    assert b"see /metrics" in content
    assert ask(port, "POST")[0].status == 501
    for words in (b"\x16\x03\x01\x00\r\n\r\n", b"GET /metrics HTTP/1.1\r\nA: " + b"x" * 200_000, b"\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as sock, contextlib.suppress(OSError):
            sock.sendall(words)
            assert b"# HELP" not in sock.recv(65536)
    assert ask(port)[0].status == 200


CLIENTS: dict[str, Callable[[socket.socket], object]] = {
    "silent": lambda sock: None,
    "in the middle of a word": lambda sock: sock.sendall(b"GET /met"),
    "half closed": lambda sock: sock.shutdown(socket.SHUT_WR),
    "deaf": lambda sock: sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n"),
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_500_clients_that_say_or_hear_nothing_keep_nobody_out_and_take_no_threads(port: int, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            CLIENTS[kind](stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)))
        for _ in range(3):
            assert ask(port)[0].status == 200
        serving = [thread for thread in threading.enumerate() if "process_request" in thread.name]
        assert len(serving) <= 2 * metrics.AT_ONCE


def test_a_port_that_is_taken_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("", 0)) as taken:
        server = metrics.MetricsServer(taken.getsockname()[1], str)
        assert server.start() is None
        server.close()
    assert "the job continues without metrics" in caplog.text
