"""What the hosts' answers come to, without any host."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.launching import program
from trainer_launch.model.findings import Fault, Status
from trainer_launch.planning.command import parse_command
from trainer_launch.preflight import mpi_hosts
from trainer_launch.preflight.mpi_hosts import DNS, KEY, Refusal, refusal, script_command

TOKEN = "t0k3n"
GOOD = "4.1.4"
OWN = mpi_hosts.LaunchersMpi(mpirun="mpirun", version="4.1.4")


def ask(command: str, *before: str, path: str | None = None) -> str | None:
    """Run the script by a shell here, as sshd would."""
    text = "\n".join([*before, command])
    done = subprocess.run(
        ["sh", "-c", text], env={"PATH": path or "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120
    )
    return mpi_hosts.read(TOKEN, done.stdout)


def test_the_script_tells_what_is_there(tmp_path: Path) -> None:
    tools = tmp_path / "a folder"
    program(tools / "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    answer = ask(script_command(TOKEN, "mpirun"), path=f"{tools}:/usr/bin:/bin")
    assert answer == GOOD


def test_the_script_bears_that_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to(shutil.which("sh") or "/bin/sh")
    (tmp_path / "env").symlink_to(shutil.which("env") or "/usr/bin/env")
    answer = ask(script_command(TOKEN, "no mpirun"), path=str(tmp_path))
    assert answer == ""


def test_what_a_login_shell_prints_is_told_apart() -> None:
    answer = ask(script_command(TOKEN, "x"), "echo Welcome", "echo")
    assert answer == ""


@pytest.mark.parametrize(
    ("line", "mpirun"),
    [
        ("mpirun -np 4 python3.11 train.py", "mpirun"),
        ("/opt/mpi/bin/mpirun -n 2 ./a.out", "/opt/mpi/bin/mpirun"),
        ("python train.py", "mpirun"),
        ("horovodrun -np 3 /venv/bin/python train.py", ""),
    ],
)
def test_the_mpirun_of_a_command(line: str, mpirun: str) -> None:
    assert mpi_hosts._typed(parse_command(shlex.split(line))).mpirun == mpirun


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("mpirun (Open MPI) 4.1.4", "4.1.4"),
        ("    Version:                                 4.0.2", "4.0.2"),
        ("mpirun (Open MPI) 5.0.8", "5.0.8"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307", "2021.9"),
        ("unknown", "unknown"),
        ("", ""),
    ],
)
def test_versions_are_found_in_what_mpiruns_say(said: str, version: str) -> None:
    assert mpi_hosts.version_in(said) == version


@pytest.mark.parametrize(
    ("code", "err", "stage"),
    [
        (255, "root@w-0: Permission denied (publickey).", mpi_hosts.KEY),
        (
            255,
            "@@@@\n@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.",
            mpi_hosts.HOST_KEY,
        ),
        (
            255,
            "No ED25519 host key is known for w-0 and you have requested strict checking.",
            mpi_hosts.HOST_KEY,
        ),
        (255, "kex_exchange_identification: Connection closed by remote host", mpi_hosts.BANNER),
        (255, "something else", mpi_hosts.BANNER),
        (1, "This account is currently not available.", mpi_hosts.SHELL),
        (3, "", mpi_hosts.SHELL),
        (None, "", mpi_hosts.SESSION),  # a host that is busy, or whose home hangs, is not the job's fault
    ],
)
def test_the_stage_is_told_by_sshs_own_words(code: int | None, err: str, stage: str) -> None:
    found = refusal(code, err)
    assert found.stage == stage
    assert found.why


def test_a_script_that_did_not_run_gives_no_version() -> None:
    assert mpi_hosts.read(TOKEN, "t0k3 4.1.4\nThis account is not available.") is None


def test_hosts_that_are_stuck_alike_are_told_in_one_sentence() -> None:
    why = Refusal(KEY, "Permission denied (publickey).")
    [hosts, ssh] = mpi_hosts.reached({"w-0": why, "w-1": None, "w-2": why})
    assert hosts.status is Status.PASS
    assert (ssh.check, ssh.status, ssh.fault) == ("mpi-ssh", Status.FAIL, Fault.JOB)
    assert ssh.text == "the job's key is refused by w-0, w-2: Permission denied (publickey)."
    assert ssh.subject == "w-0, w-2"


def test_a_host_that_is_not_there_is_the_nodes_fault_and_nobody_passes_it() -> None:
    found = list(mpi_hosts.reached({"w-0": Refusal(DNS, "Name or service not known"), "w-1": None}))
    assert [(one.check, one.status) for one in found] == [("mpi-hosts", Status.FAIL), ("mpi-ssh", Status.PASS)]
    assert found[0].fault is Fault.NODE
    assert found[1].text.startswith("1 of 2 hosts")


def test_a_pass_does_not_claim_what_nobody_checked() -> None:
    *_, ssh = mpi_hosts.reached({"w-0": None}, check_host_keys=False)
    assert ssh.text == "the only host accept the job's key, and host keys are not checked (--insecure-host-keys)"


def test_hosts_like_the_launcher_pass() -> None:
    [found] = mpi_hosts.alike(OWN, {"w-0": GOOD, "w-1": GOOD})
    assert found.status is Status.PASS


def test_a_launcher_without_mpirun_is_no_pass() -> None:
    [found] = mpi_hosts.alike(mpi_hosts.LaunchersMpi(mpirun="mpirun", is_here=False), {})
    assert (found.status, found.fault) == (Status.FAIL, Fault.JOB)
    assert found.text == "mpirun is not in the launcher's PATH, so nothing can be started on the hosts"


@pytest.mark.parametrize(
    "own",
    [
        mpi_hosts.LaunchersMpi(mpirun="mpirun", is_here=False, is_needed=False),
        mpi_hosts.LaunchersMpi(mpirun="mpirun"),
    ],
)
def test_an_mpirun_that_is_not_known_is_unknown_and_no_pass(own: mpi_hosts.LaunchersMpi) -> None:
    assert [one.status for one in mpi_hosts.alike(own, {"w-0": GOOD})] == [Status.UNKNOWN]


def test_another_version_is_named() -> None:
    [found] = mpi_hosts.alike(OWN, {"w-0": GOOD, "w-1": "5.0.1", "w-2": GOOD})
    assert (found.text, found.fault) == ("mpirun is 5.0.1 on w-1, and 4.1.4 on the launcher", Fault.JOB)


@pytest.mark.parametrize(("rest", "status"), [({"w-1": GOOD}, Status.PASS), ({}, Status.UNKNOWN)])
def test_what_a_host_does_not_have_is_not_compared(rest: dict[str, str], status: Status) -> None:
    [found] = mpi_hosts.alike(OWN, {"w-0": "", **rest})
    assert found.status is status
