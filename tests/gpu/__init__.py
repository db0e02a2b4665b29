"""What only a GPU can show: checks marked `gpu`, and the program that runs them, each process apart, and keeps results.

``python -m halograd.gpucheck`` runs them part by part (:mod:`tests.gpu.parts`), ``pytest -m gpu`` the checks alone.
"""
