"""A hostile network against launchers that really run: PID 1 neither dies nor grows, and its job ends well."""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import script, start
from tests.fuzz import hostile
from tests.observability import statusserver
from tests.ports import free_port
from tests.waiting import eventually
from trainer_launch.membership import protocol as coordination
from trainer_launch.membership.candidates import ask
from trainer_launch.membership.client import Client
from trainer_launch.model import Endpoint, StatusEndpoint
from trainer_launch.model.errors import NodeError
from trainer_launch.observability import trainjob_status
from trainer_launch.preflight.children import pair_bench
from trainer_launch.preflight.cluster.pair_tests import CHILD

DEADLINE_S = 120.0
GROWTH_BYTES = 24 << 20  # of PID 1; a server that kept what strangers send would have ten times that
every_answer = pytest.mark.parametrize("answer", hostile.ANSWERS.values(), ids=list(hostile.ANSWERS))


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


RUN = ("run", "--nproc-per-node", "1")
ROLL_CALL = ("preflight", "--level", "quick", "--wait-timeout", "90", "--only", "roll-call")


@pytest.mark.process
@pytest.mark.torch
@pytest.mark.parametrize("words", [RUN, ROLL_CALL], ids=lambda words: words[0])
def test_strangers_at_node_0s_ports_neither_end_it_nor_make_it_grow(words: tuple[str, ...], tmp_path: Path) -> None:
    port, metrics = free_port(), free_port()
    train = script(tmp_path, "import time\ntime.sleep(0.5)\n")
    words = (*words, "--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
    words += ("--termination-log", str(tmp_path / "words"))
    scraped = ("--metrics-port", str(metrics)) if words[0] == "run" else ()
    with start(*words, *scraped, "--node-rank", "0", "--", train) as first:
        eventually(lambda: first.process.poll() is not None or listens(port), "it listens")
        assert first.process.poll() is None, first.end()
        pid_1 = psutil.Process(first.pid)
        hostile.attack(port, 0.3)  # what a first stranger costs, such as modules for errors, is no growth
        before, files = pid_1.memory_info().rss, pid_1.num_fds()
        made = hostile.attack(port) + (hostile.attack(metrics) if scraped else 0)
        assert made > 50
        assert first.process.poll() is None, first.end()
        eventually(lambda: pid_1.num_fds() <= files + 4, "descriptors of strangers are closed")
        assert pid_1.memory_info().rss - before < GROWTH_BYTES
        assert listens(port)
        with start(*words, "--node-rank", "1", "--", train) as second:
            code, said = second.end(90.0)
            assert code == 0, said
        said = first.ends_with(0)
    assert "Traceback" not in said
    assert said.count("dropped a connection") < 60, "a flood of strangers became a flood of lines"


@every_answer
def test_who_asks_a_hostile_coordinator_gets_one_sentence_in_time(answer: Callable[[socket.socket], None]) -> None:
    with hostile.server(answer) as port:
        began_s = time.monotonic()
        with pytest.raises(NodeError, match=r"at 127\.0\.0\.1:") as caught:
            ask(Endpoint("127.0.0.1", port), "job", b"secret", timeout_s=1.0)
        assert str(caught.value).isprintable()
        assert time.monotonic() - began_s < 30.0


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 5000,
        b"HTTP/1.1 " + b"9" * 4000 + b" OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 4500 + b"\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 5000 + b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n",
    ],
    ids=lambda answer: answer[:40].decode("ascii", "replace") or "nothing",
)
def test_whatever_the_trainjobs_endpoint_answers_is_an_answer_that_shows_no_token(
    answer: bytes, tmp_path: Path
) -> None:
    statusserver.make_certificates(tmp_path)
    (tmp_path / "token").write_text("tok-1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")

    def speak(sock: socket.socket) -> None:
        sock.settimeout(5)
        with context.wrap_socket(sock, server_side=True) as secured:
            secured.recv(4096)
            secured.sendall(answer)

    with hostile.server(speak) as port:
        endpoint = StatusEndpoint(
            scheme="https", server_host="localhost", server_port=port, path=statusserver.PATH,
            ca_file=str(tmp_path / "ca.crt"), token_file=str(tmp_path / "token"),
        )  # fmt: skip
        told = trainjob_status.send(endpoint, b"{}")
    assert told.isprintable()
    assert "tok-1" not in told


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 2000], ids=["nothing", "HTTP", "no end"])
def test_a_stranger_who_comes_first_does_not_take_a_pair_tests_time(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, began_s = listener.getsockname()[1], time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as stranger, ThreadPoolExecutor(1) as pool:
            stranger.sendall(says)
            waits = pool.submit(pair_bench.measured, "token", DEADLINE_S, listener, "", 0)
            assert pair_bench.measured("token", DEADLINE_S, None, "127.0.0.1", port)[0] == ""
            assert waits.result()[0] == ""
        assert time.monotonic() - began_s < DEADLINE_S / 2, "the stranger was waited for"


@pytest.mark.parametrize("answer", [b"ok x\n", b"ok\n", b"ok \xff\n", b"ok " + b"9" * 400 + b"\n"])
def test_ports_that_are_none_are_no_answer_in_a_test_of_collectives(answer: bytes) -> None:
    def speak(sock: socket.socket) -> None:
        sock.recv(100)
        sock.sendall(answer)

    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import collective_bench as bench\n"
        "order = {'host': '127.0.0.1', 'port': sys.argv[2], 'token': 't'}\n"
        "print(bench.dialed(order, time.monotonic() + 10))\n"
    )
    with hostile.server(speak) as port:
        argv = (sys.executable, "-I", "-S", "-c", code, str(CHILD.parent), str(port))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout == "('the other end names no port', 0)\n"


CHALLENGE = coordination.render(coordination.Challenge("ab"))


@contextlib.contextmanager
def joining(words: bytes, *, resets: bool = False) -> Iterator[list[int]]:
    """A node and a coordinator that says this to each that comes, and hangs up; an entry for each time it came."""
    calls: list[int] = []

    def speak(sock: socket.socket) -> None:
        calls.append(1)
        sock.sendall(words)
        if resets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hostile.RESET)

    hello = coordination.Hello(coordination.VERSION, "job", 1, "n-1", "i1")
    with hostile.server(speak) as port, contextlib.closing(Client(Endpoint("127.0.0.1", port), hello, b"secret")):
        yield calls


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        *(b"", CHALLENGE, CHALLENGE + b'{"kind":"welcome","lease_s":999999}\n'),
        CHALLENGE + b'{"kind":"welcome","lease_s":1e-9}\n',
    ],
    ids=["nothing", "challenge", "long lease", "no lease"],
)  # fmt: skip
def test_a_node_comes_again_whatever_a_coordinator_says_before_it_hangs_up(words: bytes, resets: bool) -> None:
    with joining(words, resets=resets) as calls:
        eventually(lambda: len(calls) >= 8, "the node comes again")


def test_a_node_without_a_descriptor_for_the_moment_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = socket.socket
    refused: list[int] = []

    def short(*args: object, **more: object) -> socket.socket:
        if threading.current_thread().name == "coordinator client" and len(refused) < 3:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return genuine(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr("trainer_launch.membership.client.socket.socket", short)
    with joining(CHALLENGE) as calls:
        eventually(lambda: len(calls) >= 2, "the node comes again")
    assert len(refused) == 3
