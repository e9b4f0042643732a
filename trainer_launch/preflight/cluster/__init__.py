"""Cluster preflight: before the job all nodes meet at node 0, are compared and tested, and get one verdict."""
