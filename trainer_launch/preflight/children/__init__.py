"""Programs that checks start by path, in processes that may hang and are killed; nothing imports this folder."""
