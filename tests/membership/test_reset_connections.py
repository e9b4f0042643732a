"""A connection between a launcher and its coordinator that is reset, as firewalls and proxies do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest

from tests.membership.test_server import LONG_S, await_, cluster  # noqa: F401 - a fixture
from tests.membership.world import running
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.client import Client, Connected, Disconnected
from trainer_launch.membership.state import JobPhase, status
from trainer_launch.model import Endpoint

SOON_S = 0.3


class Proxy:
    """Passes connections on to a port of loopback, and resets them."""

    def __init__(self, port):
        self._port, self._pairs = port, []
        self.is_passing = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if not self.is_passing:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self._port))
                self._pairs += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)

    def reset(self):
        """Let both ends read ECONNRESET."""
        pairs, self._pairs = self._pairs, []
        for sock in pairs:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RD)
            sock.close()

    def close(self):
        self._listener.close()
        self.reset()


@pytest.fixture
def behind_a_proxy(cluster, request):  # noqa: F811
    """A coordinator, node 0, and node 1 behind a proxy; both train."""
    cluster.serve(2, lease_s=getattr(request, "param", LONG_S))
    proxy = Proxy(cluster.port)
    cluster.open.callback(proxy.close)
    zero = cluster.node(0)
    one = Client(Endpoint("127.0.0.1", proxy.port), msg.Hello(msg.VERSION, "job", 1, "pod-1", "1-a"))
    cluster.open.callback(one.close)
    cluster.form([zero, one])
    return cluster, proxy, zero, one


def test_a_reset_connection_restarts_nothing(behind_a_proxy):
    coordinator, proxy, zero, one = behind_a_proxy
    for _ in range(3):
        proxy.reset()
        await_(one, Disconnected)
        await_(one, Connected)
    one.send(msg.Done(1))
    zero.send(msg.Done(1))
    await_(zero, msg.Finished)
    await_(one, msg.Finished)
    assert sum("connected again within its lease; nothing restarts" in text for text in coordinator.said) == 3
    assert not any("is over" in text for text in coordinator.said)


def test_a_failure_that_was_lost_with_the_connection_is_reported_on_the_next(behind_a_proxy):
    _, proxy, zero, one = behind_a_proxy
    proxy.is_passing = False
    proxy.reset()
    await_(one, Disconnected)
    one.send(msg.Failed(1, 1, 7, None))
    proxy.is_passing = True
    assert await_(zero, msg.Restart).reason.startswith("rank 1 failed on node 1 (pod-1) with exit code 7")


@pytest.mark.parametrize("behind_a_proxy", [2.0], indirect=True)
def test_a_node_that_does_not_come_back_is_lost_with_its_lease(behind_a_proxy):
    _, proxy, zero, _ = behind_a_proxy
    proxy.is_passing, before_s = False, time.monotonic()
    proxy.reset()
    restart = await_(zero, msg.Restart)
    assert restart.reason == "node 1 (pod-1) is gone"
    assert 1.0 < restart.unnoticed_s < time.monotonic() - before_s + 1.0, "since it was heard last"


def call_again(world, peer, generation=1):
    """The process of node 1 that had this connection calls again."""
    return world.call(1, incarnation=world.incarnations[peer], generation=generation)


def test_a_new_connection_may_come_before_the_old_ones_end():
    world, (_, one) = running(2)
    call_again(world, one)
    world.gone(one, ended=False)
    assert world.phase is JobPhase.RUNNING


def test_a_new_process_of_a_node_ends_the_generation_at_once():
    world, (_, one) = running(2)
    world.gone(one, ended=False)
    world.now_s += SOON_S
    world.call(1, generation=1)
    assert world.phase is JobPhase.GATHERING


def test_a_process_that_ended_is_lost_at_once():
    world, (_, one) = running(2)
    world.gone(one)
    assert world.phase is JobPhase.GATHERING


def test_a_node_that_missed_the_present_generation_cannot_resume_it():
    world, (_, one) = running(2)
    world.gone(one, ended=False)
    call_again(world, one, generation=0)
    assert world.phase is JobPhase.GATHERING


def test_a_coordinator_that_was_stopped_itself_gives_an_absent_node_its_lease_anew():
    world, (_, one) = running(2)
    world.gone(one, ended=False)
    world.now_s += 60.0
    world.tick()
    assert world.phase == JobPhase.RUNNING
    world.now_s += 4.0
    world.tick()
    assert world.phase == JobPhase.GATHERING


def test_the_status_of_a_node_whose_connection_was_reset_is_running():
    world, (_, one) = running(2)
    world.gone(one, ended=False)
    assert [row[2] for row in status(world.state, world.now_s).nodes] == ["running", "running"]
