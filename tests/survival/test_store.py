"""The store of a generation: nobody waits there for a node that is lost."""

from __future__ import annotations

import importlib
import importlib.util
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.conftest import require

pytestmark = pytest.mark.torch
LONG_S = 10.0  # less than torch's own wait of 60 s


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")


class Generation:
    """One that can end."""

    def __init__(self) -> None:
        from trainer_launch.pytorch.elastic_rendezvous import GenerationStore, open_store

        self.is_over = False
        self.opened = open_store(None)
        self.store = GenerationStore("generation/1", self.opened, lambda: self.is_over)

    def ends_soon(self) -> None:
        threading.Timer(0.2, self.end).start()

    def end(self) -> None:
        self.is_over = True


@pytest.fixture
def generation() -> Iterator[Generation]:
    made = Generation()
    yield made
    made.end()


def test_values_come_as_soon_as_they_are_set(generation: Generation) -> None:
    threading.Timer(0.2, generation.store.set, ("late", "2")).start()
    generation.store.set("early", "1")
    assert generation.store.multi_get(["early", "late"]) == [b"1", b"2"]
    assert generation.store.get("late") == b"2"
    generation.store.wait(["early"])


@pytest.mark.parametrize("ask", ["get", "multi_get"])
def test_the_rank_of_a_node_that_was_lost_meanwhile_is_not_waited_for(generation: Generation, ask: str) -> None:
    from torch.distributed import DistStoreError

    began_s = time.monotonic()
    generation.ends_soon()
    with pytest.raises(DistStoreError, match="the generation is over"):
        generation.store.get("missing") if ask == "get" else generation.store.multi_get(["missing"])
    assert time.monotonic() - began_s < LONG_S


def test_the_barrier_at_the_end_lets_go_when_the_generation_is_over(generation: Generation) -> None:
    began_s = time.monotonic()
    generation.ends_soon()
    generation.store.wait(["missing"])
    assert time.monotonic() - began_s < LONG_S


def test_a_store_whose_node_is_lost_is_not_dialled_for_ever(generation: Generation) -> None:
    from torch.distributed import DistNetworkError

    from trainer_launch.pytorch.elastic_rendezvous import reach_store

    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    generation.ends_soon()
    said = rf"the store at 127.0.0.1:{port} could not be reached for \d s \(.*refused\); .* --port-range"
    with pytest.raises(DistNetworkError, match=said):
        reach_store("127.0.0.1", port, lambda: generation.is_over)
    reached = reach_store("127.0.0.1", generation.opened.port, lambda: False)
    reached.set("key", "value")
    assert generation.opened.get("key") == b"value"
