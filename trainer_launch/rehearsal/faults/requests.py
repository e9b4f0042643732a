"""What `--fault` and `--chaos` ask for, held against the job and this machine before anything starts."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import shown
from trainer_launch.rehearsal.controllers.documents import read_values
from trainer_launch.rehearsal.controllers.fields import Field
from trainer_launch.rehearsal.controllers.loading import text_of
from trainer_launch.rehearsal.driver import Job
from trainer_launch.rehearsal.faults import capabilities, grammar, isolation
from trainer_launch.rehearsal.faults import chaos as chances
from trainer_launch.rehearsal.faults import validation as asking
from trainer_launch.rehearsal.faults.fault import Fault
from trainer_launch.rehearsal.faults.validation import Asked

_log = logging.getLogger(__name__)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `local` about faults."""
    parser.add_argument(
        "--fault",
        action="append",
        metavar="TEXT|FILE.yaml",
        help="inject this fault, such as 'kill worker node=1 at=step:40'; may be repeated; see above",
    )
    parser.add_argument(
        "--chaos",
        metavar="TEXT",
        help="inject random faults, such as 'seed=7 rate=1/30s'; a seed repeats them",
    )


def asked(flags: Mapping[str, Any]) -> Asked:
    """Read the flags, and the files that they name.

    Raises:
        UsageError: one does not fit.
    """
    faults: list[Fault] = []
    for text in flags["fault"] or ():
        faults += read(text_of(text, "--fault"), text) if names_file(text) else [grammar.parse(text)]
    if len(faults) > MAX_FAULTS:
        raise UsageError(f"--fault has {len(faults)} faults; the maximum is {MAX_FAULTS}")
    text = flags["chaos"]
    return Asked(faults=tuple(faults), chaos=None if text is None else chances.parse(text))


def isolate(wanted: Asked) -> bool:
    """Whether the pods have a network of their own; for that the same command begins once more, in namespaces.

    Raises:
        UsageError: a fault cannot be carried out on this machine.
    """
    if isolation.is_inside():
        return True
    machine = isolation.check(wanted.samples)
    if capabilities.wants_own_network(wanted.samples):
        isolation.enter(machine)  # does not return
    if capabilities.wants_names(wanted.faults):
        machine = isolation.look(network=True, memory=False)
        why = capabilities.why_no_network(machine)
        if not why:
            isolation.enter(machine)
        _log.warning("the loss of node 0 cannot be survived here, because pods have no names of their own: %s", why)
    return False


def fitted(job: Job) -> Job:
    """The job with faults that fit it.

    Raises:
        UsageError: one is for a pod that the job has not, or adds one to a job that cannot grow.
    """
    wanted = asking.fitted(job.asked, job.workload.drafts)
    grown = [fault for fault in wanted.faults if fault.kind == "add node"]
    if grown and job.grown is None:
        raise UsageError(
            f"--fault {shown(grown[0].text)} needs a job that can grow, and this one has a fixed number of nodes; "
            "use a range such as --nodes 1:2, or with -f a job with Worker replicas"
        )
    if grown and job.grown is not None:
        job.grown(len(grown))
    return replace(job, asked=wanted)


# -- YAML files --------------------------------------------------------------------------------


MAX_FAULTS = 1_000
ENDS = (".yaml", ".yml")


def names_file(text: str) -> bool:
    """Whether `--fault` is given a file rather than a fault."""
    return text.endswith(ENDS) and "=" not in text


def read(text: str, source: str) -> tuple[Fault, ...]:
    """All faults of a file, in its order; `source` is what messages call it.

    Raises:
        UsageError: it is no YAML, or a fault in it does not fit; the sentence names file and entry.
    """
    values = [value for value in read_values(text, source) if value is not None]
    if len(values) != 1:
        raise UsageError(f"{source} holds {len(values)} documents; expected one with faults: and a list")
    document = Field(values[0], "", source)
    document.only(("faults",))
    entries = document.get("faults").items()
    if not entries:
        raise document.get("faults").bad("a list of faults")
    if len(entries) > MAX_FAULTS:
        raise UsageError(f"{source} holds {len(entries)} faults; the maximum is {MAX_FAULTS}")
    return tuple(map(_fault, entries))


def _fault(entry: Field) -> Fault:
    where = f"{entry.where}: {entry.path}"
    if isinstance(entry.value, str):
        return grammar.parse(entry.value, where)
    if not isinstance(entry.value, dict):
        raise entry.bad("a text such as 'kill worker node=1', or an object with fault:")
    kind = " ".join(entry.get("fault").text().split()[:5])
    pairs = [(key, _word(field)) for key, field in entry.fields() if key != "fault" and field.given]
    return grammar.build(kind, pairs, f"{where} ({shown(kind)[1:-1]})")


def _word(field: Field) -> str:
    """YAML makes numbers of some values."""
    value: Any = field.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)[:40]
    return field.text()
