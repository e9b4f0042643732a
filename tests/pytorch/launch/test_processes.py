"""`launch` in a process that has a life of its own: threads, children, handlers, an end by SIGKILL."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.pytorch.launch.script import end, program, start
from tests.waiting import eventually

pytestmark = [pytest.mark.torch, pytest.mark.process]


@pytest.mark.long("tests/pytorch/launch/test_processes.py")
def test_a_thread_may_call_it_and_the_processs_own_children_stay_its_own(tmp_path: Path) -> None:
    main = """import subprocess
seen = []
signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))
child = subprocess.Popen([sys.executable, "-c", "raise SystemExit(5)"])
thread = threading.Thread(target=lambda: say(trainer_launch.launch(os.getpid, quick())))
thread.start()
thread.join()
say([child.wait(), bool(seen)])"""
    code, said, output = end(start(tmp_path, main))
    assert code == 0, output
    assert len(said) == 2, output
    pids, own = said
    assert len({*pids.values()}) == 2
    assert own == [5, True]


@pytest.mark.long("tests/pytorch/launch/test_processes.py")
def test_a_function_that_calls_sys_exit_ends_its_worker_as_a_program_would(tmp_path: Path) -> None:
    main = """say(trainer_launch.launch(sys.exit, quick(start_method="spawn"), 0))
found = failure(sys.exit, 3)
say([found[0], "exit code 3" in found[1]])"""
    code, said, output = end(start(tmp_path, main))
    assert code == 0, output
    assert said == [{"0": None, "1": None}, ["WorkerFailedError", True]]


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    argv = program(tmp_path, "pass")
    path = Path(argv[1])
    path.write_text(path.read_text() + "\nprint(failure(os.getpid))\n")
    process = start(tmp_path, "", argv=argv)
    code, _, output = end(process)
    assert code == 0, output
    assert "put it under if __name__ == '__main__':" in output


def test_a_killed_launcher_is_reported_and_leaves_no_worker(tmp_path: Path) -> None:
    top = """
def end_the_launcher():
    os.write(1, b"worker %d\\n" % os.getpid())
    if os.environ["RANK"] == "1": os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""
    code, (told,), output = end(start(tmp_path, "say(failure(end_the_launcher))", top=top))
    assert code == 0, output
    assert told[:2] == ["NodeError", "the launcher of launch() was killed, and its workers with it"]
    eventually(lambda: not any(alive(pid) for pid in workers(output)), "the workers end")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_killed_caller_leaves_nothing_behind(tmp_path: Path, method: str) -> None:
    process = start(tmp_path, f"trainer_launch.launch(wait_deaf, quick(start_method={method!r}))")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(2)]
    assert all(line.startswith("worker ") for line in lines), lines
    process.kill()
    process.wait()
    eventually(lambda: not any(alive(pid) for pid in workers("".join(lines))), "the workers end")
    process.stdout.close()


def workers(output: str) -> list[int]:
    """The pids that workers have printed."""
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("worker ")]


def alive(pid: int) -> bool:
    """Whether this process runs; one that nobody has reaped does not."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
