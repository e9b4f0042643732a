"""The container: facts read from it, and the few changes to it: shared memory, files, sockets."""
