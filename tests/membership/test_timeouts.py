"""The times of membership fit each other, and no other module has one of its own."""

from __future__ import annotations

import pytest

from trainer_launch.membership import timeouts as t
from trainer_launch.model.settings import Settings

KUBELET_RESTARTS_S = 3.0
TORCH_GRACE_S = 30.0
ORDERS = {
    "a pod that kubelet restarts is back before the others go elsewhere": (KUBELET_RESTARTS_S, t.TAKEOVER_S),
    "a late renewal or two cost no lease": (2 * t.LEASE_S / t.RENEWALS, t.LEASE_S),
    "an attempt at a candidate ends before its lease would": (t.CONNECT_TO_CANDIDATE_S, t.LEASE_S),
    "node 0's address refuses more than once before others are asked sooner": (
        2 * t.SOON_PAUSE_S,
        t.TAKEOVER_REFUSED_S,
    ),
    "and they are asked later where nobody refuses": (t.TAKEOVER_REFUSED_S, t.TAKEOVER_S),
    "an attempt at node 0 leaves time for another before others are asked": (2 * t.CONNECT_S, t.TAKEOVER_S),
    "workers of a side without a coordinator are told to stop before another side forms": (t.BLIP_S, t.TAKEOVER_S),
    "a loop that only sleeps is woken before it counts as stuck": (2 * t.LOOK_S, t.STUCK_S),
    "pauses grow": (t.FIRST_PAUSE_S, t.SOON_PAUSE_S),
    "and go on growing": (t.SOON_PAUSE_S, t.LONGEST_PAUSE_S),
    "pauses stay short for longer than a takeover takes": (t.TAKEOVER_S, t.SOON_S),
    "who calls without pause is back within its first window": (t.SOON_PAUSE_S, t.GATHER_S),
    "one who waits in the longest pause comes within the first window": (
        t.LONGEST_PAUSE_S + t.CONNECT_S,
        t.WINDOW_S,
    ),
    "a node that stops its workers with torch's grace is waited for": (TORCH_GRACE_S, t.SETTLE_S),
    "a node whose workers succeeded outlives a takeover": (t.TAKEOVER_S + t.WINDOW_S, t.GONE_S),
    "a crowd is cleared faster than a single caller": (t.CROWD_S, t.GREET_S),
    "a client waits for a greeting as long as a server does": (t.GREET_S, t.GREETING_S),
    "who looks for candidates sees one before its nodes are refused no more": (
        t.LOOK_EVERY_S * (1 + t.LOOK_JITTER) + t.LOOK_ANSWER_S,
        t.YIELD_S,
    ),
    "and they ask others before": (t.TAKEOVER_S + t.CONNECT_TO_CANDIDATE_S + t.SOON_PAUSE_S, t.YIELD_S),
    "a look that takes long is still the next one": (10 * (t.LOOK_EVERY_S + t.LOOK_ANSWER_S), t.LOOK_GAP_S),
    "so is one that waits for slow name servers, counted from the beginning of the one before": (
        t.LOOK_EVERY_S * (1 + t.LOOK_JITTER) + 2 * (t.LOOK_NAMES_S + t.LOOK_ANSWER_S),
        t.LOOK_GAP_S,
    ),
    "looks that are far apart cannot bridge the time that proves absence": (2 * t.LOOK_GAP_S, t.UNSEEN_S),
    "coordinators elsewhere find node 0 before it begins without their nodes": (
        t.DNS_CACHE_S + 2 * (t.LOOK_EVERY_S * (1 + t.LOOK_JITTER) + t.LOOK_ANSWER_S),
        t.UNSEEN_S,
    ),
    "workers without a coordinator have ended before node 0 begins without them": (
        2 * t.LEASE_S + t.BLIP_S + t.STOPPING_S,
        t.UNSEEN_S,
    ),
    "node 0 begins without others before it is given up": (t.UNSEEN_S, t.REJOIN_S),
    "the termination message are said within the shortest grace": (t.HANG_UP_S, t.BLIP_S),
}


@pytest.mark.parametrize("name", ORDERS)
def test_times_are_in_order(name: str) -> None:
    shorter_s, longer_s = ORDERS[name]
    assert shorter_s <= longer_s


def test_the_settings_of_a_user_have_the_same_defaults() -> None:
    assert Settings.model_fields["wait_timeout"].default == t.REJOIN_S
