"""MPI jobs with real Open MPI and real `trainer-launch sshd` on hosts with their own networks and names."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launching import program
from tests.conftest import require
from tests.hosts.mpi import Job, Run, job, no_strays
from tests.mpi.ssh import pods
from tests.mpi.ssh.secrets import secret

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path, 3) as made:
        yield made


def test_trainers_command_runs_on_every_host_in_the_order_of_the_list(three: Job) -> None:
    three.start_workers()
    run = three.launch("mpirun", "--hostfile", str(three.hostfile), "--tag-output", "hostname")
    assert run.end() == 0, run.output
    for rank in range(3):
        assert re.search(rf",{rank}\]<stdout>: ?job-node-0-{rank}\b", run.output), (
            run.output
        )  # Open MPI 5 has a space
    no_strays(three)


def test_a_training_script_gets_its_mpirun_and_the_launchers_settings(three: Job) -> None:
    three.start_workers()
    script = three.folder / "show.py"
    script.write_text(
        "import os; print('got {NCCL_DEBUG} {HF_TOKEN}'.format_map({'HF_TOKEN': None, **os.environ}))"
    )
    run = three.launch("python3", str(script), env={"NCCL_DEBUG": "INFO", "HF_TOKEN": "hf_abcdefghijklmnopqrstuv"})
    assert run.end() == 0, run.output
    assert run.output.count("got INFO None") == 3


def test_it_waits_for_a_late_host_and_tells_which(three: Job) -> None:
    three.start_workers("job-node-0-0.job", "job-node-0-1.job")
    run = three.launch("mpirun", "hostname")
    line = run.read_until("of 3 hosts ready")
    assert "job-node-0-2.job (port: Connection refused)" in line
    three.start_workers("job-node-0-2.job")
    assert run.end() == 0, run.output


def test_hosts_that_never_come_end_the_job_with_138_and_the_stage_of_each(three: Job) -> None:
    three.start_workers("job-node-0-0.job", "job-node-0-1.job")
    three.hostfile.write_text(f"{three.hostfile.read_text()}job-node-0-9.job slots=1\n")
    run = three.launch("mpirun", "hostname", options=("--wait-timeout", "4"))
    assert run.end() == 138, run.output
    assert "2 of 4 hosts ready; missing: job-node-0-2.job: port: Connection refused" in run.last_words
    assert "job-node-0-9.job: DNS: " in run.last_words


def test_a_host_with_another_jobs_key_is_named_with_its_stage(three: Job) -> None:
    three.start_workers("job-node-0-0.job", "job-node-0-1.job")
    three.start_workers("job-node-0-2.job", mount=secret(three.folder / "another"))
    run = three.launch("mpirun", "hostname", options=("--wait-timeout", "12"))
    assert run.end() == 138, run.output
    assert "missing: job-node-0-2.job: key: " in run.last_words
    no_strays(three)


def test_a_list_that_is_mended_while_it_waits_is_taken(three: Job) -> None:
    three.start_workers()
    good = three.hostfile.read_text()
    three.hostfile.write_text("job-node-0-9.job slots=1\n")
    run = three.launch("mpirun", "hostname")
    run.read_until("job-node-0-9.job (DNS: ")
    three.hostfile.write_text(good)
    assert run.end() == 0, run.output
    assert "the list of hosts has changed: 3 hosts now" in run.output


def names_who_failed_first() -> bool:
    """Of Open MPI 5 it is chance whose end is told first, the failed rank's or that of one whom it left."""
    told = subprocess.run(("mpirun", "--version"), capture_output=True, text=True, timeout=60, check=True).stdout
    return "(Open MPI) 5" not in told


def test_a_failed_rank_starts_the_job_again_from_its_checkpoint(three: Job) -> None:
    three.start_workers()
    run = three.launch("mpirun", *three.train(10, "once"))
    assert run.end() == 0, run.output
    assert run.steps() == list(range(10))
    who = "rank 1 ended with exit code 7" if names_who_failed_first() else ""
    assert f"{who}; restart 1 of 3" in run.output
    no_strays(three)


def test_when_the_budget_is_spent_the_job_ends_with_the_first_failed_ranks_code(three: Job) -> None:
    three.start_workers()
    run = three.launch("mpirun", *three.train(10, "always"), options=("--max-restarts", "1"))
    code = run.end()
    if code == 138 and not names_who_failed_first():
        assert "reason=PeerLost" in run.last_words
        assert "a rank lost another one" in run.last_words
    else:
        assert code == 7, run.output
        who = "rank=1 " if names_who_failed_first() else ""
        assert f"{who}exit=7" in run.last_words
    assert "the restart budget is used up (1 restart)" in run.output
    no_strays(three)


def test_a_killed_host_is_waited_for_and_the_job_goes_on(three: Job) -> None:
    three.start_workers()
    run = three.launch("mpirun", *three.train(30), options=("--max-restarts", "0"))
    run.read_until("step 5 ")
    three.kill("job-node-0-1.job")
    run.read_until("job-node-0-1.job is lost")
    no_strays(three)
    three.start_workers("job-node-0-1.job")
    assert run.end() == 0, run.output
    assert run.steps() == list(range(30))


@pytest.mark.long("tests/hosts/test_mpi_jobs.py")
def test_with_a_minimum_the_survivors_go_on_and_take_the_host_in_again(three: Job) -> None:
    three.start_workers()
    options = ("--min-nodes", "2", "--shrink-after", "0")
    run = three.launch("mpirun", *three.train(400), options=options)
    run.read_until("step 5 of 3 ranks")
    before_s = time.monotonic()
    three.kill("job-node-0-1.job")
    run.read_until(" of 2 ranks")
    assert time.monotonic() - before_s < 60
    three.start_workers("job-node-0-1.job")
    run.read_until("job-node-0-1.job joins")
    run.read_until(" of 3 ranks")
    run.terminate()
    assert run.end() == 143, run.output
    no_strays(three)


SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(2)
    print("saved %s\\n" % os.environ["OMPI_COMM_WORLD_RANK"], end="", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("listens %s\\n" % os.environ["OMPI_COMM_WORLD_RANK"], end="", flush=True)
while True: time.sleep(0.1)
"""


def saving(it: Job, text: str, *options: str) -> Run:
    """A job of ranks that save when they are asked to stop; all listen."""
    it.start_workers()
    script = it.folder / "saves.py"
    script.write_text(text)
    run = it.launch("mpirun", "python3", str(script), options=options)
    for _ in range(3):
        run.read_until("listens ")
    return run


def test_asked_to_stop_every_rank_may_save_and_the_launcher_ends_with_143(three: Job) -> None:
    run = saving(three, SAVES, "--grace", "20")
    run.terminate()
    assert run.end() == 143, run.output
    assert all(f"saved {rank}\n" in run.output for rank in range(3))
    no_strays(three)


def test_a_worker_that_is_asked_to_stop_lets_its_rank_save_though_the_daemon_would_not(three: Job) -> None:
    run = saving(three, SAVES, "--max-restarts", "0")
    worker = three.workers[1]
    worker.process_1(three.sshd[worker.name]).terminate()
    run.read_until("saved 1")
    assert three.sshd[worker.name].wait(60) == 143
    run.terminate()
    run.end()
    no_strays(three)


def test_ranks_checkpoint_and_drain_by_the_signals_that_say_so_and_mpirun_ends_none_of_them(three: Job) -> None:
    also = 'signal.signal(signal.SIGHUP, lambda *_: os.write(1, b"written\\n"))\nprint("listens '
    text = SAVES.replace('print("listens ', also)
    run = saving(three, text, "--grace", "1", "--signals", "HUP=checkpoint,TERM=drain")
    run.signal(signal.SIGHUP)
    for _ in range(3):
        run.read_until("written")
    run.terminate()
    assert run.end() == 143, run.output
    assert all(f"saved {rank}\n" in run.output for rank in range(3))
    no_strays(three)


def test_asked_to_stop_while_it_waits_it_ends_at_once(three: Job) -> None:
    run = three.launch("mpirun", "hostname")
    run.read_until("0 of 3 hosts ready")
    run.terminate()
    assert run.end(timeout_s=30) == 143


def test_a_launcher_that_is_killed_leaves_nothing_on_the_hosts(three: Job) -> None:
    three.start_workers()
    run = three.launch("mpirun", *three.train(1000))
    run.read_until("step 5 ")
    three.launcher.kill(run.process)
    run.end()
    no_strays(three)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that other users can enter, which pytest's own they cannot."""
    made = Path(tempfile.mkdtemp(prefix="a job "))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


def test_an_ordinary_user_without_a_home_runs_it_all(open_folder: Path) -> None:
    with job(open_folder, 3, as_user=True) as it:
        it.start_workers()
        run = it.launch("mpirun", *it.train(10, "once"), env={"HOME": "/tmp"})
        assert run.end() == 0, run.output
        assert run.steps() == list(range(10))
        assert "allow-run-as-root" not in run.output
        no_strays(it)


@pytest.mark.parametrize("mpirun", ["mpirun.openmpi", "mpiexec.mpich"])
def test_a_user_that_no_file_knows_runs_it_all_with_nss_wrapper(open_folder: Path, mpirun: str) -> None:
    """As OpenShift gives a pod a uid. Ranks know who they are, and on other hosts have no library preloaded."""
    pods.require_nss_wrapper()
    require(shutil.which(mpirun), f"needs {mpirun}")
    code = "import getpass, os; print(getpass.getuser(), os.environ.get('LD_PRELOAD'), flush=True)"
    with job(open_folder, 2, as_user=True, has_entry=False) as it:
        it.start_workers(env={"HOME": "/"})
        run = it.launch(mpirun, sys.executable, "-c", code, env={"HOME": "/"})
        assert run.end() == 0, run.output
        assert run.output.count("trainer-launch None\n") == 2, run.output


def test_a_launcher_that_is_a_node_too_needs_no_sshd(three: Job) -> None:
    three.hostfile.write_text(f"{three.hostfile.read_text()}{three.launcher.name} slots=1\n")
    three.start_workers()
    run = three.launch("mpirun", "--tag-output", "hostname")
    assert run.end() == 0, run.output
    assert run.output.replace("]<stdout>: ", "]<stdout>:").count(f"]<stdout>:{three.launcher.name}") == 1
    assert run.output.count("]<stdout>:") == 4


@pytest.mark.long("tests/hosts/test_mpi_jobs.py")
def test_hosts_of_the_discovery_script_join_and_leave(three: Job) -> None:
    names = [host.name for host in three.workers]
    three.hostfile.write_text(f"{names[0]} slots=1\n{names[1]} slots=1\n")
    script = program(three.folder / "discover_hosts.sh", f"echo {names[0]}\necho {names[1]}")
    three.start_workers()
    # A host of ours shares /etc with this machine, so the script lies elsewhere than mpi-operator mounts it.
    moved = f"from trainer_launch.contracts import mpi_operator\nmpi_operator.DISCOVERY = {str(script)!r}\n"
    (three.folder / "sitecustomize.py").write_text(moved)
    env = {"PYTHONPATH": str(three.folder)}
    run = three.launch("mpirun", *three.train(4000), options=("--min-nodes", "1", "--shrink-after", "0"), env=env)
    run.read_until("step 5 of 2 ranks")
    script.write_text(f"#!/bin/sh\necho {names[0]}\necho {names[1]}\necho {names[2]}\n")
    run.read_until(f"{names[2]} joins")
    run.read_until(" of 3 ranks")
    script.write_text(f"#!/bin/sh\necho {names[0]}\necho {names[1]}\n")
    run.read_until(f"{names[2]} left the job")
    run.read_until(" of 2 ranks")
    run.terminate()
    assert run.end() == 143, run.output
    no_strays(three)
