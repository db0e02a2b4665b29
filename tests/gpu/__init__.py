"""Checks that need a GPU, marked `gpu`, and the program that runs each in a separate process and records the results.

``python -m halograd.gpucheck`` runs them part by part (:mod:`tests.gpu.parts`), ``pytest -m gpu`` the checks alone.
"""
