"""Incidents of real jobs: what is collected of a failure and of a hang, who is named, and who is not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import clean_env, launch, launched, script, start
from tests.ports import free_port
from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.incident_bundle import Incident

pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.timeout(300)]
TWO = ("--nproc-per-node", "2")
FAILS = "os._exit(3)"  # at once: while Python shuts down, its connections are closed, and it has no exit code yet

# Five steps of two or more ranks; in the sixth, rank 1 does what the case wants while the others wait for it, and
# have left a file that tells so.
TRAIN = """
import os, signal, sys, time, torch, torch.distributed as dist
WAITS = "ENOUGH.{}." + os.environ["TORCHELASTIC_RESTART_COUNT"]
def read_batch():
    open("ENOUGH").close()
def train():
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(4)
    for step in range(5):
        dist.all_reduce(total)
        print(f"rank {rank} step {step}\\n", end="", flush=True)
    if rank == 1:
        WHAT
    work = dist.all_reduce(total, async_op=True)
    open(WAITS.format(rank), "w").close()
    work.wait()
    print(f"rank {rank} is done\\n", end="", flush=True)
    os._exit(0)
train()
"""


def training(folder: Path, what: str) -> str:
    os.mkfifo(folder / "enough")  # until somebody writes into it
    text = TRAIN.replace("WHAT", what).replace("ENOUGH", str(folder / "enough"))
    return script(folder, text)


def until_reported(tmp_path: Path, *words: str, times: int = 1) -> str:
    """The output of a job whose rank 1 is in `read_batch` until so many nodes have reported the hang."""
    with start(*words, "--", training(tmp_path, "read_batch()")) as run:
        run.read_until("suspected hang: .*; collected in ", times)
        (tmp_path / "enough").write_text("")
        return run.ends_with(0)


def incidents(place: Path, *words: str) -> str:
    ended = launched("incidents", *words, "--incident-dir", str(place))
    return ended.stdout


def shown(place: Path, number: int = -1) -> dict[str, Any]:
    """One incident as JSON, by default the newest."""
    found: list[dict[str, Any]] = json.loads(incidents(place, "list", "--json"))
    return found[number]


def test_by_default_a_hang_is_explained_and_nobody_is_killed(tmp_path: Path) -> None:
    place, log = tmp_path / "incidents", tmp_path / "events"
    watched = ("--hang-report-after", "2", "--incident-dir", str(place), "--events", str(log))
    output = until_reported(tmp_path, "run", *watched, *TWO)
    assert "attempt=1" in output
    sentence = "rank 1 (node 0) never entered all_reduce #6 of default_pg, [[4]] Float; rank 0 has waited in it for"
    assert f"suspected hang: {sentence}" in output
    one = shown(place)
    assert one["sentence"].startswith(sentence)
    assert "rank 1 is in train.py:" in one["sentence"]
    assert one["sentence"].endswith("(read_batch)")
    assert (one["kind"], one["ranks"], one["reason"]) == ("hang", [1], "")
    assert (Path(one["folder"]) / "sentence.txt").read_text() == one["sentence"] + "\n"
    (told,) = [event for line in log.read_text().splitlines() if (event := json.loads(line))["event"] == "incident"]
    assert (told["text"], told["id"], told["ranks"]) == (one["sentence"], one["id"], "1")
    assert [state["rank"] for state in one["states"]] == [0, 1]
    assert {"stacks/rank-0.txt", "stacks/rank-1.txt", "host/network.txt", "environment.txt"} <= set(one["files"])
    assert {f"flight_recorder/nccl_trace_rank_{rank}" for rank in range(2)} <= set(one["files"])
    reader = (sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace")  # torch's own
    read = subprocess.run([*reader, f"{one['folder']}/flight_recorder", "-v"], capture_output=True, text=True)
    assert "missing_ranks={1}" in read.stdout + read.stderr


def test_nodes_know_together_what_each_does_not(tmp_path: Path) -> None:
    place = tmp_path / "incidents"
    watched = ("--hang-report-after", "2", "--incident-dir", str(place), "--log-level", "info")
    output = until_reported(tmp_path, "local", "--nodes", "3", *watched, times=3)
    sentence = "rank 1 (node 1) never entered all_reduce #6 of default_pg, [[4]] Float; ranks 0,2 have waited in it"
    for node in range(3):
        assert f"[trainer-launch {node}] suspected hang: {sentence}" in output
    assert f"1 incident in {place}; see trainer-launch incidents show --incident-dir {place}\n" in output
    (found,) = json.loads(incidents(place, "list", "--json"))
    ids = [found["id"], *found["same_moment"]]
    assert {name.partition("-node")[2][:1] for name in ids} == {"0", "1", "2"}
    assert found["sentence"].startswith(sentence)
    assert {incidents(place, "show", name) for name in ids} == {joined := incidents(place, "show")}
    assert [line.split()[0] for line in joined.splitlines()[2:6]] == ["RANK", "0", "1", "2"]
    assert joined.count("default_pg #5/6") == 2, "of ranks 0 and 2"
    assert all(name in joined for name in ids), "what each node has"


def test_what_all_ranks_do_is_collected_on_request_and_nobody_is_suspected(tmp_path: Path) -> None:
    place, env = tmp_path / "incidents", {"TMPDIR": str(tmp_path)}
    words = ("local", "--nodes", "3", "--incident-dir", str(place), "--log-level", "info")
    with start(*words, "--", training(tmp_path, "read_batch()"), env=env) as run:
        run.read_until("step 4", 3)
        shown = launch("incidents", "collect", env=env)
        (tmp_path / "enough").write_text("")
        code, output = run.end()
    assert shown.returncode == 0, shown.stderr
    assert code == 0, output
    assert "suspected" not in output
    head, _, *table = shown.stdout.splitlines()
    assert head.startswith("collected on request: ")
    assert [line.split()[0] for line in table[:4]] == ["RANK", "0", "1", "2"]
    assert "stack of rank 1 (node 1), innermost call first:" in shown.stdout
    assert "train.py:5 (read_batch)" in shown.stdout
    found: list[dict[str, Any]] = json.loads(incidents(place, "list", "--json"))
    assert [(one["kind"], len(one["same_moment"])) for one in found] == [("request", 2)], "one incident of 3 nodes"


def test_any_node_shows_the_stack_of_the_rank_that_another_one_has(tmp_path: Path) -> None:
    program, places = training(tmp_path, "read_batch()"), [tmp_path / f"incidents-{node}" for node in range(2)]
    env = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    env["PET_MASTER_PORT"] = str(free_port())
    with contextlib.ExitStack() as stack:
        runs = [
            stack.enter_context(
                start(
                    *("run", "--hang-report-after", "2", "--incident-dir", str(place), "--", program),
                    env={**env, "PET_NODE_RANK": str(node), "TMPDIR": str(tmp_path)},
                )
            )
            for node, place in enumerate(places)
        ]
        for run in runs:
            run.read_until("suspected hang: .*; collected in ")
        texts = [incidents(place, "show") for place in places]
        (tmp_path / "enough").write_text("")
        assert [run.end()[0] for run in runs] == [0, 0]
    for text, place in zip(texts, places, strict=True):
        assert "stack of rank 1 (node 1), innermost call first:" in text
        assert "train.py:5 (read_batch)" in text
        assert "train.py:5 (read_batch)" in incidents(place, "list")


def test_a_failure_keeps_what_the_other_ranks_did(tmp_path: Path) -> None:
    place = tmp_path / "incidents"
    # What it has forked ends as a program, and does not speak for it.
    fails = (
        "if os.fork() == 0:\n            return\n"
        "        while not all(os.path.exists(WAITS.format(other)) for other in (0, 2)):\n"
        "            time.sleep(0.02)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)"
    )
    secret = {"MY_TOKEN": "a-secret-value"}
    options = ("--max-restarts", "1", "--incident-dir", str(place))
    ended = launched(
        "run", *options, "--prefix", "--nproc-per-node", "3", "--", training(tmp_path, fails), env=secret, code=137
    )
    one = shown(place)
    sentence = "rank 1 ended with signal SIGKILL; last entered: ranks 0,2 all_reduce #6 of default_pg"
    assert (one["kind"], one["sentence"]) == ("failure", sentence)
    assert shown(place, 0)["sentence"] == sentence, "also of the failure before, after which the job went on"
    assert f" | {sentence}\n" in ended.stderr
    states = {state["rank"]: state for state in one["states"]}
    assert (states[1]["life"], states[1]["how"]) == ("dead", "SIGKILL")
    assert set(states) == {0, 1, 2}
    assert "output/rank-1.txt" in one["files"]
    environment = (Path(one["folder"]) / "environment.txt").read_text()
    assert "MY_TOKEN=[redacted]" in environment
    everything = b"".join(path.read_bytes() for path in Path(one["folder"]).rglob("*") if path.is_file())
    assert b"a-secret-value" not in everything


def test_fifos_in_place_of_all_files_that_a_worker_can_reach_hold_nobody_up(tmp_path: Path) -> None:
    fails = (
        "for path in (os.environ['TORCHELASTIC_ERROR_FILE'], *os.scandir(os.environ['TRAINER_LAUNCH_RUN_DIR'])):\n"
        "            if not os.path.isdir(path):\n"
        "                os.path.lexists(path) and os.unlink(path)\n"
        "                try:\n"
        "                    os.mkfifo(path)\n"
        "                except FileExistsError:  # PID 1 has written it anew\n"
        "                    pass\n"
        f"        {FAILS}"
    )
    options = ("--max-restarts", "1", "--incident-dir", str(tmp_path / "incidents"))
    ended = launched("run", *options, *TWO, "--", training(tmp_path, fails), env={"TMPDIR": str(tmp_path)}, code=3)
    assert ended.stderr.count("rank 1 ended with exit code 3\n") == 3, "of both generations, and of the job"


def test_a_token_in_a_workers_output_and_traceback_is_nowhere_in_its_incident(tmp_path: Path) -> None:
    place, token = tmp_path / "incidents", "hf_" + "a1b2c3d4e5f6g7h8"
    fails = f'print("uses {token}", file=sys.stderr); login = lambda token: token.no; login(token="{token}")'
    options = ("--max-restarts", "0", "--prefix", "--incident-dir", str(place))
    ended = launch("run", *options, *TWO, "--", training(tmp_path, fails))
    assert f"uses {token}" in ended.stderr, "what a pod prints is its own"
    contents = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    assert [path for path, content in contents.items() if token.encode() in content] == []
    assert any(b"uses [redacted]" in content for content in contents.values())
    text = incidents(place, "show")
    assert "uses [redacted]" in text
    assert token not in text


def test_nothing_is_collected_where_nobody_wants_it_and_a_directory_that_cannot_be_written_holds_nothing_up(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    program, env = training(tmp_path, FAILS), {"TMPDIR": str(tmp_path)}
    for place, said in (("none", ""), (str(tmp_path / "file"), "cannot save an incident in")):
        options = ("--max-restarts", "0", "--incident-dir", place)
        ended = launched("run", *options, *TWO, "--", program, env=env, code=3)
        assert said in ended.stderr
        assert ("set --incident-dir to a writable directory, or to none" in ended.stderr) is bool(said)
    assert list(tmp_path.glob("**/incident.json")) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_the_default_directory_is_not_used_if_it_belongs_to_another_user(tmp_path: Path) -> None:
    place = tmp_path / "trainer-launch-incidents"
    place.mkdir(mode=0o700)
    os.chown(place, 1000, 1000)
    words = ("run", "--max-restarts", "0", *TWO, "--", training(tmp_path, FAILS))
    ended = launched(*words, env={"TMPDIR": str(tmp_path)}, code=3)
    assert f"cannot save an incident in {place}: it belongs to another user (uid 1000); set" in ended.stderr
    assert list(place.iterdir()) == []


def test_the_command_lists_and_shows_also_what_was_copied(tmp_path: Path) -> None:
    place = tmp_path / "incidents"
    options = ("--max-restarts", "1", "--incident-dir", str(place))
    launched("run", *options, *TWO, "--", training(tmp_path, "raise ValueError('no luck')"), code=1)
    head, *rows = incidents(place).splitlines()
    assert head.split() == ["ID", "KIND", "LINE", "OF", "CODE", "SENTENCE"]
    assert all(" train.py:13 (train) " in row for row in rows), rows
    assert len(rows) == 2
    newest = rows[-1].split()[0]
    text = incidents(place, "show", newest)
    sentence, reason = text.splitlines()[:2]
    assert sentence == "rank 1 ended with exit code 1: ValueError: no luck"
    assert reason == "reason=Failed"
    assert "failure at 20" in text
    assert "last output of rank-1:" in text
    assert incidents(place, "show") == text, "the newest without an ID"
    copied = tmp_path / "copied"
    shutil.copytree(place / newest, copied / newest)
    assert incidents(copied, "show").partition(" files")[0] == text.partition(" files")[0]
    beginning = newest[:-1]  # of both there, if both are of the same second; of the only one here
    assert incidents(copied, "show", beginning) == incidents(copied, "show")
    assert incidents(copied / newest, "show").startswith("rank 1 ended with")


def test_show_has_the_line_of_the_data_loader_that_a_rank_waits_for(tmp_path: Path) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "job-node0", 1.0)
    of_loader = "rank 2's pt_data_worker (pid 8061): in data.py:17 (read_from_storage)"
    incident_bundle.add(folder, "report.txt", f"no progress for 8 s\nrank 2: in __next__\n{of_loader}\n")
    incident_bundle.finish(folder, Incident(sentence="rank 2 never entered", kind="hang", time_s=1.0))
    lines = incidents(tmp_path, "show").splitlines()
    assert of_loader in lines
    assert "rank 2: in __next__" not in lines, "the table of ranks has it"


def test_a_directory_whose_name_commands_a_terminal_is_named_without_its_commands(tmp_path: Path) -> None:
    place = tmp_path / "\x1b[31mred"
    place.mkdir()
    said = f"no incidents yet in {tmp_path}/?[31mred/trainer-launch-incidents\n"
    assert launch("incidents", env={"TMPDIR": str(place)}).stdout == said


def test_before_any_incident_there_are_none_yet(tmp_path: Path) -> None:
    for exists in (False, True):
        env, words = {"TMPDIR": str(tmp_path)}, f"no incidents yet in {tmp_path}/trainer-launch-incidents\n"
        for action in ((), ("list",), ("show",)):
            ended = launch("incidents", *action, env=env)
            assert (ended.returncode, ended.stdout, ended.stderr) == (0, words, "")
        assert launch("incidents", "list", "--json", env=env).stdout == "[]\n"
        if not exists:
            (tmp_path / "trainer-launch-incidents").mkdir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "20990101"), "unexpected argument '20990101': incidents list takes no ID"),
        (("page",), "incidents page was removed in 0.3; use incidents show"),
        (("shwo",), "unknown action 'shwo'"),
        (("bundle",), "incidents bundle was removed in 0.3; copy the directory that incidents show names"),
        (("list", "--incident-dir", "/nowhere"), "no directory /nowhere; set --incident-dir"),
        (("list", "--incident-dir", "none"), "--incident-dir is none"),
    ],
)
def test_what_is_not_there_is_one_clear_error(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    place = () if "--incident-dir" in words else ("--incident-dir", str(tmp_path))
    ended = subprocess.run(
        [sys.executable, "-m", "trainer_launch", "incidents", *words, *place],
        env=clean_env(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
