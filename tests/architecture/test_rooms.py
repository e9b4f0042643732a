"""The drawing of the rooms in CONTRIBUTING.md is true, and imports go down it only."""

from __future__ import annotations

from tests.architecture.rooms import arrows, drawn_arrows, drawn_floors


def test_every_room_is_on_one_floor_of_the_drawing() -> None:
    assert sorted(room for floor in drawn_floors() for room in floor) == sorted(arrows())


def test_imports_go_to_lower_floors_only() -> None:
    floor = {room: number for number, rooms in enumerate(drawn_floors()) for room in rooms}
    wrong = [
        f"{one} -> {other}" for one, others in arrows().items() for other in others if floor[one] >= floor[other]
    ]
    assert sorted(wrong) == []


def test_the_arrows_of_the_drawing_are_the_imports() -> None:
    assert drawn_arrows() == arrows()
