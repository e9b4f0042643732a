"""Fuzz parsers for a while, guided by what each input reaches; keep what reaches something new.

    python -m tests.fuzz.fuzz --seconds 60              # every target for a minute, one after the other
    python -m tests.fuzz.fuzz --seconds 600 pod hosts   # two of them

It needs atheris. What a defect takes is written to `crashes/NAME` in the folder that --work names; `TARGET
--add found-… FILE` puts it into the corpus, with the mend, where every run of the tests replays it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz import corpus, nasty
from tests.fuzz.registry import Target, in_home, targets

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 10  # for one input
_MEMORY_MB = 1024
_KEPT_INPUTS, _KEPT_BYTES = 40, 25_000  # of each target, in the repository
_STATUS = re.compile(r"#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+).*?exec/s: (\d+)")
_FORMS = {
    "json": nasty.changed_json,
    "lines": nasty.changed_lines,
    "yaml": nasty.changed_yaml,
    "text": nasty.changed_text,
    "words": lambda data, chance: nasty.changed_text(data, chance, b"\0"),
    "bytes": nasty.changed_text,
}


def main() -> int:
    """Fuzz what was asked for; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="targets; all of them when none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60); 0: only --keep")
    parser.add_argument("--work", default=tempfile.gettempdir() + "/trainer-launch-fuzz", help="scratch folder")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--keep", action="store_true", help="put what is new and small into the repository's corpus"
    )
    parser.add_argument(
        "--add", nargs=2, metavar=("NAME", "FILE"), help="put a crash of one target into the corpus"
    )
    parsed, rest = parser.parse_known_args()
    if parsed.one:
        _in_this_process(parsed.names[0], rest)
    unknown = set(parsed.names) - targets().keys()
    if unknown:
        parser.error(f"there is no target {', '.join(sorted(unknown))}; expected some of {', '.join(targets())}")
    if parsed.add:
        (target,), (name, file) = parsed.names, parsed.add
        corpus.write(target, {**corpus.read(target), name: Path(file).read_bytes()})
        return 0
    chosen = [known for name, known in targets().items() if not parsed.names or name in parsed.names]
    work = Path(parsed.work)
    found = [one.name for one in chosen if parsed.seconds and not _fuzz(one, work, parsed.seconds)]
    for one in chosen if parsed.keep else ():
        _keep(one, work / "grown" / one.name)
    print(f"found something: {', '.join(found)}" if found else "nothing found", flush=True)
    return 1 if found else 0


def _fuzz(one: Target, work: Path, seconds: int) -> bool:
    """Fuzz one target; False when it found something."""
    from tests.fuzz import seeds  # it imports what is fuzzed, which in the child comes later

    grown, crashes, kept = (work / kind / one.name for kind in ("grown", "crashes", "kept"))
    shutil.rmtree(kept, ignore_errors=True)
    for folder in (grown, crashes, kept):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in corpus.read(one.name).items():
        (kept / name).write_bytes(data)
    for number, seed in enumerate(seeds.of(one.name)):
        (grown / f"seed-{number}").write_bytes(seed[: one.max_bytes])
    words = work / f"{one.name}.dict"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in _words(one)), encoding="ascii")
    done = _libfuzzer(
        one, seconds + 120, f"-max_total_time={seconds}", f"-timeout={_TIMEOUT_S}", f"-rss_limit_mb={_MEMORY_MB}",
        f"-max_len={one.max_bytes}", f"-artifact_prefix={crashes}/", f"-dict={words}", "-print_final_stats=1",
        str(grown), str(kept),
    )  # fmt: skip
    states = _STATUS.findall(done.stderr)
    began = next((edges for _, what, edges, _, _ in states if what == "INITED"), "0")
    count, _, edges, features, rate = states[-1] if states else ("0", "", "0", "0", "0")
    verdict = "ok" if done.returncode == 0 else "FOUND"
    print(
        f"{one.name:18} {count:>9} runs {rate:>6}/s  edges {began:>5} -> {edges:>5}"
        f"  features {features:>6}  {verdict}",
        flush=True,
    )
    if done.returncode:
        print("\n".join(_story(done.stdout + done.stderr)), flush=True)
    return done.returncode == 0


def _keep(one: Target, grown: Path) -> None:
    """The smallest inputs that together go all ways that were found, beside what is there by hand."""
    before, known = corpus.read(one.name), set[tuple[object, int, int]]()
    by_hand = {name: data for name, data in before.items() if name != corpus.digest(data)}
    files = [file for file in grown.glob("*") if re.fullmatch("[0-9a-f]{40}", file.name)]
    found = {name: data for name, data in before.items() if name not in by_hand}
    found |= {file.name: file.read_bytes() for file in files}
    kept, count, room = by_hand, _KEPT_INPUTS, _KEPT_BYTES
    for name, data in sorted(found.items(), key=lambda each: (len(each[1]), each[0])):
        ways = _ways(one, data)
        if ways - known and count and len(data) <= room:
            kept[name] = data
            known |= ways
            count, room = count - 1, room - len(data)
    corpus.write(one.name, kept)


def _ways(one: Target, data: bytes) -> set[tuple[object, int, int]]:
    """Which lines of the package follow each other."""
    found: set[tuple[object, int, int]] = set()
    last: dict[object, int] = {}

    def step(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            found.add((frame.f_code, last.get(frame, 0), frame.f_lineno))
            last[frame] = frame.f_lineno
        return step

    def enter(frame: FrameType, event: str, _: object) -> Any:
        return step if event == "call" and "/trainer_launch/" in frame.f_code.co_filename else None

    sys.settrace(enter)
    try:
        one.run(data)
    finally:
        sys.settrace(None)
    return found


def _libfuzzer(one: Target, limit_s: int, *flags: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.fuzz.fuzz", "--one", f"{one.home}:{one.name}", *flags]
    return subprocess.run(
        argv, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, errors="replace", timeout=limit_s, check=False,
    )  # fmt: skip


def _story(text: str) -> list[str]:
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if "Uncaught Python exception" in line or "ERROR:" in line), 0)
    return lines[start : start + 60]


def _in_this_process(name: str, flags: list[str]) -> None:
    """Become libFuzzer for this target."""
    atheris: Any = importlib.import_module("atheris")  # where there is none, all but this works

    os.nice(19)
    with atheris.instrument_imports(include=["trainer_launch"]):
        one = in_home(*name.split(":"))
    change = _FORMS[one.form]

    def mutated(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        made = change(data, chance) if chance.random() < 0.5 else None
        if made is None or len(made) > max_size:
            return bytes(atheris.Mutate(data, max_size))
        return bytes(made)

    atheris.Setup([sys.argv[0], *flags], one.run, custom_mutator=mutated)
    atheris.Fuzz()


def _words(one: Target) -> list[str]:
    """The texts in the modules that the target's own module imports: keys, names, kinds."""
    home = sys.modules[one.run.__module__]
    files = {getattr(value, "__file__", None) for value in vars(home).values()}
    found = set()
    for file in sorted(name for name in files if name and "trainer_launch" in name):
        for part in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and 1 < len(part.value) < 40:
                found.add(part.value)
    return sorted(word for word in found if "\n" not in word)[:1500]


def _escaped(word: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "".join(f"\\x{b:02x}" for b in c.encode()) for c in word)


if __name__ == "__main__":
    sys.exit(main())
