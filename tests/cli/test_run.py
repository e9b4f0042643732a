"""run: any program under the launcher, as a user starts it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env, launch, launched, script

pytestmark = pytest.mark.process

NODE_0_HAS_NO_NAME = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "1",
    "PET_MASTER_ADDR": "nobody.invalid",
    "PET_MASTER_PORT": "29500",
}


def test_an_output_limit_says_how_much_it_dropped_and_the_diagnosis_still_has_the_last_lines(
    tmp_path: Path,
) -> None:
    words = tmp_path / "words"
    program = "seq 1000; seq 1000 >&2; exit 3"
    ended = launched(
        "run", "--output-limit", "5", "--termination-log", str(words), "--", "sh", "-c", program, code=3
    )
    assert ended.stdout.startswith("1\n2\n3\n4\n5\n... 995 lines dropped (--output-limit 5)\n")
    assert "... 995 lines dropped" in ended.stderr
    assert "1000" in words.read_text().splitlines()


def test_a_script_and_a_module_are_started_with_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.argv)")
    ended = launch("run", "--", "train.py", "--lr", "1", cwd=tmp_path)
    assert ended.stdout == "['train.py', '--lr', '1']\n"
    module = launch("run", "--", "-m", "train", "x", cwd=tmp_path)
    assert module.stdout.endswith("'x']\n")


def test_the_termination_message_names_reason_node_and_exit_code(tmp_path: Path) -> None:
    words = tmp_path / "termination-log"
    env = {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3", "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1"}
    program = "echo out of luck >&2; exit 9"
    options = ["--prefix", "--termination-log", str(words)]
    launched("run", *options, "--", "sh", "-c", program, env=env | {"JOB_COMPLETION_INDEX": "3"}, code=9)
    first, *rest = words.read_text().splitlines()
    assert first.startswith("reason=Failed ")
    assert "node=3" in first
    assert "exit=9" in first
    assert "out of luck" in rest


REFUSES = "import argparse\nargparse.ArgumentParser(prog='train.py').parse_args()\n"
WITHOUT_RANK = (
    "raise ValueError('Error initializing torch.distributed using env:// rendezvous: environment variable RANK "
    "expected, but not set')\n"
)


@pytest.mark.parametrize(
    ("program", "reason", "why"),
    [
        (REFUSES, "ProgramError", "it rejected its arguments"),
        (WITHOUT_RANK, "Misconfigured", "a torch job are not set"),
    ],
    ids=["arguments", "RANK"],
)
def test_refused_arguments_and_a_missing_rank_are_recognised_by_default(
    tmp_path: Path, program: str, reason: str, why: str
) -> None:
    ended = launch("run", "--", "python", script(tmp_path, program), "--lr=1")
    assert f"reason={reason} " in ended.stderr
    assert why in ended.stderr


@pytest.mark.torch
def test_a_name_that_never_resolves_ends_with_138_at_the_deadline(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    ended = launched(
        "run", "--wait-timeout", "0.5", "--", "train.py", env=NODE_0_HAS_NO_NAME, cwd=tmp_path, code=138
    )
    assert "nobody.invalid" in ended.stderr


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&-", ">/dev/full"])
def test_a_closed_or_full_stream_is_no_traceback(redirect: str, tmp_path: Path) -> None:
    words = f"{shlex.join(LAUNCHER)} run -- sh -c 'exit 7' {redirect}"
    ended = subprocess.run(("sh", "-c", words), env=clean_env(), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 7
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("name", ["random.py", "json.py", "logging.py", "trainer_launch/__init__.py", "torch.py"])
@pytest.mark.parametrize(
    "words",
    [
        ("run", "--nproc-per-node", "1"),
        pytest.param(("local", "--nodes", "1"), marks=pytest.mark.long("tests/cli/test_run.py")),
    ],
)
def test_a_users_file_of_any_name_is_not_taken_for_ours_or_pythons(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    shadow = tmp_path / name
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text("import os\nos._exit(9)\n")
    start_installed = "import sys; sys.path.remove(''); from trainer_launch.cli import main; main()"
    ended = subprocess.run(
        (sys.executable, "-c", start_installed, *words, "--", "sh", "-c", "exit 5"),
        env=clean_env(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 5, ended.stderr


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path) -> None:
    assert launch("run", "--", "true", env={"TMPDIR": str(tmp_path)}).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_pid_1_never_loads_what_is_heavy() -> None:
    """The launcher itself is looked at, while a child runs: none of the heavy libraries is mapped into it."""
    probe = "import os; print(open(f'/proc/{os.getppid()}/maps').read())"
    maps = launch("run", "--", sys.executable, "-c", probe).stdout
    assert "python" in maps
    assert not [line for line in maps.splitlines() if "libtorch" in line or "mpi4py" in line or "_yaml" in line]


@pytest.mark.process
def test_a_run_without_a_platform_says_that_it_runs_as_a_single_node() -> None:
    done = launch("run", "--", "true")
    assert "no platform found; running as a single node: engine=plain" in done.stderr
    assert "contract=" not in done.stderr
    assert "coordinator=" not in done.stderr


LINKS = {  # of a Service called trainer-launch-metrics, and of one called trainer-launch
    **{f"TRAINER_LAUNCH_METRICS_{name}": value for name, value in {
        "PORT": "tcp://10.0.0.1:9400", "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "9400",
        "PORT_9400_TCP": "tcp://10.0.0.1:9400", "PORT_9400_TCP_PROTO": "tcp",
    }.items()},
    "TRAINER_LAUNCH_PORT": "tcp://10.0.0.2:80",
    "TRAINER_LAUNCH_SERVICE_PORT_HTTP": "80",
}  # fmt: skip
MANY = {f"SVC_{number}_SERVICE_{part}": "10.0.0.1" for number in range(4_500) for part in ("HOST", "PORT")}


@pytest.mark.process
def test_links_to_9000_services_and_to_ours_change_nothing() -> None:
    done = launch("run", "--", "sh", "-c", "env | grep -c '^SVC_'", env={**LINKS, **MANY})
    assert (done.returncode, done.stdout.strip()) == (0, "9000"), done.stderr
    assert "TRAINER_LAUNCH_" not in done.stderr
    assert "10.0.0.1" not in done.stderr


# Once the launcher has chosen its port, another program gets it, if the kernel gives it to any.
OTHERS_ASK = """
import contextlib, socket
from trainer_launch.cli import main
from trainer_launch.planning import engines
task_of, other = engines.task_of, socket.socket()

def and_others_ask(*words, **more):
    task = task_of(*words, **more)
    with contextlib.suppress(OSError):
        other.bind(("127.0.0.1", task.loopback_port))
    return task

engines.task_of = and_others_ask
main()
"""


@pytest.mark.process
@pytest.mark.torch
def test_no_other_program_gets_the_port_where_the_workers_of_a_single_node_meet(tmp_path: Path) -> None:
    words = ("run", "--nproc-per-node", "1", "--", script(tmp_path, "print('trained')"))
    argv = (sys.executable, "-c", OTHERS_ASK, *words)
    done = subprocess.run(argv, env=clean_env(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


OWN_STORE = """
import os, torch, torch.distributed as dist
from datetime import timedelta

host, port, rank, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
is_master = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
store = dist.TCPStore(host, int(port), int(size), is_master, timedelta(seconds=30))
store.set(f"mine/{rank}", rank)
store.wait([f"mine/{other}" for other in range(int(size))])
dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=int(rank), world_size=int(size))
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.process
@pytest.mark.torch
def test_a_scripts_own_store_at_master_port_meets_as_under_torchrun(tmp_path: Path) -> None:
    done = launch("run", "--nproc-per-node", "2", "--", script(tmp_path, OWN_STORE))
    assert (done.returncode, done.stdout.count("met 2")) == (0, 2), done.stderr
