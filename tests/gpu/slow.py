"""Slow producer of data, and messages after it: they must carry the values that it has written."""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.dtensor import End, Exchange, Layout
from halograd.kernels import Backend

__all__ = ["Slow", "check_download", "check_upload_ahead", "reused_message"]


class Slow:
    """Producer that keeps the device busy for some milliseconds, then fills an array with a value."""

    def __init__(self, kernels: Backend) -> None:
        n = 2048 if not kernels.device.is_host and kernels.name == "cudnn" else 64
        self._x, self._y = kernels.zeros((n, n), "float32"), kernels.zeros((n, n), "float32")
        self._kernel = kernels.dense_forward(self._x, self._x, None, self._y)

    def write(self, array: Any, value: float) -> None:
        for _ in range(10):
            self._kernel()
        array.fill(value)


def reused_message(kernels: Backend, comm: Communicator) -> None:
    """Repeat a redistribution from rows to columns without a wait between the repetitions."""
    slow, size, shape = Slow(kernels), comm.size, (1, 4 * comm.size, 4 * comm.size, 16)
    rows, columns = Layout.blocks(shape, {"height": size}, size), Layout.blocks(shape, {"width": size}, size)
    source = kernels.zeros(rows.boxes[comm.rank].shape, "float32")
    target = kernels.zeros(columns.boxes[comm.rank].shape, "float32")
    kept = [kernels.zeros(target.shape, "float32") for _ in range(6)]
    exchange = Exchange(comm, End(rows.boxes, source), End(columns.boxes, target))
    for i, copy in enumerate(kept):
        slow.write(source, 10.0 * i + comm.rank)
        exchange.run()
        source.fill(-1)
        np.copyto(copy, target)
        target.fill(-2)
    exchange.close()
    for i, copy in enumerate(kept):
        found = kernels.device.to_host(copy)
        for rank in range(size):
            if not (found[:, 4 * rank : 4 * rank + 4] == 10.0 * i + rank).all():
                raise AssertionError(f"message {i} of rank {rank} carried {np.unique(found)[:4]}")


def check_download(kernels: Backend) -> None:
    device, slow = kernels.device, Slow(kernels)
    array, pinned = kernels.zeros((1 << 16,), "float32"), device.pinned((1 << 16,), "float32")
    for value in (1.0, 2.0, 3.0):
        slow.write(array, value)
        device.download(array, pinned)
        event = device.mark()
        array.fill(-1)  # after the copy
        event.wait()
        if not (pinned == value).all():
            raise AssertionError(f"expected {value} everywhere, got {np.unique(pinned)[:4]}")


def check_upload_ahead(kernels: Backend) -> None:
    device, slow = kernels.device, Slow(kernels)
    staged, used = kernels.zeros((1 << 16,), "float32"), kernels.zeros((1 << 16,), "float32")
    pinned = [device.pinned((1 << 16,), "float32") for _ in range(2)]
    after, found = device.mark(), []  # the zeros of `staged` may still have to be written
    for i, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        if i >= 2:
            device.synchronize()  # pinned memory of two rounds before is free
        pinned[i % 2][:] = value
        event = device.upload_ahead([(pinned[i % 2], staged)], after)
        slow.write(used, -1)
        device.join(event)
        np.copyto(used, staged)
        after = device.mark()
        found.append(device.to_host(used))
    for value, array in zip((1.0, 2.0, 3.0, 4.0), found):
        if not (array == value).all():
            raise AssertionError(f"expected {value} everywhere, got {np.unique(array)[:4]}")
