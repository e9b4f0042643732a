"""The preflight of an MPI launcher: is every host reached, let in, alike, able to call back; is each pair well."""
