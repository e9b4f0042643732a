"""ssh between the pods of an MPI job: the job's key, and what sshd and ssh are configured with."""
