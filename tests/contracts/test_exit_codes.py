"""What the v1 operator's ExitCode policy does with a code (pkg/util/train/train_util.go of release-1.9)."""

from __future__ import annotations

import pytest

from trainer_launch.model import exit_codes


@pytest.mark.parametrize(
    ("code", "retryable"),
    [
        (0, None),
        (1, False),
        (2, False),
        (3, False),
        (126, False),
        (127, False),
        (128, True),  # the user guide says no; the code says yes
        (130, True),
        (137, True),
        (138, True),
        (139, True),  # the user guide says no; the code says yes
        (143, True),
        (48879, True),  # stands for a container without a terminated state
    ],
)
def test_the_policy_starts_again_above_127(code: int, retryable: bool | None) -> None:
    assert exit_codes.retryable(code) is retryable


def test_our_own_codes_say_what_they_mean_under_both_lists_of_the_policy() -> None:
    permanent_in_guide, retryable_in_guide = {1, 2, 126, 127, 128, 139}, {130, 137, 138, 143}
    assert {
        exit_codes.FAILED,
        exit_codes.MISCONFIGURED,
        exit_codes.NOT_EXECUTABLE,
        exit_codes.NOT_FOUND,
    } <= permanent_in_guide
    assert {exit_codes.INFRASTRUCTURE, exit_codes.STOPPED} <= retryable_in_guide
    assert all(exit_codes.retryable(code) for code in retryable_in_guide)
