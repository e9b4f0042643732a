"""Faults that preflight finds, and healthy fleets that it leaves alone: tests/preflight/fault_catalogue.py."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.measuring import Case, Failed, Reading, Section, Setup
from benchmarks.peers import versions_here
from tests.pods import missing
from tests.preflight.fault_catalogue import FAULTS, HEALTHY_FLEETS, Found, accused, looked_for
from tests.preflight.fleet import simulated_library

WHO = "trainer-launch"
LIMIT_S = 600.0
SIZES = (8, 64)
FOUND, NAMED, OTHERS = "faults found", "faults named with their machine", "faults for which others failed, too"
LEFT, QUIET = "healthy fleets left alone", "healthy fleets without a warning"


def healthy(text: str, nodes: int) -> str:
    """The row of a healthy fleet."""
    return f"healthy, {nodes} nodes: {text}"


def once() -> Mapping[str, Reading | str]:
    """All faults, then all healthy fleets: what was said of each."""
    why = missing()
    with simulated_library():
        found = {fault.text: looked_for(fault) for fault in FAULTS if not (fault.needs_root and why)}
        fleets = {healthy(fleet.text, nodes): accused(fleet, nodes) for fleet in HEALTHY_FLEETS for nodes in SIZES}
    left_out = {fault.text: f"left out: {why}" for fault in FAULTS if fault.text not in found}
    return figures(found, fleets) | left_out


def figures(
    found: Mapping[str, Found], fleets: Mapping[str, tuple[list[str], list[str]]]
) -> dict[str, Reading | str]:
    """How many faults were found and named, how many healthy fleets were left alone; and each of them."""
    if not any(result.is_right for result in found.values()):
        raise Failed("no fault was found")
    rows: dict[str, Reading | str] = {
        FOUND: Reading(sum(result.finding is not None for result in found.values()), f"of {len(found)}"),
        NAMED: Reading(sum(result.is_named for result in found.values()), f"of {len(found)}"),
        OTHERS: Reading(sum(bool(result.accused) for result in found.values()), f"of {len(found)}"),
        LEFT: Reading(sum(not failed for failed, _ in fleets.values()), f"of {len(fleets)}"),
        QUIET: Reading(sum(not (failed or warned) for failed, warned in fleets.values()), f"of {len(fleets)}"),
    }
    rows |= {text: Reading(1, str(result)) if result.is_right else str(result) for text, result in found.items()}
    for text, (failed, warned) in fleets.items():
        rows[text] = f"ACCUSED: {failed[0][:150]}" if failed else Reading(1, "; ".join(warned)[:150])
    return rows


def opened() -> Setup:
    """All of it, once."""
    rows = (FOUND, NAMED, OTHERS, LEFT, QUIET, *(fault.text for fault in FAULTS))
    rows += tuple(healthy(fleet.text, nodes) for fleet in HEALTHY_FLEETS for nodes in SIZES)
    return Setup([Case(WHO, dict.fromkeys(rows, ""), once, LIMIT_S, 180.0)])


SECTION = Section(
    name="preflight-faults",
    title="Preflight",
    about=(
        "Each fault is put into one machine of a healthy fleet of 8: below a simulated NVIDIA library, into trees "
        "of /proc and /sys, or with real processes in namespaces. Healthy fleets differ in what is normal."
    ),
    shows=(FOUND, NAMED, OTHERS, LEFT, QUIET),
    pictured=(FOUND, NAMED, OTHERS, LEFT, QUIET),
    open=opened,
    versions=lambda: versions_here("trainer-launch"),
    whos=(WHO,),
    repeats=1,
)
