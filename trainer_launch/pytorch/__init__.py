"""The torch workers of this node as children of PID 1: worker group, fork server, store process."""
