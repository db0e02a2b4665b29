"""Timings on one GPU as JSON lines: ``python -m benchmarks.gpu NAME ...``; parts of ``python -m halograd.gpucheck``."""
