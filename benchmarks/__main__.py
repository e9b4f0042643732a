"""Measure this project and its peers, keep the raw data, and draw RESULTS.md: `make bench`.

python -m benchmarks                              all that is quick, five times
python -m benchmarks --only survival              one section, or several: a,b; survival is all rows of it
python -m benchmarks --only recovery --continue --repeats 10    add to what there is
python -m benchmarks --draw                       only draw the page anew
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone

from benchmarks import page
from benchmarks.measuring import Section, Terms, become_reaper, end_leftovers, measure, say, settle
from benchmarks.results import Refused, Results, continued, load, machine, save
from benchmarks.sections import SECTIONS, chosen
from benchmarks.tables import circumstances, quiet_limit, table


def main() -> int:
    """Ends with 1 where something could not be measured, 2 for what was asked wrongly."""
    asked = _options().parse_args()
    become_reaper()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this keeps what there is
    try:
        if not asked.draw:
            return measure_all(chosen(asked.only), asked)
        page.write(SECTIONS)
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
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run after so many")
    parser.add_argument("--who", type=_names, default=(), metavar="A,B", help="only these; printed, and not kept")
    parser.add_argument("--continue", action="store_true", dest="goes_on", help="add to the raw data there is")
    parser.add_argument("--draw", action="store_true", help="measure nothing, only write RESULTS.md anew")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


def measure_all(sections: Sequence[Section], asked: argparse.Namespace) -> int:
    """Section by section; those that take turns, turn by turn. 1 if one could not even begin."""
    limit, load_now = quiet_limit(machine()), os.getloadavg()[0]
    quiet = limit if load_now <= limit else None
    if quiet is None:
        say(f"the load is {load_now:.1f}: other work runs here, and the page will say so")
    until_s = time.monotonic() + asked.minutes * 60
    worst = 0
    in_turn = [section for section in sections if section.takes_turns]
    runs = [_Run(one, asked, until_s, asked.repeats, quiet) for one in sections if not one.takes_turns]
    shared = [_Run(section, asked, until_s, 1, quiet) for section in in_turn]
    for run in [*runs, *shared]:
        run.check()
    for run in [*runs, *(shared * asked.repeats)]:
        worst |= run.once()
        if not asked.who:
            page.write(SECTIONS)
    return worst


class _Run:
    """The measuring of one section, in one go or in several."""

    def __init__(
        self, section: Section, asked: argparse.Namespace, until_s: float, repeats: int, quiet: float | None
    ) -> None:
        """`quiet` is the load to begin at; None where other work keeps it above."""
        self._section, self._asked, self._until_s, self._repeats = section, asked, until_s, repeats
        self._quiet = quiet
        self._results: Results | None = None

    def check(self) -> None:
        """Before anything is measured.

        Raises:
            Refused: it cannot be continued.
        """
        if self._asked.goes_on and self._section.missing() is None:
            self._begun()

    def once(self) -> int:
        """1 if it could not even begin."""
        section = self._section
        if (why := section.missing()) is not None:
            say(f"{section.name}: left out: {why}")
            return 0
        if time.monotonic() > self._until_s:
            return 0
        if self._results is None and self._quiet is not None:
            settle(self._quiet)  # or what the section before has left of its load would be taken for other work
        began_s = time.monotonic()
        try:
            self._results = results = self._results or self._begun()
            before_s = results.took_s

            def keep(now: Results) -> None:
                now.took_s = round(before_s + time.monotonic() - began_s, 1)
                self._keep(now)

            terms = Terms(repeats=self._repeats, until_s=self._until_s, who=self._asked.who, keep=keep)
            measure(section, results, terms)
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - whatever one section does, the others go on
            say(f"{section.name}: could not be measured: {type(error).__name__}: {error}")
            return 1
        finally:
            end_leftovers()
        if self._asked.who:
            print(f"\n{table(results, section.whos)}\n\n{circumstances(results)}\n", flush=True)
        say(f"{section.name}: done in {time.monotonic() - began_s:.0f} s")
        return 0

    def _begun(self) -> Results:
        results = begun(self._section, self._asked.repeats)
        return continued(load(self._section.name), results) if self._asked.goes_on else results

    def _keep(self, now: Results) -> None:
        now.repeats = max((len(one.values) + len(one.failures) for one in now.figures), default=0)
        if now.repeats and not self._asked.who:
            save(now)


def begun(section: Section, repeats: int) -> Results:
    """A section's raw data, still empty."""
    return Results(
        section=section.name,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        machine=machine(),
        versions=dict(section.versions()),
        load=round(os.getloadavg()[0], 1),
        repeats=repeats,
        command=f'make bench BENCH_ARGS="--only {section.name} --repeats {section.repeats or repeats}"',
    )


if __name__ == "__main__":
    sys.exit(main())
