"""Measure this project and its peers, keep the raw data, and draw RESULTS.md: `make bench`.

python -m benchmarks                              all that is quick, five times
python -m benchmarks --only survival              one section, or several: a,b; survival is all rows of it
python -m benchmarks --draw                       only draw the page anew
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from benchmarks import page, tables
from benchmarks.measuring import Section, become_reaper, end_leftovers, measure, say, settle
from benchmarks.page import SECTIONS
from benchmarks.results import Refused, Results, machine, save


def main() -> int:
    """Ends with 1 where something could not be measured, 2 for what was asked wrongly."""
    asked = _options().parse_args()
    become_reaper()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this keeps what there is
    try:
        if not asked.draw:
            return measure_all(chosen(asked.only), asked.repeats, asked.who)
        page.write()
        return 0
    except Refused as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: stopped; whole turns of what was measured are kept", file=sys.stderr)
        return 130
    finally:
        end_leftovers()


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="A,B", help="of " + ", ".join(section.name for section in SECTIONS))
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="runs of each contestant (default 5)")
    parser.add_argument("--who", type=_names, default=(), metavar="A,B", help="only these; printed, and not kept")
    parser.add_argument("--draw", action="store_true", help="measure nothing, only write RESULTS.md anew")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def chosen(only: str | None) -> list[Section]:
    """The sections of these names, `survival` for all its rows; without names: those of `make bench`.

    Raises:
        Refused: there is none of that name.
    """
    if only is None:
        return [section for section in SECTIONS if section.is_by_default]
    sections: list[Section] = []
    for word in _names(only):
        named = [section for section in SECTIONS if f"{section.name}-".startswith(f"{word}-")]
        if not named:
            raise Refused(f"--only {word!r} is none of {', '.join(section.name for section in SECTIONS)}")
        sections += named
    return sections


def measure_all(sections: Sequence[Section], repeats: int, who: tuple[str, ...]) -> int:
    """Section by section, when the machine is quiet; 1 if one could not even begin."""
    limit, load = tables.quiet_limit(machine()), os.getloadavg()[0]
    if load > limit:
        say(f"the load is {load:.1f}: other work runs here, and the page will say so")
    worst = 0
    for section in sections:
        if why := section.missing():
            say(f"{section.name}: left out: {why}")
            continue
        if load <= limit:
            settle(limit)  # or the load that the section before has left would be taken for other work
        worst |= _measure(section, section.repeats or repeats, who)
        if not who:
            page.write()
    return worst


def _measure(section: Section, repeats: int, who: tuple[str, ...]) -> int:
    began_s = time.monotonic()
    results = Results(
        section=section.name,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        machine=machine(),
        versions=dict(section.versions()),
        load=round(os.getloadavg()[0], 1),
        repeats=0,
        command=f'make bench BENCH_ARGS="--only {section.name} --repeats {repeats}"',
    )

    def keep() -> None:
        results.took_s = round(time.monotonic() - began_s, 1)
        results.repeats = max((len(one.values) + len(one.failures) for one in results.figures), default=0)
        if results.repeats and not who:
            save(results)

    try:
        measure(section, results, repeats, who, keep)
    except Exception as error:  # noqa: BLE001 - whatever one section does, the others go on
        say(f"{section.name}: could not be measured: {type(error).__name__}: {error}")
        return 1
    finally:
        end_leftovers()
    if who:
        print(f"\n{tables.table(results, section.whos)}\n", flush=True)
    say(f"{section.name}: done in {time.monotonic() - began_s:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
