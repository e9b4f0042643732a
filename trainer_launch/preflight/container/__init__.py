"""Checks of this container: limits, names, ports, memory, storage."""
