"""mpirun over the pods of a job: hosts waited for, a typed command taken over, ends understood, starts repeated."""
