"""Benchmarks of training steps: time, memory, and overlap of communication."""
