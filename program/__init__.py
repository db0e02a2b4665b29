"""The program of a training step: compiled once, then run; also the source of its cost, traffic, memory and listing."""
