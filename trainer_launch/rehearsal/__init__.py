"""A job rehearsed on one machine: where its pods come from, what goes wrong on purpose, and what came of it."""
