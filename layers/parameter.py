"""Parameters: shape, initial values by name, and whether weight decay applies."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

__all__ = ["Parameter"]


@dataclass(frozen=True)
class Parameter:
    """Description of one parameter array, whole.

    Attributes
    ----------
    shape
        Shape of the array. Convolution weights are ``(K, *kernel, C / groups)``.
    init
        ``"he"`` (normal, variance 2 / fan_in; He et al. 2015), ``"glorot"`` (uniform; Glorot and Bengio
        2010), ``"zeros"``, ``"ones"``, or a number, that of every element.
    fan_in, fan_out
        Number of inputs and outputs of one unit, for ``he`` and ``glorot``.
    decay
        Whether weight decay applies (not to biases and norms).
    channel_axis, input_axis
        Axes that run along the output's channels and along the input's: where those are cut, a rank holds the
        block of its channels. None: there is no such axis.
    rounded
        Whether the gradient is computed in the dtype of the activations where that has 16 bits (by a convolution); else
        in float32.
    """

    shape: tuple[int, ...]
    init: str | float = "zeros"
    fan_in: int = 1
    fan_out: int = 1
    decay: bool = True
    channel_axis: int | None = None
    input_axis: int | None = None
    rounded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # compared, and looked up
        if isinstance(self.init, str) and self.init not in ("he", "glorot", "zeros", "ones"):
            raise ValueError(f"init: expected 'he', 'glorot', 'zeros', 'ones' or a number, got {self.init!r}")
        channel, inner = self.channel_axis, self.input_axis
        if channel is not None and inner is not None and inner <= channel:
            raise ValueError(
                f"input_axis: expected one behind channel_axis ({self.channel_axis}), got {self.input_axis}; blocks of "
                "parameters are numbered in that order"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def initial(self, name: str, seed: int) -> np.ndarray:
        """Initial values in float64, a function of `name` and `seed` only: the same on every decomposition."""
        if self.init in ("zeros", "ones") or not isinstance(self.init, str):
            return np.full(self.shape, {"zeros": 0.0, "ones": 1.0}.get(str(self.init), self.init), np.float64)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if self.init == "he":
            return rng.standard_normal(self.shape) * math.sqrt(2.0 / self.fan_in)
        limit = math.sqrt(6.0 / (self.fan_in + self.fan_out))
        return rng.uniform(-limit, limit, self.shape)
