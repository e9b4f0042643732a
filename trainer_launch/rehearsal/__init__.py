"""A job rehearsed on one machine: where its pods come from, which faults are injected, and what came of it."""
