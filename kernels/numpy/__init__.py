"""The reference backend: NumPy, on every machine, in float32 and float64."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import threadpoolctl

from ..backend import Backend
from ..memory import Scratch, aligned_empty
from .attention import NumpyAttention
from .convolution import COLUMN_BYTES, NumpyConvolutions
from .losses import NumpyLosses
from .norms import NumpyNorms
from .pointwise import NumpyPointwise
from .updates import NumpyUpdates

__all__ = ["BlasLimit", "NumpyBackend"]


#: NumPy's BLAS, looked up once: a search through all libraries of the process takes milliseconds.
_loaded = lru_cache(threadpoolctl.ThreadpoolController)


class BlasLimit:
    """Limit of NumPy's BLAS to `threads`, until :meth:`close`.

    Local. The limit belongs to the process; of several open limits, the last one made applies.
    """

    def __init__(self, threads: int) -> None:
        self._limits = _loaded().limit(limits=threads, user_api="blas")
        self._open = True

    def close(self) -> None:
        """Restore the previous number of BLAS threads. `close` may be called twice."""
        if self._open:
            self._open = False
            self._limits.restore_original_limits()


class NumpyBackend(NumpyConvolutions, NumpyAttention, NumpyPointwise, NumpyNorms, NumpyLosses, NumpyUpdates, Backend):
    """NumPy kernels.

    Parameters
    ----------
    threads
        BLAS threads of matrix products; everything else runs on one thread.
    column_bytes
        Upper bound of the memory of an unfolded input [B].
    """

    name: ClassVar[str] = "numpy"

    def __init__(self, threads: int = 1, column_bytes: int = COLUMN_BYTES) -> None:
        self.xp = np
        self.version = np.__version__
        self.threads = threads
        self.dtypes = self.conv_dtypes = ("float32", "float64")
        self.dtype_remedy = "use float32, or the backend onednn for bfloat16 convolutions"
        self.scratch = Scratch(aligned_empty)
        self.column_bytes = column_bytes
        self._blas = BlasLimit(threads)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return aligned_empty(shape, dtype)

    @property
    def held_bytes(self) -> int:
        return self.scratch.nbytes

    def close(self) -> None:
        self.scratch.release()
        self._blas.close()
