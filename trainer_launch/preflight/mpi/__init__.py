"""The preflight of an MPI launcher: are all hosts reached, is its key accepted, are the programs alike."""
