"""One pool of threads per process: NumPy's BLAS is held to a number while a backend is open."""

from __future__ import annotations

import threadpoolctl

__all__ = ["BlasLimit"]


class BlasLimit:
    """Holds every BLAS loaded so far to `threads`, until :meth:`close`.

    Local. The limit belongs to the process, so of several open at a time the last one made counts.
    """

    def __init__(self, threads: int) -> None:
        self._limits = threadpoolctl.threadpool_limits(limits=threads, user_api="blas")
        self._open = True

    def close(self) -> None:
        """Give BLAS its former number of threads back. May be called twice."""
        if self._open:
            self._open = False
            self._limits.restore_original_limits()
