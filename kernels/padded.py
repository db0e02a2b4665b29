"""Channels that lie padded with zeros in memory, for convolutions that tensor cores take. Pure arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LANES", "channels_in_memory", "tensor_core_channels"]

#: Channels of 16 bits in an access of 16 bytes.
LANES = 8


def tensor_core_channels(channels: int, dtype: Any) -> int:
    """As many channels as the input of a convolution should have for tensor cores, which take 16 bits by eights.

    Up to eight channels stay: cuDNN has engines for first layers. Of others it would make a padded copy itself, in its
    workspace and at every call (measured by planning 18 channels of 2048 x 2048: 192 MiB, and none of 24).

    >>> [tensor_core_channels(n, "float16") for n in (1, 3, 8, 18, 24)], tensor_core_channels(18, "float32")
    ([1, 3, 8, 24, 24], 18)
    """
    return channels if np.dtype(dtype).itemsize != 2 or channels <= LANES else -(-channels // LANES) * LANES


def channels_in_memory(array: Any) -> int | None:
    """Channels from one position of an array ``(N, *spatial, C)`` to the next; None if it is not packed but for these.

    >>> a = np.zeros((2, 5, 4, 24))
    >>> channels_in_memory(a), channels_in_memory(a[..., :18]), channels_in_memory(a[:, 1:, :, :18])
    (24, 24, None)
    """
    size = np.dtype(array.dtype).itemsize
    *outer, channels = array.shape
    if array.strides[-1] != size and channels > 1:
        return None
    room = array.strides[-2] if outer[-1] > 1 else None
    run = room
    for n, stride in zip(reversed(outer), reversed(array.strides[:-1])):
        if n == 1:
            continue
        if run is None:
            run = room = stride
        if stride != run:
            return None
        run = stride * n
    room = channels * size if room is None else room
    return room // size if room % size == 0 and room >= channels * size else None
