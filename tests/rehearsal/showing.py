"""A program for tests: a live table below lines that come fast. Arguments: pods, lines, seconds to stay."""

import os
import sys
import time

from trainer_launch.rehearsal.report.history import Entry, What
from trainer_launch.rehearsal.report.reporting import Live, TableState, is_wanted


def main() -> None:
    count, lines, stay_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    pods = [f"demo-node-0-{number}" for number in range(count)]
    live = Live(
        TableState.of("TrainJob demo", pods, ["kill pod node=1 at=step:9000"]), lambda pod: f"step 7 of {pod}"
    )
    if not is_wanted("auto", os.environ):
        print("no table")
        return
    for pod in pods:
        live.observe(Entry(at_s=0.0, what=What.POD_STARTED, pod=pod, attempt=1))
        live.observe(Entry(at_s=0.0, what=What.CONTAINER_STARTED, pod=pod, container="main", attempt=1))
        live.observe(Entry(at_s=0.1, what=What.STEP, pod=pod, container="main", step=7))
    live.observe(Entry(at_s=0.2, what=What.POD_ENDED, pod=pods[-1], text="Pending"))
    print("before")
    live.begin()
    try:
        began_s = time.monotonic()
        for number in range(lines):
            os.write(1, b"line %d of the job\n" % number)
        print(f"wrote {lines} lines in {time.monotonic() - began_s:.3f} s", flush=True)
        time.sleep(stay_s)
    except KeyboardInterrupt:
        print("interrupted")
    finally:
        live.close()
    print("after")


main()
