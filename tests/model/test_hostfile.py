"""Lists of hosts in the words of Open MPI, MPICH and Horovod: read, refused, written."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_launch.model import Member, hostfile
from trainer_launch.model.errors import ContractError

hosts = st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z0-9](\.[a-z]{1,10}){0,3}", fullmatch=True)
members = st.lists(
    st.builds(Member, hosts, st.integers(0, 1000)), max_size=5, unique_by=lambda member: member.host
).map(tuple)


def test_open_mpi_lines_are_read_with_or_without_slots() -> None:
    text = "# all\n\na.b slots=8\r\nc\nd slots = 2 max-slots=4 # two\n"
    assert hostfile.parse_open_mpi(text) == (Member("a.b", 8), Member("c"), Member("d", 2, 4))


@pytest.mark.parametrize(
    "line",
    [
        "a slots",
        "a slots=x",
        "a slot=1",
        "a slots=1 slots=2",
        "a slots=4 max_slots=2",
        "user@a slots=1",
        "a:4",
        "a slots=99999999",
    ],
)
def test_an_unknown_word_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(ContractError, match=r"hosts line 3 is .*expected HOST"):
        hostfile.parse_open_mpi(f"ok slots=1\n\n{line}\n", "hosts")


def test_a_host_without_slots_gets_one_per_line_as_open_mpi_counts() -> None:
    assert hostfile.parse_open_mpi("a\nb\na\n") == (Member("a", 2), Member("b"))


def test_a_host_may_be_repeated_but_not_contradicted() -> None:
    assert hostfile.parse_open_mpi("a slots=2\na slots=2\n") == (Member("a", 2),)
    with pytest.raises(ContractError, match="a with 2 and 3 slots"):
        hostfile.parse_open_mpi("a slots=2\na slots=3\n")


def test_hydra_takes_the_colon_from_the_right() -> None:
    text = "a.svc.cluster.local:8\nb\n[fd00::1]:2\nfd00::2:3\nz:0\n"
    want = (
        Member("a.svc.cluster.local", 8),
        Member("b"),
        Member("fd00::1", 2),
        Member("fd00::2", 3),
        Member("z", 0),
    )
    assert hostfile.parse_hydra(text) == want


@pytest.mark.parametrize(("text", "slots"), [("a:2\na:2", 4), ("a:1\nb:8\na:2", 3), ("a\na:2", 3), ("a\na", 2)])
def test_a_host_that_a_file_for_hydra_repeats_has_all_of_its_slots(text: str, slots: int) -> None:
    assert hostfile.parse_hydra(text)[0] == Member("a", slots)


@pytest.mark.parametrize("line", ["a:", ":1", "a:x", "a :1", "a b", "a:-1", "a slots=1"])
def test_hydra_refuses_what_it_does_not_know(line: str) -> None:
    with pytest.raises(ContractError, match="line 1"):
        hostfile.parse_hydra(line)


def test_horovod_lists_are_one_line() -> None:
    assert hostfile.parse_horovod("a:1, b:2") == (Member("a", 1), Member("b", 2))
    assert hostfile.parse_horovod("  ") == ()
    with pytest.raises(ContractError, match="HOST:N,HOST:N"):
        hostfile.parse_horovod("a:1,,b:1")


def test_a_discovery_script_is_read_without_running_it() -> None:
    script = "#!/bin/sh\necho gpu-mpi-launcher:8\n\necho gpu-mpi-worker-0:8\necho 'gpu-mpi-worker-10:8'"
    want = [("gpu-mpi-launcher", 8), ("gpu-mpi-worker-0", 8), ("gpu-mpi-worker-10", 8)]
    assert [(m.host, m.slots) for m in hostfile.parse_discovery(script)] == want
    assert hostfile.parse_discovery("a.b.svc\nc.d.svc:2\n") == (Member("a.b.svc"), Member("c.d.svc", 2))
    assert hostfile.parse_discovery("#!/bin/sh\n") == ()


@pytest.mark.parametrize("line", ["echo", "echo a b", "rm -rf /", "echo $(hostname)", "echo a;b"])
def test_a_discovery_script_that_does_more_is_refused(line: str) -> None:
    with pytest.raises(ContractError, match="line 2"):
        hostfile.parse_discovery(f"#!/bin/sh\n{line}\n")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("name-[0-3,5]", ["name-0", "name-1", "name-2", "name-3", "name-5"]),
        ("job-node-0-[0]\n", ["job-node-0-0"]),
        ("a,b-[1-2].x,c", ["a", "b-1.x", "b-2.x", "c"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("", []),
    ],
)
def test_flux_short_form_is_expanded(text: str, want: list[str]) -> None:
    assert hostfile.expand_hostlist(text) == tuple(want)


@pytest.mark.parametrize(
    "text",
    ["a-[3-1]", "a-[0-99999999]", "a-[", "a-]", "a-[x]", "a-[0][1]", "a,,b", "a-[]", "a,a", "a-[0-60000,1-60000]"],
)
def test_flux_short_form_is_bounded_and_checked(text: str) -> None:
    with pytest.raises(ContractError, match="hostlist is"):
        hostfile.expand_hostlist(text)


def test_too_many_hosts_are_refused() -> None:
    text = "".join(f"h{n}\n" for n in range(hostfile.MAX_HOSTS + 1))
    with pytest.raises(ContractError, match="at most 65536 hosts"):
        hostfile.parse_open_mpi(text)


@settings(max_examples=50, deadline=None, database=None)
@given(members)
def test_every_form_reads_back_what_it_writes(wanted: tuple[Member, ...]) -> None:
    assert hostfile.parse_open_mpi(hostfile.render_open_mpi(wanted)) == wanted
    assert hostfile.parse_hydra(hostfile.render_hydra(wanted)) == wanted
    assert hostfile.parse_horovod(hostfile.render_horovod(wanted)) == wanted
    assert hostfile.parse_discovery(hostfile.render_hydra(wanted)) == wanted
