"""Rehearsals made up to be looked at: a good one, a bad one, a crowd, and one that says nasty things."""

from __future__ import annotations

from tests.rehearsal.told import Tale, finished, restarted
from trainer_launch.rehearsal.history import What
from trainer_launch.rehearsal.rehearsal_report import RehearsalReport

NASTY = '<script>document.title="owned"</script><img src=http://evil.example/x onerror=alert(1)>\x1b[31m\u202e&"\''


def small() -> RehearsalReport:
    """Two pods, three faults; it resumes."""
    tale = Tale("demo-master-0", "demo-worker-0")
    for pod in tale.pods:
        tale.add(0.2, What.STATUS, pod, text="Init")
    tale.start(1.4).meet(3.0).steps(3.5, range(1, 41), each_s=0.2)
    tale.fault(11.6, "kill worker node=1 at=step:40", "demo-worker-0").meet(13.0)
    tale.steps(13.5, range(31, 81), each_s=0.2)
    tale.fault(23.7, "term pod node=1 grace=10 at=step:80", "demo-worker-0").stop(23.7, "demo-worker-0")
    tale.end(25.0, "demo-worker-0", 143, "Restarting").start(26.2, "demo-worker-0").meet(27.4)
    tale.steps(28.0, range(80, 121), each_s=0.2)
    tale.fault(37.0, "partition node=1 for=4s at=37s", "demo-worker-0")
    tale.add(41.0, What.FAULT_OVER, "demo-worker-0", text="partition node=1 for=4s at=37s")
    return finished(tale.steps(42.0, range(121, 171), each_s=0.2), 53.0).report()


def bad() -> RehearsalReport:
    """Begins all over again."""
    return restarted(before=140, resumed=1, last=150).report()


def crowd(pods: int = 50, faults: int = 40) -> RehearsalReport:
    """Many pods, many faults, an attempt for each."""
    names = tuple(f"charlm-large-node-0-{number}" for number in range(pods))
    tale = Tale(*names, kind="TrainJob", name="charlm-large").start(0.0).meet(2.0)
    now_s, step = 3.0, 1
    for number in range(faults):
        tale.steps(now_s, range(step, step + 20), names[0])
        now_s, step = now_s + 2.2, step + 14
        pod = names[(number * 7 + 3) % pods]
        tale.fault(now_s, f"kill pod node={(number * 7 + 3) % pods} at={now_s:.1f}s", pod)
        tale.end(now_s, pod, 137, "Restarting").start(now_s + 1.0, pod).meet(now_s + 1.6)
        now_s += 2.0
    return finished(tale.steps(now_s, range(step, step + 60), names[0]), now_s + 9).report()


def nasty() -> RehearsalReport:
    """Names, faults and lines that would be markup, and a secret."""
    tale = Tale(f"pod{NASTY}", "b" * 300, name=NASTY, kind=NASTY).start(0.0).steps(1.0, range(1, 5))
    tale.fault(2.0, NASTY * 9, f"pod{NASTY}").fault(2.5, "kill pod " + "x" * 400)
    tale.message = f"password=hunter2 {NASTY} {'y' * 4000}"
    return tale.condition(3.0, NASTY, 1).report(4.0, 1)


def lost() -> RehearsalReport:
    """A pod that does not come back; the other one waits for it, and ends."""
    tale = Tale("charlm-large-node-0-0", "charlm-large-node-0-1", kind="TrainJob", name="charlm-large")
    tale.start(0.0).meet(2.0).steps(3.0, range(1, 31), each_s=0.2).fault(9.0, "kill pod back=never", tale.pods[1])
    tale.end(9.0, tale.pods[1], 137, "Terminated").end(13.0, tale.pods[0], 138)
    why = "charlm-large-node-0-1: deleted, and not created again; its node charlm-large-node-0-0 failed"
    tale.message = "the pod was deleted, and not created again"
    return tale.condition(13.0, f"Failed (TrainJobFailed): {why}", 1).report(14.0, 138)


def without_steps() -> RehearsalReport:
    """Programs that tell no steps."""
    tale = Tale("plain-0", "plain-1").start(0.0).fault(3.0, "kill pod node=1", "plain-1")
    tale.end(3.0, "plain-1", 137, "Restarting").start(5.0, "plain-1")
    tale.add(8.0, What.FAULT_MISSED, text="kill pod node=7", why="there is no node 7")
    return finished(tale, 9.0).report()
