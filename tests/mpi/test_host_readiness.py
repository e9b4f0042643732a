"""The table of hosts that are waited for."""

from __future__ import annotations

from trainer_launch.mpi.host_readiness import Readiness, Stage, ready, stuck, summary, table

SEEN = {
    "a.job": Readiness(Stage.READY, ""),
    "b.job": Readiness(Stage.PORT, "Connection refused"),
    "c.job": Readiness(Stage.DNS, "Name or service not known"),
    "d.job": Readiness(Stage.KEY, "Permission denied (publickey)."),
}


def test_each_host_shows_what_it_has_passed_and_where_it_is_stuck() -> None:
    assert table(SEEN, 10, 80) == [
        "NAME   DNS  PORT  BANNER  KEY  READY",
        "b.job  ok   --                 Connection refused",
        "c.job  --                      Name or service not known",
        "d.job  ok   ok    ok      --   Permission denied (publickey).",
        "a.job  ok   ok    ok           yes",
    ]


def test_of_many_hosts_those_that_are_stuck_stand_first_and_the_rest_is_counted() -> None:
    many = {f"h{n}": Readiness(Stage.READY if n != 77 else Stage.PORT, "") for n in range(500)}
    lines = table(many, 6, 80)
    assert len(lines) == 6
    assert lines[1].startswith("h77 ")
    assert lines[-1] == "… and 496 more, 496 of them ready"


def test_no_line_is_longer_than_the_screen() -> None:
    long = {"x" * 90: Readiness(Stage.PORT, "y" * 90)}
    assert all(len(line) <= 60 for line in table(long, 5, 60))


def test_one_line_says_the_same_for_a_log() -> None:
    assert summary(SEEN, most=2) == (
        "1 of 4 hosts ready; waiting for b.job (port: Connection refused); "
        "c.job (DNS: Name or service not known); and 1 more"
    )


def test_who_is_ready_and_who_is_stuck() -> None:
    assert ready(SEEN) == {"a.job"}
    assert stuck(SEEN)["d.job"] == "key: Permission denied (publickey)."
