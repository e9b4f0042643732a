"""What fuzzing has kept: one file for each target, `corpus/TARGET.jsonl`, with an input in each line.

A line is `{"text": …}`, or `{"base64": …}` where the bytes are no UTF-8, with a `name` if a person put it there.
Lines are sorted, so that a kept input is one line of a diff.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"


def targets() -> list[str]:
    """The targets that have a corpus."""
    return sorted(file.stem for file in FOLDER.glob("*.jsonl"))


def read(target: str, folder: Path = FOLDER) -> dict[str, bytes]:
    """The inputs of one target, by name; the name of what fuzzing kept is the SHA-1 of its bytes."""
    file = folder / f"{target}.jsonl"
    if not file.exists():
        return {}
    entries = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()]
    inputs = [(entry.get("name"), _bytes_of(entry)) for entry in entries]
    return {name or digest(data): data for name, data in inputs}


def write(target: str, inputs: Mapping[str, bytes], folder: Path = FOLDER) -> None:
    """Replace them; the same inputs always give the same file."""
    named = [{"name": name} if name != digest(data) else {} for name, data in inputs.items()]
    entries = [{**name, **_entry_of(data)} for name, data in zip(named, inputs.values(), strict=True)]
    lines = sorted(json.dumps(entry) + "\n" for entry in entries)
    folder.mkdir(exist_ok=True)
    (folder / f"{target}.jsonl").write_text("".join(lines), encoding="ascii")


def digest(data: bytes) -> str:
    """The name that libFuzzer gives an input."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def _bytes_of(entry: Mapping[str, str]) -> bytes:
    return entry["text"].encode() if "text" in entry else base64.b64decode(entry["base64"])


def _entry_of(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
