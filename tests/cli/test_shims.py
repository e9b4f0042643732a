"""Programs called torchrun, mpirun, … that use the launcher; wrappers that `run` sees through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, launch, launched, program, script, start
from tests.cli.test_platforms import SLURM, TRAIN
from tests.ports import free_port
from trainer_launch.commands.install_shims import NAMES, decide

pytestmark = pytest.mark.process
REAL = 'echo "real $0 $@"'  # what a real program does here
torch = pytest.mark.torch


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    """A folder of shims."""
    folder = tmp_path / "shims"
    assert launch("install-shims", str(folder)).returncode == 0
    return folder


def run(words: list[str], path: list[Path], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run words with these folders first in PATH."""
    found = clean_env(env)
    found["PATH"] = os.pathsep.join([*map(str, path), found["PATH"]])
    return subprocess.run(words, env=found, capture_output=True, text=True, timeout=120)


def test_all_names_are_installed_and_installing_again_is_fine(shims: Path) -> None:
    assert sorted(path.name for path in shims.iterdir()) == sorted(NAMES)
    again = launched("install-shims", str(shims))
    assert f"export PATH={shims}:$PATH" in again.stdout


def test_the_line_that_it_prints_puts_a_directory_with_a_space_into_path(tmp_path: Path) -> None:
    line = launch("install-shims", str(tmp_path / "my shims")).stdout.splitlines()[-1]
    assert run(["sh", "-c", f"{line}; command -v torchrun"], []).stdout == f"{tmp_path}/my shims/torchrun\n"


def test_an_empty_directory_is_not_the_present_one() -> None:
    ended = launch("install-shims", "")
    assert (ended.returncode, "missing directory" in ended.stderr) == (2, True)


def test_a_real_program_is_never_overwritten(tmp_path: Path) -> None:
    real = program(tmp_path / "bin" / "torchrun", REAL)
    before = real.read_text()
    ended = launched("install-shims", str(real.parent), code=2)
    assert "has a torchrun that is not a shim" in ended.stderr
    assert real.read_text() == before


STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("words", "env", "above", "line"),
    [
        ("torchrun t.py", {}, None, "run -- torchrun t.py"),
        ("torchrun t.py", {"TRAINER_LAUNCH_SHIM": "off"}, None, None),
        ("torchrun t.py", {"TRAINER_LAUNCH_SHIM": "0"}, None, None),
        ("torchrun t.py", {"TRAINER_LAUNCH_SHIM": "False"}, None, None),
        ("torchrun t.py", {}, "plain", "run -- torchrun t.py"),
        ("torchrun t.py", {}, "torchrun", None),
        ("torchrun t.py", {}, "torch", None),
        ("torchrun t.py", {"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "a"}, None, None),
        ("torchrun t.py", {"LOCAL_RANK": "0"}, None, "run -- torchrun t.py"),  # Azure ML's
        ("torchrun t.py", {"PMI_RANK": "0"}, None, None),
        ("torchrun t.py", {"PMI_RANK": "0", **STEP, "SLURM_STEP_NUM_TASKS": "8"}, None, None),
        ("torchrun t.py", {"PMI_RANK": "0", **STEP}, None, "run -- torchrun t.py"),
        ("mpirun -np 2 a", {"OMPI_COMM_WORLD_RANK": "0"}, None, None),
        ("mpirun -np 2 a", {}, None, "run -- mpirun -np 2 a"),
        ("horovodrun --check-build", {}, None, None),
        ("mpirun --version", {}, None, None),
        ("torchrun", {}, None, None),
        ("accelerate config", {}, None, None),
        ("accelerate launch t.py", {}, None, "run -- accelerate launch t.py"),
        ("accelerate launch --num_processes 2 t.py", {}, None, "run -- accelerate launch --num_processes 2 t.py"),
        ("deepspeed t.py", {}, None, "run -- deepspeed t.py"),
        ("tune run --nnodes 2 r --config c", {}, None, "run -- tune run --nnodes 2 r --config c"),
        ("tune run r --config c", {}, None, None),
        ("tune download m", {}, None, None),
    ],
)
def test_a_shim_uses_the_launcher_where_that_helps(
    words: str, env: dict[str, str], above: str | None, line: str | None
) -> None:
    assert decide(words.split(), env, above) == (None if line is None else tuple(line.split()))


def test_the_real_program_runs_unchanged_where_the_launcher_cannot_help(shims: Path, tmp_path: Path) -> None:
    real = program(tmp_path / "bin" / "deepspeed", 'echo "real $0 $@"; exit 7')
    ended = run(["deepspeed", "t.py", "a b"], [shims, real.parent])
    assert (ended.returncode, ended.stdout) == (7, f"real {real} t.py a b\n")
    assert "deepspeed runs without the launcher, so failed workers are not restarted in place: " in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_program_that_is_only_a_shim_is_not_found(shims: Path, tmp_path: Path) -> None:
    ended = run(["deepspeed", "t.py"], [shims, tmp_path])
    assert ended.returncode == 127
    assert "was not found in PATH behind its shim" in ended.stderr


def test_a_module_of_the_job_with_a_name_of_pythons_does_not_break_a_shim(shims: Path, tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('not mine')\n")
    real = program(tmp_path / "bin" / "deepspeed", REAL)
    found = clean_env({"PATH": os.pathsep.join(map(str, (shims, real.parent, "/usr/bin", "/bin")))})
    ended = subprocess.run(
        ["deepspeed", "t.py"], env=found, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout == f"real {real} t.py\n", ended.stderr


@torch
def test_what_an_sdk_writes_recovers_in_place_from_a_killed_worker(shims: Path, tmp_path: Path) -> None:
    """The container's command is a shell, as Kubeflow's SDK writes it: no ENTRYPOINT, no launcher typed."""
    train = script(tmp_path, TRAIN)
    port = str(free_port())
    path = os.pathsep.join((str(shims), os.path.dirname(sys.executable), os.environ["PATH"]))
    both = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    pods = [
        subprocess.Popen(
            ["bash", "-c", f"true first; torchrun {train}; code=$?; echo end $code; exit $code"],
            env=clean_env({**both, "PET_NODE_RANK": str(rank), "JOB_COMPLETION_INDEX": str(rank), "PATH": path}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert pods[1].stdout is not None
        line = next(line for line in pods[1].stdout if "rank 1 of 2, restart 0" in line)
        os.kill(int(line.rpartition("pid ")[2].rstrip(".\n")), signal.SIGKILL)
        said = [pod.communicate(timeout=90)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert all(f"rank {rank} of 2, restart 1" in said[rank] for rank in range(2))


@torch
def test_run_sees_through_wrappers_and_a_shell(tmp_path: Path) -> None:
    # One write for each line: the other worker writes as well.
    text = (
        "import os\n"
        "seen = os.environ['RANK'], os.environ['A'], os.sched_getaffinity(0)\n"
        "os.write(1, ('worker %s %s %s\\n' % seen).encode())\n"
    )
    train = script(tmp_path, text)
    cpu = min(os.sched_getaffinity(0))
    line = f"env A=x taskset -c {cpu} torchrun --nproc-per-node 2 {train}"
    ended = launched("run", "--log-level", "warning", "--", "bash", "-c", line)
    assert sorted(ended.stdout.splitlines()) == [f"worker {rank} x {{{cpu}}}" for rank in range(2)]


@torch
def test_workers_of_deepspeed_get_their_local_rank_as_an_argument(tmp_path: Path) -> None:
    train = script(tmp_path, "import os, sys; os.write(1, f'{sys.argv[1:]}\\n'.encode())")
    ended = launched("run", "--", "deepspeed", "--num_gpus", "2", train, "--lr", "1")
    said = [line for line in ended.stdout.splitlines() if "--lr" in line]
    assert sorted(said) == [f"['--local_rank={rank}', '--lr', '1']" for rank in range(2)]


@torch
def test_a_launcher_in_front_of_a_script_leaves_the_workers_and_the_message_to_the_one_in_it(
    shims: Path, tmp_path: Path
) -> None:
    text = "import os, sys\nprint('restart', os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(23)"
    line = f"cd {tmp_path}; torchrun --max-restarts 1 {script(tmp_path, text)}; exit $?"
    message = tmp_path / "message"
    path = os.pathsep.join((str(shims), os.path.dirname(sys.executable), os.environ["PATH"]))
    env = {"PATH": path, "TRAINER_LAUNCH_TERMINATION_LOG": str(message)}
    ended = launched("run", "--", "bash", "-c", line, env=env, code=23)
    assert [line for line in ended.stdout.splitlines() if "restart" in line] == ["restart 0", "restart 1"]
    assert "rank=0" in message.read_text().splitlines()[0], "the launcher that knows the ranks has told its end"


def test_an_old_message_is_replaced(tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text("reason=Failed of the run before\n")
    os.utime(message, (1, 1))
    assert launch("run", "--termination-log", str(message), "--", "sh", "-c", "exit 4").returncode == 4
    assert "exit=4" in message.read_text()


@torch
def test_the_real_torchrun_runs_unchanged_where_it_has_another_python(shims: Path, tmp_path: Path) -> None:
    real = program(tmp_path / "bin" / "torchrun", REAL)
    real.write_text('#!/bin/sh\necho "real $@"; exit 3\n')
    ended = run(["torchrun", "t.py"], [shims, real.parent])
    assert (ended.returncode, ended.stdout) == (3, "real t.py\n")
    assert f"{real} runs in another Python than the launcher, {sys.executable}" in ended.stderr
    assert "install trainer-launch with pip for" in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_nodes_that_the_real_torchrun_does_not_know_of_are_said(shims: Path, tmp_path: Path) -> None:
    real = program(tmp_path / "bin" / "torchrun", REAL)
    slurm = {**SLURM, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    for env, said in ((slurm, True), ({"PET_NNODES": "2", "PET_NODE_RANK": "0"}, False)):
        ended = run(["torchrun", "--brand-new", "t.py"], [shims, real.parent], env)
        assert ("Each of the 2 nodes trains alone unless torchrun's own options" in ended.stderr) == said, (
            ended.stderr
        )


def test_a_contract_error_ends_no_job_that_says_itself_that_it_has_one_node(shims: Path, tmp_path: Path) -> None:
    real = program(tmp_path / "bin" / "torchrun", REAL)
    env = {"PET_NNODES": "two"}
    alone = run(["torchrun", "--standalone", "t.py"], [shims, real.parent], env)
    assert (alone.returncode, alone.stdout) == (0, f"real {real} --standalone t.py\n")
    assert "PET_NNODES is 'two'" in alone.stderr
    real.write_text(f"#!{sys.executable}\n")
    assert run(["torchrun", "t.py"], [shims, real.parent], env).returncode == 2


LOST = """
import os, signal, sys
print(f"restart {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.environ.get('PROFILE')} {sys.argv[1:]}", flush=True)
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""
STOPPED = """
import os, signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("trains", flush=True)
time.sleep(120)
"""


def ours_in_path(*first: Path) -> str:
    """PATH with these before the folder of the launcher's Python, where the real torchrun is."""
    return os.pathsep.join((*map(str, first), os.path.dirname(sys.executable), os.environ["PATH"]))


def check_recovered(ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("restart 1") == 2, ended.stdout + ended.stderr
    assert "WARNING" not in ended.stderr.replace("rank 1", ""), ended.stderr


@torch
@pytest.mark.parametrize("command", ["bash start.sh", "timeout 60 ./start.sh"])
def test_a_script_that_calls_torchrun_recovers_in_place_from_a_killed_worker(tmp_path: Path, command: str) -> None:
    text = f"set -e\ncd {tmp_path}\n# torchrun\ntorchrun --nproc-per-node 2 {script(tmp_path, LOST)}\necho end"
    program(tmp_path / "start.sh", text)
    ended = launch("run", "--", *command.split(), env={"PATH": ours_in_path()}, cwd=tmp_path)
    check_recovered(ended)
    assert ended.stdout.endswith("end\n")


TOLD = """
import os, sys
print(f"of {os.environ['WORLD_SIZE']} restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
sys.exit(int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2)
"""


@pytest.mark.long("tests/cli/test_shims.py")
@torch
@pytest.mark.parametrize(
    ("options", "line", "code"),
    [
        ("--max-restarts 2", "torchrun --nproc-per-node 2", 0),
        ("--max-restarts 1", "torchrun --nproc-per-node 2 --max-restarts 9", 1),
        ("--max-restarts 1", "trainer-launch run --max-restarts 2 -- torchrun --nproc-per-node 2", 0),
    ],
)
def test_options_after_run_hold_in_a_script_unless_a_launcher_in_it_has_its_own(
    tmp_path: Path, options: str, line: str, code: int
) -> None:
    line = line.replace("trainer-launch", f"{sys.executable} -m trainer_launch")
    program(tmp_path / "start.sh", f"{line} {script(tmp_path, TOLD)}")
    ended = launched(
        "run", *options.split(), "--", "./start.sh", env={"PATH": ours_in_path()}, cwd=tmp_path, code=code
    )
    assert [ended.stdout.count(f"of 2 restart {number}") for number in range(4)] == [2, 2, 2 - 2 * code, 0]


@torch
def test_a_login_shell_keeps_its_profile_and_the_launcher(tmp_path: Path) -> None:
    """The profile puts the job's Python first in PATH, as conda's does."""
    (tmp_path / ".bash_profile").write_text(f"export PROFILE=read PATH={ours_in_path()}\n")
    line = f"torchrun --nproc-per-node 2 {script(tmp_path, LOST)}"
    ended = launch("run", "--", "bash", "-lc", line, env={"HOME": str(tmp_path)})
    check_recovered(ended)
    assert "restart 1 read" in ended.stdout


@pytest.mark.long("tests/cli/test_shims.py")
@torch
def test_a_wrapper_with_the_launchers_own_python_recovers_in_place(tmp_path: Path) -> None:
    """Such a wrapper puts its environment first in PATH, before the shims."""
    words = ("uv", "run", "--no-sync")
    program(tmp_path / "bin" / words[0], f'shift {len(words) - 1}; export PATH={ours_in_path()}; exec "$@"')
    typed = (*words, "torchrun", "--nproc-per-node", "2", script(tmp_path, LOST))
    check_recovered(launch("run", "--", *typed, env={"PATH": ours_in_path(tmp_path / "bin")}))


@pytest.mark.parametrize("line", ["uv run", "conda run -n x"])
def test_a_wrapper_with_another_python_runs_its_own_torchrun_and_says_what_is_lost(
    tmp_path: Path, line: str
) -> None:
    words = line.split()
    real = program(tmp_path / "venv" / "torchrun", REAL)
    program(tmp_path / "bin" / words[0], f'shift {len(words) - 1}; export PATH={real.parent}:$PATH; exec "$@"')
    ended = launch("run", "--", *words, "torchrun", "t.py", env={"PATH": ours_in_path(tmp_path / "bin")})
    assert (ended.returncode, ended.stdout) == (0, f"real {real} t.py\n")
    assert "torchrun runs without the launcher, so failed workers are not restarted in place" in ended.stderr
    assert "install trainer-launch with pip for" in ended.stderr


@torch
def test_a_stop_reaches_the_workers_of_a_script_and_they_may_save(tmp_path: Path) -> None:
    program(tmp_path / "start.sh", f"torchrun --nproc-per-node 2 {script(tmp_path, STOPPED)}\necho never")
    with start("run", "--", "bash", "start.sh", env={"PATH": ours_in_path()}, cwd=tmp_path) as started:
        started.read_until("trains", 2)
        started.signal(signal.SIGTERM)
        said = started.ends_with(143)
    assert said.count("saved") == 2, said


def test_shims_for_scripts_can_be_switched_off_and_are_explained(tmp_path: Path) -> None:
    words = ("--", "sh", "-c", "command -v torchrun; exit 0")
    on = launch("run", *words)
    assert on.stdout.endswith("/shims/torchrun\n"), on.stderr
    assert "/shims/torchrun" not in launch("run", *words, env={"TRAINER_LAUNCH_SHIM": "off"}).stdout
    assert "PATH=/tmp/trainer-launch/shims:" in launch("explain", *words).stdout
    assert "shims" not in launch("explain", *words, env={"TRAINER_LAUNCH_SHIM": "off"}).stdout
