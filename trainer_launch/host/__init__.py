"""What this container has, read from it, and the few things done to it: shared memory, files, sockets."""
