"""Kernel times of layers on one rank (pure arithmetic): from a roofline, or measured and stored on disk."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from halograd.errors import UserError

from ..layers import Layer
from ..layers.settings import settings_of
from .machine import Machine

if TYPE_CHECKING:
    from .profile.cache import Conditions, TimeCache

__all__ = ["KernelTimes", "LayerTime", "LayerWork", "MeasuredTimes", "Recorded", "RooflineTimes"]


class LayerTime(NamedTuple):
    """Time of a layer on one rank, without messages.

    Attributes
    ----------
    forward
        Time of the forward pass [s].
    backward_data
        Time of the gradient of the inputs, and of everything else in backward except `backward_filter` [s].
    backward_filter
        Time of the gradient of the weights if it has a kernel of its own; else 0 [s].
    """

    forward: float
    backward_data: float = 0.0
    backward_filter: float = 0.0

    @property
    def backward(self) -> float:
        """Time of the backward pass [s]."""
        return self.backward_data + self.backward_filter

    @property
    def total(self) -> float:
        """Time of forward and backward [s]."""
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerWork:
    """Layer on the blocks of one rank: a local version of the layer, with the shapes that its kernels get.

    :meth:`of` creates it. If the output channels are cut (`filters`), the inputs have all channels, because they are
    gathered first; if the input channels are cut, the inputs have the rank's channels. `spread`: whether statistics are
    sums over several ranks.
    """

    layer: Layer
    inputs: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    trainable: bool = True
    input_gradient: bool = True
    spread: bool = False

    @classmethod
    def of(
        cls,
        layer: Layer,
        inputs: Sequence[Sequence[int]],
        dtype: str = "float32",
        trainable: bool = True,
        *,
        input_gradient: bool = True,
        filters: int | None = None,
        outputs: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LayerWork:
        """Return the work of `layer` on local blocks.

        Parameters
        ----------
        layer
            The layer in the network; it is not modified.
        inputs
            Local shapes ``(n, *spatial, C)`` of the inputs of the kernels, without halos and padding.
        dtype
            Dtype of the computation.
        trainable
            Whether there is a backward pass.
        input_gradient
            Whether backward computes the gradient of the inputs (the first layer of a network does not).
        filters
            Local output channels of a convolution or dense layer; all of them if None.
        outputs
            Local spatial extents of the output. By default they follow from those of the input as in the whole
            network, which is wrong by a few rows for a layer without padding that is cut in space.
        options
            Options of the layer in the strategy, if it is cut over several ranks (which may sum its `statistics`);
            None: it is on one rank.
        """
        # Python's integers: the key is JSON.
        shapes = tuple([tuple(map(int, shape)) for shape in inputs])
        local = layer if filters is None else layer.of_filters(filters)
        if outputs is not None:
            local, sample = local.of_outputs(shapes[0][1:], tuple(outputs))
            shapes = ((shapes[0][0], *sample), *shapes[1:])
        # 2 stands for any number of ranks: kernels depend only on whether statistics are summed over several.
        local, spread = local.of_statistics(1 if options is None else 2, options or {})
        # Without a backward pass the gradient flag is False, so that equal work has one key.
        return cls(local, shapes, dtype, trainable, input_gradient and trainable, spread)

    @cached_property
    def kind(self) -> str:
        """Class name of the layer, with its module if the class is not one of halograd."""
        # Classes of users in different modules may have the same name.
        kind = type(self.layer)
        return kind.__name__ if kind.__module__.startswith("halograd.") else f"{kind.__module__}.{kind.__qualname__}"

    @cached_property
    def key(self) -> str:
        """Key of the stored time: one line of JSON, the same in every process. Layers with equal keys have equal times.

        It contains the layer's class, its settings except its name, the shapes of the inputs, the dtype, and three
        flags: whether there is a backward pass, whether this computes the gradient of the inputs, and whether
        statistics are sums over several ranks.
        """
        settings = settings_of(self.layer, self.inputs[0][1:])
        config = json.dumps(settings, sort_keys=True, separators=(",", ":"))
        flags = [self.trainable, self.input_gradient, self.spread]
        return json.dumps([self.kind, config, self.inputs, self.dtype, *flags], separators=(",", ":"))

    @property
    def samples(self) -> int:
        """Number of local samples."""
        return self.inputs[0][0]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Sample shapes of the inputs."""
        return [shape[1:] for shape in self.inputs]

    @cached_property
    def output(self) -> tuple[int, ...]:
        """Sample shape of the output. Raises UserError if the layer, such as one of the user, rejects the blocks."""
        try:
            return self.layer.output_shape(*self.shapes)
        except ValueError as error:
            raise UserError(
                f"{self.kind}: expected a layer that can be timed on blocks {self.inputs}, got: {error}; override "
                "of_outputs() to return a layer for such blocks"
            ) from error


class KernelTimes(ABC):
    """Times of layers on one rank, without messages. They are cached, because planners request the same times
    repeatedly.
    """

    def __init__(self) -> None:
        self._known: dict[Any, LayerTime] = {}

    def time(
        self,
        layer: Layer,
        inputs: Sequence[tuple[int, ...]],
        dtype: str = "float32",
        trainable: bool = True,
        *,
        input_gradient: bool = True,
        filters: int | None = None,
        outputs: Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> LayerTime:
        """Return the time of `layer` on local blocks, 0 if one is empty; parameters as in :meth:`LayerWork.of`."""
        # A tuple, because a cut layer without this option, (None,), differs from a layer on one rank, None.
        statistics = None if options is None else (options.get("statistics"),)
        # `and` keeps None, and converts a list, which has no hash.
        cut = (filters, outputs and tuple(outputs), statistics)
        known = (layer, tuple(inputs), dtype, trainable, input_gradient, *cut)
        if known not in self._known:
            more: dict[str, Any] = {"input_gradient": input_gradient, "filters": filters, "outputs": outputs}
            work = LayerWork.of(layer, inputs, dtype, trainable, **more, options=options)
            if all(math.prod(shape) for shape in work.inputs):
                _ = work.output  # raises an error before the work is measured
                self._known[known] = self.of_work(work)
            else:  # the rank has no elements of the layer
                self._known[known] = LayerTime(0.0)
        return self._known[known]

    @abstractmethod
    def of_work(self, work: LayerWork) -> LayerTime:
        """Return the time of a layer on nonempty local blocks."""


#: Memory traffic of the backward of a fused activation: it reads y and dy, writes the masked dy [passes over y].
_MASK = 3.0


class RooflineTimes(KernelTimes):
    """Times from `Layer.flops` and bytes moved, on a machine that need not be available.

    Each kernel takes ``machine.roofline(flops, bytes)``, with the efficiency of its phase if the layer has weights.
    Layers with weights run three kernels of the same number of operations (forward, gradient of the inputs, gradient of
    the weights); the gradients of other layers have `Layer.backward_flops` times the operations of their forward. Bytes
    are those of the passes over inputs and output (:class:`~halograd.layers.layer.Passes`) and of the weights.

    Parameters
    ----------
    machine
        Machine with the rates of the device.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def of_work(self, work: LayerWork) -> LayerTime:
        passes = work.layer.passes

        itemsize = np.dtype(work.dtype).itemsize
        xs = [math.prod(shape) * itemsize for shape in work.inputs]
        x = sum(xs)
        y = work.samples * math.prod(work.output) * itemsize
        # Local sizes, because a local layer has the rank's filters and input channels only.
        parameters = work.layer.parameters(*work.shapes)
        weights = sum(p.size for p in parameters.values()) * itemsize
        flops = work.samples * work.layer.flops(*work.shapes)
        has_filter = "w" in parameters

        def kernel(phase: str, flops: float, nbytes: float) -> float:
            return self.machine.roofline(flops, nbytes, work.dtype, phase if has_filter else "")

        forward = kernel("forward", flops, passes.inputs(False, xs) + passes.forward[1] * y + weights)
        if not work.trainable:
            return LayerTime(forward)
        data = mask = filter_ = 0.0
        if has_filter and getattr(work.layer, "activation", None) is not None:
            mask = self.machine.roofline(0, _MASK * y, work.dtype)
        # Gradients of a norm's parameters come from the kernel of its data gradient, which a first layer runs, too.
        if passes.data != (0, 0) and (work.input_gradient or (parameters and not has_filter)):
            work_back = flops * work.layer.backward_flops
            data = kernel("backward_data", work_back, passes.inputs(True, xs) + passes.data[1] * y + weights)
        if has_filter:
            # It reads x and dy, and writes dw.
            filter_ = kernel("backward_filter", flops, x + y + weights)
        return LayerTime(forward, mask + data, filter_)


class MeasuredTimes(KernelTimes):
    """Times measured on this machine, from a cache on disk.

    A time that was not measured is an error (UserError) if there is neither `measure` nor `fallback`.

    Parameters
    ----------
    cache
        Cache of measured times.
    conditions
        Device, library, threads and ranks; times measured under other conditions are not used.
    fallback
        Times that are used if there is no measured time.
    measure
        Function that measures missing times, which are then stored in the cache; it has priority over `fallback`.
        (Under MPI a measurement is collective: all ranks request the same times.)

    Attributes
    ----------
    missing
        Requested but unmeasured work by key, which a profile still has to measure.
    """

    def __init__(
        self,
        cache: TimeCache,
        conditions: Conditions,
        fallback: KernelTimes | None = None,
        measure: Callable[[LayerWork], LayerTime] | None = None,
    ) -> None:
        super().__init__()
        self.cache, self.conditions = cache, conditions
        self.fallback, self.measure = fallback, measure
        self.missing: dict[str, LayerWork] = {}

    def of_work(self, work: LayerWork) -> LayerTime:
        measured = self.cache.get(self.conditions, work.key)
        if measured is not None:
            return LayerTime(*measured)

        if self.measure is not None:
            time = self.measure(work)
            self.cache.put(self.conditions, work.key, time)
            return time
        self.missing[work.key] = work
        if self.fallback is None:
            raise UserError(
                f"kernel times: expected a measured time of {work.kind} on {work.inputs} in {self.cache.path}, "
                "got none; run `halograd profile` for this model, ranks and threads"
            )
        return self.fallback.of_work(work)

    def forget(self) -> None:
        """Clear the times that were looked up, and `missing`; call this after the cache gets new entries."""
        self._known.clear()
        self.missing.clear()


class Recorded(KernelTimes):
    """Times of another :class:`KernelTimes`, with a record of the requested layers.

    Attributes
    ----------
    requested
        Requested layers on local blocks, by key.
    """

    def __init__(self, times: KernelTimes) -> None:
        super().__init__()
        self._times = times
        self.requested: dict[str, LayerWork] = {}

    def of_work(self, work: LayerWork) -> LayerTime:
        self.requested[work.key] = work
        return self._times.of_work(work)
