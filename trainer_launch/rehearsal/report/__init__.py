"""The report of a rehearsal: its history, the costs of faults, text, JSON and the HTML page."""
