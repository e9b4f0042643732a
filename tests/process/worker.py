"""A program for tests to start: notes what happens to it. `worker.py WHAT…`, each word one thing it does, in order.

note:TEXT     append a line to $NOTES
catch         note each catchable signal from now on, and go on
ignore        ignore SIGTERM, SIGINT, SIGHUP, SIGQUIT
save:S:CODE   on SIGTERM note "term", on SIGINT "int", work for S seconds, note "saved", exit with CODE
fork:WORDS    fork a child that does WORDS (separated by +)
setsid        begin a session
detach        fork, exit in the parent: double fork
rest          wait until a signal ends us
die:N         die of signal N
exit:N        exit
inherited     note mask, ignored signals, session
lines:N:MARK  write N lines to stdout in odd pieces
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable

CATCHABLE = sorted(set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})


def note(text):
    fd = os.open(os.environ["NOTES"], os.O_WRONLY | os.O_APPEND)
    os.write(fd, text.encode() + b"\n")
    os.close(fd)


def save(seconds, code):
    def handler(number, _):
        note("int" if number == signal.SIGINT else "term")
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            time.sleep(0.01)
        note("saved")
        os._exit(int(code))

    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


def inherited():
    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    ours = sum(1 << (number - 1) for number in signal.valid_signals())  # 32 and 33 belong to the C library
    note(f"mask {int(status['SigBlk'], 16) & ours} ignored {int(status['SigIgn'], 16) & ours}")
    note(f"session {os.getsid(0) == os.getpid()}")


def lines(count, mark):
    text = b"".join(b"%s:%d:%s\n" % (mark.encode(), i, mark.encode() * 20) for i in range(int(count)))
    dice = random.Random(mark)
    while text:
        size = dice.randrange(1, 5000)
        os.write(1, text[:size])
        text = text[size:]


def catch():
    for number in CATCHABLE:
        signal.signal(number, lambda number, _: note(f"got {int(number)}"))


def ignore():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def fork(*words):
    if os.fork() == 0:
        do(":".join(words).split("+"))
        os._exit(0)


def detach():
    if os.fork() != 0:
        os._exit(0)


def rest():
    while True:
        signal.pause()


def die(number):
    os.kill(os.getpid(), int(number))


def leave(code):
    os._exit(int(code))


DEEDS: dict[str, Callable[..., object]] = {
    "note": note,
    "catch": catch,
    "ignore": ignore,
    "save": save,
    "fork": fork,
    "setsid": os.setsid,
}
DEEDS |= {"detach": detach, "rest": rest, "die": die, "exit": leave, "inherited": inherited}
DEEDS |= {"lines": lines}


def do(words):
    for word in words:
        name, *args = word.split(":")
        DEEDS[name](*args)


do(sys.argv[1:])
