"""torchrun's options as data, held against the parser of the installed torch."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.planning.torchrun_options import (
    OPTIONS,
    check_form,
    destinations,
    from_variables,
    split_command,
)

# Prints each option of torch's own parser: names, destination, whether it is a flag, whether PET_* is read.
_ASK_TORCH = """
import json
from torch.distributed.run import get_args_parser
print(json.dumps([
    [a.option_strings, a.dest, a.nargs == 0, type(a).__name__ in ("env", "check_env"), list(a.choices or [])]
    for a in get_args_parser()._actions if a.option_strings and a.dest != "help"
]))
"""


@pytest.mark.torch
def test_the_table_says_what_the_installed_torchs_parser_says() -> None:
    answer = subprocess.run(
        [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=True, timeout=120
    )
    theirs = {
        dest: (strings, flag, env, choices) for strings, dest, flag, env, choices in json.loads(answer.stdout)
    }
    missing = set(theirs) - set(OPTIONS)
    assert not missing, f"torch knows options that the table lacks: {missing}"
    for name, (strings, flag, env, choices) in theirs.items():
        ours = OPTIONS[name]
        assert ours.flag in strings
        assert (ours.form == "flag") == flag, name
        assert ours.env == (env or name == "numa_binding"), name  # PET_NUMA_BINDING is read for every torch
        if choices:
            assert ours.form == "|".join(choices), name
        assert {ours.short, ""} <= {*strings, ""}, name


def test_both_spellings_joined_and_separate_values_and_abbreviations_are_taken() -> None:
    words = [
        "--nproc_per_node",
        "4",
        "--nnodes=2",
        "--max-rest=3",
        "-t",
        "3",
        "-r1",
        "--standalone",
        "train.py",
        "--x",
    ]
    split = split_command(words)
    assert dict(split.options) == {
        "nproc_per_node": "4", "nnodes": "2", "max_restarts": "3", "tee": "3", "redirects": "1", "standalone": "1",
    }  # fmt: skip
    assert split.program == ("train.py", "--x")


def test_options_after_the_script_are_the_scripts_own() -> None:
    split = split_command(["--nnodes=1", "train.py", "--nnodes=7", "--", "-m"])
    assert dict(split.options) == {"nnodes": "1"}
    assert split.program == ("train.py", "--nnodes=7", "--", "-m")


def test_an_option_of_a_newer_torch_is_handed_on_when_its_value_is_plain() -> None:
    assert split_command(["--brand-new=7", "train.py"]).unknown == ("--brand-new=7",)


@pytest.mark.parametrize(
    "words",
    [
        ["--brand-new", "7", "train.py"],
        ["--nnodes"],
        ["--nnodes=2"],
        [],
        ["--standalone=1", "x"],
        ["--rdzv=a", "x"],
        ["-q", "x"],
    ],
)
def test_what_cannot_be_split_is_one_error(words: list[str]) -> None:
    with pytest.raises(UsageError):
        split_command(words)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--rdzv-id", "--nnodes=2", "train.py"], "--nnodes=2"),
        (["-t", "-r3", "train.py"], "-r3"),
        (["--role", "--", "x"], "--"),
    ],
)
def test_an_option_behind_an_empty_variable_is_not_taken_for_its_value(words: list[str], found: str) -> None:
    with pytest.raises(UsageError, match=f"{words[0]} needs a value, found '{found}'; is a variable empty?"):
        split_command(words)


@pytest.mark.parametrize("value", ["-", "-1", "-.5", "-a b", ""])
def test_a_value_may_begin_with_a_hyphen_as_in_argparse(value: str) -> None:
    assert split_command(["--rdzv-id", value, "train.py"]).options == {"rdzv_id": value}


@pytest.mark.parametrize("value", ["", "1", "true", "True", "yes", "on"])
def test_a_flags_variable_may_say_true_in_any_word_even_empty(value: str) -> None:
    assert from_variables({"PET_STANDALONE": value}) == {"standalone": "1"}


@pytest.mark.parametrize("value", ["0", "false", "no", "OFF"])
def test_a_flags_variable_that_says_false_is_absent(value: str) -> None:
    assert from_variables({"PET_MODULE": value}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_restarts", ""),
        ("max_restarts", "-1"),
        ("monitor_interval", "soon"),
        ("start_method", "clone"),
        ("standalone", "maybe"),
        ("master_port", "http"),
        ("tee", "4"),
        ("redirects", "0:1,2"),
        ("local_ranks_filter", "a"),
        ("local_ranks_filter", "0 1"),
    ],
)
def test_a_value_out_of_form_names_the_variable_and_what_was_expected(name: str, value: str) -> None:
    option = OPTIONS[name]
    with pytest.raises(UsageError, match=f"invalid value '{value}' for {option.variable}: expected"):
        from_variables({option.variable: value})


@pytest.mark.parametrize("value", ["5", "0.5", ".5", "5.", "1e-3"])
def test_an_interval_is_written_as_python_takes_it(value: str) -> None:
    assert from_variables({"PET_MONITOR_INTERVAL": value}) == {"monitor_interval": value}


@pytest.mark.parametrize("name", ["tee", "redirects", "local_ranks_filter"])
def test_a_variable_of_spaces_is_absent_and_spaces_around_a_value_are_none_of_it(name: str) -> None:
    variable = OPTIONS[name].variable
    assert from_variables({variable: " "}) == {}
    assert from_variables({variable: " 1 "}) == {name: "1"}


def test_a_program_without_python_is_no_module() -> None:
    for split in (
        lambda: split_command(["--no-python", "-m", "json.tool"]),
        lambda: check_form({"no_python": "1", "module": "1"}),
    ):
        with pytest.raises(UsageError, match="remove one of them"):
            split()


def test_a_template_for_the_prefix_of_lines_is_taken_from_the_option_and_its_variable() -> None:
    options = {"tee": "3", "log_line_prefix_template": "<${hostname} ${role_name} ${rank}/${local_rank} $other>"}
    assert dict(split_command(["--log-line-prefix-template=[${rank}]", "x"]).options) == {
        "log_line_prefix_template": "[${rank}]"
    }
    assert from_variables({"PET_LOG_LINE_PREFIX_TEMPLATE": "[${rank}]"}) == {
        "log_line_prefix_template": "[${rank}]"
    }
    env = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "older"}
    streams = destinations(options, env, "trainer", {1: 5}, "/logs")
    assert streams[1][1].prefix == f"<{socket.gethostname()} trainer 5/1 $other>"
