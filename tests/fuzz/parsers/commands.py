"""What users type: commands of torchrun, mpirun and horovodrun, our own settings, and lists in them."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from tests.fuzz.oracle import FOLDER, Refused, attempt, text_of
from tests.fuzz.registry import target
from trainer_launch.commands import options, rehearse
from trainer_launch.commands import options as fields
from trainer_launch.contracts import UNKNOWN
from trainer_launch.model import Job, Origin, hostfile, settings, signal_policy, value_parsers
from trainer_launch.model.codec import MessageError, decode
from trainer_launch.model.errors import LaunchError, UsageError
from trainer_launch.planning import mpi_options, task, torch, torchrun_options
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.job import overlay, with_minimum
from trainer_launch.planning.mpi import forwarded
from trainer_launch.preflight import policy, registry, thresholds
from trainer_launch.preflight.external_check import MAX_BYTES, ExternalReport
from trainer_launch.rehearsal import faults, kubelet

_LAST_WORDS = f"{FOLDER}/termination-log"


@target()
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
    for program in ("mpirun", "horovodrun"):
        typed = attempt(mpi_options.parse, [program, *words], kinds=(UsageError,), names=program)
        if not isinstance(typed, Refused):
            assert typed.program
            attempt(typed.number_of, "slots-per-host", kinds=(UsageError,))
            attempt(hostfile.parse_horovod, typed.hosts or "", "--hosts")
    mpi_options.is_horovodrun(words)


@target()
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
    attempt(task.ports_of, found, names="--port-range")
    attempt(torch._modules, found.preload, names="--preload")


@target(1000)
def option(data: bytes) -> None:
    """Values of options that have a grammar of their own."""
    text = text_of(data)
    given = attempt(signal_policy.parse, text, kinds=(UsageError,), names="--signals")
    if not isinstance(given, Refused):
        attempt(signal_policy.stop_signal, given, names="--signals")
    attempt(registry.named, text, "--only", kinds=(UsageError,), names="--only")
    if "\0" not in text:  # no word and no variable has one, and no file
        attempt(policy.parse_flag, text, kinds=(UsageError,), names="--policy")
    attempt(forwarded, text, kinds=(UsageError,), names="--forward-env")
    seconds = value_parsers.parse_duration(text)
    assert seconds is None or seconds >= 0
    words = attempt(kubelet.words_of, text, kinds=(LaunchError,), names="--command")
    assert isinstance(words, Refused) or words


@target(8000)
def reference(data: bytes) -> None:
    """The report of a healthy job, or a table of what GPUs should deliver; a site's policy, and its own check."""
    found = attempt(thresholds.parse_table, data, "--reference it", kinds=(UsageError,), names="--reference it")
    assert isinstance(found, Refused) or all(row.value > 0 for row in found.rows.values())
    for name in ("it.json", "it.toml"):
        given = text_of(data), name, policy.Policy()
        attempt(policy.parse_content, *given, kinds=(UsageError,), names=name)
    told = attempt(decode, ExternalReport, data, MAX_BYTES, kinds=(MessageError,))
    for finding in () if isinstance(told, Refused) else told.findings:
        assert finding.finding().text.isprintable()


@target()
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
    attempt(task.ports_of, found.settings, names="--port-range")
    attempt(signal_policy.parse, found.settings.signals or "", names="--signals")
    if name == "rehearse":
        attempt(rehearse._nodes, found.settings, names="--nodes")
        attempt(rehearse._nproc, found.settings, names="--nproc-per-node")
        for text in found.flags["fault"] or ():
            attempt(faults.parse, text, kinds=(UsageError,), names="--")
