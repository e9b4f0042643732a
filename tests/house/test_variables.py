"""Every TRAINER_LAUNCH_* variable that the code names is a setting, or one that the launcher tells its children."""

from __future__ import annotations

import re

from tests.house.package import FILES, name_of
from trainer_launch.settings import INTERNAL, PREFIX, Settings

NAMED = {
    name
    for path in FILES
    if name_of(path) != "settings.py"
    for name in re.findall(PREFIX + r"([A-Z_]+)", path.read_text(encoding="utf-8"))
}


def test_every_variable_is_a_setting_or_internal() -> None:
    assert INTERNAL | {name.upper() for name in Settings.model_fields} >= NAMED


def test_every_internal_variable_is_used() -> None:
    assert NAMED >= INTERNAL
