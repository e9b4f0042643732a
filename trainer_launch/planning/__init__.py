"""From a job, this machine and a command line to a plan: topology, flags over the platform's words, engines."""
