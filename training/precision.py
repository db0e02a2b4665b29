"""Which dtype activations may have on a backend."""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.errors import UserError

from ..device import as_dtype, is_low

__all__ = ["check_dtype"]


def check_dtype(dtype: Any, kernels: Any) -> np.dtype:
    """The dtype of activations, which the kernels must have. Local, alike on all ranks.

    Raises
    ------
    UserError
        A dtype of 16 bits on a CPU, or one that these kernels do not compute with.
    """
    found = as_dtype(dtype)
    if is_low(found) and kernels.device.is_host:
        raise UserError(
            f'training.dtype: expected "float32" or "float64" with kernels = "{kernels.name}", got "{found.name}", '
            'which needs a GPU; set backend.kernels = "cudnn" or another dtype'
        )
    if found.name not in kernels.dtypes:
        raise UserError(
            f'training.dtype: expected {" or ".join(kernels.dtypes)} with kernels = "{kernels.name}", '
            f"got {found.name}; {kernels.dtype_remedy}"
        )
    return found
