"""Each GPU does real work: it answers, adds and multiplies right, keeps what it is given, and does not hang."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.bench_results import PEERS, Benched, Ending
from trainer_launch.preflight.gpu.facts import numbered
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-load"
NEEDS_LOAD = True
_NOT_BUILT = ("no kernel image", "not compatible with the current PyTorch", "sees no GPU", "driver on your system")


def limit_s(subject: Subject) -> float:
    """All children together, until the last one was killed."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """One child for each GPU has multiplied, copied, and met itself with NCCL."""
    found = findings_of_gpus.load(subject)
    if found is None:
        return
    if not found.tested:
        yield Finding(check=NAME, status=Status.SKIPPED, scope=Scope.GPU, text=found.trouble)
    elif found.trouble and subject.cards is not None and not subject.cards.facts().trouble:
        text = f"the GPUs were not watched under load: {found.trouble}"
        yield Finding(check=NAME, status=Status.UNKNOWN, scope=Scope.GPU, text=text)
    without = [one for one in found.tested if one.ending is Ending.NO_TORCH]
    unknown = [one for one in found.tested if one.ending is Ending.NOT_RUN]
    if without:
        text = "not tested: the program's Python has no torch"
        yield Finding(check=NAME, status=Status.SKIPPED, scope=Scope.GPU, text=text)
    if unknown:
        text = f"{numbered([one.gpu for one in unknown])} not tested: {unknown[0].why}"
        yield Finding(check=NAME, status=Status.UNKNOWN, scope=Scope.GPU, text=text)
    tested = [one for one in found.tested if one not in (*without, *unknown)]
    yield from _judged(tested)


def _judged(tested: Sequence[Benched]) -> Iterator[Finding]:
    unfit = [one for one in tested if any(word in one.why for word in _NOT_BUILT)]
    bad = [Trouble(gpu=one.gpu, text=_wrong(one), measured=one.stage) for one in tested if _wrong(one)]
    node = [one for one in bad if one.gpu not in {other.gpu for other in unfit}]
    yield from findings_of_gpus.summed(NAME, (), node, "")
    image = "use a torch that is built for this card and its driver"
    job = [Trouble(gpu=one.gpu, text=_wrong(one), measured=one.stage, action=image) for one in unfit]
    yield from findings_of_gpus.summed(NAME, (), job, "", Fault.JOB)
    if tested and not bad:
        repeats, patterns = tested[0].repeats, min(one.tested_bytes for one in tested)
        text = f"{numbered([one.gpu for one in tested])}: {repeats} products came out the same, bit by bit"
        text += f"; {patterns >> 30} GiB of memory kept three patterns" if patterns else ""
        yield Finding(check=NAME, status=Status.PASS, scope=Scope.GPU, text=text)


def _wrong(one: Benched) -> str:
    if one.different:
        return (
            f"computes wrong results: {one.different} of {one.repeats} repeats of a product differ from the first"
        )
    if one.wrong_words:
        return f"forgets: {one.wrong_words} words of {one.tested_bytes >> 30} GiB came back changed"
    if not one.sums_right:
        return "adds wrongly in a collective of its own"
    if one.stage == PEERS and one.ending is not Ending.STUCK:
        return ""  # who waits for others may not be the faulty one: gpu-peers says what is to be said
    if one.ending is Ending.FAILED:
        return f"failed its test at {one.stage!r}: {one.why}"
    return one.why
