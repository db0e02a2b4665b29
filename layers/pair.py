"""Two kernels that are made together because the one behind uses what the one before remembers."""

from __future__ import annotations

from typing import Any

__all__ = ["Pair"]


class Pair:
    """Kernels of the two passes."""

    def __init__(self, forward: Any, backward: Any) -> None:
        self.forward, self.backward = forward, backward

    def close(self) -> None:
        """Free both."""
        for kernel in (self.forward, self.backward):
            if kernel is not None:
                kernel.close()
