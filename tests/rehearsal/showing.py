"""A program for tests: a live table below lines that come fast (their number), or a list (steps)."""

import os
import resource
import sys
import time

from tests.rehearsal.controllers.actors import Job
from tests.rehearsal.controllers.manifests import runtime, trainjob
from trainer_launch.observability import live
from trainer_launch.rehearsal.reporting import live_rows, live_title


def table(lines: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    for _ in range(1100):  # the picture has descriptors above those that select() takes
        os.dup(2)
    job, began_s = Job(runtime(), trainjob("{numNodes: 2}", "demo")), time.monotonic()
    last = list(job.state.pods)[-1]
    job.delete(last, back_s=1000.0)
    job.end(last, 137)
    steps = dict.fromkeys(job.state.pods, 7)

    def rows(most: int) -> tuple[str, list]:
        title = live_title("TrainJob demo", job.state, time.monotonic() - began_s, 7, 0)
        return title, live_rows(job.state, steps, lambda pod: f"step 7 of {pod.name}", most)

    try:
        with live.table(rows):
            for number in range(lines):
                os.write(1, b"line %d of the job\n" % number)
            print(f"wrote {lines} lines in {time.monotonic() - began_s:.3f} s", flush=True)
            os.write(1, b"half a line")
            time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted")
    print("after")


def main() -> None:
    if not live.is_wanted():
        print("no table")
    elif sys.argv[1] == "steps":
        with live.progress(lambda: [("network", "PASS", "fine"), ("gpu", live.RUNNING, ""), ("storage", "", "")]):
            print("beside", flush=True)
            time.sleep(60)
    else:
        table(int(sys.argv[1]))


main()
