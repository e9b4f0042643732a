"""Real names of variables and files, and values that are almost right, empty, huge or not text at all."""

from __future__ import annotations

import json
from pathlib import Path

_DATA = json.loads(Path(__file__).with_name("nasty.json").read_text(encoding="ascii"))
NAMES: list[str] = _DATA["names"]
PATHS: list[str] = _DATA["paths"]
VALUES: list[str] = _DATA["values"]
CONTENTS: list[str] = _DATA["contents"]
HOSTNAMES: list[str] = _DATA["hostnames"]
COMMANDS: list[tuple[str, ...]] = [tuple(words) for words in _DATA["commands"]]
