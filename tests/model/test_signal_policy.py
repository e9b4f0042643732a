"""What each signal is for, as a user says it."""

from __future__ import annotations

import signal

import pytest

from trainer_launch.model import signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.model.signal_policy import SignalAction

TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


def test_names_are_read_with_and_without_sig_in_any_case():
    assert signal_policy.parse("USR1=checkpoint, sigterm=Drain,RTMIN=terminate") == {
        USR1: SignalAction.CHECKPOINT,
        TERM: SignalAction.DRAIN,
        int(signal.SIGRTMIN): SignalAction.TERMINATE,
    }
    assert signal_policy.parse("") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("USR1", "one of forward, checkpoint, drain, terminate"),
        ("USR1=save", "one of forward, checkpoint, drain, terminate"),
        ("USR9=forward", "unknown signal 'USR9'"),
        ("=drain", "unknown signal ''"),
        ("KILL=forward", "SIGKILL, which the launcher cannot pass on"),
        ("STOP=drain", "SIGSTOP, which"),
        ("CHLD=drain", "SIGCHLD, which"),
        ("SEGV=drain", "SIGSEGV, which"),
        ("USR1=drain,SIGUSR1=forward", "twice"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(text, said):
    with pytest.raises(UsageError, match=said):
        signal_policy.parse(text)


def test_by_default_requests_to_stop_stop_and_all_else_is_forwarded():
    for number in signal_policy.STOP_SIGNALS:
        assert signal_policy.action_of(number, {}) is SignalAction.TERMINATE
    for other in signal_policy.RELAYED:
        assert signal_policy.action_of(other, {}) is SignalAction.FORWARD


def test_torchs_agent_is_asked_to_stop_by_a_signal_that_it_does_not_hand_on():
    assert signal_policy.stop_signal({}) == TERM
    assert signal_policy.stop_signal(signal_policy.parse("TERM=drain")) == signal.SIGINT
    assert signal_policy.stop_signal(signal_policy.parse("TERM=drain,INT=forward")) == signal.SIGQUIT
    with pytest.raises(UsageError, match="leaves no signal that stops the job"):
        signal_policy.stop_signal(signal_policy.parse("TERM=drain,INT=drain,QUIT=drain,HUP=forward"))
