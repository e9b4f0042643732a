"""Injected faults: their words, their schedule, what this machine can do, and doing it."""
