"""What runs the suite under MPI so that a fault or a deadlock on one rank is a failure and never a hang."""
