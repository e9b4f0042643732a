"""Frozen classes are `dataclasses`' own in all but the time that defining them takes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from trainer_launch.model.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """With each kind of field."""

    host: str
    port: int = 80
    tags: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = dataclasses.field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Looks at what it is given."""

    at: Place
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError("count")


@dataclass(frozen=True, slots=True)
class Nearer(Place):
    """With a field more."""

    near: bool = True


@dataclass(frozen=True, slots=True)
class Nothing:
    """Without fields."""


def test_an_object_is_made_shown_and_replaced_as_ever() -> None:
    place = Place("a", tags={"b": "c"})
    assert repr(place) == "Place(host='a', port=80, tags={'b': 'c'}, note='')"
    assert dataclasses.replace(place, port=1) == Place("a", 1, {"b": "c"})
    assert dataclasses.asdict(place) == {"host": "a", "port": 80, "tags": {"b": "c"}, "note": ""}
    assert Place("a").tags is not Place("a").tags
    assert Nearer("a", 1, {}, "", False).near is False
    assert copy.deepcopy(place) == pickle.loads(pickle.dumps(place)) == place
    assert not hasattr(place, "__dict__")


def test_objects_are_equal_by_the_fields_that_are_compared() -> None:
    assert Place("a", note="x") == Place("a", note="y") != Place("b")
    assert Place("a") != Nearer("a")
    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())
    assert len({Checked(at=place, count=1).count for place in (Place("a"), Place("b"))}) == 1
    with pytest.raises(TypeError, match="unhashable"):
        hash(Place("a"))


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="host"):
        Place("a").host = "b"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="host"):
        del Place("a").host
    with pytest.raises(ValueError, match="count"):
        Checked(at=Place("a"), count=-1)
    make: Any = Checked
    for given in ({}, {"at": Place("a")}, {"at": Place("a"), "count": 1, "more": 1}):
        with pytest.raises(TypeError):
            make(**given)
    with pytest.raises(TypeError):
        make(Place("a"), 1)


def test_a_match_statement_sees_the_fields_in_order() -> None:
    match Place("a", 3):
        case Place(host, port):
            assert (host, port) == ("a", 3)
