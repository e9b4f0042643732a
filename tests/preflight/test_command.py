"""`trainer-launch preflight` as a pod's init container runs it: real limits, a real /dev/shm, a real network."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cli.launching import LAUNCHER, clean_env, launch, launched
from tests.conftest import require
from tests.contracts.pods import V2_TORCH
from tests.ports import free_port
from tests.schemas.validator import violations
from tests.waiting import eventually
from trainer_launch.host import slow_files
from trainer_launch.preflight import report_formats

pytestmark = pytest.mark.process

NODE_1 = V2_TORCH | {"HOSTNAME": "job-node-0-1"}
CAP_IPC_LOCK = 14
NO_STORAGE = ("--only", "storage", "--storage", "/no/such/directory")  # a fatal failure
NO_LOCK = ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock")


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise AssertionError(done.stderr) from None
    assert violations("preflight", report) == []
    assert report["exit_code"] == done.returncode
    return report


def loud(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The findings that speak, by check."""
    found = report_of(done)["findings"]
    return {finding["check"]: finding for finding in found if finding["status"] not in ("pass", "skipped")}


def wrapped(
    wrap: Sequence[str], *words: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command inside another one."""
    require(subprocess.run([*wrap, "true"], capture_output=True).returncode == 0, f"needs {wrap[0]}, and root")
    argv = [*wrap, *LAUNCHER, "preflight", "--json", *words]
    return subprocess.run(argv, env=clean_env(env), capture_output=True, text=True, timeout=120)


def test_this_container_is_told_on_one_screen() -> None:
    done = launched("preflight", "--", "true")
    assert done.stdout.startswith("Preflight ")
    assert "memory" in done.stdout.partition("passed: ")[2].partition("skipped: ")[0]
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_every_output_tells_the_same(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("report.json", "words")}
    written = ("--report", str(files["report.json"]), "--termination-log", str(files["words"]))
    done = launch("preflight", "--json", *written, *NO_STORAGE)
    report = report_of(done)
    assert (done.returncode, report["verdict"]) == (30, "fatal")
    assert json.loads(files["report.json"].read_text()) == report
    assert files["words"].read_text().startswith("reason=PreflightFatal exit=30 retryable=false ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "words"]


def test_a_report_to_what_is_no_file_replaces_nothing(tmp_path: Path) -> None:
    link, target = tmp_path / "link.json", tmp_path / "target"
    link.symlink_to(target)
    launch("preflight", "--report", str(link), "--only", "cpu")
    assert link.is_symlink()
    assert violations("preflight", json.loads(target.read_text())) == []


def test_a_report_that_cannot_be_written_changes_no_verdict(tmp_path: Path) -> None:
    """The volume may be what the checks have found at fault: they are told first."""
    words, full = tmp_path / "words", tmp_path / "full.html"
    full.symlink_to("/dev/full")
    done = launched("preflight", "--report", str(full), "--termination-log", str(words), *NO_STORAGE, code=30)
    assert "No such file or directory at create" in done.stdout
    assert f"--report: {full} was not written: No space left on device" in done.stderr
    assert words.read_text().startswith("reason=PreflightFatal exit=30 ")


def test_nobody_waits_for_a_file_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # as a file server that has gone: who opens it waits
    monkeypatch.setattr(slow_files, "mount_of", lambda path: ("/gone", "nfs4"))
    monkeypatch.setattr(report_formats, "_FILE_LIMIT_S", 0.05)
    report_formats.write_file(str(pipe), "text")
    assert "pipe was not written: " in caplog.text
    os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # and who waits goes on


def test_the_kill_switch_checks_nothing() -> None:
    done = launch("preflight", *NO_STORAGE, env={"TRAINER_LAUNCH_POLICY": "off"})
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing was checked" in done.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--mode", "warn"), "--mode was removed in 0.3; use --policy observe to run all checks and fail none"),
        (("--storage", "shared:/ckpt"), "--storage shared:PATH was removed in 0.3; use --storage PATH"),
        (("--report", "/nowhere/r.json"), "--report /nowhere/r.json cannot be written: No such file or directory"),
        (
            ("--report", "r.txt"),
            "invalid value 'r.txt' for --report: expected a file that ends with .html (a page for people) or .json",
        ),
        (("--node-rank", "5", "--nodes", "2", "--master-addr", "a"), "rank"),
    ],
)
def test_what_is_configured_badly_ends_with_2_and_the_pods_status_says_why(
    words: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    log = tmp_path / "words"
    done = launched("preflight", *words, env={"TRAINER_LAUNCH_TERMINATION_LOG": str(log)}, code=2)
    assert sentence in done.stderr
    assert sentence in log.read_text()


def test_a_port_range_that_is_taken_is_said_and_retryable(tmp_path: Path) -> None:
    log = tmp_path / "words"
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        env = {
            **NODE_1,
            "PET_NODE_RANK": "0",
            "JOB_COMPLETION_INDEX": "0",
            "TRAINER_LAUNCH_TERMINATION_LOG": str(log),
        }
        done = launched("preflight", "--level", "quick", "--port-range", f"{port}-{port}", env=env, code=20)
    assert f"port {port} is taken on this node" in done.stderr
    assert f"port {port} is taken on this node" in log.read_text()


def test_nobody_else_pays_for_the_checks() -> None:
    def loaded(*words: str) -> set[str]:
        argv = (sys.executable, "-X", "importtime", "-m", "trainer_launch", *words)
        done = subprocess.run(argv, env=clean_env(), capture_output=True, text=True, timeout=120, check=True)
        return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import")}

    assert not {"trainer_launch.preflight", "psutil"} & loaded("run", "--", "true")
    checking = loaded("preflight", "--only", "cpu")
    assert "trainer_launch.preflight" in checking
    assert not {"torch", "numpy", "yaml", "multiprocessing", "rich"} & checking


def test_memory_that_cannot_be_locked_is_found_by_trying() -> None:
    done = wrapped(("prlimit", "--memlock=65536:65536", *NO_LOCK), "--only", "memlock")
    (found,) = (finding for finding in report_of(done)["findings"] if finding["check"] == "memlock")
    has_rdma = any(Path("/dev/infiniband").glob("uverbs*"))
    assert (done.returncode, found["status"]) == ((30, "fail") if has_rdma else (0, "skipped"))
    assert "the limit is 64 KiB" in found["text"]


def test_the_limit_alone_is_not_believed() -> None:
    """With CAP_IPC_LOCK the kernel does not look at it."""
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapBnd:")[2].split()[0], 16)
    require(capabilities >> CAP_IPC_LOCK & 1, "needs CAP_IPC_LOCK")
    done = wrapped(("prlimit", "--memlock=65536:65536", "setpriv", "--inh-caps", "+ipc_lock"), "--only", "memlock")
    assert report_of(done)["verdict"] == "pass"


def test_a_server_that_fails_for_one_suffix_is_not_taken_for_a_missing_service(tmp_path: Path) -> None:
    """It denies the name without a suffix; glibc remembers that it failed before."""
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\nsearch team.svc.cluster.local\noptions ndots:5 timeout:1 attempts:1\n")
    program = shlex.join([sys.executable, str(Path(__file__).with_name("nxdomain.py")), "2"])
    make = f'ip link set lo up && mount --bind {conf} /etc/resolv.conf && exec {program} "$0" "$@"'
    done = wrapped(("unshare", "-nm", "sh", "-c", make), "--wait-timeout", "0", "--only", "dns", env=NODE_1)
    assert done.returncode == 20
    found = loud(done)["dns"]
    assert "job-node-0-0.job: the DNS server does not answer, or answers SERVFAIL or REFUSED" in found["text"]
    assert found["action"].startswith("DNS does not work here")


def test_two_nodes_on_one_machine_whose_name_is_on_loopback_pass() -> None:
    """What `run` takes, `preflight` takes."""
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    env |= {"PET_MASTER_PORT": str(free_port()), "HOSTNAME": "localhost"}
    argv = [*LAUNCHER, "preflight", "--level", "quick", "--policy", "cpu=off", "--wait-timeout", "60"]
    nodes = [
        subprocess.Popen(
            argv, env=clean_env({**env, "PET_NODE_RANK": str(rank)}), stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said


@pytest.mark.long("tests/preflight/test_command.py")
@pytest.mark.parametrize("node_rank", ["0", "1"])
def test_the_deadline_holds_where_dns_never_answers(tmp_path: Path, node_rank: str) -> None:
    conf = tmp_path / "resolv.conf"
    conf.write_text("nameserver 127.0.0.1\nsearch a.svc.cluster.local svc.cluster.local\noptions ndots:5\n")
    silent = (
        "import socket, subprocess, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
        "s.bind(('127.0.0.1', 53)); sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    )
    program = shlex.join([sys.executable, "-c", silent])
    make = f'ip link set lo up && mount --bind {conf} /etc/resolv.conf && exec {program} "$0" "$@"'
    env = {**NODE_1, "PET_NODE_RANK": node_rank, "JOB_COMPLETION_INDEX": node_rank}
    done = wrapped(("unshare", "-nm", "sh", "-c", make), "--wait-timeout", "6", env=env)
    assert done.returncode in (20, 30)
    assert report_of(done)["took_s"] < 6 + 6
    assert "the DNS server does not answer" in loud(done)["dns"]["text"]


@pytest.mark.parametrize(
    ("node_rank", "awaited", "number", "code"),
    [
        ("0", "1 of 2 nodes present, ", signal.SIGTERM, 143),
        ("1", "waiting for node 0 (127.0.0.1): ", signal.SIGINT, 130),
    ],
)
def test_a_preflight_that_is_asked_to_stop_says_what_it_waited_for(
    tmp_path: Path, node_rank: str, awaited: str, number: int, code: int
) -> None:
    words = tmp_path / "words"
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    env |= {"PET_MASTER_PORT": str(free_port()), "PET_NODE_RANK": node_rank, "HOSTNAME": "host-x"}
    argv = [*LAUNCHER, "preflight", "--level", "quick", "--wait-timeout", "600", "--termination-log", str(words)]
    argv += ["--only", "cpu,roll-call", "--", "true"]
    waiting = subprocess.Popen(argv, env=clean_env(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert waiting.stderr is not None
    if node_rank == "0":
        assert "cluster preflight: 1 of 2 nodes present" in waiting.stderr.readline()
    eventually(lambda: _listens(waiting.pid), "the node to take part")
    waiting.send_signal(number)
    said, told = waiting.communicate(timeout=120)
    assert (waiting.returncode, said) == (code, "")
    name = signal.Signals(number).name
    assert f"[trainer-launch] Preflight stopped by {name} after " in told
    assert awaited in told
    assert words.read_text().startswith(
        f"reason=PreflightStopped exit={code} retryable=true node={node_rank} host="
    )
    assert awaited in words.read_text()


_GOES_AWAY = """
import os, signal, threading
from trainer_launch.preflight.node_preflight import PreflightProgress

def fails():
    raise OSError(5, "Input/output error")

progress = PreflightProgress(lambda text: print(text, flush=True))
progress.view.callback(fails)
progress.undo = fails
os.kill(os.getpid(), signal.SIGHUP)
threading.Event().wait(60)
print("went on")
"""


def test_a_preflight_that_is_asked_to_stop_ends_also_where_its_terminal_is_gone() -> None:
    done = subprocess.run([sys.executable, "-c", _GOES_AWAY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 143
    assert done.stdout.startswith("reason=PreflightStopped exit=143 ")
    assert "went on" not in done.stdout


def test_a_terminal_shows_what_is_under_way_and_a_pod_does_not_load_rich(tmp_path: Path) -> None:
    place = ("--nodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    words = ("preflight", "--wait-timeout", "2", *place)
    command = shlex.join([*LAUNCHER, *words])
    env = {**clean_env(), "TERM": "xterm"}
    env.pop("CI", None)
    argv = ("script", "-qec", f"stty rows 40 cols 100; {command}", str(tmp_path / "terminal"))
    require(shutil.which("script") and importlib.util.find_spec("rich"), "needs script and rich")
    subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, timeout=120)
    shown = (tmp_path / "terminal").read_text()
    assert "waiting for nodes: 1 of 2 nodes present" in shown
    assert "\x1b[?25h" in shown, "the cursor is back"
    done = launched(*words, env={"TERM": "xterm"}, code=20)
    assert "\x1b" not in done.stdout + done.stderr


def _listens(pid: int) -> bool:
    return any(found.status == psutil.CONN_LISTEN for found in psutil.Process(pid).net_connections("tcp"))
