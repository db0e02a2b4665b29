"""Pooling tests that every backend passes, run with the CUDA kernels on the CPU."""

import numpy as np
import pytest

from ..conftest import Arrays
from ..test_pooling import (  # noqa: F401
    test_drawn_geometries,
    test_max_of_negative_values_ignores_padding,
    test_pools,
    test_remembered_positions_survive_other_kernels,
)
from .conftest import BFLOAT16


@pytest.fixture(params=[np.dtype(np.float32), BFLOAT16], ids=str)
def typed(backend, host, request) -> Arrays:
    """Return a factory of arrays with four or eight elements per vector; other tests cover the other dtypes."""
    host.set_order(request.param == BFLOAT16)
    return Arrays(backend, request.param)
