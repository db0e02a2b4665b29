"""Interface of convolutions that also compute the sums of a batch norm over the array that they write."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..device import as_dtype
from .convolution import Convolutions
from .geometry import Geometry
from .kernel import BatchNormArrays, FusedActivation, Kernel, any_empty, chain
from .norms import Norms

__all__ = ["SummedConvolution", "SummedConvolutions", "is_one_launch", "on_tensor_cores"]

#: Most rows of a local norm that may be one launch per direction. A block then has all rows of `SECTOR` bytes of
#: channels, and reads them a second time from the cache of its multiprocessor: 128 KiB of x, and as much of dy.
MOST_ROWS, SECTOR = 4096, 32
#: Rates at which a multiprocessor reads its sectors, and at which two launches read and write memory [B/s]; time of the
#: launch that is saved, as a node of a graph [s]. Of an H200, from eleven shapes (benchmarks/gpu/norms.py): one launch
#: took 7.5 to 8.8 us and 2.4 ns per row forward, 4.3 ns backward; two launches 9.8 to 11.2 us and their traffic.
BLOCK_RATE, MEMORY_RATE, LAUNCH = 27e9, 2.7e12, 2e-6
#: Multiprocessors of the device of a plan: an H100.
UNITS = 132


def is_one_launch(rows: int, nbytes: int, blocks: int, tensors: int, units: int = UNITS) -> bool:
    """Return whether a local norm may be one launch, and takes no longer than in two launches, by an estimate.

    Parameters
    ----------
    rows
        Elements per channel.
    nbytes
        Size of one tensor [B].
    blocks
        Blocks of the launch.
    tensors
        Tensors that both passes over the rows read: x, in backward also dy.
    units
        Multiprocessors of the device; each runs one block at a time.
    """
    # Each block reads its rows of the tensors twice, and the blocks run in rounds.
    one_launch = 2 * tensors * rows * SECTOR / BLOCK_RATE * math.ceil(blocks / units)
    # Both launches read the tensors, and one writes the result.
    two_launches = (2 * tensors + 1) * nbytes / MEMORY_RATE
    return rows <= MOST_ROWS and one_launch <= LAUNCH + two_launches


@dataclass(frozen=True)
class SummedConvolution:
    """Description of a convolution before or after a batch norm.

    Attributes
    ----------
    x, w, y
        Local shapes of image, weights and output, or of their gradients.
    dtype
        Dtype of image and output.
    backward
        False: the norm reads the output of the convolution, and needs ``sum y``, ``sum y^2``. True: the convolution
        reads the output of the norm, and the data gradient is followed by the sums of the norm's gradient.
    activation
        Activation of the norm.
    local
        Whether the statistics are of this rank alone, so that the norm may be one launch (`is_one_launch`).
    """

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    dtype: str
    geometry: Geometry
    backward: bool
    activation: FusedActivation | None = None
    local: bool = False


def on_tensor_cores(
    conv: SummedConvolution, dtypes: tuple[str, ...] = ("float16", "bfloat16"), units: int = UNITS
) -> bool:
    """Return whether cuDNN 9.19 plans this convolution with its sums as one kernel, and the kernel saves a pass.

    The sums are in float32. Rounding to 16 bits changes the variance of a channel by more than these sums do, so
    statistics come from them in 16 bits only. A norm that is one launch has no pass to save.
    """
    g, f = conv.geometry, conv.activation
    if conv.dtype not in dtypes or g.groups != 1:
        return False
    summed = conv.x if conv.backward else conv.y
    rows, row_bytes = math.prod(summed[:-1]), summed[-1] * as_dtype(conv.dtype).itemsize
    blocks = math.ceil(row_bytes / SECTOR)
    if conv.local and is_one_launch(rows, rows * row_bytes, blocks, 1 + conv.backward, units):
        return False
    # cuDNN has no plan for strided data gradients, and the plans in sums.py compute no derivative but that of ReLU.
    if conv.backward and (any(n != 1 for n in g.stride) or (f is not None and f.kind != "relu")):
        return False
    # cuDNN's plans with sums take multiples of 8 channels.
    return not (conv.x[-1] % 8 or conv.y[-1] % 8)


class SummedConvolutions(Convolutions, Norms):
    """Factories of convolutions that also compute the sums of a batch norm.

    Here convolution and sums are two kernels, one after the other. A backend with kernels that compute both overrides
    `fuses_sums`, `_with_statistics` and `_with_gradient_sums`.
    """

    def fuses_sums(self, conv: SummedConvolution) -> bool:
        """Return whether one kernel may compute this convolution and its sums, so that a program should use it."""
        return False

    def conv_forward_sums(self, x: Any, w: Any, b: Any, y: Any, sums: Any, geometry: Geometry) -> Kernel:
        """Build `conv_forward` without activation, which also writes ``sums = [sum y, sum y^2]``, ``(2, K)``, float64
        or, with images of 16 bits, float32.

        Sums are over this process. With images of 16 bits they may come from sums in float32, over `y` before it is
        rounded: the relative error of ``E[y^2] - E[y]^2`` is then about 1e-6 times ``1 + E[y]^2 / var``.
        """
        vector = self.zeros(y.shape[-1:], y.dtype)  # the sums read none of the others
        arrays = BatchNormArrays(y, y, None, None, vector, vector, vector, vector, sums, sums, 1.0)
        separate = chain(self.conv_forward(x, w, b, y, geometry), self.batch_norm(arrays).statistics)
        return separate if any_empty(x, y) else self._with_statistics(separate, x, w, b, y, sums, geometry)

    def conv_backward_data_sums(self, dy: Any, w: Any, geometry: Geometry, norm: BatchNormArrays) -> Kernel:
        """Build `conv_backward_data` with the gradient of a norm's output, ``norm.dy``, as its result, and the sums of
        the norm's gradient.

        The kernel writes `sums`, `dgamma` and `dbeta` as ``backward_sums()`` does, and ``norm.dy``: the gradient before
        or after it is multiplied by the derivative of a ReLU. ``backward_data()`` of a norm with `summed` may multiply
        again.
        """
        convolution = self.conv_backward_data(dy, w, norm.dy, geometry)
        # Kernels that apply an activation themselves write no intermediate result to dx.
        # Others need a workspace of their own: `norm.dy` is their input.
        dx = norm.dy if self.fuses_norms else self.empty(norm.dy.shape, norm.dy.dtype)
        sums = self.batch_norm(replace(norm, dx=dx)).backward_sums
        assert sums is not None
        separate = chain(convolution, sums)
        return separate if any_empty(dy, norm.dy) else self._with_gradient_sums(separate, dy, w, geometry, norm)

    def _with_statistics(
        self, separate: Kernel, x: Any, w: Any, b: Any, y: Any, sums: Any, geometry: Geometry
    ) -> Kernel:
        """Return a kernel for `conv_forward_sums` on arrays with elements: by default `separate`, the two kernels."""
        return separate

    def _with_gradient_sums(
        self, separate: Kernel, dy: Any, w: Any, geometry: Geometry, norm: BatchNormArrays
    ) -> Kernel:
        """Return a kernel for `conv_backward_data_sums` on arrays with elements: by default `separate`, the two
        kernels.
        """
        return separate
