"""The program of a training step: compiled once, then run, priced, counted, placed in memory and listed."""
