"""The examples in the docstrings of `halograd.comm`."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "boot",
        "counters",
        "device_channel",
        "gpu.choice",
        "gpu.link",
        "gpu.mpi_aware",
        "rounds",
        "sums",
        "transports",
        "transports.shared",
    ],
)
def test_examples(module):
    outcome = doctest.testmod(importlib.import_module(f"halograd.comm.{module}"))
    assert outcome.attempted > 0
    assert outcome.failed == 0
