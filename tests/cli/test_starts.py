"""How programs start for real: below nohup, by mpirun, as another user; and what is refused then."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.cli.launching import LAUNCHER, clean_env, ended, launch, launched, program, script
from tests.conftest import quick_first, require
from tests.mpi.ssh.pods import opened
from tests.waiting import eventually

pytestmark = pytest.mark.process
OPEN_MPI, MPICH = "mpirun.openmpi", "mpirun.mpich"
LONG = pytest.mark.long("tests/cli/test_starts.py")


def last_words(folder: Path, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit code, termination message and all output of a run."""
    message = folder / "message"
    message.touch()
    done = launch("run", *words, env={"TRAINER_LAUNCH_TERMINATION_LOG": str(message), **(env or {})}, cwd=folder)
    return done.returncode, message.read_text(), done.stdout + done.stderr


def started(folder: Path, *within: str) -> subprocess.Popen[str]:
    """A launcher below something, whose program has begun, and waits for the file `enough`."""
    began, enough = folder / "began", folder / "enough"
    code = f"import os, time; open({str(began)!r}, 'w').close()\n"
    code += f"while not os.path.exists({str(enough)!r}): time.sleep(0.05)\nprint('done')"
    words = (*within, *LAUNCHER, "run", "--", sys.executable, "-c", code)
    process = subprocess.Popen(
        words,
        env=clean_env(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    eventually(began.exists, "the program began")
    return process


@pytest.mark.parametrize(
    ("within", "number"),
    [
        (("nohup",), signal.SIGHUP),
        (("sh", "-c", 'trap "" INT QUIT; exec "$@"', "sh"), signal.SIGINT),
        (("sh", "-c", 'trap "" INT QUIT; exec "$@"', "sh"), signal.SIGQUIT),
        (("sh", "-c", 'trap "" USR1; exec "$@"', "sh"), signal.SIGUSR1),
    ],
    ids=["nohup", "INT", "QUIT", "USR1"],
)
def test_a_signal_that_was_ignored_at_the_start_ends_neither_the_launcher_nor_its_program(
    tmp_path: Path, within: Sequence[str], number: int
) -> None:
    process = started(tmp_path, *within)
    process.send_signal(number)
    (tmp_path / "enough").touch()
    code, said = ended(process)
    assert (code, said.count("done\n")) == (0, 1), said


def test_a_pod_can_be_stopped_also_where_its_parent_had_ignored_sigterm(tmp_path: Path) -> None:
    process = started(tmp_path, "sh", "-c", 'trap "" TERM; exec "$@"', "sh")
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert (code, said.count("done\n")) == (143, 0), said


@pytest.mark.parametrize(
    ("mpirun", "words", "says"),
    [
        (OPEN_MPI, "-np 64 true", ("64 slots that were requested", "(1 host with ", "--oversubscribe")),
        (OPEN_MPI, "--foo -np 2 true", ('unknown option "--foo"',)),
        (OPEN_MPI, "--map-by bogus -np 1 true", ("policy is not recognized: Policy: bogus",)),
        (OPEN_MPI, "--bind-to core --oversubscribe -np 64 true", ("more processes than cpus", "--bind-to none")),
        (OPEN_MPI, "--mca plm nosuch -np 1 true", ("component was not found", "Framework: plm Component: nosuch")),
        (MPICH, "--foo -np 2 true", ("unrecognized argument foo",)),
        (MPICH, "-launcher bogus -np 2 true", ("unrecognized launcher: bogus",)),
        (MPICH, "-bind-to bogus -np 2 true", ('unrecognized directive "bogus"',)),
    ],
)
def test_what_mpirun_itself_refuses_is_misconfigured_and_started_once(
    tmp_path: Path, mpirun: str, words: str, says: Sequence[str]
) -> None:
    require(shutil.which(mpirun), f"needs {mpirun}")
    code, message, said = last_words(tmp_path, "--", mpirun, *words.split())
    assert (code, said.count("started mpirun")) == (2, 1), said
    assert message.startswith("reason=Misconfigured ")
    assert " retryable=false " in message
    assert all(text in message for text in says), message


@pytest.mark.parametrize("mpirun", [OPEN_MPI, MPICH])
def test_a_program_that_ranks_cannot_execute_is_said_with_the_reason_and_not_started_again(
    tmp_path: Path, mpirun: str
) -> None:
    require(shutil.which(mpirun), f"needs {mpirun}")
    (tmp_path / "train.sh").write_bytes(b"#!/bin/sh\r\necho\r\n")
    (tmp_path / "train.sh").chmod(0o755)
    code, message, said = last_words(tmp_path, "--", mpirun, "-np", "2", "./train.sh")
    assert said.count("started mpirun") == 1, said
    assert code in (126, 127)
    assert "mpirun cannot run './train.sh': its lines end as on Windows (CRLF)" in message
    assert message.startswith("reason=NotRunnable "), message


@pytest.mark.parametrize("mpirun", [OPEN_MPI, MPICH])
def test_a_rank_that_ends_with_127_and_prints_what_mpirun_says_is_restarted(tmp_path: Path, mpirun: str) -> None:
    require(shutil.which(mpirun), f"needs {mpirun}")
    train = script(
        tmp_path, "import os, sys; print('step 9', flush=True); os.write(2, sys.argv[1].encode()); os._exit(127)"
    )
    text = "There are not enough slots available in the system\n"
    words = ("--max-restarts", "1", "--", mpirun, "-np", "1", sys.executable, train, text)
    code, message, said = last_words(tmp_path, *words)
    assert (code, said.count("started mpirun")) == (127, 2), said
    assert message.startswith("reason=Failed "), message


@pytest.mark.parametrize(("line", "starts"), [("no-such-tool pull", 1), ("exit 127", 2)])
def test_a_shell_that_lacks_a_command_at_the_start_is_started_once(tmp_path: Path, line: str, starts: int) -> None:
    require(shutil.which(OPEN_MPI), f"needs {OPEN_MPI}")
    (tmp_path / "train.sh").write_text(f"{line}\n")
    words = ("--max-restarts", "1", "--", OPEN_MPI, "-np", "1", "bash", "train.sh")
    code, message, said = last_words(tmp_path, *words)
    assert (code, said.count("started mpirun")) == (127, starts), said
    assert message.startswith("reason=NotRunnable " if starts == 1 else "reason=Failed "), message


LEAKED = {
    "slurm": {"SLURM_JOB_ID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    | dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), "node[1-2]"),
    "pbs": {"PBS_JOBID": "1.x", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": "/var/spool/gone"},
    "lsf": {"LSB_JOBID": "7", "LSB_HOSTS": "node1", "LSB_MCPU_HOSTS": "node1 2"},
    "sge": {"PE_HOSTFILE": "/var/spool/gone", "SGE_ROOT": "/x", "ARC": "a", "JOB_ID": "3"},
}


@pytest.mark.parametrize("manager", quick_first(LEAKED, 2, LONG))
@pytest.mark.parametrize("mpirun", [OPEN_MPI, MPICH])
def test_a_resource_manager_that_is_not_here_is_not_asked_for_hosts(
    tmp_path: Path, mpirun: str, manager: str
) -> None:
    require(shutil.which(mpirun), f"needs {mpirun}")
    require(not any(map(shutil.which, ("srun", "qrsh", "pbsdsh", "blaunch"))), "here is a resource manager")
    code, _, said = last_words(tmp_path, "--", mpirun, "-np", "2", "echo", "a rank", env=LEAKED[manager])
    assert (code, said.count("a rank\n")) == (0, 2), said
    assert "its resource manager is not here: mpirun does not ask it" in said


def test_a_real_srun_starts_the_ranks_as_ever(tmp_path: Path) -> None:
    require(shutil.which(MPICH), f"needs {MPICH}")
    program(tmp_path / "srun", f"touch {tmp_path}/called\nexit 1")
    env = {**LEAKED["slurm"], "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(
        (*LAUNCHER, "run", "--", MPICH, "-np", "2", "true"),
        env=clean_env(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        eventually(lambda: (tmp_path / "called").exists(), "srun was called")
    finally:
        process.terminate()
        ended(process)


def test_another_installation_of_mpi_is_named_by_its_variable(tmp_path: Path) -> None:
    require(shutil.which(OPEN_MPI), f"needs {OPEN_MPI}")
    env = {"OPAL_PREFIX": "/opt/other", "OMPI_MCA_btl": "self,tcp"}
    code, message, said = last_words(tmp_path, "--", OPEN_MPI, "-np", "2", "true", env=env)
    assert code == 2, said
    assert "and ended with exit code 1: " in message
    assert message.endswith("unset what names another installation of MPI: OPAL_PREFIX=/opt/other\n")
    assert message.startswith("reason=Misconfigured ")


def test_a_missing_script_of_ranks_is_quoted(tmp_path: Path) -> None:
    require(shutil.which(OPEN_MPI), f"needs {OPEN_MPI}")
    code, message, said = last_words(tmp_path, "--", OPEN_MPI, "-np", "2", sys.executable, "/app/train_mpi.py")
    assert (code, said.count("started mpirun")) == (2, 1), said
    assert "because its script does not exist: " in message.splitlines()[0]
    assert "can't open file '/app/train_mpi.py'" in message.splitlines()[0]


WHO = "import os; os.write(1, f'rank {os.environ[\"RANK\"]} is {os.getuid()}\\n'.encode())"


@pytest.mark.torch
def test_the_launcher_itself_runs_as_the_user_that_a_program_in_front_changes_to() -> None:
    require(os.geteuid() == 0, "needs root, to change the user")
    require(shutil.which("setpriv"), "needs setpriv")
    folder = Path(tempfile.mkdtemp())  # those of pytest are closed to others, again with each pytest that starts
    folder.chmod(0o755)
    user = ("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups")
    mounts = ("unshare", "--mount", "bash", "-c", f'{opened(folder)}\nexec "$@"', "bash")
    done = launched("run", "--", *user, "torchrun", "--nproc-per-node", "2", script(folder, WHO), within=mounts)
    assert sorted(line for line in done.stdout.splitlines() if " is " in line) == [
        "rank 0 is 1234",
        "rank 1 is 1234",
    ]


def test_where_another_user_may_not_read_the_launcher_the_command_runs_without_and_says_so(tmp_path: Path) -> None:
    program(tmp_path / "gosu", '[ "$2" = torchrun ] || exit 9\nshift\nexec "$@"')
    program(tmp_path / "torchrun", 'echo the real one "$@"')
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = launch("run", "--", "gosu", "app", "torchrun", "t.py", env=env)
    assert (done.returncode, done.stdout) == (0, "the real one t.py\n"), done.stderr
    assert done.stderr.count("the command runs without the launcher: behind gosu") == 1


@pytest.mark.parametrize("mpirun", [OPEN_MPI, MPICH])
def test_a_value_with_line_breaks_and_a_list_of_hosts_from_windows_hold_no_job_up(
    tmp_path: Path, mpirun: str
) -> None:
    require(shutil.which(mpirun), f"needs {mpirun}")
    (tmp_path / "hosts").write_bytes(b"localhost:2\r\n" if mpirun == MPICH else b"localhost slots=2\r\n")
    env = {
        "NCCL_NOTES": "first\nsecond",
        "NOTES": "a\r\nb\n",
        "NCCL_DEBUG": "WARN",
        "TRAINER_LAUNCH_LOG_LEVEL": "info",
    }
    option = "-f" if mpirun == MPICH else "--hostfile"
    words = ("--", mpirun, option, "hosts", "-np", "2", "sh", "-c", "echo rank $NCCL_DEBUG")
    code, _, said = last_words(tmp_path, *words, env=env)
    assert (code, said.count("rank WARN\n")) == (0, 2), said


LOADER = """
import os, subprocess, sys, time
rank, restart = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
if rank == 1 and restart == "0":
    read, write = os.pipe()
    child = subprocess.Popen(  # blocked in a pipe that nobody reads, in a session of its own, deaf to SIGTERM
        [sys.executable, "-c", f"import os, signal; signal.signal(15, signal.SIG_IGN); "
         f"open({sys.argv[1]!r}, 'w').write(str(os.getpid())); os.write({write}, bytes(1 << 20))"],
        pass_fds=[read, write], start_new_session=True,
    )
    while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
print(f"restart {restart}", flush=True)  # one piece: two ranks write at once
"""


@pytest.mark.torch
def test_a_loader_that_its_killed_rank_left_blocked_in_a_pipe_is_gone_before_the_restart(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    done = launched("run", "--nproc-per-node", "2", "--grace", "2", "--", script(tmp_path, LOADER), str(pid))
    assert done.stdout.count("restart 1") == 2, done.stdout
    assert not os.path.exists(f"/proc/{pid.read_text()}")
