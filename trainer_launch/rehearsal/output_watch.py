"""What pods write, heard as it passes by: steps, and lines that somebody waits for. Pure.

It sits in the way of all output, so it looks at blocks, and at lines only where there is something in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainer_launch.model.user_patterns import MAX_LINE
from trainer_launch.supervisor.line_buffer import LINE_BYTES
from trainer_launch.supervisor.rate_limit import is_summary

_TAKES_OVER = 20
_MANY = 32  # steps in one block, of which not all are looked at
MAX_TEXT = 2_000  # characters of a line that are handed on
_WORD = b"step"
_STEP = re.compile(rb"\bstep[ =:]+([0-9]{1,12})(?![0-9])", re.IGNORECASE)
_TAG = re.compile(rb"\[[^\]\n]{1,80}\] ")  # in front of a line: whose it is


@dataclass(frozen=True, slots=True)
class Heard:
    """A line that tells a step, or that somebody waits for."""

    line: str
    step: int | None = None


@dataclass(slots=True)
class Ear:
    """Of one stream of one process."""

    rest: bytes = b""  # of a line whose end has not come
    speaker: bytes | None = None  # whose steps count: of a pod's workers the first that said one
    last: int = 0  # what that one said last
    others: int = 0  # steps of others since then
    is_folded: bool = False  # all workers say the same steps, and only the first to say one is shown

    def hear(self, data: bytes, patterns: tuple[re.Pattern[str], ...] = ()) -> list[Heard]:
        """What is worth telling in these bytes."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            self.rest = (self.rest + data)[-LINE_BYTES:]
            return []
        text, self.rest = self.rest + data[:cut], data[cut:][-LINE_BYTES:]
        heard = [*self._steps(text)] if _WORD in text.lower() else []
        if patterns:
            lines = (shown(line) for line in re.split(rb"[\r\n]+", text) if line)
            heard += [Heard(line) for line in lines if _is_wanted(line, patterns)]
        return heard

    def _steps(self, text: bytes) -> Iterator[Heard]:
        """The first step, each one that goes back, and the last one."""
        last: Heard | None = None
        is_first = True
        found = list(_STEP.finditer(text))
        if len(found) > _MANY:  # nobody begins again within a block
            found = [*found[: _MANY // 4], *found[-_MANY // 2 :]]
        for match in found:
            line = _line_at(text, match.start())
            if not self._counts(line):
                continue
            step, before = int(match[1]), self.last
            self.last, last = step, Heard(shown(line), step)
            if is_first or step < before:
                yield last
                is_first, last = False, None
        if last is not None:
            yield last

    def _counts(self, line: bytes) -> bool:
        """Whether the speaker says it, or somebody who seems to have taken over."""
        if is_summary(line.decode(errors="replace")):
            self.is_folded = True
            return False
        tag = _TAG.match(line)
        who = tag[0] if tag else b""
        if self.speaker is None or self.others >= _TAKES_OVER:
            self.speaker, self.last = who, 0
        if who != self.speaker and not self.is_folded:
            self.others += 1
            return False
        self.others = 0
        return True


def _is_wanted(line: str, patterns: tuple[re.Pattern[str], ...]) -> bool:
    return not is_summary(line) and any(pattern.search(line[:MAX_LINE]) for pattern in patterns)


def shown(line: bytes) -> str:
    """As text, without what is too long."""
    return line[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT]


def _line_at(text: bytes, place: int) -> bytes:
    start = max(text.rfind(b"\n", 0, place), text.rfind(b"\r", 0, place)) + 1
    ends = [end for end in (text.find(b"\n", place), text.find(b"\r", place)) if end >= 0]
    return text[start : min(ends, default=len(text))]
