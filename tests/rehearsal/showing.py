"""A program for tests: a live table below lines that come fast. Arguments: pods, lines, seconds to stay."""

import os
import sys
import time

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import runtime, trainjob
from trainer_launch.rehearsal.report.reporting import Live, is_wanted
from trainer_launch.rehearsal.report.summary import live_table, live_title


def main() -> None:
    count, lines, stay_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    job, began_s = Job(runtime(), trainjob(f"{{numNodes: {count}}}", "demo")), time.monotonic()
    last = list(job.state.pods)[-1]
    job.delete(last, back_s=1000.0)
    job.end(last, 137)
    steps = dict.fromkeys(job.state.pods, 7)

    def table(most: int) -> list[str]:
        to_come = ["kill pod node=1 at=step:9000"]
        title = live_title("TrainJob demo", job.state, time.monotonic() - began_s, 7, 0, to_come)
        return [title, *live_table(job.state, steps, lambda pod: f"step 7 of {pod.name}", most)]

    live = Live(table)
    if not is_wanted(os.environ):
        print("no table")
        return
    print("before")
    live.begin()
    try:
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
