"""Why a job does not go on, or ended: hangs, stacks, collectives, stragglers, incidents."""
