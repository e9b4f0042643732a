"""explain: the same truth for people and programs, from this container or a snapshot."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import launch, launched, script
from tests.contracts.pods import V2_TORCH
from trainer_launch import __version__
from trainer_launch.commands import options
from trainer_launch.model import settings

V2 = V2_TORCH | {"PET_NPROC_PER_NODE": "auto", "HOSTNAME": "job-node-0-1"}
SECRETS = {"WANDB_API_KEY": "hunter2", "DB_PASSWORD": "hunter2", "HF_TOKEN": "hunter2", "MY_SECRET": "hunter2"}


def test_json_has_the_five_keys_and_the_flat_job() -> None:
    explained = json.loads(launch("explain", "--json", "--", "true", env=V2).stdout)
    assert sorted(explained) == ["contract", "facts", "job", "plan", "warnings"]
    assert explained["contract"] == "trainer-v2-torch"
    assert explained["job"]["nodes"] == 2
    assert explained["job"]["nproc_per_node"] == "auto"
    assert explained["job"]["world_size"] is None
    assert explained["plan"]["nproc_per_node"] >= 1
    assert {"name": "PET_NNODES", "value": "2", "origin": "env", "field": "nodes"} in explained["facts"]["read"]


def test_the_plan_is_the_argument_list_that_would_run(tmp_path: Path) -> None:
    train = script(tmp_path, "")
    plan = json.loads(launch("explain", "--json", "--", "torchrun", train, "--lr", "1", env=V2).stdout)["plan"]
    assert (plan["engine"], plan["processes"]) == ("torch", [])
    assert plan["workers"]["argv"][1:] == ["-u", train, "--lr", "1"]
    assert plan["workers"]["count"] == plan["nproc_per_node"]


def test_a_job_that_only_torchrun_can_run_says_why_and_what_runs(tmp_path: Path) -> None:
    words = ("torchrun", "--run-path", script(tmp_path, ""))
    plan = json.loads(launch("explain", "--json", "--", *words, env=V2).stdout)["plan"]
    (process,) = plan["processes"]
    assert (plan["engine"], plan["workers"]) == ("torchrun", None)
    assert "--run-path" in process["argv"]
    assert "with --run-path torchrun itself runs the script" in plan["reasons"][0]
    told = launch("explain", "--", *words, env=V2).stdout
    assert "with --run-path torchrun itself runs the script" in told


def test_without_a_command_this_nodes_place_is_still_told() -> None:
    plan = json.loads(launch("explain", "--json", env=V2 | {"PET_NPROC_PER_NODE": "3"}).stdout)["plan"]
    assert (plan["engine"], plan["node_rank"], plan["nproc_per_node"], plan["world_size"]) == (None, 1, 3, 6)
    assert plan["omp_num_threads"] == "1"


def test_a_platform_of_ones_own_needs_only_the_variables_that_the_page_of_contracts_sets() -> None:
    page = (Path(__file__).parents[2] / "docs" / "contracts.md").read_text(encoding="utf-8")
    platforms = {"$(MY_NODES)": "3", "$(MY_RANK)": "2", "$(MY_FIRST_POD)": "first.pod"}
    rows = re.findall(r"^- \{name: (TRAINER_LAUNCH_\w+), value: ([^}]+)\}", page, re.MULTILINE)
    env = {name: platforms.get(value, value.strip('"')) for name, value in rows}
    plan = json.loads(launch("explain", "--json", "--", "train.py", env=env).stdout)["plan"]
    assert (plan["min_nodes"], plan["node_rank"], plan["coordinator"]) == (3, 2, "first.pod:29500")
    assert plan["nproc_per_node"] >= 1


def test_a_plain_shell_is_explained_helpfully() -> None:
    told = launched("explain")
    assert "Contract: unknown. No variable or file of a training controller was found." in told.stdout
    assert "trainer-launch rehearse" in told.stdout
    assert json.loads(launch("explain", "--json").stdout)["contract"] == "unknown"


def test_a_strangers_snapshot_cannot_command_the_terminal(tmp_path: Path) -> None:
    pod = tmp_path / "pod.json"
    pod.write_text(json.dumps({"env": {}, "files": {}, "hostname": "h", "command": ["./x\x1b[31m"]}))
    told = launch("explain", "--pod", str(pod)).stdout
    assert "'./x?[31m'" in told
    assert "\x1b" not in told


def plan_of(told: str) -> dict[str, str]:
    """The rows of the plan that people see."""
    rows = told.partition("\nPlan\n")[2].partition("\n\n")[0].splitlines()
    return {name.strip(): value for name, _, value in (row.strip().partition("  ") for row in rows)}


def test_people_see_what_would_run_and_nothing_of_the_launchers_own(tmp_path: Path) -> None:
    train = script(tmp_path, "")
    told = launch("explain", "--", "torchrun", train, "--lr", "1", env=V2 | {"PET_NPROC_PER_NODE": "2"}).stdout
    plan = plan_of(told)
    assert plan["command"].strip() == f"torchrun {train} --lr 1"
    assert plan["job"].strip() == "2 nodes, 4 workers in all"
    assert plan["workers here"].strip().endswith(": ranks 2-3")
    assert plan["nodes meet at"].strip().startswith("job-node-0-0.job:29500")
    for internal in ("/tmp/trainer-launch", "TRAINER_LAUNCH_", "trainer_launch.pytorch", "rdzv-conf"):
        assert internal not in told, "--json has it"


def test_node_0_is_said_to_run_the_coordinator() -> None:
    own = {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0", "HOSTNAME": "job-node-0-0"}
    plan = plan_of(launch("explain", "--", "torchrun", "train.py", env=V2 | own).stdout)
    assert plan["nodes meet at"].strip().endswith("; this pod runs the coordinator")
    assert plan["restarts"].strip().startswith("3 worker failures per job, waiting 600 s for a lost node")


def test_no_plan_is_explained_and_ends_as_run_would() -> None:
    told = launched("explain", "--engine", "torchrun", "--", "torchrun", "--nnodes=1:2", "train.py", env=V2, code=2)
    assert "Contract: trainer-v2-torch" in told.stdout
    assert "no plan" in told.stdout
    assert len(told.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("word", "said"), [("missing.py", "the script 'missing.py' does not exist"), ("mpirn", "in PATH")]
)
def test_what_run_could_not_start_here_is_a_warning_and_of_another_pod_nothing_is_known(
    tmp_path: Path, word: str, said: str
) -> None:
    pod = tmp_path / "pod.json"
    here = json.loads(launch("explain", "--json", "--save-pod", str(pod), "--", word).stdout)
    assert [text for text in here["warnings"] if text.startswith("run would end with 127: ") and said in text]
    there = json.loads(launch("explain", "--json", "--pod", str(pod)).stdout)
    assert "run would end" not in str(there["warnings"])


@pytest.mark.parametrize("form", [["--json"], []])
def test_no_secret_is_ever_printed(form: list[str]) -> None:
    words = ["sh", "-c", "true", "--api-key=hunter2", "--password", "hunter2"]
    told = launched("explain", *form, "--", *words, env=V2 | SECRETS)
    assert "hunter2" not in told.stdout + told.stderr


def test_a_saved_pod_explains_as_the_pod_itself_and_holds_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "pod.json"
    here = launched("explain", "--json", "--save-pod", str(path), "--", "true", env=V2 | SECRETS)
    assert "hunter2" not in path.read_text()
    saved = json.loads(path.read_text())
    assert saved["env"]["PET_NNODES"] == "2"
    assert saved["hostname"] == "job-node-0-1"
    there = json.loads(launch("explain", "--json", "--pod", str(path)).stdout)
    assert there["job"] == json.loads(here.stdout)["job"]
    assert there["contract"] == "trainer-v2-torch"


def test_another_pod_is_explained_with_its_own_settings_and_with_those_typed_in_its_command(tmp_path: Path) -> None:
    path = tmp_path / "pod.json"
    own = {"TRAINER_LAUNCH_MAX_RESTARTS": "10", "TRAINER_LAUNCH_NPROC_PER_NODE": "2"}
    command = ["/usr/bin/trainer-launch", "run", "--nproc-per-node", "4", "--", "train.py", "--lr", "1"]
    path.write_text(json.dumps({"env": V2 | own, "hostname": "job-node-0-1", "command": command}))

    def plan(*words: str) -> dict[str, Any]:
        mine = {"TRAINER_LAUNCH_NPROC_PER_NODE": "9", "TRAINER_LAUNCH_MAX_RESTARTS": "1"}
        told = launch("explain", "--json", "--pod", str(path), *words, env=mine)
        made: dict[str, Any] = json.loads(told.stdout)["plan"]
        return made

    told = plan()
    assert (told["engine"], told["nproc_per_node"]) == ("torch", 4)
    assert told["workers"]["argv"][-3:] == ["train.py", "--lr", "1"]
    told = plan("--nproc-per-node", "3", "--", "other.py")
    assert (told["nproc_per_node"], told["workers"]["argv"][-1]) == (3, "other.py")
    (process,) = plan("--engine", "torchrun")["processes"]
    assert process["argv"][-3:] == ["train.py", "--lr", "1"]
    assert any(word == "--max-restarts=10" for word in process["argv"])


def test_a_pod_that_cannot_be_read_is_saved_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "pod.json"
    ended = launch("explain", "--save-pod", str(path), "--", "true", env=V2 | {"PET_NNODES": "two"} | SECRETS)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
    saved = path.read_text()
    assert json.loads(saved)["env"]["PET_NNODES"] == "two"
    assert "hunter2" not in saved
    assert launch("explain", "--pod", str(path)).stderr == ended.stderr


def test_explain_changes_nothing_and_reads_a_snapshot_in_place_of_this_container(tmp_path: Path) -> None:
    path = tmp_path / "pod.json"
    path.write_text(json.dumps({"env": {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3",
                                        "JAX_COORDINATOR_ADDRESS": "a:1", "JOB_COMPLETION_INDEX": "3"},
                                "files": {}, "hostname": "x"}))  # fmt: skip
    before = sorted(tmp_path.iterdir())
    explained = json.loads(launch("explain", "--json", "--pod", str(path), env=V2, cwd=tmp_path).stdout)
    assert explained["contract"] == "trainer-v2-jax"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", [[], *([name] for name, own in options.COMMANDS.items() if own)])
def test_help_fits_eighty_columns_and_names_the_variables(command: list[str]) -> None:
    told = launched(*command, "--help", env={"COLUMNS": "80"})
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert "TRAINER_LAUNCH_" in told.stdout
    examples = told.stdout.partition("\nexamples:\n")[2]
    assert f"trainer-launch {command[0] if command else 'rehearse'} " in examples
    assert launch("help", *command, env={"COLUMNS": "80"}).stdout == told.stdout


LOADED = (
    "import sys\nfrom trainer_launch.commands import options\n"
    "try: options.parse('trainer-launch', sys.argv[1:])\n"
    "except SystemExit: pass\n"
    "print(*(name for name in sys.modules if name.startswith('trainer_launch.')), file=sys.stderr)"
)


@pytest.mark.parametrize("words", [["--help"], ["version"], *([name, "--help"] for name in options.COMMANDS)])
def test_help_and_version_load_nothing_that_they_do_not_print(words: list[str]) -> None:
    told = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, check=True)
    assert told.stdout
    packages = {name.split(".")[1] for name in told.stderr.split()}
    assert packages <= {"commands", "host", "model"}
    commands = {name for name in told.stderr.split() if name.startswith("trainer_launch.commands.")}
    assert commands == {"trainer_launch.commands.options", "trainer_launch.commands.catalog"}


@pytest.mark.parametrize("command", ["run", "preflight", "explain", "rehearse"])
def test_help_shows_the_options_most_people_need_and_help_all_shows_each(command: str) -> None:
    told = (launch(command, flag).stdout for flag in ("--help", "--help-all"))
    few, whole = (set(re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)) for text in told)
    rare = {settings.flag_of(name) for name in set(options.COMMANDS[command]) - options.COMMON}
    assert whole - few == rare
    assert few & {settings.flag_of(name) for name in options.COMMON}


def test_the_version_is_told_in_every_usual_way() -> None:
    assert {launch(word).stdout for word in ("version", "--version", "-V")} == {f"trainer-launch {__version__}\n"}


def test_help_about_help_and_version_is_the_help_of_all_commands() -> None:
    lines = ("help", "help help", "help version", "version --help", "version -h", "help --help")
    assert {launch(*line.split()).stdout for line in lines} == {launch("--help").stdout}
