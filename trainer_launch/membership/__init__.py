"""The control plane of a job: who is in, which generation runs, what it may still cost. It knows no engine."""
