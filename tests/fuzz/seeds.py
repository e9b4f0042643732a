"""What fuzzing begins with beside `seed-…` in the corpus: the cases of other tests, and our own messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from msgspec import to_builtins

from tests.contracts import nasty
from tests.contracts.pods import CASES
from tests.fuzz import corpus
from tests.rehearsal.controllers.manifests import cases as manifests
from trainer_launch.diagnosis.collectives import Entries, Explanation, RankState
from trainer_launch.diagnosis.stall import STALL, Ranks
from trainer_launch.diagnosis.stragglers import STRAGGLERS, ClockAnswer, Entered
from trainer_launch.membership import protocol as coordination
from trainer_launch.membership.protocol import Claim
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.observability import node_view
from trainer_launch.observability.goodput import TRAINING, LedgerSummary
from trainer_launch.preflight.cluster import preflight_messages as calling
from trainer_launch.preflight.report_formats import finding_as_json
from trainer_launch.supervisor.run_observer import TimeKind

_TESTS = Path(__file__).parents[1]
_BAD = Finding(check="dns", status=Status.FAIL, fault=Fault.NODE, text="no address", measured=1.5, evidence=("a",))


def of(name: str) -> list[bytes]:
    """The seeds of a target."""
    made = globals().get(f"_{name}")
    return [text if isinstance(text, bytes) else text.encode("utf-8", "replace") for text in made()] if made else []


def _pod() -> Iterator[str]:
    yield from (json.dumps(case["pod"]) for case in list(CASES.values())[::2])


def _json_config() -> Iterator[str]:
    for case in CASES.values():
        env = case["pod"].get("env", {})
        yield from (env[name] for name in ("TF_CONFIG",) if name in env)


def _hosts() -> Iterator[bytes]:
    for number in range(5):
        for text in nasty.CONTENTS:
            yield bytes([number]) + text.encode("utf-8", "replace")
        yield bytes([number]) + b"a slots=2 max_slots=4\nb:2\n[::1]:3\nname-[0-3,08-10],c # x\necho d:1\n"


def _value() -> Iterator[bytes]:
    texts = ["a,b=c", "k=v,l=w", "1-2", "500m", "16Gi", "1e3", "1.5m", "10Mbit/s", "'a", "^=eth0,ib"]
    for number in range(10):
        for text in (*nasty.VALUES[:60], *texts):
            yield bytes([number]) + text.encode("utf-8", "replace")


_CONVERSATION = (
    coordination.Hello(coordination.VERSION, "job", 0, "n-0", "i0", claims=(Claim(3, 0, "0-2", True),)),
    coordination.Hello(coordination.VERSION, "job", 1, "n-1", "i1", 2, 1, "proof", workers=8, role="trainer"),
    coordination.Join("i0"), coordination.Join("i1", 1), coordination.Took(1), coordination.Store(1, "10.0.0.1", 4000),
    coordination.Failed(1, 0, 1, None, "boom", "ValueError"), coordination.Renew(), coordination.Done(1),
    coordination.Leave("bye"), coordination.StatusQuery(coordination.VERSION, "job"),
    coordination.Hello(coordination.VERSION, "job", 2, "n-2", "i2", 2**31 - 1),
    coordination.Note(1, STALL, Ranks((RankState(rank=0), RankState(rank=1, place="x")), 5, 1.0)),
    coordination.Note(1, STRAGGLERS, ClockAnswer(1, 5)), coordination.Note(1, STRAGGLERS, Entered((Entries(rank=0),))),
    coordination.Join("i0", 1, notes={STALL: {"all_reduce #1": (0,)}, TRAINING: LedgerSummary({TimeKind.TRAINING: 1.0}, 5)}),
)  # fmt: skip
_FROM_SERVER = (
    coordination.Challenge("ab"), coordination.Welcome(5.0), coordination.Refused("no", True),
    coordination.Quarantined("no", False),
    coordination.Waiting(1, 2, ("n-1",)), coordination.Formed(1, 0, 2, 0, True, Claim(1, 0, "0-1", False), 8, 16, 4, 8),
    coordination.Go(1, "h", 1), coordination.Restart(1, "x"), coordination.GiveUp("x", "n", 1, 1, None, "m"),
    coordination.Finished(), coordination.JobStatus("running", 1, 0, 3, 1, 2, 2, ((0, "h", "up", 1.0),), None),
    coordination.Note(1, STALL, Explanation(text="text", ranks=(1,))),
)  # fmt: skip
_CALLED = (
    calling.Hello(calling.VERSION, "job", 0, "n-0", "i0", listens=4000), calling.Hello(calling.VERSION, "job", 1, "n-1", "i1", listens=1),
    calling.Time(1.5), calling.NodeReport({"torch": "2.13", "ENV NCCL_X": "1"}, 0.1, 0.1, (_BAD,)),
    calling.Result(1, (calling.RailResult("", 10**9),)), calling.NodeReport(findings=(_BAD,), is_early=True), calling.Renew(),
    coordination.Hello(coordination.VERSION, "job", 1, "n-1", "i1"),
    calling.PreflightWaiting(1, 2, ("a",), 3.0), calling.TimeIs(1.0, 2.0, 3.0), calling.Complete("salt"),
    calling.Test(1, 0, "h", 1, "tok", 5.0), calling.Decided((_BAD,)),
    calling.Refused("no", False),
)  # fmt: skip


def _coordinator_lines() -> Iterator[bytes]:
    yield from (coordination.render(message).strip() for message in (*_CONVERSATION, *_FROM_SERVER))


def _cluster_preflight_lines() -> Iterator[bytes]:
    yield from (calling.render(message).strip() for message in _CALLED)


def _coordinator_talk() -> Iterator[bytes]:
    lines = [coordination.render(message).strip() for message in _CONVERSATION]
    for job in range(3):
        told = [bytes([48 + number % 2]) + line for number, line in enumerate(lines)]
        yield bytes([job]) + b"\n".join(
            [b"0+", b"1+", *told, b"0-", b"1t", b"\x60t", b"0+", told[0], b"0" + lines[2]]
        )
        both = [lines[0], lines[2], lines[4], lines[5], lines[8]], [lines[1], lines[3], lines[4], lines[8]]
        yield bytes([job]) + b"\n".join([b"0" + line for line in both[0]] + [b"1" + line for line in both[1]])


def _cluster_preflight_talk() -> Iterator[bytes]:
    lines = [calling.render(message).strip() for message in _CALLED]
    for flags in (0, 1, 4, 12):
        told = [b"0" + lines[0], b"1" + lines[1], b"0" + lines[3], b"1" + lines[3]]
        told += [side + lines[number] for number in (7, 4) for side in (b"0", b"1")]
        told += [b"0" + lines[5], b"0" + lines[8]]
        yield bytes([flags]) + b"\n".join(told)
        yield bytes([flags]) + b"\n".join([*told, b"0-", b"1t", b"0" + lines[0], b"\x60t"])


def _findings() -> Iterator[str]:
    yield json.dumps({"format": "trainer-launch-preflight", "version": 2, "findings": [finding_as_json(_BAD)]})


def _manifest() -> Iterator[str]:
    yield from (case["manifest"] for case in list(manifests().values())[::2])


def _reference() -> Iterator[bytes]:
    yield (_TESTS.parent / "trainer_launch/preflight/references.json").read_bytes()[:6000]
    row = {"model": "H100", "measure": "gemm", "value": 1.5, "unit": "TFLOP/s", "source": "me"}
    yield json.dumps({"format": "trainer-launch-references", "version": 1, "references": [row]}).encode()
    yield json.dumps(
        {"format": "trainer-launch-preflight", "version": 2, "verdict": "pass", "measured": [row]}
    ).encode()
    yield json.dumps({"observe": True, "rules": {"cpu": "off", "external-dcgm": "fatal"}}).encode()
    yield b'observe = true\n[rules]\ncpu = "off"\n"gpu-ecc" = "warn"\n'
    yield json.dumps(
        {"findings": [{"name": "dcgm", "status": "fail", "text": "no", "gpu": 3, "remedy": "RMA"}]}
    ).encode()


def _launchers_view() -> Iterator[str]:
    view = node_view.View(
        version="0", pid=1, started_ticks=2, run_dir="/r", host="h", node_rank=0, contract="c", engine="e", phase="running",
        since_s=1.0, started_s=1.0, processes=(("a", 1),), exits=(("a", 1),), job="j", coordinator=("h", 1),
    )  # fmt: skip
    text = json.dumps(to_builtins(view))
    yield text.replace('"pid": 1', '"pid": @PID').replace('"started_ticks": 2', '"started_ticks": @TICKS')


def _symptom() -> Iterator[str]:
    for path in sorted((_TESTS / "supervisor").glob("*.txt")):
        yield path.read_text(encoding="utf-8")[:4000]


def _other_end() -> Iterator[bytes]:
    yield b"".join(coordination.render(message) for message in _FROM_SERVER)
    yield b"".join(calling.render(message) for message in _CALLED)


def _ending() -> Iterator[bytes]:
    extra = {"extraInfo": {"py_callstack": "a", "timestamp": "1700000000"}}
    for more in ({}, {"message": {"message": "m", **extra}}, {"message": {"message": "m", "errorCode": -9}}):
        for name in ("symptom", "mpi_output"):
            printed = [text for kept, text in sorted(corpus.read(name).items()) if kept.startswith("seed-")]
            yield b"\n".join([json.dumps(more).encode(), *printed])[:4000]
        yield json.dumps(more).encode() + b"\nExit code: 0\nProcess 3 exit with status code 0."
