"""A typed mpirun: what is taken out of it, what stays, and what is refused."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.planning import mpi_options


def parse(line: str) -> mpi_options.Typed:
    return mpi_options.parse(shlex.split(line))


@pytest.mark.parametrize(
    "word", ["mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.hydra", "/opt/mpi/bin/mpirun", "orterun", "prterun"]
)
def test_these_are_mpiruns(word: str) -> None:
    assert mpi_options.is_mpirun(word)


def test_the_sdks_command_gives_its_hostfile_and_keeps_its_script() -> None:
    taken = parse("mpirun --hostfile /etc/mpi/hostfile bash -c 'python -c \"print(1)\"'")
    assert taken.hostfile == "/etc/mpi/hostfile"
    assert taken.program == ("bash", "-c", 'python -c "print(1)"')


def test_flytes_command_keeps_all_options_in_their_order() -> None:
    taken = parse(
        "mpirun --allow-run-as-root -bind-to none -map-by slot -x LD_LIBRARY_PATH -x PATH -x NCCL_DEBUG=INFO "
        "-mca pml ob1 -mca btl ^openib -np 6 python train.py -np 3"
    )
    assert taken.number == 6
    assert taken.named == ("LD_LIBRARY_PATH", "PATH", "NCCL_DEBUG")
    assert {"allow-run-as-root", "pml", "btl"} <= taken.names
    assert shlex.join(taken.kept) == (
        "--allow-run-as-root -bind-to none -map-by slot -x LD_LIBRARY_PATH -x PATH -x NCCL_DEBUG=INFO "
        "-mca pml ob1 -mca btl '^openib'"
    )
    assert taken.program == ("python", "train.py", "-np", "3")


def test_hydras_words_are_understood_alike() -> None:
    taken = parse("mpiexec.hydra -n 4 -ppn 2 -f hosts -genv NCCL_DEBUG INFO -genvlist A,B ./a.out -n 9")
    assert (taken.number, taken.hostfile, taken.named) == (4, "hosts", ("A", "B"))
    assert taken.kept == ("-ppn", "2", "-genv", "NCCL_DEBUG", "INFO", "-genvlist", "A,B")
    assert taken.program == ("./a.out", "-n", "9")


def test_several_hosts_options_are_one_list() -> None:
    assert parse("mpirun -H a:2 --host b,c ./a.out").hosts == "a:2,b,c"


def test_of_several_programs_each_keeps_its_number() -> None:
    taken = parse("mpirun -np 1 ./server : -np 2 ./worker")
    assert taken.number is None
    assert taken.kept == ("-np", "1")
    assert taken.program == ("./server", ":", "-np", "2", "./worker")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mpirun", "has no program"),
        ("mpirun -np 2", "has no program"),
        ("mpirun -np", "lacks its value"),
        ("mpirun --mca btl", "lacks its value"),
        ("mpirun -np two ./a.out", "expected a number"),
        ("mpirun -np 0 ./a.out", "expected a number"),
        ("horovodrun -np 2", "has no program"),
        ("horovodrun --blacklist-cooldown-range 1", "lacks its value"),
        ("horovodrun -x 1 y", "unknown option of horovodrun: 'x'; write it in full"),
    ],
)
def test_what_cannot_be_understood_is_refused_in_one_sentence(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(line)


@pytest.mark.parametrize(
    ("line", "number", "hosts", "kept", "program"),
    [
        ("-np 2 train", 2, None, "", "train"),
        ("--num-proc=2 -H a:1,b:1 python t.py -np 9", 2, "a:1,b:1", "", "python t.py -np 9"),
        ("-np 2 --min-np 1 -p 22 -i /k x", 2, None, "--min-np 1 -p 22 -i /k", "x"),
        ("-np 1 --gloo --new=1 -np 2 -- x --gloo", 2, None, "--gloo --new=1", "x --gloo"),
        ("-np 2 --blacklist-cooldown-range 5 9 x", 2, None, "--blacklist-cooldown-range 5 9", "x"),
    ],
)
def test_horovodruns_options_are_read_as_its_own_parser_reads_them(
    line: str, number: int, hosts: str | None, kept: str, program: str
) -> None:
    taken = parse(f"horovodrun {line}")
    assert (taken.number, taken.hosts, shlex.join(taken.kept), shlex.join(taken.program)) == (
        *(number, hosts, kept, program),
    )


@pytest.mark.parametrize(
    ("line", "elastic"),
    [("-np 2", False), ("-np 2 --min-np 1", True), ("--max-np 2", False), ("--host-discovery-script d", True)],
)
def test_it_is_elastic_by_horovods_own_rule(line: str, elastic: bool) -> None:
    assert parse(f"horovodrun {line} x").is_elastic is elastic


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5", "9" * 20])
def test_a_number_of_horovodrun_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--min-num-proc is .* expected a number from 1"):
        parse(f"horovodrun --min-np {text} x").number_of("min-num-proc", "min-np")
