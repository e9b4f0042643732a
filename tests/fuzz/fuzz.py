"""Fuzz parsers for a while, guided by what each input reaches; keep what reaches something new.

    python -m tests.fuzz.fuzz --seconds 60              # every target for a minute, one after the other
    python -m tests.fuzz.fuzz --seconds 600 pod hosts   # two of them

It needs atheris. What a defect takes is written to `crashes/NAME` in the folder that --work names; `TARGET
--add found-… FILE` puts it into the corpus, with the mend, where every run of the tests replays it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz import corpus
from tests.fuzz.registry import Target, in_home, targets

ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 10  # for one input
_MEMORY_MB = 1024
_KEPT_INPUTS, _KEPT_BYTES = 40, 25_000  # of each target, in the repository
_STATUS = re.compile(r"#(\d+)\s+(\w+)\s+cov: (\d+) ft: (\d+).*?exec/s: (\d+)")
# Numbers beyond every float, digits of other scripts, nests, control characters, YAML's tags, paths that climb.
_PIECES = json.loads(Path(__file__).with_name("pieces.json").read_text(encoding="ascii"))


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
        _keep(one, work)
    print(f"found something: {', '.join(found)}" if found else "nothing found", flush=True)
    return 1 if found else 0


def _fuzz(one: Target, work: Path, seconds: int) -> bool:
    """Fuzz one target; False when it found something."""
    grown, crashes, kept = (work / kind / one.name for kind in ("grown", "crashes", "kept"))
    shutil.rmtree(kept, ignore_errors=True)
    for folder in (grown, crashes, kept):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in corpus.read(one.name).items():
        (kept / name).write_bytes(data)
    pieces = [piece.encode("utf-8", "surrogatepass") for piece in _PIECES]  # a dictionary takes the short ones only
    for number, seed in enumerate(pieces):
        (grown / f"seed-{number}").write_bytes(seed[: one.max_bytes])
    words = work / f"{one.name}.dict"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in _PIECES), encoding="ascii")
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


def _keep(one: Target, work: Path) -> None:
    """The smallest inputs that together reach all that was reached, beside what is there by hand."""
    merged = work / "merged" / one.name
    shutil.rmtree(merged, ignore_errors=True)
    merged.mkdir(parents=True)
    _libfuzzer(one, 600, "-merge=1", str(merged), str(work / "kept" / one.name), str(work / "grown" / one.name))
    kept = {name: data for name, data in corpus.read(one.name).items() if name != corpus.digest(data)}
    count, room = _KEPT_INPUTS, _KEPT_BYTES
    for data in sorted((file.read_bytes() for file in merged.iterdir()), key=len):
        if count and len(data) <= room:
            kept[corpus.digest(data)] = data
            count, room = count - 1, room - len(data)
    corpus.write(one.name, kept)


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
    atheris.Setup([sys.argv[0], *flags], one.run)
    atheris.Fuzz()


def _escaped(word: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in word.encode("utf-8", "surrogatepass"))


if __name__ == "__main__":
    sys.exit(main())
