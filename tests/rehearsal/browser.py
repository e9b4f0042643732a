"""A real browser without a screen, which shows a page and measures it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

from tests.conftest import require

# What stands where, and what is wrong with it: told to FRAME, whose title the browser then prints.
MEASURE = """<script>
const box = (e) => e.getBoundingClientRect();
const all = (s) => [...document.querySelectorAll(s)].filter((e) => box(e).width > 0 && box(e).height > 0);
const meet = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 0.5
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 0.5;
const overlaps = (s) => { const r = all(s).map(box); let n = 0;
  for (let i = 0; i < r.length; i++) for (let j = 0; j < i; j++) n += meet(r[i], r[j]); return n; };
const rgb = (t) => t.match(/[\\d.]+/g).map(Number);
const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => v / 255)
  .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const behind = (e) => { for (; e; e = e.parentElement) { const c = rgb(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
const contrast = (e) => { const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); };
const texts = all("h1,h2,header p,.sums b,.sums span,td,th,.name,.note,.axis span,.scale span")
  .concat(all(".legend li,.mend,footer"));
const found = {
  width: innerWidth, page: document.documentElement.scrollWidth,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
  lanes: all(".lane .track").map((e) => [box(e).left, box(e).width, box(e).height]),
  hits: all(".lane .hit").map((e) => (box(e).left + box(e).right) / 2),
  steps: all(".steps .track").map((e) => [box(e).left, box(e).width, box(e).height]),
  lines: all(".steps polyline").length, segments: all(".lane .s").length,
  outside: all("body *").filter((e) => !e.closest("svg"))
    .filter((e) => box(e).right > innerWidth + 1 || box(e).left < -1)
    .map((e) => e.className + " " + e.textContent.slice(0, 30)),
  overlaps: Object.fromEntries([".axis span", ".scale span", ".name", ".lane .track"]
    .map((s) => [s, overlaps(s)])),
  smallest: Math.min(...texts.map((e) => parseFloat(getComputedStyle(e).fontSize))),
  faintest: Math.min(...texts.map(contrast)),
  broken: all("td.k").filter((e) => { const r = document.createRange(); r.selectNodeContents(e);
    return new Set([...r.getClientRects()].map((b) => b.top)).size > 1; }).map((e) => e.textContent),
  labels: all("td[data-of]").filter((e) => { const s = getComputedStyle(e, "::before");
    const pen = document.createElement("canvas").getContext("2d"); pen.font = s.font;
    return s.content !== "none" && pen.measureText(e.dataset.of).width > parseFloat(s.width); })
    .map((e) => e.dataset.of),
  cut: all(".axis span,.scale span,th,.sums b,h1").filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)
    .map((e) => e.textContent),
};
parent.postMessage(JSON.stringify(found), "*");
</script>"""
# A browser's window has a least width, a frame has none; and two frames need but one browser.
FRAME = """<!DOCTYPE html><html><head><meta name="color-scheme" content="light dark"><title></title></head><body>
<script>
const told = [];
const hear = (event) => { told.push(JSON.parse(event.data)); document.title = JSON.stringify(told); };
addEventListener("message", hear);
</script>FRAMES</body></html>"""
ONE = '<iframe src="PAGE" style="border:0;width:WIDTHpx;height:2000px"></iframe>'
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass(frozen=True)
class Browser:
    """Debian's chromium, in a profile of its own."""

    program: str
    profile: Path

    def show(self, page: Path, *flags: str, width: int = 1280) -> subprocess.CompletedProcess[str]:
        """Open a file; what the page logs comes on stderr."""
        argv = (
            *(self.program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--hide-scrollbars", f"--window-size={width},2000", f"--user-data-dir={self.profile}"),
            *("--enable-logging=stderr", "--disable-background-networking", "--no-first-run"),
        )
        return subprocess.run(
            (*argv, *flags, page.as_uri()), text=True, capture_output=True, timeout=100, check=True
        )

    def measure(self, page: Path, widths: Sequence[int], *, dark: bool = False) -> dict[int, dict[str, Any]]:
        """What MEASURE finds at each width, in a copy of the page, whose policy would not let it."""
        copy, frame = page.with_name(f"measured-{page.name}"), page.with_name(f"frame-{page.name}")
        text = _POLICY.sub("", page.read_text(encoding="utf-8"))
        copy.write_text(text.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
        ones = "".join(ONE.replace("PAGE", copy.name).replace("WIDTH", str(width)) for width in widths)
        frame.write_text(FRAME.replace("FRAMES", ones), encoding="utf-8")
        flags = ("--blink-settings=preferredColorScheme=0",) if dark else ()
        shown = self.show(frame, "--dump-dom", "--virtual-time-budget=5000", *flags, width=max(widths) + 100)
        title = re.search(r"<title>(.*?)</title>", shown.stdout, re.DOTALL)
        assert title, shown.stderr
        found: list[dict[str, Any]] = json.loads(unescape(title[1]))
        return {one["width"]: one for one in found}


def browser_in(folder: Path) -> Browser:
    """The machine's browser; without one the test is skipped, in CI it fails."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    require(program, "needs chromium")
    return Browser(program=program or "", profile=folder / "profile")
