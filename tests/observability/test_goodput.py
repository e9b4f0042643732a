"""Where the wall time of a job went: of each history the ledger books every second once, as the right kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainer_launch.model import codec
from trainer_launch.observability import goodput
from trainer_launch.observability.goodput import Ledger, LedgerSummary, Signs
from trainer_launch.supervisor.run_observer import TimeKind


def spent(ledger: Ledger, at_s: float, *, has_succeeded: bool = False) -> dict[str, float]:
    """Seconds by kind, without the kinds that took none."""
    totals = goodput.totals(ledger, at_s, has_succeeded=has_succeeded)
    return {kind.value: round(one_s, 6) for kind, one_s in totals.items() if one_s > 1e-9}


def until_training(at_s: float = 10.0) -> Ledger:
    """2 s of launcher, 3 s of waiting, 1 s of meeting; workers from 6 on."""
    ledger = goodput.Ledger(at_s=at_s - 10.0)
    for kind, then_s in ((TimeKind.WAITING, 2.0), (TimeKind.MEETING, 5.0), (TimeKind.TRAINING, 6.0)):
        ledger = goodput.enter(ledger, kind, at_s - 10.0 + then_s)
    return ledger


def failed_at(ledger: Ledger, at_s: float, again_s: float) -> Ledger:
    """A worker has died, 1 s of stopping, 1 s of waiting, and new workers from `again_s` on."""
    for kind, then_s in ((TimeKind.STOPPING, at_s), (TimeKind.WAITING, at_s + 1), (TimeKind.TRAINING, again_s)):
        ledger = goodput.enter(ledger, kind, then_s)
    return ledger


def test_what_comes_before_the_first_step_is_starting() -> None:
    ledger = goodput.see(until_training(), Signs(first_s=9.0, last_s=20.0, first_step=1, step=12), 20.0)
    assert spent(ledger, 20.0) == {"starting": 5.0, "waiting_for_nodes": 3.0, "meeting": 1.0, "training": 11.0}


def test_a_restart_costs_stopping_waiting_restarting_and_repeated_steps() -> None:
    ledger = goodput.see(until_training(), Signs(first_s=9.0, last_s=29.0, first_step=1, step=20), 30.0)
    ledger = failed_at(ledger, 30.0, 32.0)
    # Resumed from step 15: steps 16 to 20 are done again, one a second, from 35 on.
    ledger = goodput.see(ledger, Signs(first_s=36.0, last_s=50.0, first_step=16, step=30), 50.0)
    assert spent(ledger, 50.0) == {
        "starting": 5.0,
        "waiting_for_nodes": 4.0,
        "meeting": 1.0,
        "training": 21.0 + 10.0,
        "stopping": 1.0,
        "restarting": 4.0,
        "repeating_steps": 4.0,
    }


def lost_at(ledger: Ledger, at_s: float) -> Ledger:
    """A rank is lost, and the others leave; 2 s later all meet again, with their state."""
    for kind, then_s in (
        (TimeKind.REPLACING, 0.0),
        (TimeKind.WAITING, 1.0),
        (TimeKind.REPLACING, 2.0),
        (TimeKind.TRAINING, 2.5),
    ):
        ledger = goodput.enter(ledger, kind, at_s + then_s)
    return ledger


def test_where_ranks_keep_their_state_a_loss_is_replacing_ranks_and_repeats_nothing() -> None:
    ledger = goodput.see(until_training(), Signs(first_s=9.0, last_s=29.0, first_step=1, step=20), 30.0)
    kept = lost_at(ledger, 30.0)
    again = Signs(first_s=33.0, last_s=40.0, first_step=20, step=27)  # rank 0 had shown step 20 before it was done
    times = spent(goodput.see(kept, again, 40.0), 40.0)
    assert (times["replacing_ranks"], times["waiting_for_nodes"], times["training"]) == (2.0, 4.0, 21.0 + 7.0)
    assert not {"stopping", "restarting", "repeating_steps"} & times.keys()


def test_steps_that_begin_anew_each_epoch_prove_no_repetition() -> None:
    ledger = goodput.see(until_training(), Signs(first_s=9.0, last_s=29.0, first_step=1, step=20), 30.0)
    ledger = failed_at(ledger, 30.0, 32.0)
    ledger = goodput.see(ledger, Signs(first_s=33.0, last_s=38.0, first_step=1, step=6), 38.0)
    ledger = goodput.see(ledger, Signs(first_s=33.0, last_s=48.0, first_step=1, step=2), 48.0)
    ledger = goodput.see(ledger, Signs(first_s=33.0, last_s=58.0, first_step=1, step=12), 58.0)
    assert spent(ledger, 58.0)["repeating_steps"] == 5.0, "only what came before it was known"


def test_a_hang_was_being_detected_since_the_last_progress() -> None:
    ledger = goodput.see(until_training(), Signs(first_s=9.0, last_s=29.0, first_step=1, step=20), 60.0)
    ledger = goodput.enter(ledger, TimeKind.STOPPING, 90.0, since_s=29.5)
    assert spent(ledger, 90.0)["detecting"] == 60.5
    assert spent(ledger, 90.0)["training"] == 20.5


def test_a_suspected_hang_is_detecting_until_the_next_sign() -> None:
    ledger = goodput.see(until_training(), Signs(first_s=9.0, last_s=29.0, first_step=1, step=20), 30.0)
    hangs = goodput.suspect(ledger)
    assert spent(hangs, 129.0)["detecting"] == 100.0
    slow = goodput.see(hangs, Signs(first_s=9.0, last_s=130.0, first_step=1, step=21), 130.0)
    assert spent(slow, 130.0)["training"] == 121.0, "it only was slow: nobody is accused"


def test_checkpoints_are_taken_out_of_the_steps_they_interrupt() -> None:
    ledger = goodput.see(
        until_training(), Signs(first_s=9.0, last_s=29.0, first_step=1, step=20, saved_s=4.0), 30.0
    )
    assert (spent(ledger, 29.0)["training"], spent(ledger, 29.0)["checkpointing"]) == (16.0, 4.0)
    saves = Signs(first_s=9.0, last_s=31.0, first_step=1, step=20, saved_s=4.0, is_saving=True)
    saving = goodput.see(ledger, saves, 31.0)
    assert spent(saving, 131.0)["checkpointing"] == 104.0, "three minutes of it are no hang and no training"
    done = goodput.see(saving, replace(saves, last_s=141.0, saved_s=104.0, is_saving=False, step=30), 141.0)
    assert (spent(done, 141.0)["training"], spent(done, 141.0)["checkpointing"]) == (28.0, 104.0)


def test_how_long_a_restart_took_is_certain_once_its_first_step_is_seen() -> None:
    """A counter must not fall when a step is seen that was done a while ago."""
    ledger = goodput.see(until_training(), Signs(first_s=9.0, last_s=29.0, first_step=1, step=20), 30.0)
    ledger = failed_at(ledger, 30.0, 32.0)
    assert goodput.totals(ledger, 40.0)[TimeKind.RESTARTING] == 8.0
    assert TimeKind.RESTARTING not in goodput.certain(ledger, 40.0)
    ledger = goodput.see(ledger, Signs(first_s=35.0, last_s=40.0, first_step=21, step=26), 40.0)
    assert goodput.certain(ledger, 40.0)[TimeKind.RESTARTING] == 3.0


def test_a_job_that_never_shows_a_step_has_trained_since_its_workers_run() -> None:
    ledger = until_training()
    assert spent(ledger, 100.0)["starting"] == 96.0, "its first step may still come"
    assert spent(ledger, 700.0)["training"] == 694.0
    ended = goodput.enter(ledger, TimeKind.ENDING, 100.0)
    assert spent(ended, 101.0, has_succeeded=True)["training"] == 94.0
    assert "training" not in spent(ended, 101.0), "it failed before it showed anything"


def test_what_nobody_saw_of_a_job_that_shows_steps_later_was_its_start() -> None:
    ledger = failed_at(until_training(), 900.0, 902.0)
    ledger = goodput.see(ledger, Signs(first_s=905.0, last_s=910.0, first_step=1, step=6), 910.0)
    assert spent(ledger, 910.0)["starting"] == 2.0 + 894.0 + 3.0


def test_who_joins_a_job_goes_on_with_the_longest_ledger() -> None:
    ledger = goodput.enter(goodput.Ledger(at_s=0.0), TimeKind.WAITING, 2.0)
    told = LedgerSummary({TimeKind.TRAINING: 100.0, TimeKind.WAITING: 3.0}, 40)
    joined = goodput.enter(goodput.adopt(ledger, told, 3.0), TimeKind.TRAINING, 4.0)
    joined = goodput.see(joined, Signs(first_s=6.0, last_s=16.0, first_step=31, step=41), 16.0)
    assert spent(joined, 16.0) == {
        "training": 101.0,
        "waiting_for_nodes": 4.0,
        "restarting": 2.0,
        "repeating_steps": 9.0,
    }
    assert goodput.adopt(joined, LedgerSummary({TimeKind.WAITING: 1.0}, 50), 16.0).spent_s == joined.spent_s, (
        "a younger one"
    )


def test_a_ledger_for_others_is_a_message() -> None:
    told = goodput.summary(until_training(), 20.0)
    assert codec.decode(LedgerSummary, codec.encode(told)) == told
    for bad in ('{"spent_s": {"napping": 1}}', '{"spent_s": {"training": -1}}', '{"spent_s": {"training": 1e99}}'):
        with pytest.raises(codec.MessageError):
            codec.decode(LedgerSummary, bad)


def test_the_sentence_names_the_longest_first() -> None:
    text = goodput.sentence(
        {TimeKind.WAITING: 90.0, TimeKind.TRAINING: 7200.0, TimeKind.STOPPING: 0.01, TimeKind.ENDING: 2.25}
    )
    assert text == "98.7 % of 2 h 1 min: training 2 h, waiting for nodes 1 min 30 s, ending 2.2 s"


def test_where_no_step_was_seen_the_goodput_is_not_said_to_be_nothing() -> None:
    seconds = dict.fromkeys(TimeKind, 0.0) | {TimeKind.STARTING: 3.0}
    assert goodput.sentence(seconds) == "no step was seen in 3.0 s: starting 3.0 s"
    assert goodput.sentence({}) == "no step was seen in 0.0 s"
    assert goodput.sentence({TimeKind.REPEATING: 3.0}) == "0.0 % of 3.0 s: repeating steps 3.0 s"


# -- any history -------------------------------------------------------------------------------

_STEPS = st.none() | st.integers(0, 100)
_EVENTS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(TimeKind), st.none() | st.floats(-50, 50)),
    st.tuples(st.just("see"), _STEPS, st.floats(0, 30), st.floats(0, 30), st.booleans()),
    st.tuples(st.just("suspect")),
)


@given(st.lists(st.tuples(st.floats(0, 20), _EVENTS), max_size=40), st.floats(0, 100))
def test_every_second_of_any_history_is_booked_once(
    history: list[tuple[float, tuple[object, ...]]], rest_s: float
) -> None:
    ledger, now_s, saved_s, certain = goodput.Ledger(at_s=5.0), 5.0, 0.0, dict.fromkeys(TimeKind, 0.0)
    for pause_s, event in history:
        now_s += pause_s
        ledger, saved_s = _take(ledger, event, now_s, saved_s)
        totals = goodput.totals(ledger, now_s)
        assert sum(totals.values()) == pytest.approx(now_s - 5.0, abs=1e-6)
        assert all(one_s >= -1e-9 for one_s in totals.values())
        before, certain = certain, {**dict.fromkeys(TimeKind, 0.0), **goodput.certain(ledger, now_s)}
        grew = [
            kind for kind in TimeKind if kind not in (TimeKind.STARTING, TimeKind.TRAINING)
        ]  # these know what nobody saw
        assert all(certain[kind] >= before[kind] - 1e-6 for kind in grew)
    assert sum(goodput.totals(ledger, now_s + rest_s).values()) == pytest.approx(now_s + rest_s - 5.0, abs=1e-6)


def _take(ledger: Ledger, event: tuple[object, ...], now_s: float, saved_s: float) -> tuple[Ledger, float]:
    match event:
        case ("enter", TimeKind() as kind, offset_s):
            since_s = now_s + offset_s if isinstance(offset_s, float) else None
            return goodput.enter(ledger, kind, now_s, since_s), 0.0
        case ("see", step, float(ago_s), float(more_s), is_saving):
            first = ledger.signs.first_s if ledger.signs is not None else now_s - ago_s
            signs = Signs(
                first_s=first,
                last_s=now_s - ago_s / 4,
                first_step=step if isinstance(step, int) else None,
                step=step if isinstance(step, int) else None,
                saved_s=saved_s + more_s,
                is_saving=bool(is_saving),
            )
            return goodput.see(ledger, signs, now_s), saved_s + more_s
    return goodput.suspect(ledger), saved_s
