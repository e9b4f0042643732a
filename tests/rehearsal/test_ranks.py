"""Which process is a worker: by its rank, and never one that a worker has forked."""

from __future__ import annotations

from trainer_launch.rehearsal.pod_watch import chosen


def test_a_worker_of_torch_is_the_uppermost_with_its_local_rank() -> None:
    processes = {
        1: {"RANK": "0"},  # of the whole pod: PyTorchJob
        2: {"RANK": "4", "LOCAL_RANK": "0"},
        3: {"RANK": "5", "LOCAL_RANK": "1"},
        4: {"RANK": "5", "LOCAL_RANK": "1"},  # a data loader
    }
    parents = {2: 1, 3: 1, 4: 3}
    assert chosen(processes, parents, 0) == 2
    assert chosen(processes, parents, 1) == 3
    assert chosen(processes, parents, 2) is None


def test_a_worker_of_mpi_has_a_local_rank_or_its_place_among_the_pods_ranks() -> None:
    assert chosen({7: {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_RANK": "3"}}, {}, 1) == 7
    hydra = {8: {"PMI_RANK": "3"}, 9: {"PMI_RANK": "2"}, 10: {"PMI_RANK": "2"}}
    assert [chosen(hydra, {10: 9}, local) for local in (0, 1, 2)] == [9, 8, None]


def test_who_has_no_rank_is_no_worker() -> None:
    assert chosen({1: {"RANK": "0", "WORLD_SIZE": "2"}, 2: {}, 3: {"LOCAL_RANK": "x"}}, {}, 0) is None
