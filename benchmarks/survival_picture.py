"""Draw docs/survival.svg from survival.json: what each fault costs a job, here and under torchrun.

    python benchmarks/survival_picture.py

The figures are those of `survival.py`, as benchmarks/README.md has them; nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs" / "survival.svg"

WIDTH, NAMES, RIGHT = 860, 250, 110  # pixels: the whole, the faults' names, the room for words behind a bar
LONGEST_S = 16.0  # seconds at the right end of the scale
BAR, ROW, HEAD = 9, 30, 62
END = ' text-anchor="end"'
STYLE = """
  .page { fill: #ffffff } .line { stroke: #d7dce2 }
  text { font: 13px system-ui, sans-serif; fill: #1f2630 }
  .small { font-size: 11.5px; fill: #5b6675 } .head { font-weight: 600 }
  .ours { fill: #1a7f5a } .peer { fill: #c2621b }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0f141a } .line { stroke: #2f3843 }
    text { fill: #e4e9ef } .small { fill: #9aa7b6 } .ours { fill: #3fbf8c } .peer { fill: #e8935a }
  }"""


def x_of(seconds: float) -> float:
    """Where so many seconds end."""
    return NAMES + seconds / LONGEST_S * (WIDTH - NAMES - RIGHT)


def text(x: float, y: float, words: str, style: str = "", more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" class="{style}"{more}>{escape(words)}</text>'


def bar(y: float, who: str, seconds: float | None, words: str) -> Iterator[str]:
    """One bar and what stands behind it; without a figure, or with one beyond the scale, the words alone."""
    end = NAMES if seconds is None else x_of(min(seconds, LONGEST_S))
    if seconds is not None:
        size = f'width="{max(2, end - NAMES):.0f}" height="{BAR}"'
        yield f'<rect x="{NAMES}" y="{y:.0f}" {size} rx="2" class="{who}"/>'
        words = f"{seconds:.1f} s, {words}" if seconds <= LONGEST_S else words
    yield text(end + 6, y + BAR - 0.5, words, "small")


def job(found: dict[str, Any], y: float) -> Iterator[str]:
    """The head of a job with its key, and its faults."""
    yield text(16, y + 18, found["job"], "head")
    yield f'<rect x="16" y="{y + 28}" width="{BAR}" height="{BAR}" class="ours"/>' + text(
        31, y + 37, "trainer-launch"
    )
    yield f'<rect x="140" y="{y + 28}" width="{BAR}" height="{BAR}" class="peer"/>' + text(
        155, y + 37, found["peer"]
    )
    for number, row in enumerate(found["rows"]):
        top = y + HEAD - 10 + number * ROW
        yield text(NAMES - 10, top + 14, row["fault"], more=END)
        yield from bar(top, "ours", *row["ours"])
        yield from bar(top + BAR + 2, "peer", *row["peer"])


def draw(figures: dict[str, Any]) -> str:
    """The picture."""
    heights = [HEAD + ROW * len(found["rows"]) for found in figures["jobs"]]
    end = 54 + sum(heights)
    parts = [text(16, 28, "Seconds from a fault until all pods that are left train again", "head")]
    parts.append(
        text(
            16, 46, "1/2/1: how often each pod was started; a pod that is killed stays away for about 3 s", "small"
        )
    )
    for seconds in range(0, int(LONGEST_S) + 1, 4):
        x = x_of(seconds)
        parts.append(f'<line x1="{x:.0f}" y1="{54 + HEAD - 14}" x2="{x:.0f}" y2="{end}" class="line"/>')
        parts.append(text(x, end + 16, f"{seconds} s", "small", ' text-anchor="middle"'))
    y = 54.0
    for found, height in zip(figures["jobs"], heights, strict=True):
        parts.extend(job(found, y))
        y += height
    parts.append(text(16, end + 36, f"{figures['date']}: {figures['machine']};", "small"))
    parts.append(text(16, end + 52, f"{figures['how']}.", "small"))
    size = f'width="{WIDTH}" height="{end + 66}" viewBox="0 0 {WIDTH} {end + 66}"'
    page = f'<rect width="{WIDTH}" height="{end + 66}" rx="8" class="page"/>'
    title = "<title>What each fault costs a job of three pods, here and under torchrun</title>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join((head, f"{title}<style>{STYLE}", "</style>", page, *parts, "</svg>", ""))


if __name__ == "__main__":
    PICTURE.write_text(draw(json.loads((HERE / "survival.json").read_text(encoding="utf-8"))), encoding="utf-8")
    print(PICTURE)
