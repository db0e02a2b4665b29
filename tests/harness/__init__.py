"""Runner of the test suite under MPI, in which a fault or a deadlock of one rank is a failure and never a hang."""
