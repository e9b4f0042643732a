"""The report of a rehearsal: its history, the costs of faults, the live table, text, JSON and the HTML page."""
