"""An emulated processor: convolutions take the time of a device with a given rate, and no CPU time.

So the schedule of four ranks can be measured on two cores: kernels sleep for as long as they would take on a GPU, and
the rest of the step's time shows how well messages and kernels overlap.
"""

from __future__ import annotations

import inspect
import time
from typing import Any

from halograd.comm.transports.emulated import sleep_until

__all__ = ["PacedBackend"]


class PacedBackend:
    """Backend whose convolution kernels return no earlier than ``flops / rate`` after their call.

    Parameters
    ----------
    backend
        Backend that computes the results; arrays should be so small that its time is negligible.
    rate
        Rate of the emulated processor [flop/s].
    """

    def __init__(self, backend: Any, rate: float) -> None:
        self._backend, self._rate = backend, rate

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._backend, name)
        if not inspect.ismethod(attribute) or name not in _OUTPUT_AND_WEIGHTS:
            return attribute
        y, w = _OUTPUT_AND_WEIGHTS[name]

        def make(*args: Any, **kwargs: Any) -> Any:
            positions = args[y].size / max(1, args[y].shape[-1])
            return _PacedKernel(attribute(*args, **kwargs), 2 * positions * args[w].size / self._rate)

        return make


#: Positions of output and weights (or their gradients) among the arguments.
_OUTPUT_AND_WEIGHTS = {"conv_forward": (3, 1), "conv_backward_data": (0, 1), "conv_backward_filter": (1, 2)}


class _PacedKernel:
    def __init__(self, kernel: Any, seconds: float) -> None:
        self._kernel, self._seconds = kernel, seconds

    def __call__(self) -> None:
        end = time.perf_counter() + self._seconds
        self._kernel()
        sleep_until(end)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)
