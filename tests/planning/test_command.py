"""What the user typed after --: recognised, with the wrappers around it, the launchers in it, and its grace."""

from __future__ import annotations

import shlex

import pytest

from tests.planning.requests import given
from tests.refusals import refusal
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.command import (
    CommandKind,
    grace_of,
    launcher_in,
    parse_command,
    see_through,
    unexpanded,
)


@pytest.mark.parametrize(
    ("line", "kind", "python", "program"),
    [
        ("train.py --lr 1", CommandKind.SCRIPT, "", "train.py --lr 1"),
        ("./train.py", CommandKind.SCRIPT, "", "./train.py"),
        ("-m pkg.mod --lr 1", CommandKind.MODULE, "", "pkg.mod --lr 1"),
        ("python train.py", CommandKind.SCRIPT, "python", "train.py"),
        (
            "/usr/bin/python3.11 -u -X dev train.py -v",
            CommandKind.SCRIPT,
            "/usr/bin/python3.11 -u -X dev",
            "train.py -v",
        ),
        ("python -uW ignore train.py", CommandKind.SCRIPT, "python -uW ignore", "train.py"),
        ("python -um mod x", CommandKind.MODULE, "python -u", "mod x"),
        ("python -mmod x", CommandKind.PROGRAM, "", "python -mmod x"),
        ("python -c pass", CommandKind.PROGRAM, "", "python -c pass"),
        ("python", CommandKind.PROGRAM, "", "python"),
        ("bash -c 'torchrun train.py'", CommandKind.PROGRAM, "", "bash -c 'torchrun train.py'"),
        ("mpirun -np 2 python train.py", CommandKind.PROGRAM, "", "mpirun -np 2 python train.py"),
        ("pythonista.sh", CommandKind.PROGRAM, "", "pythonista.sh"),
    ],
)
def test_a_command_is_recognised(line: str, kind: CommandKind, python: str, program: str) -> None:
    command = parse_command(shlex.split(line))
    assert command.kind is kind
    assert command.python == tuple(shlex.split(python))
    assert command.program == tuple(shlex.split(program))
    assert command.argv == tuple(shlex.split(line))


def test_a_module_may_be_glued_to_its_flag() -> None:
    assert parse_command(("-mpkg.mod", "x")) == parse_command(("-m", "pkg.mod", "x"))


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nnodes=2 -m pkg.mod x",
        "python -m torch.distributed.run --nnodes 2 -m pkg.mod x",
        "-m torch.distributed.run --nnodes 2 -m pkg.mod x",
    ],
)
def test_torchrun_is_taken_apart_however_it_is_called(line: str) -> None:
    torchrun = given(parse_command(shlex.split(line)).torchrun)
    assert dict(torchrun.options) == {"nnodes": "2", "module": "1"}
    assert torchrun.program == ("pkg.mod", "x")


@pytest.mark.parametrize(
    ("line", "is_worker"),
    [
        ("train.py", True),
        ("-m pkg.mod", True),
        ("python -m pkg.mod torch.distributed.launch", True),
        ("python -m torch.distributed.launch --nproc_per_node=8 train.py", False),
        ("-m accelerate.commands.launch train.py", False),
        ("python3 -u -m accelerate.commands.accelerate_cli launch train.py", False),
        ("python -m deepspeed.launcher.runner train.py", False),
        ("torchrun train.py", False),
        ("deepspeed train.py", False),
    ],
)
def test_a_module_that_starts_workers_itself_is_no_worker(line: str, is_worker: bool) -> None:
    assert parse_command(shlex.split(line)).is_worker is is_worker


@pytest.mark.parametrize("words", [[], [""], ["--lr", "1"], ["-c", "pass"]])
def test_no_command_is_an_error_that_says_how_to_write_one(words: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--|program"):
        parse_command(words)


def test_an_option_of_the_launcher_after_the_entrypoints_dashes_is_named_as_a_variable() -> None:
    with pytest.raises(UsageError, match=r"goes before --, or into TRAINER_LAUNCH_NPROC_PER_NODE$"):
        parse_command(["--nproc-per-node=2", "train.py"])


@pytest.mark.parametrize(
    ("line", "prefix", "command"),
    [
        ("env A=1 torchrun t.py", "env A=1", "torchrun t.py"),
        ("/usr/bin/env -u HOME A=b=c B= python3 t.py", "/usr/bin/env -u HOME A=b=c B=", "python3 t.py"),
        ("nice -n 5 ionice -c2 -n 0 train.py --lr 1", "nice -n 5 ionice -c2 -n 0", "train.py --lr 1"),
        ("numactl -N 0 --membind=0 torchrun t.py", "numactl -N 0 --membind=0", "torchrun t.py"),
        ("taskset -c 0-3 python t.py", "taskset -c 0-3", "python t.py"),
        ("nohup horovodrun -np 2 t", "nohup", "horovodrun -np 2 t"),
        ("tini -s -- torchrun t.py", "", "torchrun t.py"),
        ("dumb-init -c -- env A=1 torchrun t.py", "env A=1", "torchrun t.py"),
        ("bash -c 'torchrun --nproc-per-node 2 t.py \"a b\"'", "", "torchrun --nproc-per-node 2 t.py 'a b'"),
        ("sh -euxc 'exec python t.py'", "", "python t.py"),
        ("tini -- bash -c 'numactl -N 0 torchrun t.py'", "numactl -N 0", "torchrun t.py"),
        # Programs that change the user, also before a shell.
        (
            "setpriv --reuid=1000 --clear-groups torchrun t.py",
            "setpriv --reuid=1000 --clear-groups",
            "torchrun t.py",
        ),
        ("setpriv --reuid 1000 --regid 1000 -- python t.py", "setpriv --reuid 1000 --regid 1000 --", "python t.py"),
        ("gosu app:app torchrun t.py", "gosu app:app", "torchrun t.py"),
        ("s6-setuidgid app bash start.sh", "s6-setuidgid app", "bash start.sh"),
        ("tini -- gosu app bash -c 'torchrun t.py'", "gosu app", "torchrun t.py"),
        ("gosu app mpirun.openmpi -np 2 python t.py", "gosu app", "mpirun.openmpi -np 2 python t.py"),
        ("env -C /job A=/b gosu app python t.py", "env -C /job A=/b gosu app", "python t.py"),
    ],
)
def test_a_wrapper_that_becomes_the_command_stands_in_front_of_the_launcher(
    line: str, prefix: str, command: str
) -> None:
    seen = see_through(shlex.split(line))
    assert (seen.prefix, seen.command) == (tuple(shlex.split(prefix)), tuple(shlex.split(command)))


@pytest.mark.parametrize(
    "line",
    [
        "train.py",
        "torchrun t.py",
        "env -S 'torchrun t.py'",
        "env -i torchrun t.py",
        "nice ./program",
        "taskset -p 0xf 1234",
        "timeout 60 torchrun t.py",
        "nice ./wrapper.bin python t.py",
        "gosu app /opt/launch python t.py",
        "uv run torchrun t.py",
        "bash train.sh",
        "bash -c 'torchrun t.py' name argument",
        "bash -lc 'torchrun t.py | tee log'",
        "bash -lc 'torchrun t.py'",
        "bash -c 'A=1 torchrun t.py'",
        "bash -c 'torchrun t.py $ARGS'",
        "bash -c 'cd /x; torchrun t.py'",
        "bash -c 'torchrun \"t.py'",
        "bash -c ./program",
        "bash -c 'time torchrun t.py'",
    ],
)
def test_a_command_stays_as_it_is_where_something_would_be_lost(line: str) -> None:
    words = tuple(shlex.split(line))
    assert see_through(words) == ((), words)


@pytest.mark.parametrize(
    ("line", "name", "is_inside"),
    [
        ("torchrun x.py", "torchrun", False),
        ("/opt/venv/bin/torchrun x.py", "torchrun", False),
        ("env A=1 torchrun x.py", "torchrun", True),
        ("timeout 60 python -u -m torch.distributed.run x.py", "torch.distributed.run", True),
        ("bash -c 'pip install x && torchrun --nproc-per-node 2 x.py'", "torchrun", True),
        ("""bash -c 'cat > x.py << EOM\nprint("it is")\nEOM\ntorchrun "x.py"'""", "torchrun", True),
        ("bash -euc 'A=1 exec python3 -m torch.distributed.run x.py'", "torch.distributed.run", True),
        ("env A=1 sh -c 'torchrun x.py'", "torchrun", True),
        ("bash -lc 'torchrun --version; exec trainer-launch run -- torchrun x.py'", "trainer-launch", True),
        ("accelerate launch --cpu x.py", "accelerate launch", False),
        ("python -m accelerate.commands.launch x.py", "accelerate.commands.launch", False),
        ("deepspeed --num_gpus 2 x.py", "deepspeed", False),
        ("sh -c 'mpirun -np 2 x'", "mpirun", True),
        ("trl sft --config c.yaml", "trl sft", False),
        ("uv run accelerate-launch x.py", "accelerate-launch", True),
    ],
)
def test_a_launcher_is_recognised(line: str, name: str, is_inside: bool) -> None:
    found = given(launcher_in(shlex.split(line)))
    assert (found.name, found.is_inside) == (name, is_inside)


@pytest.mark.parametrize(
    "line",
    [
        "./train.sh --launcher deepspeed",
        "uv run --with deepspeed train.py",
        "env A=1 python train.py deepspeed",
        "env A=torchrun python train.py",
        "python -c 'import torchrun'",
        "bash -c 'echo torchrun'",
        "bash -c 'pip install deepspeed; python train.py'",
    ],
)
def test_a_word_that_names_no_launcher_is_none(line: str) -> None:
    assert launcher_in(shlex.split(line)) is None


PLAIN = parse_command(("train.py",))
TYPED = parse_command(("torchrun", "--shutdown-timeout", "60", "train.py"))
TORCHS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}
PET = {"PET_SHUTDOWN_TIMEOUT": "120"}


@pytest.mark.parametrize(
    ("command", "env", "seconds"),
    [
        (PLAIN, {}, 25),
        (TYPED, {}, 60),
        (PLAIN, TORCHS, 90),
        (PLAIN, {**TORCHS, **PET}, 120),
        (PLAIN, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "99999999"}, 86_400),  # for ever, which no poll() can wait
    ],
)
def test_torchs_shutdown_timeout_sets_the_grace_in_torchruns_own_order(command, env, seconds: int) -> None:
    assert grace_of(25.0, command, env, is_given=False) == seconds


def test_an_explicit_grace_wins() -> None:
    assert grace_of(20.0, TYPED, TORCHS, is_given=True) == 20


@pytest.mark.parametrize("env", [{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, {"PET_SHUTDOWN_TIMEOUT": "-1"}])
def test_a_timeout_that_is_no_number_is_refused_with_its_name(env) -> None:
    said = refusal(lambda: grace_of(25.0, PLAIN, env, is_given=False))
    assert f"for {next(iter(env))}: expected" in said


@pytest.mark.parametrize(
    "line",
    [
        "runuser -u app -- torchrun t.py",
        "runuser app -c 'torchrun t.py'",
        "su - app -c 'cd /x && torchrun t.py'",
        "sudo -E -u app torchrun t.py",
        "chroot /image torchrun t.py",
        "bash -c 'cd /x; exec gosu app torchrun t.py'",
        "env -i sudo torchrun t.py",
    ],
)
def test_a_launcher_that_cannot_find_our_shims_is_recognised_as_hidden(line: str) -> None:
    launcher = given(launcher_in(shlex.split(line)))
    assert (launcher.name, launcher.is_hidden, launcher.is_shim) == ("torchrun", True, False)
    assert see_through(shlex.split(line)).prefix == ()


@pytest.mark.parametrize(
    "line", ["env -i torchrun t.py", "timeout -v 60 torchrun t.py", "unshare -m torchrun t.py"]
)
def test_a_letter_that_takes_no_value_hides_no_launcher(line: str) -> None:
    launcher = given(launcher_in(shlex.split(line)))
    assert (launcher.name, launcher.is_inside, launcher.is_hidden) == ("torchrun", True, False)


@pytest.mark.parametrize("line", ["torchrun --help", "python -m torch.distributed.run --print-completion bash"])
def test_a_question_to_torchrun_is_left_to_it(line: str) -> None:
    command = parse_command(shlex.split(line))
    assert (command.torchrun, command.is_worker, launcher_in(command.argv)) == (None, False, None)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train.py $(STEPS)", "defines STEPS"),
        ("python train.py --steps=$(STEPS) --dir $(OUT.DIR)", "in the argument '--steps=$(STEPS)'"),
        ("mpirun -np $(N) ./a.out", "defines N"),
        ("train.py ${DATA}/x", "write $(DATA)"),
        ("train.py $DATA/x", "or run it with bash -c"),
        ("train.py $NOT_SET", None),
        ("train.py --local-rank=${local_rank}", None),
        ("train.py --cost 5$ --text $$(STEPS)", None),
        ("bash -c 'train.py $(date)'", None),
        ("env A=1 sh -c 'train.py $DATA'", None),
    ],
)
def test_a_reference_that_nobody_has_replaced_is_said_unless_a_shell_reads_it(line: str, says: str | None) -> None:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    warning = unexpanded(list(lexer), {"DATA": "/data"})
    assert (warning is None) == (says is None), warning
    assert says is None or (says in str(warning) and " was not expanded: " in str(warning))
