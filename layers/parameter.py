"""Parameters: shape, initial values by name or from elsewhere, and whether weight decay applies."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["GivenValues", "Parameter", "given"]


@dataclass(frozen=True, eq=False)
class GivenValues:
    """Initial values that come from elsewhere: an array, or a file that is read when they are needed.

    Attributes
    ----------
    shape
        Of the whole array.
    read
        Makes the array. It is called once by every rank that holds some of it, and the result is not kept: so a rank
        holds one whole array at a time, beside its own blocks.
    source
        What the values are, for a comparison between ranks: a file and its checksum. Empty for arrays.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    source: str = ""


def given(values: GivenValues | Any) -> GivenValues:
    """Initial values of an array, or what is that already."""
    if isinstance(values, GivenValues):
        return values
    array = np.asarray(values)
    return GivenValues(array.shape, lambda: array)


@dataclass(frozen=True)
class Parameter:
    """Description of one parameter array, whole.

    Attributes
    ----------
    shape
        Shape of the array. Convolution weights are ``(K, *kernel, C / groups)``.
    init
        ``"he"`` (normal, variance 2 / fan_in; He et al. 2015), ``"glorot"`` (uniform; Glorot and Bengio
        2010), ``"zeros"``, ``"ones"``, a number, that of every element, or values that are given, see
        :meth:`Layer.initialized`.
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
    init: str | float | GivenValues = "zeros"
    fan_in: int = 1
    fan_out: int = 1
    decay: bool = True
    channel_axis: int | None = None
    input_axis: int | None = None
    rounded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))  # compared, and looked up
        if isinstance(self.init, GivenValues):
            if self.init.shape != self.shape:
                raise ValueError(f"expected initial values of shape {self.shape}, got {self.init.shape}")
        elif isinstance(self.init, str) and self.init not in ("he", "glorot", "zeros", "ones"):
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
        """Initial values, a function of `name` and `seed` only, or given: the same on every decomposition.

        float64, or as they are given.
        """
        if isinstance(self.init, GivenValues):
            return self.init.read()
        if self.init in ("zeros", "ones") or not isinstance(self.init, str):
            return np.full(self.shape, {"zeros": 0.0, "ones": 1.0}.get(str(self.init), self.init), np.float64)
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if self.init == "he":
            return rng.standard_normal(self.shape) * math.sqrt(2.0 / self.fan_in)
        limit = math.sqrt(6.0 / (self.fan_in + self.fan_out))
        return rng.uniform(-limit, limit, self.shape)
