"""What is said of hosts that are waited for."""

from __future__ import annotations

from trainer_launch.mpi.host_readiness import Readiness, Stage, ready, stuck, summary

SEEN = {
    "a.job": Readiness(Stage.READY, ""),
    "b.job": Readiness(Stage.PORT, "Connection refused"),
    "c.job": Readiness(Stage.DNS, "Name or service not known"),
    "d.job": Readiness(Stage.KEY, "Permission denied (publickey)."),
}


def test_one_line_says_which_hosts_are_missing_and_why() -> None:
    assert summary(SEEN, most=2) == (
        "1 of 4 hosts ready; waiting for b.job (port: Connection refused); "
        "c.job (DNS: Name or service not known); and 1 more"
    )


def test_who_is_ready_and_who_is_stuck() -> None:
    assert ready(SEEN) == {"a.job"}
    assert stuck(SEEN)["d.job"] == "key: Permission denied (publickey)."
