"""Parameters of layers: their description and initial values, their blocks over the ranks, weight normalization.

A :class:`Parameter` describes a whole array. A :class:`ParameterBlocks` holds the block of each rank, and the groups of
ranks that hold the same block. Weight normalization replaces weights by directions and lengths.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ..dtensor import Blocks, Groups, Intervals, Layout, balanced_boundaries, intervals
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered

__all__ = [
    "ForeignArray",
    "GivenValues",
    "Parameter",
    "ParameterBlocks",
    "as_given_values",
    "block_channels",
    "blocks_of",
    "lower_weight_norm",
    "with_lengths",
]


@dataclass(frozen=True, eq=False)
class ForeignArray:
    """Array of another framework, whose numbers are those of a parameter in another order.

    Attributes
    ----------
    name, shape
        Its name and shape there.
    order
        Function from that array, of any dtype, to the parameter. It only moves numbers, or leaves some of them out.
    """

    name: str
    shape: tuple[int, ...]
    order: Callable[[np.ndarray], np.ndarray]

    def positions(self) -> np.ndarray:
        """Return, for each element of the parameter, the index of its number in the flattened foreign array."""
        return self.order(np.arange(math.prod(self.shape)).reshape(self.shape)).astype(np.int64, copy=False)


@dataclass(frozen=True, eq=False)
class GivenValues:
    """Initial values from outside: an array, or a file that is read when the values are needed.

    Attributes
    ----------
    shape
        Shape of the whole array.
    read
        Function that returns the array. Every rank that holds some of it calls this once, and does not keep the result:
        a rank holds one whole array at a time, in addition to its own blocks.
    source
        Origin of the values, to compare between ranks: a file and its checksum. Empty for arrays.
    foreign
        The array of another framework that these values are made of; None: unknown.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    source: str = ""
    foreign: ForeignArray | None = None


def as_given_values(values: GivenValues | Any) -> GivenValues:
    """Wrap an array as initial values; :class:`GivenValues` are returned unchanged."""
    if isinstance(values, GivenValues):
        return values
    array = np.asarray(values)
    return GivenValues(array.shape, lambda: array)


@dataclass(frozen=True)
class Parameter:
    """Description of one whole parameter array.

    Attributes
    ----------
    shape
        Shape of the array. Convolution weights are ``(K, *kernel, C / groups)``.
    init
        ``"he"`` (normal, variance 2 / fan_in; He et al. 2015), ``"glorot"`` (uniform; Glorot and Bengio
        2010), ``"normal"`` (standard deviation `std`), ``"zeros"``, ``"ones"``, a number for every element, or given
        values, see :meth:`Layer.initialized`.
    fan_in, fan_out
        Number of inputs and outputs of one unit, for ``he`` and ``glorot``.
    std
        Standard deviation, for ``normal``.
    decay
        Whether weight decay applies (not to biases and norms).
    spatial_axes
        Axes that correspond to the output's spatial axes, one for each, in order: a rank holds the box of its output
        block. An extent of 1 stands for all positions, so it is not cut. Empty: the array has no element per position.
    channel_axis, input_axis
        Axes that correspond to the output's and to the input's channels: if those are cut, a rank holds the block of
        its channels. None: there is no such axis.
    rounded
        Whether the gradient may have the 16-bit dtype of the activations (convolutions on a GPU) instead of float32.
    """

    shape: tuple[int, ...]
    init: str | float | GivenValues = "zeros"
    fan_in: int = 1
    fan_out: int = 1
    decay: bool = True
    channel_axis: int | None = None
    input_axis: int | None = None
    rounded: bool = False
    spatial_axes: tuple[int, ...] = ()
    std: float = 1.0

    def __post_init__(self) -> None:
        for name in ("shape", "spatial_axes"):  # hashable tuples, for comparison and lookup
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.init, GivenValues):
            if self.init.shape != self.shape:
                raise ValueError(f"expected initial values of shape {self.shape}, got {self.init.shape}")
        elif isinstance(self.init, str) and self.init not in ("he", "glorot", "normal", "zeros", "ones"):
            raise ValueError(f"init: expected 'he', 'glorot', 'normal', 'zeros', 'ones' or a number, got {self.init!r}")
        axes = [axis for axis in (*self.spatial_axes, self.channel_axis, self.input_axis) if axis is not None]
        if any(after <= axis for axis, after in itertools.pairwise(axes)):
            raise ValueError(
                "axes of a parameter: expected spatial_axes, channel_axis and input_axis in rising order, got "
                f"{self.spatial_axes}, {self.channel_axis} and {self.input_axis}; blocks of parameters are numbered in "
                "that order"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def initial(self, name: str, seed: int) -> np.ndarray:
        """Return initial values: the given ones, or values that depend only on `name` and `seed`.

        They are the same for every decomposition. Their dtype is float64, or that of the given values.
        """
        if isinstance(self.init, GivenValues):
            return self.init.read()
        if self.init in ("zeros", "ones") or not isinstance(self.init, str):
            return np.full(self.shape, {"zeros": 0.0, "ones": 1.0}.get(str(self.init), self.init), np.float64)
        # By name, so that a layer added elsewhere changes no other initial values.
        # A checksum, because Python's hash of a string differs between processes.
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        if self.init in ("he", "normal"):
            return rng.standard_normal(self.shape) * (self.std if self.init == "normal" else math.sqrt(2 / self.fan_in))
        limit = math.sqrt(6.0 / (self.fan_in + self.fan_out))
        return rng.uniform(-limit, limit, self.shape)


@dataclass(frozen=True)
class ParameterBlocks:
    """The blocks of one parameter over the ranks.

    Attributes
    ----------
    boxes
        Box per rank, in indices of the whole array; empty if the rank holds nothing of it.
    holders
        Groups of ranks that hold the same block. Each rank of a group has a summand of the gradient; ranks without a
        group hold nothing.
    """

    boxes: Blocks
    holders: Groups

    @property
    def whole(self) -> bool:
        """Whether every rank holds the whole parameter."""
        return self.holders.is_whole

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of elements in the block of each group."""
        return tuple(self.boxes[self.holders.members(color)[0]].size for color in range(self.holders.count))

    @cached_property
    def largest(self) -> int:
        """Number of elements in the largest block."""
        return self.boxes.fullest


def block_channels(channels: int, parts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return the output channels of each part of "channel": whole blocks of the output's layout.

    >>> block_channels(10, {"channel": 2, "input_channel": 2})
    [(0, 6), (6, 10)]
    """
    inner = parts["input_channel"]
    cuts = balanced_boundaries(channels, parts["channel"] * inner)
    return [(cuts[k * inner], cuts[(k + 1) * inner]) for k in range(parts["channel"])]


def blocks_of(spec: Parameter, parts: Mapping[str, int], output: Layout) -> ParameterBlocks:
    """Return the blocks of one parameter of a layer with these parts and this layout of its output."""
    used = math.prod(parts.values())
    # The cuts of samples do not matter, so layouts of all batches share one result.
    space = output.boxes.axes[1:-1] if spec.spatial_axes else ()
    return _blocks_of(spec, space, parts["channel"], parts["input_channel"], used, output.size)


@lru_cache(maxsize=65536)
def _blocks_of(
    spec: Parameter, space: tuple[Intervals, ...], channel: int, inner: int, used: int, size: int
) -> ParameterBlocks:
    # Boxes are products of one list of intervals per axis of the parameter, but the grid of ranks has more axes: each
    # list repeats its intervals for the axes of the grid that do not cut the parameter.
    # Row-major: replicas along the first axis of the parameter, then its positions, channels and input channels.
    replicas = used // (channel * inner * math.prod(map(len, space)))  # ranks with other samples, or positions
    grid = (replicas, *map(len, space), channel, inner)
    grid_axes: list[int | None] = [None, *spec.spatial_axes, spec.channel_axis, spec.input_axis]
    axes: list[Intervals] = [((0, n),) for n in spec.shape]
    agreeing, first = [], []
    for d, (axis, pieces) in enumerate(zip(spec.spatial_axes, space), start=1):
        whole = spec.shape[axis] == 1  # held by every part of the axis
        axes[axis] = ((0, 1),) * len(pieces) if whole else pieces
        agreeing += [] if whole else [d]
    if spec.input_axis is not None:
        axes[spec.input_axis] = intervals(spec.shape[spec.input_axis], inner)
        agreeing.append(len(grid) - 1)
    if spec.channel_axis is not None:
        axes[spec.channel_axis] = tuple(
            block_channels(spec.shape[spec.channel_axis], {"channel": channel, "input_channel": inner})
        )
        agreeing.append(len(grid) - 2)
    # An axis of the grid that cuts no axis of the parameter repeats each interval of the last axis before it that does;
    # without one before it, it repeats all intervals of axis 0.
    leading, last = 1, None
    for d, (parts, parameter_axis) in enumerate(zip(grid, grid_axes)):
        if parameter_axis is not None:
            last = parameter_axis
        elif last is None:
            leading *= parts
        elif d == len(grid) - 1 and spec.channel_axis is not None:  # only the first part of the sum adds the bias
            axes[last] = tuple((a, a if share else b) for a, b in axes[last] for share in range(parts))
            first.append(d)
        else:
            axes[last] = tuple(piece for piece in axes[last] for _ in range(parts))
    axes[0] = _repeated(axes[0], leading)
    return ParameterBlocks(Blocks(axes, size), Groups.agreeing(grid, agreeing, size, first))


@lru_cache(maxsize=4096)
def _repeated(axis: Intervals, times: int) -> Intervals:
    """Return the intervals repeated for each replica; parameters with the same blocks share one object."""
    return axis * times


def with_lengths(specs: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters of a layer with `w` as directions, and with the length of each filter as `g` ``(K,)``.

    The initial length is sqrt(2), the root mean square length of weights that are drawn by the rule of He.
    """
    lengths = Parameter(specs["w"].shape[:1], math.sqrt(2.0))
    return {"w": specs["w"], "g": lengths, **{key: spec for key, spec in specs.items() if key != "w"}}


def lower_weight_norm(context: Context, lower: Callable[[Context], Lowered]) -> Lowered:
    """Lower a layer with the weights ``g[k] * w[k] / |w[k]|`` instead of its parameter `w` (Salimans and Kingma 2016).

    Every rank computes the gradients of directions and lengths from its gradient of the weights. Both are linear in the
    gradient of the weights, so they are summed over the ranks like those of other parameters. This needs no additional
    communication.
    """
    params, grads = context.params, context.grads
    v, g, lengths = params["w"], params["g"], (params["w"].shape[0], *(1 for _ in params["w"].shape[1:]))
    w = context.scratch(v.shape, v.dtype)
    norms, sums = context.scratch(lengths, context.wide), context.scratch(lengths, "float64")
    unit = context.scratch(v.shape, context.wide)
    views = {"v": v, "g": g.reshape(*lengths), "norms": norms}
    context.run(context.kernel(_normalizing, **views, w=w, unit=unit, sums=sums))
    dw = context.scratch(v.shape, grads["w"].dtype)
    lowered = lower(context.with_arrays({**params, "w": w}, {**grads, "w": dw}))

    def backward() -> None:
        assert lowered.backward is not None
        lowered.backward()
        if context.frozen:
            return
        work = {"unit": context.scratch(v.shape, context.wide), "product": context.scratch(v.shape, context.wide)}
        work |= {"sums": context.scratch(lengths, "float64"), "factor": context.scratch(lengths, context.wide)}
        gradients = {"dw": dw, "dv": grads["w"], "dg": grads["g"].reshape(*lengths)}
        context.run(context.kernel(_gradients, **views, **gradients, **work))

    return Lowered(backward)


def _others(array: Any) -> tuple[int, ...]:
    """Return all axes except that of the filters."""
    return tuple(range(1, array.ndim))


@reads("v", "g")
@writes("norms", "w", "unit", "sums")
def _normalizing(environment: Any, v: Any, g: Any, norms: Any, w: Any, unit: Any, sums: Any) -> Callable[[], None]:
    """Return the kernel ``w = g * v / |v|``, which also writes the norms."""

    def run() -> None:
        if v.size:  # a rank that the layer does not use holds nothing
            # `unit` holds the squares first: one array less.
            np.multiply(v, v, out=unit)
            np.add.reduce(unit, axis=_others(v), dtype=np.float64, out=sums, keepdims=True)
            np.sqrt(sums, out=norms, casting="same_kind")
            np.divide(v, norms, out=unit)
            np.multiply(unit, g, out=w)

    return run


@reads("v", "g", "norms", "dw")
@writes("dv", "dg", "unit", "product", "sums", "factor")
def _gradients(
    environment: Any, v: Any, g: Any, norms: Any, dw: Any, dv: Any, dg: Any, **work: Any
) -> Callable[[], None]:
    """Return the kernel ``dg = sum dw * u``, ``dv = g / |v| * (dw - dg * u)`` with ``u = v / |v|``."""
    unit, product, sums, factor = (work[key] for key in ("unit", "product", "sums", "factor"))

    def run() -> None:
        if not v.size:
            return
        # Equation 3 of Salimans and Kingma 2016; u is computed again, because forward has not kept it.
        np.divide(v, norms, out=unit)
        np.multiply(dw, unit, out=product)
        np.add.reduce(product, axis=_others(v), dtype=np.float64, out=sums, keepdims=True)
        np.copyto(dg, sums, casting="same_kind")
        np.multiply(unit, dg, out=unit)
        np.subtract(dw, unit, out=product)
        np.divide(g, norms, out=factor)
        np.multiply(product, factor, out=dv)

    return run
