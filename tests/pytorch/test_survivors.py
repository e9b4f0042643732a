"""Both sides of `generations()`, at the points that real workers seldom reach."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest

from tests.pytorch.nodes import Here
from tests.supervisor.fakes import Program
from trainer_launch.diagnosis.worker_samples import WorkerPlace
from trainer_launch.membership.protocol import GiveUp
from trainer_launch.model import Process, Workers, exit_codes
from trainer_launch.pytorch import generations
from trainer_launch.pytorch.fork_server import Starter
from trainer_launch.pytorch.generations import OutOfGroups, Survivors
from trainer_launch.supervisor.system import System


@pytest.mark.parametrize("rank", ["0", "1"], ids=["back to the pod's value", "another value"])
def test_a_survivor_gets_its_new_rank_also_where_the_pod_has_a_variable_of_that_value(rank: str) -> None:
    group: Any = Mock(workers=Workers(count=1, argv=(), env={"RANK": "0"}))
    group.places = {"rank 2": WorkerPlace(2, 0)}
    old, new = (Process(name=f"rank {each}", argv=(), env={"RANK": each}) for each in ("2", rank))
    group.processes.kept = {7: old}
    Starter(group).start([new], 1234)
    group.survivors.enter.assert_called_once_with(f"rank {rank}", {"RANK": rank})


def test_a_survivor_whose_end_is_not_reaped_yet_when_the_next_generation_begins_is_told_nothing() -> None:
    survivors = Survivors(create_autospec(System, instance=True))
    worker = survivors.open("rank 0")
    os.close(worker)
    assert survivors.hear() == []
    survivors.enter("rank 0", {"RANK": "0"})


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_groups_are_aborted_where_their_backend_can(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    aborted: list[str] = []
    own: Any = SimpleNamespace(name=lambda: backend, abort=lambda: aborted.append(backend))
    group = SimpleNamespace(_device_types=("cpu",), _get_backend=lambda _device: own)
    groups = SimpleNamespace(_world=SimpleNamespace(pg_map=[group]))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=SimpleNamespace(distributed_c10d=groups)))
    generations._GroupSockets().shut()
    assert aborted == ([] if backend == "gloo" else [backend])


def test_a_peer_can_send_to_a_rank_that_has_left_however_soon_gloo_closes_its_own_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else gloo forgets the peer's message, and waits for it for ever."""
    sockets = generations._GroupSockets()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with sockets.making():
            own = socket.create_connection(listener.getsockname())
        peer = listener.accept()[0]

        class Seen(socket.socket):
            def shutdown(self, how: int) -> None:
                super().shutdown(how)
                own.close()  # gloo's thread has seen the end

        with monkeypatch.context() as patched:
            patched.setattr(socket, "socket", Seen)
            sockets.shut()
            sockets.shut()
    with peer:
        for _ in range(3):  # a reset is told at the second one
            assert peer.send(b"message") == len(b"message")
    for connection in sockets._open.values():
        connection.close()


class Waiting(Survivors):
    """Survivors without connections: `left` have just left their groups; dismissed ones end."""

    def __init__(self, here: Here, *left: str) -> None:
        self._here, self._news = here, [*left]
        self.able, self.left, self.holders = {*left}, set[str](), set[str]()

    def hear(self) -> list[tuple[str, Any]]:
        self.left |= {*self._news}
        news, self._news = self._news, []
        return [(name, OutOfGroups(has_state=True)) for name in news]

    def leave(self, names: Collection[str], generation: int) -> None:
        pass

    def dismiss(self) -> None:
        while self.left:
            self._here.system.ends(self._here.system.now() + 0.2, self.left.pop(), 15)


@pytest.mark.parametrize("leaves_s", [0.5, 1.5], ids=["before the request", "after it"])
def test_workers_that_only_note_a_request_to_stop_end_where_they_wait_for_the_next_generation(
    tmp_path: Path, leaves_s: float
) -> None:
    notes = Program(term_s=None)
    here = Here(tmp_path, rank_0=[notes], rank_1=[Program(ends_s=1.3)])

    def lose_the_others() -> None:
        here.node._group.survivors = Waiting(here, "rank 0")

    here.does(leaves_s, lose_the_others)
    here.system.signalled(1.0, 15)
    ended = here.run()
    assert ended.took_s < 2.5, "it does not wait for the end of the grace"


@pytest.mark.parametrize("leaves_s", [0.5, 1.5], ids=["before the job's end", "after it"])
def test_a_failed_job_waits_for_no_survivor_that_only_notes_the_signal(tmp_path: Path, leaves_s: float) -> None:
    here = Here(tmp_path, rank_0=[Program(term_s=None)], rank_1=[Program()])
    here.does(leaves_s, lambda: setattr(here.node._group, "survivors", Waiting(here, "rank 0")))
    ended = here.hears(1.0, GiveUp("no restart is left")).run()
    assert ended.took_s < 2.5, "no step is left to it"


class Entering(Waiting):
    """Survivors of which one comes to be inside in the moment in which another worker dies."""

    def hear(self) -> list[tuple[str, Any]]:
        self.able |= {"rank 0"} if self._here.system.now() >= 1.0 else set()
        return []


def test_a_worker_that_has_just_come_to_be_inside_is_not_stopped_for_anothers_death(tmp_path: Path) -> None:
    dies, ends = Program(ends_s=1.0, number=9), Program(ends_s=1.0)
    here = Here(tmp_path, rank_0=[Program(ends_s=1.5), ends], rank_1=[dies, ends])
    here.does(0.5, lambda: setattr(here.node._group, "survivors", Entering(here)))
    here.run()
    assert (1, "leader", "rank 0", 15) not in here.system.calls


def test_a_worker_that_is_dismissed_while_it_waits_exits_as_one_that_was_stopped() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = generations._Channel(theirs.fileno())
    with theirs:
        channel.begin()
        ours.close()
        with pytest.raises(SystemExit) as ended:
            channel.enter_next()
    assert ended.value.code == exit_codes.STOPPED


def test_a_survivor_that_hears_of_its_generations_end_before_it_enters_leaves_it_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generations, "_watch_groups", lambda sockets: None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = generations._Channel(theirs.fileno())

    def happens(_seconds: float) -> None:
        if channel._number == 1:
            channel.enter(2)
        else:
            channel._groups.end()

    monkeypatch.setattr(channel._changed, "wait", happens)
    with ours, theirs:
        channel.enter(1)
        channel._end_waiting(2)
    assert channel.is_leaving


def test_a_survivor_that_is_to_enter_with_workers_that_cannot_be_started_waits_for_nothing() -> None:
    survivors = Survivors(create_autospec(System, instance=True))
    worker = survivors.open("rank 0")
    os.write(worker, generations.of_worker.encode(OutOfGroups(has_state=True)))
    survivors.hear()
    survivors.close({"rank 0": "rank 1"})
    survivors.dismiss()
    os.set_blocking(worker, False)
    assert os.read(worker, 100) == b"", "it is told that no generation follows"
    os.close(worker)
