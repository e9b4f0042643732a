"""Survivors of a lost rank keep their process and their state, with real workers of torch over gloo."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.launching import clean_env, launch, launched, script, shm_of_its_own, start
from tests.pods import of_the_fork_server

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).with_name("keeping.py"))
STEPS = 40
LONG = pytest.mark.long("tests/pytorch/test_generations.py")


def train(tmp_path: Path, faults: dict[int, tuple[Any, str]], *options: str, steps: int = STEPS) -> tuple[int, str]:
    """Run the job with these faults; its exit code, and all it printed."""
    words = (SCRIPT, str(steps), str(tmp_path / "faults"), json.dumps(faults))
    own = ("--nproc-per-node", "4", "--max-restarts", "50", "--grace", "10")
    kept = ("--incident-dir", str(tmp_path / "incidents"))
    ended = launch("run", *own, *kept, *options, "--", *words)
    return ended.returncode, ended.stdout + ended.stderr


def shown(output: str) -> list[dict[str, Any]]:
    """What each rank has shown of each generation."""
    return [json.loads(text) for text in re.findall(r"generation (\{.*?\})", output)]


def ends(output: str) -> set[str]:
    """The hashes of all ranks' models, optimizers and losses."""
    return {*re.findall(r"\bend (\w{20})", output)}


def forgotten(output: str) -> bool:
    """Whether gloo has left a rank that sent to the killed one in its collective for ever: it is replaced, too."""
    return "cannot leave its collective; it is replaced" in output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of a job without faults."""
    code, output = train(tmp_path_factory.mktemp("undisturbed"), {})
    (only,) = ends(output)
    assert code == 0, output
    return only


def test_after_a_kill_the_others_keep_their_processes_and_all_is_equal_to_the_last_bit(
    tmp_path: Path, undisturbed: str
) -> None:
    code, output = train(tmp_path, {7: (1, "kill"), 20: (0, "kill"), 33: (3, "kill")})
    assert (code, ends(output)) == (0, {undisturbed}), output
    pids = [{each["rank"]: each["pid"] for each in shown(output) if each["generation"] == n} for n in (1, 2, 3, 4)]
    kept = [
        {rank for rank in range(4) if before[rank] == after[rank]} for before, after in itertools.pairwise(pids)
    ]
    assert {each["step"] for each in shown(output) if each["generation"] == 3} == {20}, "nothing is done again"
    if forgotten(output):
        return
    assert kept == [{0, 2, 3}, {1, 2, 3}, {0, 1, 2}], output
    assert {(each["kept"], each["new"]) for each in shown(output) if each["generation"] == 2} == {
        (3, True),
        (3, False),
    }
    assert re.search(r"generation 2: 1 rank replaced in \d+\.\d+ s; 3 ranks kept their state at step 7", output), (
        output
    )


def test_ranks_that_send_at_the_moment_in_which_a_generation_ends_are_kept(tmp_path: Path) -> None:
    body = """
        import sys, torch, trainer_launch
        from torch import distributed
        state, ones = {"step": 0}, torch.ones(3)
        for generation in trainer_launch.generations():
            with generation:
                distributed.init_process_group("gloo")
                generation.share(state)
                sys.stdout.write(f"training in {generation.number}\\n")
                while generation.number <= 12:
                    distributed.all_reduce(ones)
                    state["step"] += 1
    """
    options = ("--nproc-per-node", "4", "--max-restarts", "50", "--incident-dir", "none")
    with start(
        "run", *options, "--", script(tmp_path, textwrap.dedent(body)), env={"PYTHONUNBUFFERED": "1"}
    ) as run:
        for number in range(1, 13):
            run.read_until(f"training in {number}$", times=4)
            of_the_fork_server(psutil.Process(run.pid), is_store=True).kill()
        output = run.ends_with(0)
    assert re.findall(r"(\d) ranks kept their state", output) == ["4"] * 12, output


@LONG
@pytest.mark.parametrize(
    "command",
    [
        ("run", "--nproc-per-node", "4", "--max-restarts", "50", "--incident-dir", "none"),
        ("run", "--nproc-per-node", "8", "--max-restarts", "50", "--incident-dir", "none"),
        ("rehearse", "--nodes", "3", "--nproc-per-node", "2", "--max-restarts", "50"),
        (
            *("rehearse", "--nodes", "2:3", "--nproc-per-node", "2", "--max-restarts", "50"),
            *("--fault", "kill pod node=2 at=line:generation"),
        ),
    ],
    ids=["1x4", "1x8", "3x2", "elastic"],
)
def test_twenty_kills_change_no_bit_of_the_losses(
    tmp_path: Path, undisturbed: str, command: tuple[str, ...]
) -> None:
    """Ranks 0 to 3 are there with each number of nodes."""
    faults = {step: (step % 4, "kill") for step in range(3, 3 + 20)}
    words = (SCRIPT, str(STEPS), str(tmp_path / "faults"), json.dumps(faults))
    ended = launch(*command, "--", *words, env={"TMPDIR": str(tmp_path)}, timeout_s=280)
    output = ended.stdout + ended.stderr
    assert (ended.returncode, ends(output)) == (0, {undisturbed}), output
    assert len(os.listdir(tmp_path / "faults")) == 20
    assert 0 not in {each["kept"] for each in shown(output) if each["generation"] > 1}, output


def test_the_programs_own_error_is_raised_and_told_as_ever(tmp_path: Path) -> None:
    code, output = train(tmp_path, {7: (2, "raise")}, "--max-restarts", "0")
    assert code == 1, output
    assert "rank 2 ended with exit code 1: ValueError: no luck" in output
    assert "lost a peer" not in output


def test_the_one_that_failed_is_replaced_and_its_error_is_told(tmp_path: Path, undisturbed: str) -> None:
    code, output = train(tmp_path, {7: (2, "raise")})
    assert (code, ends(output)) == (0, {undisturbed}), output
    assert "rank 2 ended with exit code 1: ValueError: no luck" in output
    assert {each["kept"] for each in shown(output) if each["generation"] == 2} == {3} or forgotten(output), output


def test_a_rank_that_is_stopped_is_replaced_and_those_that_wait_for_it_keep_their_state(
    tmp_path: Path, undisturbed: str
) -> None:
    code, output = train(tmp_path, {7: (2, "freeze")}, "--hang-timeout", "3")
    assert (code, ends(output)) == (0, {undisturbed}), output
    assert "rank 2 has been stopped (SIGSTOP)" in output
    assert {each["kept"] for each in shown(output) if each["generation"] == 2} == {3} or forgotten(output), output


def test_where_nobody_has_the_state_any_more_all_begin_as_at_the_start(tmp_path: Path, undisturbed: str) -> None:
    code, output = train(tmp_path, {7: ("all", "kill")}, "--max-restarts", "2")
    assert code != 0
    assert {each["kept"] for each in shown(output)} == {0}
    assert {each["new"] for each in shown(output)} == {True}


def test_a_second_death_while_the_ranks_meet_again_costs_only_that_rank(tmp_path: Path) -> None:
    body = """
        import json, os, signal, sys, torch
        from torch import distributed
        import trainer_launch
        state = {"sum": torch.zeros(4, dtype=torch.float64), "step": 0}
        for generation in trainer_launch.generations():
            with generation:
                if generation.number == 2 and generation.rank == 0:
                    os.kill(os.getpid(), signal.SIGKILL)  # the others are on their way into the new group
                distributed.init_process_group("gloo")
                generation.share(state)
                shown = json.dumps({"n": generation.number, "kept": generation.kept})
                print(f"generation {shown}", flush=True)
                while state["step"] < 30:
                    if generation.number == 1 and generation.rank == 1 and state["step"] == 9:
                        os.kill(os.getpid(), signal.SIGKILL)
                    ones = torch.ones(4, dtype=torch.float64)
                    distributed.all_reduce(ones)
                    state["sum"] += ones
                    state["step"] += 1
        print(f"sum {state['sum'].tolist()}", flush=True)
    """
    ended = launched(
        "run", "--nproc-per-node", "3", "--incident-dir", "none", "--", script(tmp_path, textwrap.dedent(body))
    )
    output = ended.stdout + ended.stderr
    assert output.count("[90.0, 90.0, 90.0, 90.0]") == 3, output
    assert {each["kept"] for each in shown(output) if each["n"] == 3} == {1}, "the new rank 1 had no state yet"


CHECKPOINTED = """
    import json, os, signal, sys, time, torch
    from torch import distributed
    import trainer_launch
    folder = os.path.dirname(__file__)
    rank_0, inside = os.path.join(folder, "rank-0"), os.path.join(folder, "inside")

    class Position:
        def state_dict(self):
            if where == "in share" and (generation.number, generation.rank) == (2, 1):
                with open(rank_0) as file:  # it sends the rest of the state
                    os.kill(int(file.read()), signal.SIGKILL)
            return {}
        def load_state_dict(self, state):
            pass

    where = sys.argv[1]
    state = {"sum": torch.zeros(4), "position": Position(), "rest": torch.zeros(16_000_000), "step": 0}
    for generation in trainer_launch.generations():
        with generation:
            if where == "before share" and (generation.number, generation.rank) == (2, 0):
                while not os.path.exists(inside):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            if generation.number == 2:
                open(inside, "w").close()
            distributed.init_process_group("gloo")
            if not generation.kept:
                state["sum"], state["step"] = torch.full((4,), 10.0), 5
            shown = json.dumps({"n": generation.number, "kept": generation.kept, "new": generation.is_new})
            print(f"generation {shown}", flush=True)
            if generation.rank == 0:
                with open(rank_0, "w") as file:
                    file.write(str(os.getpid()))
            generation.share(state)
            while state["step"] < 12:
                if generation.number == 1 and generation.rank == 1 and state["step"] == 9:
                    os.kill(os.getpid(), signal.SIGKILL)
                ones = torch.ones(4)
                distributed.all_reduce(ones)
                state["sum"] += ones
                state["step"] += 1
    print(f"sum {state['sum'].tolist()}", flush=True)
"""


@pytest.mark.parametrize(("where", "new"), [("before share", {True, False}), ("in share", {True})])
def test_where_the_last_rank_with_the_state_is_lost_all_go_on_from_the_checkpoint(
    tmp_path: Path, where: str, new: set[bool]
) -> None:
    """Rank 1 is new, and has no state yet, or only a part of it, which would be worse than none."""
    options = ("--nproc-per-node", "2", "--incident-dir", "none")
    ended = launched("run", *options, "--", script(tmp_path, textwrap.dedent(CHECKPOINTED)), where)
    output = ended.stdout + ended.stderr
    assert output.count("sum [24.0, 24.0, 24.0, 24.0]") == 2, output
    last = [each for each in shown(output) if each["n"] == 3]
    assert {each["kept"] for each in last} == {0}, output
    assert {each["new"] for each in last} == new, output


@pytest.mark.parametrize(
    "handler", ["pass", "signal.signal(signal.SIGTERM, lambda *_: None)"], ids=["none", "note"]
)
def test_survivors_that_wait_for_a_pod_hear_a_request_to_stop(tmp_path: Path, handler: str) -> None:
    options = ("--nodes", "2", "--nproc-per-node", "1", "--fault", "kill pod node=1 at=line:generation back=never")
    program = f"import runpy, signal\n{handler}\nrunpy.run_path({SCRIPT!r}, run_name='__main__')\n"
    words = (script(tmp_path, program), "100000", str(tmp_path / "faults"), "{}")
    with start("rehearse", *options, "--", *words, env={"TMPDIR": str(tmp_path)}) as run:
        run.read_until("1 of 2 nodes")
        run.signal(signal.SIGINT)
        status, output = run.end()
    assert status != 0
    assert "SIGKILL to the remaining" not in output, "it has ended when it was asked to"


@pytest.mark.parametrize(
    ("size", "fault", "kept"),
    [
        ("3", "kill worker node=1 worker=1 at=line:generation", 5),
        ("3", "kill pod node=1 at=line:generation back=1s", 4),
        ("3", "kill pod node=0 at=line:generation back=1s", 4),
        ("3", "term pod node=2 at=line:generation back=1s", 4),
        pytest.param("2:3", "kill pod node=1 at=line:generation back=8s", 4, marks=LONG),
        pytest.param("3", "partition node=1 at=line:generation for=8s", 6, marks=LONG),
    ],
)
def test_of_several_nodes_the_survivors_keep_their_state(tmp_path: Path, size: str, fault: str, kept: int) -> None:
    words = (SCRIPT, "1500" if "8s" in fault else "40", str(tmp_path / "faults"), "{}", "2")
    options = ("--nodes", size, "--nproc-per-node", "2", "--fault", fault)
    ended = launched("rehearse", *options, "--", *words, env={"TMPDIR": str(tmp_path)})
    output = ended.stdout + ended.stderr
    assert len(ends(output)) == 1, output
    assert {each["kept"] for each in shown(output) if each["generation"] == 2} == {kept} or forgotten(output), (
        output
    )


# -- without a launcher ----------------------------------------------------------------------------


def run_alone(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    path = script(tmp_path, textwrap.dedent(body))
    return subprocess.run([sys.executable, path], env=clean_env(), capture_output=True, text=True, check=False)


def test_without_a_launcher_there_is_one_generation_and_errors_are_raised(tmp_path: Path) -> None:
    body = """
        import trainer_launch
        for generation in trainer_launch.generations():
            with generation:
                print(generation, generation.is_new, flush=True)
        for generation in trainer_launch.generations():
            with generation:
                raise RuntimeError("Connection closed by peer")
    """
    ended = run_alone(tmp_path, body)
    assert ended.stdout == "<generation 1: rank 0 of 1, 0 kept> True\n"
    assert "RuntimeError: Connection closed by peer" in ended.stderr


def test_a_generation_that_is_not_used_as_a_context_is_one_clear_error(tmp_path: Path) -> None:
    ended = run_alone(tmp_path, "import trainer_launch\nfor _ in trainer_launch.generations():\n    pass\n")
    assert "RuntimeError: use each generation as a context: `with generation:`" in ended.stderr


def test_under_torchrun_a_lost_rank_is_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "faults"
    words = ("--nproc-per-node=2", "--max-restarts=1", SCRIPT, "20", str(folder), json.dumps({7: [1, "kill"]}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    env = clean_env({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})  # else torch 2.13 meets the addresses of the dead
    ended = subprocess.run(torchrun, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert {(each["generation"], each["new"]) for each in shown(ended.stdout)} == {(1, True), (2, True)}
    assert os.listdir(folder) == ["failed-7"]


HELPER = """
    import os, signal, subprocess
    from torch import distributed
    import trainer_launch

    helper = subprocess.Popen(("sleep", "600"), start_new_session=True)
    for generation in trainer_launch.generations():
        with generation:
            distributed.init_process_group("gloo")
            distributed.barrier()
            if generation.number == 1:
                if generation.rank == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                distributed.barrier()
            elif generation.rank == 0:
                print("helper", helper.poll(), flush=True)
    distributed.destroy_process_group()
"""


def test_what_a_survivor_has_started_goes_on_with_it_even_in_a_session_of_its_own(tmp_path: Path) -> None:
    ended = launched("run", "--nproc-per-node", "2", "--", script(tmp_path, textwrap.dedent(HELPER)))
    assert ended.stdout.splitlines()[-1] == "helper None"  # gloo of torch 2.8 prints there, too


# -- nothing is leaked -----------------------------------------------------------------------------

LEAKS = """
    import json, os, signal, sys, torch
    from torch import distributed
    import trainer_launch

    def used():
        pages = int(open("/proc/self/statm").read().split()[1])
        folders = {"threads": "/proc/self/task", "fds": "/proc/self/fd", "segments": "/dev/shm"}
        return {"kib": pages * 4, **{name: len(os.listdir(folder)) for name, folder in folders.items()}}

    kills, state = int(sys.argv[1]), {"sum": torch.zeros(4), "step": 0}
    for generation in trainer_launch.generations():
        with generation:
            distributed.init_process_group("gloo")
            generation.share(state)
            if generation.rank == 0:
                print(f"generation {json.dumps({'n': generation.number, **used()})}", flush=True)
            for step in range(5):
                if generation.rank == 1 and generation.number <= kills and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                distributed.all_reduce(torch.ones(4))
                state["step"] += 1
            if generation.number <= kills:
                distributed.barrier()
    distributed.destroy_process_group()
"""


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=LONG)])
def test_a_survivor_of_many_replacements_has_no_more_memory_threads_and_descriptors(
    tmp_path: Path, kills: int
) -> None:
    options = ("--nproc-per-node", "3", "--max-restarts", "999", "--incident-dir", "none")
    words = ("run", *options, "--", script(tmp_path, textwrap.dedent(LEAKS)), str(kills))
    ended = launched(*words, within=shm_of_its_own(), timeout_s=280)
    looks = shown(ended.stdout)
    assert len(looks) == kills + 1
    early, last = looks[5], looks[-1]
    assert (last["threads"], last["fds"]) == (early["threads"], early["fds"])
    assert last["kib"] - early["kib"] < 8192
    assert last["segments"] <= early["segments"] + 1


def test_the_example_goes_on_without_its_checkpoint(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "docker" / "examples" / "train_keeping_state.py"
    options = ("--nodes", "2", "--nproc-per-node", "1", "--fault", "kill worker node=1 at=step:40")
    words = (str(Path(__file__).with_name("in_time.py")), "1", str(example))
    ended = launched("rehearse", *options, "--", *words, env={"TMPDIR": str(tmp_path)}, cwd=tmp_path)
    output = ended.stdout + ended.stderr
    steps = [int(text) for text in re.findall(r"step (\d+) loss", output)]
    assert steps == [*range(1, 121)], "each step is done once"
    assert "1 rank kept its state" in output
