"""Pair tests in real children: both ends agree, every byte counts, and nothing hangs for longer than it may."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trainer_launch.preflight.children import pair_bench
from trainer_launch.preflight.cluster import pair_tests
from trainer_launch.preflight.cluster import preflight_messages as msg
from trainer_launch.preflight.cluster.pair_tests import Listener
from trainer_launch.preflight.thresholds import FLOOR

pytestmark = pytest.mark.process


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(None)
    yield made
    made.close()


def order(port: int, *, dials: bool, limit_s: float = 5.0) -> msg.Test:
    return msg.Test(0, int(dials), "127.0.0.1", port, "s-0-0-1", limit_s)


def whys(result: msg.Result) -> list[str]:
    return [rail.why for rail in result.rails]


def test_both_ends_measure_what_came(listener: Listener) -> None:
    results: list[msg.Result] = []
    other = threading.Thread(
        target=lambda: results.append(pair_tests.run(order(listener.port, dials=False), listener))
    )
    other.start()
    results.append(pair_tests.run(order(listener.port, dials=True), listener))
    other.join(10)
    assert [whys(result) for result in results] == [[""]] * 2
    assert all(result.rails[0].rate > 1_000_000 for result in results)


@pytest.mark.parametrize("round_trip_s", [0.0001, 0.02, 0.08, 0.15])
def test_a_node_that_is_far_away_is_not_too_slow_for_anything(
    round_trip_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP doubles what is under way in each round trip, up to what the kernel keeps for it."""
    now_s, sent, window = [100.0], [0], [14_600.0]

    class Far:
        def sendall(self, data: bytes) -> None:
            left = len(data)
            sent[0] += left
            while left > 0:
                now_s[0] += round_trip_s * min(1.0, left / window[0])
                left -= int(window[0])
                window[0] = min(2 * window[0], 4e6)

        def settimeout(self, seconds: float) -> None:
            pass

    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    sock: Any = Far()
    pair_bench.send(sock, "token", 105.0)
    assert sent[0] / (now_s[0] - 100.0) > FLOOR
    assert now_s[0] < 102.0, "both ways fit into the test's 5 s"


def test_who_dials_nobody_says_so(listener: Listener) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        result = pair_tests.run(order(probe.getsockname()[1], dials=True, limit_s=1.0), listener)
    assert "Connection refused" in whys(result)[0]


def test_who_waits_for_nobody_says_so_in_time(listener: Listener) -> None:
    result = pair_tests.run(order(listener.port, dials=False, limit_s=2.0), listener)
    assert whys(result) == ["the other end did not connect in time"]


def test_data_that_arrives_damaged_is_found(listener: Listener) -> None:
    """A middleman that answers as the other end would, with zeros."""
    with socket.create_server(("127.0.0.1", 0)) as forger:

        def forge() -> None:
            sock, _ = forger.accept()
            with sock, contextlib.suppress(OSError):
                sock.recv(1000)
                sock.sendall(b"ok\n")
                threading.Thread(target=swallow, args=(sock,), daemon=True).start()
                sock.sendall((1 << 18).to_bytes(8, "big") + bytes(1 << 18) + bytes(8))
                done.wait(10)

        def swallow(sock: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while sock.recv(1 << 20):
                    pass

        done = threading.Event()
        thread = threading.Thread(target=forge)
        thread.start()
        result = pair_tests.run(order(forger.getsockname()[1], dials=True), listener)
        done.set()
        thread.join(10)
    assert whys(result) == ["the data arrives damaged"]


@pytest.mark.parametrize(
    ("code", "limit_s", "why"),
    [
        ("import time; time.sleep(600)", 0.2, "its test hung and was killed after 0.2 s"),
        ("raise SystemExit(3)", 5.0, "its test ended with 3 without a result"),
    ],
)
def test_a_child_that_hangs_or_says_nothing_is_no_pass(
    listener: Listener, code: str, limit_s: float, why: str
) -> None:
    child = (sys.executable, "-I", "-S", "-c", code)
    assert whys(pair_tests.run(order(1, dials=True, limit_s=limit_s), listener, child)) == [why]


def test_a_partner_that_stops_midway_is_given_up_in_time(listener: Listener) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        result = pair_tests.run(order(mute.getsockname()[1], dials=True, limit_s=2.0), listener)
    assert "out of time" in whys(result)[0]


def test_a_test_program_that_a_busy_machine_starts_late_has_no_more_time_for_that() -> None:
    """It says itself what was wrong, before it is killed."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = str(mute.getsockname()[1])
        argv = (*pair_tests.PAIR_TEST_CHILD, "token", str(time.monotonic() - 1.0), "127.0.0.1", port)
        assert b"out of time" in subprocess.run(argv, capture_output=True, timeout=60).stdout
