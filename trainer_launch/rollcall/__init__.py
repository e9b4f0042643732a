"""Roll call: before the job starts all nodes meet at node 0, are compared and tested in pairs, and told one verdict."""
