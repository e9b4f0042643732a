"""What a node makes of how its workers ended, in the order that it saw them end."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from trainer_launch.diagnosis import group_incidents
from trainer_launch.diagnosis.group_incidents import aborted
from trainer_launch.membership import protocol as say
from trainer_launch.model import Death
from trainer_launch.pytorch.worker_ends import EarlyEnds, early_ends, failed_message, with_last_words
from trainer_launch.supervisor.failure import Evidence, classify

CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:23696"
DONE = Death(rank=1, code=0)
WAITED = Death(rank=0, code=1, message=CLOSED)
OWN = Death(rank=2, code=1, message="ValueError: x")


STOPPED_S = 5.0  # when the launcher has stopped the workers


def told(death: Death, generation: int, early: EarlyEnds) -> say.Failed:
    return failed_message(death, classify(death, Evidence()), generation, early, death.at_s)


def late(**ended: Any) -> Death:
    return Death(rank=2, at_s=6.0, **ended)


@pytest.mark.parametrize(
    ("deaths", "ends"),
    [
        ([DONE, WAITED], EarlyEnds((1,))),
        ([WAITED, DONE], EarlyEnds((1,))),  # nobody had asked it to
        ([WAITED, late(code=0)], EarlyEnds()),  # the launcher had
        ([DONE, OWN], EarlyEnds((1,), failed=True)),
        ([DONE, WAITED, OWN], EarlyEnds((1,), failed=True)),
        ([DONE, WAITED, late(signal=signal.SIGTERM)], EarlyEnds((1,))),
        ([DONE, WAITED, late(code=1, message="ValueError: asked to stop")], EarlyEnds((1,))),
        ([DONE, WAITED, Death(rank=2, signal=signal.SIGTERM, message="ValueError: x")], EarlyEnds((1,), True)),
        (
            [DONE, WAITED, Death(rank=2, signal=signal.SIGTERM, message=CLOSED)],
            EarlyEnds((1,)),
        ),  # and lost a peer
        ([DONE, Death(rank=2, signal=signal.SIGTERM), WAITED], EarlyEnds((1,), True)),
        ([DONE, Death(rank=2, signal=signal.SIGKILL), WAITED], EarlyEnds((1,), True)),
        ([DONE, WAITED, Death(rank=2, signal=signal.SIGSEGV)], EarlyEnds((1,), True)),
        ([DONE, Death(rank=0, signal=signal.SIGABRT, message=CLOSED)], EarlyEnds((1,), True)),  # a crash at exit
        ([DONE, Death()], EarlyEnds((1,), True)),  # nobody knows how it ended
        ([], EarlyEnds()),
    ],
)
def test_what_workers_did_before_they_were_stopped_counts(deaths: list[Death], ends: EarlyEnds) -> None:
    assert early_ends(deaths, STOPPED_S, {DONE.process}) == ends


def test_who_finished_and_is_not_known_to_have_done_so_by_itself_may_have_been_asked_to() -> None:
    deaths = [replace(DONE, process="rank 1"), WAITED]
    assert early_ends(deaths, STOPPED_S, {"rank 1"}) == EarlyEnds((1,))
    assert early_ends(deaths, STOPPED_S, {"rank 0"}) == EarlyEnds((1,), may_be_asked=True)


TIMED_OUT = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation"
NOT_JOINED = "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 joined."
NO_KEY = (
    "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] "
    "via c10d key-value store by key '0', but store->get('0') got error: wait timeout after 9000ms, keys: /cuda//0"
)
UNREACHED = "torch.distributed.DistNetworkError: The client socket has timed out after 8s while trying to connect"
WATCHDOG = (
    "terminate called after throwing an instance of 'c10::DistBackendError'",
    "  what():  [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: "
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=11, OpType=ALLREDUCE) ran for 5012 ms",
)


@pytest.mark.parametrize(
    ("death", "is_victim", "timed_out"),
    [
        (WAITED, True, False),
        (Death(rank=0, code=1, message=TIMED_OUT), True, True),
        (Death(rank=0, code=1, message="RuntimeError: Application timeout caused pair closure"), True, True),
        (aborted(Death(rank=0, signal=signal.SIGABRT), lambda: WATCHDOG), True, True),
        (Death(rank=0, code=1, message=NOT_JOINED), True, True),
        (Death(rank=3, code=1, message=NO_KEY), True, True),
        (
            Death(rank=0, signal=signal.SIGKILL, message="rank 0 hangs", reason="Hung"),
            False,
            False,
        ),  # by the launcher
        (OWN, False, False),
        (Death(rank=0, code=1, message=UNREACHED), False, False),
    ],
    ids=[
        "closed",
        "timed out",
        "another operation timed out",
        "aborted",
        "others had not joined",
        "rank 0 has not come",
        "hung",
        "own",
        "no store where it looks",
    ],
)
def test_who_waited_for_a_peer_in_vain_is_a_victim(death: Death, is_victim: bool, timed_out: bool) -> None:
    failed = told(death, 1, EarlyEnds())
    assert (failed.lost_peer, failed.timed_out) == (is_victim, timed_out)


def test_a_failure_is_told_as_a_lost_peer_only_if_nothing_else_failed_on_the_node() -> None:
    failed = say.Failed(3, 0, 1, None, CLOSED, "RuntimeError", True, (1,), exit_reason="PeerLost", helps=True)
    assert told(WAITED, 3, EarlyEnds((1,))) == replace(failed, is_cause=False)
    assert not told(WAITED, 3, EarlyEnds((1,), failed=True)).lost_peer
    assert not told(OWN, 3, EarlyEnds((1,))).lost_peer


def test_the_last_output_shows_a_victim_where_no_error_file_was_written() -> None:
    plain = replace(WAITED, message=None)
    assert told(with_last_words(plain, ("step 7", CLOSED)), 1, EarlyEnds()).lost_peer
    for death, lines in ((plain, ("ValueError: x",)), (replace(DONE, code=0), (CLOSED,)), (OWN, (CLOSED,))):
        assert with_last_words(death, lines) == death
    killed = Death(rank=0, signal=signal.SIGKILL)
    assert with_last_words(killed, (CLOSED,)) == killed
    chain = (
        CLOSED,
        "The above exception was the direct cause of the following exception:",
        "RuntimeError: no step",
    )
    for prefix in ("", "[rank0]: "):  # torch's hook writes it
        wrapped = with_last_words(plain, tuple(prefix + line for line in chain))
        assert told(wrapped, 1, EarlyEnds()).lost_peer
        for later in (("ValueError: x",), ("KeyError: 'a'", chain[1], "ValueError: x")):
            own = tuple(prefix + line for line in (*chain, "goes on without it", *later))
            assert with_last_words(plain, own) == plain, "the loss was handled"
    assert with_last_words(plain, ("ValueError: x", *chain[1:])) == plain


GLOO = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4. Received data size "
    "doesn't match expected size. Is there a distributed collective mismatch in your code?",
)


def test_gloos_abort_of_a_collective_of_another_size_ends_the_job_and_is_no_crash() -> None:
    death = aborted(Death(rank=3, signal=signal.SIGABRT), lambda: GLOO)
    failed = told(death, 1, EarlyEnds())
    assert (failed.cause, failed.rank) == ("ProgramError", 3)
    assert failed.message == (
        "rank 3 and its peers entered different collectives: gloo received 8 bytes where rank 3 expected at most "
        "4; a restart will not help"
    )


@pytest.mark.parametrize(
    "lines", [(), GLOO[:1], ("terminate called after throwing an instance of 'std::bad_alloc'",)]
)
def test_any_other_abort_stays_a_crash(lines: tuple[str, ...]) -> None:
    death = Death(rank=3, signal=signal.SIGABRT)
    assert aborted(death, lambda: lines) == death
    assert told(death, 1, EarlyEnds()).cause is None


def test_the_last_output_of_many_workers_that_abort_together_is_waited_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """glibc's own aborts never say what is waited for."""
    waits = list[float]()
    clock = SimpleNamespace(sleep=waits.append, monotonic=lambda: 100.0 + sum(waits))
    monkeypatch.setattr(group_incidents, "time", clock)
    for rank in range(8):
        aborted(Death(rank=rank, signal=signal.SIGABRT, at_s=100.0), lambda: ("double free or corruption",))
    assert 0.1 < sum(waits) < 0.5


@pytest.mark.parametrize("reason", ["ProgramError", "Misconfigured", "NotRunnable", None])
def test_the_coordinator_is_told_what_no_restart_can_mend(reason: str | None) -> None:
    death = Death(rank=1, code=2, message="rank 1 refuses its arguments", reason=reason)
    assert told(death, 3, EarlyEnds(failed=True)).cause == reason
