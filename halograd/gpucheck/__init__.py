"""One command that shows whether a GPU computes what it should, and how fast: ``python -m halograd.gpucheck``."""
