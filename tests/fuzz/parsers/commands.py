"""What users type: commands of torchrun, mpirun and horovodrun, our own settings, and lists in them."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import tempfile
from pathlib import Path
from unittest import mock

from tests.fuzz.oracle import Refused, attempt, text_of
from tests.fuzz.registry import target
from trainer_launch.commands import local, options
from trainer_launch.commands import options as fields
from trainer_launch.contracts import UNKNOWN
from trainer_launch.model import Job, NodeRange, Origin, hostfile, settings, signal_policy, value_parsers
from trainer_launch.model.errors import LaunchError, UsageError
from trainer_launch.mpi import horovod_ssh, mpirun_command
from trainer_launch.planning import engines, horovodrun_options, reading, torchrun_options, typed_mpirun
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.flag_overrides import overlay, with_minimum
from trainer_launch.planning.ssh_environment import named
from trainer_launch.preflight import registry, thresholds
from trainer_launch.pytorch import torchrun_rendezvous_options
from trainer_launch.rehearsal.faults import requests
from trainer_launch.rehearsal.kubelet import kubectl, pods
from trainer_launch.rehearsal.report import reporting

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
_LAST_WORDS = f"{_FOLDER.name}/termination-log"


@target("words")
def command(data: bytes) -> None:
    """A command line after `--`, words with NUL between them."""
    words = text_of(data).split("\0")
    found = attempt(parse_command, words, kinds=(UsageError,))
    if not isinstance(found, Refused):
        assert found.argv == tuple(words)
        if found.torchrun is not None:
            attempt(overlay, Job(contract=UNKNOWN.name), found.torchrun.options, Origin.COMMAND)
    taken = attempt(torchrun_options.split_command, words, kinds=(UsageError,))
    if not isinstance(taken, Refused):
        again = torchrun_options.split_command((*torchrun_options.render(taken.options), "--", *taken.program))
        assert (again.options, again.program) == (taken.options, taken.program)
        for name, value in taken.options.items():
            attempt(torchrun_options.check_value, torchrun_options.OPTIONS[name], value, "--it", names="--it")
    mpirun = attempt(typed_mpirun.parse, ["mpirun", *words], kinds=(UsageError,), names="mpirun")
    assert isinstance(mpirun, Refused) or mpirun.program
    _horovodrun(words)


def _horovodrun(words: list[str]) -> None:
    horovodrun_options.is_horovodrun(words)
    found = attempt(horovodrun_options.split_command, words, kinds=(UsageError,), names="")
    if isinstance(found, Refused):
        return
    again = horovodrun_options.split_command((*horovodrun_options.render(found), "--", *found.program, "x"))
    kept = tuple(one for one in found.typed if one[0] != "help")
    assert again.typed == kept
    for name in ("num_proc", "slots", "ssh_port"):
        attempt(found.number, name, kinds=(UsageError,))
    hosts = found.value("hosts")
    if hosts is not None:
        attempt(hostfile.parse_horovod, mpirun_command.filtered((), hosts), "--hosts")


@target("words")
def setting(data: bytes) -> None:
    """Our variables, NAME=VALUE with NUL between them, without their prefix."""
    pairs = [word.partition("=")[::2] for word in text_of(data).split("\0")]
    env = {f"{settings.PREFIX}{name.upper()}": value for name, value in pairs if name and "\0" not in value}
    with mock.patch.dict(os.environ, env, clear=True):
        found = attempt(settings.load, {}, kinds=(UsageError,), names=settings.PREFIX)
        for sentence in settings.unknown_variables(os.environ):
            assert sentence.isprintable()
    if isinstance(found, Refused):
        return
    job = attempt(overlay, Job(contract=UNKNOWN.name), settings.job_options(found), Origin.FLAG)
    if not isinstance(job, Refused):
        attempt(with_minimum, job, found.min_nodes)
    attempt(reading.ports_of, found, names="--port-range")
    attempt(engines._names, found.preload, names="--preload")


@target("text", 1000)
def option(data: bytes) -> None:
    """Values of options that have a grammar of their own."""
    text = text_of(data)
    given = attempt(signal_policy.parse, text, kinds=(UsageError,), names="--signals")
    if not isinstance(given, Refused):
        attempt(signal_policy.stop_signal, given, names="--signals")
    attempt(thresholds.parse_flag, text, kinds=(UsageError,), names="--threshold")
    attempt(registry.named, text, "--only", kinds=(UsageError,), names="--only")
    attempt(named, text, kinds=(UsageError,), names="--forward-env")
    seconds = value_parsers.parse_duration(text)
    assert seconds is None or seconds >= 0
    attempt(reporting._steps, text, kinds=(UsageError,), names="--max-lost-steps")
    words = attempt(pods.words_of, text, kinds=(LaunchError,), names="--command")
    assert isinstance(words, Refused) or words


@target("json", 8000)
def reference(data: bytes) -> None:
    """A table of what GPUs should deliver."""
    found = attempt(thresholds.parse_table, data, "--reference it", kinds=(UsageError,), names="--reference it")
    if not isinstance(found, Refused):
        again = thresholds.parse_table(thresholds.render_table(found.rows.values()).encode(), "again")
        assert again == found


@target("words")
def argv(data: bytes) -> None:
    """Our own command line: the first byte chooses the command, NUL stands between the words."""
    if not data:
        return
    name = list(fields.COMMANDS)[data[0] % len(fields.COMMANDS)]
    words = text_of(data[1:]).split("\0")
    env = {f"{settings.PREFIX}TERMINATION_LOG": _LAST_WORDS, "COLUMNS": "80"}
    said = io.StringIO()
    with mock.patch.dict(os.environ, env, clear=True), contextlib.redirect_stdout(said):
        try:
            found = attempt(options.parse, "trainer-launch", [name, *words], kinds=(UsageError,))
        except SystemExit:  # --help, --version
            found = None
    if found is None:
        assert said.getvalue()
        return
    if isinstance(found, Refused):
        return
    assert "--" not in words or found.argv == tuple(words[words.index("--") + 1 :])
    attempt(reading.ports_of, found.settings, names="--port-range")
    attempt(signal_policy.parse, found.settings.signals or "", names="--signals")
    if name == "local":
        attempt(local._nodes, found.settings, names="--nodes")
        attempt(local._nproc, found.settings, names="--nproc-per-node")
        if not any(map(requests.names_file, found.flags["fault"] or ())):
            attempt(requests.asked, found.flags, kinds=(UsageError,), names="--")


@target("words")
def stand_ins(data: bytes) -> None:
    """What mpirun and horovodrun write after `ssh` and `kubectl`, which are ours there."""
    words = text_of(data).split("\0")
    options, host, command = horovod_ssh.split(words)
    kept, given = (sorted(filter(None, some)) for some in ([*options, host, *command], words))
    assert given in (kept, sorted([*kept, "--"]))
    assert shlex.split(horovod_ssh.guarded(" ".join(command), 1e9))[-1] == " ".join(command)
    assert horovod_ssh.local_rank(" ".join(command)).strip("-0123456789") == ""
    found = attempt(kubectl._parsed, words, kinds=(SystemExit,), names="kubectl", plain=False)
    if not isinstance(found, Refused):
        pod, container, _, _ = found
        attempt(kubectl._record, "/nowhere/pods", pod, container, kinds=(SystemExit,), plain=False)


@target("lines", 1000)
def rdzv_conf(data: bytes) -> None:
    """What a plain torchrun was told of our rendezvous: the endpoint, then a value and its name in each line."""
    endpoint, *lines = text_of(data).split("\n")
    conf = dict(line.partition("=")[::2] for line in lines)
    nodes = NodeRange(1, 3) if len(lines) % 2 else NodeRange(2, 2)
    found = attempt(torchrun_rendezvous_options.read, endpoint, nodes, "job", conf, {}, kinds=(UsageError,))
    if not isinstance(found, Refused):
        torchrun_rendezvous_options.is_host(found, frozenset({"h"}), lambda host: False)
        again = {"endpoint": str(found.endpoint), "conf": {} if found.node_rank is None else {"node_rank": "1"}}
        assert (
            attempt(torchrun_rendezvous_options.read, again["endpoint"], nodes, "job", again["conf"], {})
            is not None
        )
