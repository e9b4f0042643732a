"""Should this pod start at all? registry.py lists every check."""
