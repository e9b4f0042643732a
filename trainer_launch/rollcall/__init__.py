"""Roll call: before the job starts all nodes meet at node 0, are compared and tested, and told one verdict."""
