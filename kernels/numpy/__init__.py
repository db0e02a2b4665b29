"""The reference backend: NumPy, on every machine, in float32 and float64; 16 bits are emulated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import threadpoolctl

from ...device import LOW, is_low
from ..memory import Scratch, aligned_empty
from ..summed import SummedConvolution
from .convolution import COLUMN_BYTES
from .staging import StagedKernels, StandInBuffers

__all__ = ["BlasLimit", "NumpyBackend"]


#: NumPy's BLAS, looked up once: a search through all libraries of the process takes milliseconds.
_loaded = lru_cache(threadpoolctl.ThreadpoolController)


class BlasLimit:
    """Limit of NumPy's BLAS to `threads`, until :meth:`close`.

    Local. The limit belongs to the process; of several open limits, the last one made applies. They may be closed in
    any order: after the last one is closed, BLAS has the number of threads that it had before the first was made.
    """

    _open: ClassVar[list[BlasLimit]] = []

    def __init__(self, threads: int) -> None:
        self._limiter = _loaded().limit(limits=threads, user_api="blas")  # has the number of threads until now
        self._open.append(self)

    def close(self) -> None:
        """Restore the previous number of BLAS threads, unless a later limit applies. `close` may be called twice."""
        if self not in self._open:
            return
        index = self._open.index(self)
        self._open.remove(self)
        if index == len(self._open):
            self._limiter.restore_original_limits()
        else:
            # The next limit has saved the threads of this one, which is gone: let it restore what this one has saved.
            self._open[index]._limiter = self._limiter


class NumpyBackend(StagedKernels):
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
        self.dtypes = self.conv_dtypes = ("float32", "float64", *LOW)
        self.dtype_remedy = "use float32"
        self.scratch, self.stage = Scratch(aligned_empty), StandInBuffers(aligned_empty)
        self.column_bytes = column_bytes
        self._blas = BlasLimit(threads)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return aligned_empty(shape, dtype)

    @property
    def held_bytes(self) -> int:
        return self.scratch.nbytes + self.stage.nbytes + self.own.nbytes

    def emulates(self, dtype: str) -> str:
        return "NumPy has only arithmetic of 32 and 64 bits" if is_low(dtype) else ""

    def fuses_sums(self, conv: SummedConvolution) -> bool:
        """Return True: as the reference this backend has every kernel, though it computes this one in two passes."""
        return True

    def close(self) -> None:
        self.stage.release()
        self.scratch.release()
        self._blas.close()
