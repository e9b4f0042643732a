"""PID 1: starts a plan's processes, watches them, stops them, and names why they ended."""
