"""Programs that run in children of PID 1; only here torch may be imported, and nothing imports this folder."""
