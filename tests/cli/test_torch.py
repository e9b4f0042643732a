"""run and local with torch elastic: exit codes, first failure, stopping, several nodes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import (
    DEADLINE_S,
    LAUNCHER,
    clean_env,
    launch,
    launched,
    program,
    script,
    shm_of_its_own,
    start,
)
from tests.ports import free_port

pytestmark = [pytest.mark.torch, pytest.mark.process]

RANK = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
WAIT = "time.sleep(60)\n"
both_ways = pytest.mark.parametrize("method", ["auto", "exec"])


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(42)", 42, "exit=42"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal=SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "signal=SIGSEGV"),
        ("raise ValueError('no luck')", 1, "exit=1"),
    ],
)
def test_the_first_failing_workers_end_is_the_pods(tmp_path: Path, ending: str, code: int, said: str) -> None:
    words = tmp_path / "words"
    train = script(tmp_path, f"{RANK}if rank == 1:\n    {ending}\n{WAIT}")
    options = ["--nproc-per-node", "2", "--prefix", "--termination-log", str(words)]
    launched("run", *options, "--", train, code=code)
    first, *rest = words.read_text().splitlines()
    assert "rank=1" in first
    assert said in first
    if "ValueError" in ending:
        assert any("no luck" in line for line in rest)


@both_ways
def test_of_two_failures_in_one_instant_the_first_is_blamed(tmp_path: Path, method: str) -> None:
    """torch's own stamps have whole seconds, and it would blame the lower rank."""
    note = tmp_path / "note"
    dying = f"    open({str(note)!r}, 'x').write(f'{{os.getpid()}}\\n')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    watching = f"""
def state():
    try:
        pid = open({str(note)!r}).read().strip()
        return open(f'/proc/{{pid}}/stat').read().rpartition(')')[2].split()[0] if pid else 'R'
    except FileNotFoundError:
        return 'Z' if os.path.exists({str(note)!r}) else 'R'
while state() != 'Z':
    time.sleep(0.001)
sys.exit(5)
"""
    ended = launched(
        "run",
        "--nproc-per-node=2",
        "--max-restarts=0",
        f"--start-method={method}",
        "--",
        script(tmp_path, f"{RANK}if rank == 1:\n{dying}{watching}"),
        code=137,
    )
    assert "rank=1" in ended.stderr


def test_workers_that_succeed_end_the_pod_with_0_and_see_what_torchrun_would_show_them(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "MASTER_ADDR")
    train = script(tmp_path, f"import os, sys\nprint([os.environ[n] for n in {names}], sys.argv[1:])\n")
    ended = launched("run", "--nproc-per-node", "2", "--prefix", "--", train, "--lr", "1")
    assert sorted(ended.stdout.splitlines()) == [
        "[0:0] ['0', '0', '2', '2', '0', '1', '127.0.0.1'] ['--lr', '1']",
        "[0:1] ['1', '1', '2', '2', '0', '1', '127.0.0.1'] ['--lr', '1']",
    ]


def test_a_worker_whose_rank_the_pod_itself_has_ends_without_a_word(tmp_path: Path) -> None:
    """As in a PyTorchJob of 1 worker for each pod."""
    train = script(tmp_path, "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n")
    one = {"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "0"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meet = {f"{prefix}{name}": value for prefix in ("", "PET_") for name, value in place.items()}
    ended = launched("run", "--", train, env=one | meet)
    assert "Traceback" not in ended.stderr


def test_torch_restarts_failed_workers_as_often_as_told_and_leaves_no_temporary_files(tmp_path: Path) -> None:
    train = script(tmp_path, "import os, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary), "TRAINER_LAUNCH_INCIDENT_DIR": str(tmp_path / "incidents")}
    assert launch("run", "--", "torchrun", "--max-restarts=1", train, env=env).returncode == 0
    assert launch("run", "--", "torchrun", "--max-restarts=0", train, env=env).returncode == 1
    assert list(temporary.iterdir()) == []


def test_a_job_that_advances_has_all_restarts_that_it_may_however_soon_each_of_them_fails(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("0")
    train = f"""
import sys
step = int(open({str(checkpoint)!r}).read()) + 1
open({str(checkpoint)!r}, 'w').write(str(step))
print('step', step, flush=True)
sys.exit(step < 7)
"""
    words = ("run", "--prefix", "--nproc-per-node", "1", "--max-restarts", "99", "--")
    launched(*words, script(tmp_path, train))
    assert checkpoint.read_text() == "7", "without new steps the fifth failure is the last"


@pytest.mark.parametrize("how", ["leaves", "fails"])
def test_the_rank_that_leaves_first_has_the_exit_code_although_its_connections_close_before_it_has_ended(
    tmp_path: Path, how: str
) -> None:
    """On a GPU the end of a process takes seconds: until then, the others have failed and all are asked to end."""
    train = f"""
import atexit, os, time
rank, left = os.environ["RANK"], {str(tmp_path / "left")!r}
def close():
    open(left, "w").close()
    time.sleep(60)
if rank == "1":
    atexit.register(close)
    raise {"SystemExit(3)" if how == "leaves" else "ValueError('no luck')"}
while not os.path.exists(left):
    time.sleep(0.02)
raise RuntimeError("[../gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:23456")
"""
    ended = launch("run", "--nproc-per-node", "2", "--max-restarts", "0", "--", script(tmp_path, train))
    assert ended.returncode == (3 if how == "leaves" else 1), ended.stderr
    assert "reason=Failed rank=1 " in ended.stderr


def test_a_disk_that_takes_nothing_more_is_no_reason_to_end_the_job(tmp_path: Path) -> None:
    """Files can be made, but no byte can be written to one."""
    train = script(tmp_path, "import os, sys\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n")
    words = [*LAUNCHER, "run", "--nproc-per-node", "2", "--max-restarts", "1", "--", train]
    full = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *words]
    ended = subprocess.run(full, env=clean_env(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0, ended.stderr


def test_a_failing_single_node_has_the_jobs_budget_and_its_workers_own_message(tmp_path: Path) -> None:
    """What torch's @record writes is in the termination message."""
    train = """
import json, os, sys
told = [os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")]
print("failures", *told, flush=True)
extra = {"py_callstack": "here\\nthere", "timestamp": "1"}
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    json.dump({"message": {"message": "ValueError: no luck", "extraInfo": extra}}, file)
sys.exit(3)
"""
    words = tmp_path / "words"
    ended = launched(
        "run",
        "--max-restarts=2",
        "--termination-log",
        str(words),
        "--",
        "torchrun",
        script(tmp_path, train),
        code=3,
    )
    assert ended.stdout.splitlines() == [f"failures {number} 2" for number in range(3)]
    first, *rest = words.read_text().splitlines()
    assert "ValueError: no luck" in first
    assert "there" in rest


def test_only_ports_of_the_range_are_opened_and_the_secret_stays_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2\n")
    train = script(tmp_path, "import os\nprint(os.environ['MASTER_PORT'])\n")
    options = ["--port-range", "41000-41049", "--secret-file", str(secret)]
    ended = launched("run", *options, "--", "torchrun", train)
    assert int(ended.stdout) in range(41000, 41050)
    explained = launch("explain", *options, "--json", "--", "torchrun", train).stdout
    assert json.loads(explained)["plan"]["hosting"]["port"] in range(41000, 41050)
    assert "hunter2" not in explained + ended.stderr
    secret.write_text("")
    ended = launch("run", *options, "--", "torchrun", train)
    assert (ended.returncode, "is empty" in ended.stderr) == (2, True)


def test_a_module_and_another_interpreters_flags_reach_the_workers(tmp_path: Path) -> None:
    script(tmp_path, "import sys\nprint(sys.argv[1:], sys.flags.dev_mode)\n")
    env = {"PYTHONPATH": str(tmp_path)}
    module = launch("run", "--nproc-per-node", "1", "--", "-m", "train", "x", env=env)
    assert module.stdout == "['x'] False\n"
    flags = launch("run", "--nproc-per-node", "1", "--", sys.executable, "-X", "dev", f"{tmp_path}/train.py", "y")
    assert flags.stdout == "['y'] True\n"


@pytest.mark.parametrize("words", [["run"], ["local", "--nodes", "2"]])
def test_a_shell_script_runs_as_workers_where_their_number_is_given(tmp_path: Path, words: list[str]) -> None:
    ranks = program(tmp_path / "w.sh", "echo rank $RANK of $WORLD_SIZE")
    ended = launched(*words, "--nproc-per-node", "2", "--", str(ranks))
    size = 4 if "local" in words else 2
    said = sorted(line.rpartition("] ")[2] for line in ended.stdout.splitlines() if "rank " in line)
    assert said == [f"rank {rank} of {size}" for rank in range(size)]


LOADER = f"""{RANK}
import select, subprocess
# A data loader's worker: in the leader's group, and heard when SIGTERM reaches it.
loader = subprocess.Popen([sys.executable, "-c", '''
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("loader-signalled", flush=True))
print("loader-ready", flush=True)
while True: time.sleep(0.1)
'''], stdout=subprocess.PIPE, text=True)
assert loader.stdout.readline() == "loader-ready\\n"
def save(*_):
    heard, _, _ = select.select([loader.stdout], [], [], 0.5)
    print("loader heard %s\\n" % ("SIGTERM" if heard else "nothing",), end="", flush=True)
    print("saved %s\\n" % rank, end="", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready %s\\n" % rank, end="", flush=True)
{WAIT}"""


@both_ways
def test_asked_to_stop_workers_save_while_their_loaders_live_and_the_pod_ends_with_143(
    tmp_path: Path, method: str
) -> None:
    words = ("run", "--nproc-per-node", "2", "--prefix", "--start-method", method, "--", script(tmp_path, LOADER))
    with start(*words) as launcher:
        launcher.read_until("ready", times=2)
        launcher.signal(signal.SIGTERM)
        output = launcher.ends_with(143)
    assert output.count("loader heard nothing") == 2, output
    assert "saved 0" in output
    assert "saved 1" in output


@pytest.mark.parametrize(
    ("options", "env"),
    [
        (("--grace", "2"), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60"}),
        ((), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"}),
    ],
)
def test_workers_that_ignore_sigterm_are_killed_at_the_end_of_the_grace(tmp_path: Path, options, env) -> None:
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(f'ready {os.getpid()}', flush=True)\n"
    train = script(tmp_path, RANK + deaf + WAIT)
    with start("run", "--nproc-per-node", "1", *options, "--", train, env=env) as launcher:
        (pid,) = launcher.read_until(r"^ready (\d+)")
        launcher.signal(signal.SIGTERM)
        output = launcher.ends_with(143)
    assert "grace 2 s" in output
    assert not Path(f"/proc/{pid}").exists()


LEAVES = """
import pathlib, subprocess
from multiprocessing import resource_tracker, shared_memory
folder = pathlib.Path({folder!r})
segment = folder / "segment"
if rank == 0:
    sys.exit(0)
if not segment.exists():
    leaked = shared_memory.SharedMemory(create=True, size=1 << 20)
    leaked.buf[:] = bytes(1 << 20)
    os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)  # who would tidy up
    for number in range(3):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if number > 0:
                os.setsid()
            if number > 1 and os.fork() > 0:
                os._exit(0)
            (folder / f"pid-{{os.getpid()}}").touch()
            time.sleep(60)
    bare = subprocess.Popen(["setsid", "env", "-i", "sleep", "60"])
    (folder / f"pid-{{bare.pid}}").touch()
    while len(list(folder.glob("pid-*"))) < 4:
        time.sleep(0.01)
    segment.write_text(leaked.name)
    os.kill(os.getpid(), signal.SIGKILL)
pids = [path.name.partition("-")[2] for path in folder.glob("pid-*")]
alive = [pid for pid in pids if pathlib.Path(f"/proc/{{pid}}/cmdline").exists()]
seen = ("before:", len(pids), "alive:", len(alive), "shared:", os.path.exists("/dev/shm/" + segment.read_text()))
print(" ".join(map(str, seen)) + "\\n", end="")  # at once: the other worker writes as well
"""


def test_workers_start_again_after_a_cleanup(tmp_path: Path) -> None:
    """Daemons, deaf to SIGTERM, or with an empty environment, and shared memory of a worker that was killed."""
    train = script(tmp_path, RANK + LEAVES.format(folder=str(tmp_path)))
    words = ("run", "--nproc-per-node", "2", "--max-restarts", "1", "--", train)
    ended = launched(*words, within=shm_of_its_own())
    assert "before: 4 alive: 0 shared: False" in ended.stdout
    assert "the grace period is over; sending SIGKILL to the remaining processes" in ended.stderr, ended.stderr
    assert "removed 1 shared memory segment (1 MiB) of dead workers" in ended.stderr, ended.stderr


FAILS = """
import glob, pathlib
starts = pathlib.Path({starts!r})
with starts.open("a") as file:
    file.write("start\\n")
start = starts.read_text().count("start")
run = os.environ["TRAINER_LAUNCH_RUN_DIR"]
if start < 5:
    raise ValueError("again")
print("left:", *sorted(os.path.relpath(path, run) for path in glob.glob(run + "/**", recursive=True)))
"""


def test_a_preloaded_module_that_crashes_the_fork_server_costs_only_the_fork(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    ended = launch("run", "--nproc-per-node", "2", "--preload", "mine", "--", script(tmp_path, "print('trained')"))
    assert (ended.returncode, ended.stdout.count("trained")) == (0, 2), ended.stderr
    assert "workers start without the fork server: the fork server e" in ended.stderr


def test_failures_leave_no_files_behind(tmp_path: Path) -> None:
    """A job may fail and go on for weeks, and what lies in /tmp takes memory or its node's disk."""
    train = script(tmp_path, RANK + FAILS.format(starts=str(tmp_path / "starts")))
    ended = launched("run", "--nproc-per-node", "1", "--max-restarts", "9", "--start-method", "auto", "--", train)
    assert " attempt=5 " in ended.stderr
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("left:")]
    assert len(re.findall(r"attempt_\d+(?= |$)", line)) == 1
    assert "error.json" not in line
