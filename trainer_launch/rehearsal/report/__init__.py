"""What a rehearsal shows: the live table, the history, the costs of faults, the HTML page."""
