"""Benchmarks: what a training step costs in time and memory, and what is hidden of its communication."""
