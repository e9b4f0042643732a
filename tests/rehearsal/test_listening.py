"""What is heard in the output of pods: steps and lines, whatever the blocks that it comes in."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_launch.host import runtime_directory
from trainer_launch.observability.progress import MAX_TEXT, OutputScanner, ScannedLine
from trainer_launch.rehearsal.history import HistoryEntry, What
from trainer_launch.rehearsal.pod_watch import PodWatch


def steps(*blocks: bytes, scanner: OutputScanner | None = None) -> list[int]:
    scanner = scanner or OutputScanner()
    return [one.step for block in blocks for one in scanner.scan(block) if one.step is not None]


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (b"step 40 loss 1.2\n", 40),
        (b"Step=7\n", 7),
        (b"[0:1] STEP: 12/60\n", 12),
        (b"\x1b[36m[0:1]\x1b[0m step 3\n", 3),
        (b"epoch 2, step:  9\r", 9),
    ],
)
def test_these_lines_tell_a_step(line: bytes, step: int) -> None:
    (heard,) = OutputScanner().scan(line)
    assert heard == ScannedLine(line.decode().strip("\r\n"), step)


@pytest.mark.parametrize(
    "line", [b"steps 40\n", b"misstep 4\n", b"step by step\n", b"step -1\n", b"step " + b"9" * 13]
)
def test_these_do_not(line: bytes) -> None:
    assert OutputScanner().scan(line + b"\n") == []


TQDM = "{name}{part:3.0f}%|{bar:<10}| {step}/{total} [00:02<00:48,  9.98it/s{more}]"


def bar(step: int, total: int, name: str = "", more: str = "") -> bytes:
    """A line as tqdm writes it to what is no terminal."""
    part = 100 * step / total
    line = TQDM.format(
        name=name and f"{name}: ", part=part, bar="█" * int(part / 10), step=step, total=total, more=more
    )
    return b"\r" + line.encode()


def test_a_bar_of_tqdm_tells_a_step() -> None:
    """Transformers' Trainer shows nothing else."""
    assert steps(*(bar(step, 500) for step in (0, 20, 21)), b"\n") == [0, 20, 21]
    assert steps(bar(20, 500, "Training") + b"\n") == [20]
    assert steps(b"[0:0] " + bar(20, 500)[1:] + b"\n") == [20]
    assert steps(bar(20, 500, more=", loss=0.5") + b"\r") == [20]


def test_a_bar_of_lightning_counts_on_over_its_epochs() -> None:
    lines = [bar(step, 50, f"Epoch {epoch}", ", v_num=0") for epoch in (0, 1, 2) for step in (25, 50)]
    assert steps(*lines, b"\n") == [25, 50, 75, 100, 125, 150]
    assert steps(bar(10, 50, "Epoch 3/9") + b"\n") == [110], "who counts epochs to a last one begins with 1"


def test_bars_of_something_else_tell_none() -> None:
    others = ("Validation DataLoader 0", "Sanity Checking", "Loading checkpoint shards", "Map", "Downloading")
    assert steps(*(bar(1, 1000, name) for name in others), b"\n") == []
    assert steps(b"100%|##########| 1.2k/1.2k [00:00<00:00, 3MB/s]\n", b"40%| done\n") == []
    evaluation = [bar(step, 13) for step in range(14)]
    assert steps(bar(10, 500), *evaluation, bar(11, 500), b"\n") == [10, 11], "of two bars alike the longer counts"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_a_number_is_never_cut_where_a_block_ends(sizes: list[int]) -> None:
    text, scanner, found = b"".join(b"step %d of it\n" % number for number in range(95, 106)), OutputScanner(), []
    for size in [*sizes, len(text)]:
        found += steps(text[:size], scanner=scanner)
        text = text[size:]
    assert found[-1] == 105
    assert set(found) <= set(range(95, 106))
    assert found == sorted(found)


def test_of_a_block_the_first_step_the_last_and_where_it_goes_back_are_told() -> None:
    block = b"".join(b"step %d\n" % number for number in (5, 6, 7, 8, 3, 4, 5))
    assert steps(block) == [5, 3, 5]


def test_of_several_workers_one_is_listened_to_until_it_falls_silent() -> None:
    both = [line % number for number in range(1, 4) for line in (b"[0:1] step %d\n", b"[0:0] step %d\n")]
    scanner = OutputScanner()
    assert steps(*both, scanner=scanner) == [1, 2, 3]
    assert steps(*(b"[0:0] step %d\n" % number for number in range(4, 40)), scanner=scanner)[-1] == 39


def test_lines_are_told_that_somebody_waits_for() -> None:
    patterns = (re.compile("loss nan"), re.compile("^epoch"))
    heard = OutputScanner().scan(b"epoch 1\nall is well\nthe loss nan\n", patterns)
    assert [one.line for one in heard] == ["epoch 1", "the loss nan"]
    assert OutputScanner().scan(b"epoch", patterns) == [], "the line has not ended"


def test_a_line_without_end_takes_no_memory_and_one_that_is_long_is_cut() -> None:
    scanner = OutputScanner()
    for _ in range(100):
        assert scanner.scan(b"x" * 10_000) == []
    assert len(scanner.rest) <= 65536
    (heard,) = OutputScanner().scan(b"step 1 " + b"y" * 10_000 + b"\n")
    assert len(heard.line) == MAX_TEXT


def test_steps_that_are_reported_and_printed_are_one_row_though_lines_are_read_later(tmp_path: Path) -> None:
    watch = PodWatch()

    def reports(step: int, at_s: float, pid: int = 1) -> list[tuple[float, int | None]]:
        values: dict[str, object] = {
            "rank": 0,
            "local_rank": 0,
            "pid": pid,
            "time_s": 1.0,
            "progress": None,
            "eta_s": None,
            "metrics": {},
        }
        file = Path(runtime_directory.progress_file(str(tmp_path), 0))
        file.write_text(json.dumps({**values, "step": step, "at_s": at_s}))
        return [(entry.at_s, entry.step) for entry in watch._report("a", str(tmp_path))]

    def prints(step: int, at_s: float) -> bool:
        return watch._counts(HistoryEntry(at_s=at_s, what=What.STEP, pod="a", step=step))

    assert prints(45, 5.0)
    assert reports(40, 4.8) == [], "the line has told more"
    assert reports(50, 4.9) == [(5.0, 50)], "behind the line, which was printed before"
    assert not prints(46, 5.1)
    assert prints(51, 5.2)
    assert reports(31, 8.0) == [(8.0, 31)], "the workers began again"
    assert prints(50, 8.1)
    assert reports(42, 9.0, pid=2) == [(9.0, 42)], "another process has not done what this one has shown"
    assert prints(43, 9.1)
