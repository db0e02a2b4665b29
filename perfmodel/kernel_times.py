"""Times of layers on one rank: from a machine's roofline, or measured and kept on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from halograd.errors import UserError
from halograd.layers import Layer
from halograd.perfmodel.layer_work import LayerKey, LayerTime, LayerWork
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.profile.cache import Conditions, TimeCache

__all__ = [
    "KernelTimes",
    "LayerKey",
    "LayerTime",
    "LayerWork",
    "MeasuredTimes",
    "Recorded",
    "RooflineTimes",
]


class KernelTimes(Protocol):
    """Tells what a layer costs on one rank, without messages."""

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
        ranks: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> LayerTime:
        """Time of `layer` on local blocks; parameters as in :meth:`LayerWork.of`."""
        ...


class _Times:
    """`time`, remembered by its arguments: planners ask for the same again and again."""

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
        ranks: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> LayerTime:
        """Time of `layer` on local blocks; parameters as in :meth:`LayerWork.of`."""
        statistics = (options or {}).get("statistics")
        asked = (layer, tuple(inputs), dtype, trainable, input_gradient, filters, outputs and tuple(outputs))
        known = (*asked, ranks > 1, statistics)
        if known not in self._known:
            more: dict[str, Any] = {"input_gradient": input_gradient, "filters": filters, "outputs": outputs}
            work = LayerWork.of(layer, inputs, dtype, trainable, **more, ranks=ranks, options=options)
            self._known[known] = LayerTime(0.0) if work.empty else self.of_work(work)
        return self._known[known]

    def of_work(self, work: LayerWork) -> LayerTime:
        """Time of a layer on local blocks that are not empty."""
        raise NotImplementedError


#: A fused ReLU backward: reads y and dy, writes the masked dy [passes over y].
_MASK = 3.0


class RooflineTimes(_Times):
    """Times from `Layer.flops` and bytes moved, on a machine that need not be there.

    Each kernel takes ``machine.roofline(flops, bytes)``. Layers with weights run three kernels of the same number of
    operations (forward, gradient of the inputs, gradient of the weights); the gradients of others take as
    many operations as their forward. Bytes are passes over inputs and output, see
    :class:`~halograd.layers.costs.Passes`, and the weights.

    Parameters
    ----------
    machine
        The device, and what it reaches.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def of_work(self, work: LayerWork) -> LayerTime:
        """Time of a layer on local blocks that are not empty."""
        passes = work.layer.passes
        itemsize = np.dtype(work.dtype).itemsize
        y_shape = work.layer.output_shape(*work.shapes)
        xs = [math.prod(shape) * itemsize for shape in work.inputs]
        x = sum(xs)
        y = work.samples * math.prod(y_shape) * itemsize
        parameters = work.layer.parameters(*work.shapes)
        weights = sum(p.size for p in parameters.values()) * itemsize
        flops = work.samples * work.layer.flops(*work.shapes)
        forward = self._kernel(work, flops, passes.inputs(False, xs) + passes.forward[1] * y + weights)
        if not work.trainable:
            return LayerTime(forward)
        has_filter = "w" in parameters
        data = mask = filter_ = 0.0
        if has_filter and getattr(work.layer, "activation", None) == "relu":
            mask = self._kernel(work, 0, _MASK * y)
        if passes.data != (0, 0) and (work.input_gradient or (parameters and not has_filter)):
            data = self._kernel(work, flops, passes.inputs(True, xs) + passes.data[1] * y + weights)
        if has_filter:
            filter_ = self._kernel(work, flops, x + y + weights)
        return LayerTime(forward, mask + data, filter_)

    def _kernel(self, work: LayerWork, flops: float, nbytes: float) -> float:
        return self.machine.roofline(flops, nbytes, work.dtype)


class MeasuredTimes(_Times):
    """Times that were measured on this machine, from a cache on disk.

    Parameters
    ----------
    cache
        Where measured times lie.
    conditions
        Device, library, threads and ranks: times measured under others are not used.
    fallback
        Who is asked for what was not measured.
    measure
        Measures what is not there, and its time is kept in the cache; goes before `fallback`. (Under MPI a
        measurement is collective: all ranks ask for the same.)

    Attributes
    ----------
    missing
        What was asked for and was not there, by key: what a profile has yet to measure.
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
        self.missing: dict[LayerKey, LayerWork] = {}

    def of_work(self, work: LayerWork) -> LayerTime:
        """Time of a layer on local blocks that are not empty.

        Raises
        ------
        UserError
            If it was not measured, and there is neither `measure` nor `fallback`.
        """
        found = self.cache.get(self.conditions, work.key.text())
        if found is not None:
            return LayerTime(*found)
        if self.measure is not None:
            time = self.measure(work)
            self.cache.put(self.conditions, work.key.text(), (time.forward, time.backward_data, time.backward_filter))
            return time
        self.missing[work.key] = work
        if self.fallback is None:
            raise UserError(
                f"kernel times: expected a measured time of {work.key.kind} on {work.inputs} in {self.cache.path}, "
                "there is none; run `halograd profile` for this model, ranks and threads"
            )
        return _ask(self.fallback, work)

    def forget(self) -> None:
        """Look everything up again: the cache has grown."""
        self._known.clear()
        self.missing.clear()


class Recorded(_Times):
    """Times of another, with a list of what they were asked for.

    Attributes
    ----------
    asked
        Layers on local blocks, by key.
    """

    def __init__(self, times: KernelTimes) -> None:
        super().__init__()
        self._times = times
        self.asked: dict[LayerKey, LayerWork] = {}

    def of_work(self, work: LayerWork) -> LayerTime:
        """What the other says."""
        self.asked[work.key] = work
        return _ask(self._times, work)


def _ask(times: KernelTimes, work: LayerWork) -> LayerTime:
    """What other times say of work that is local already."""
    if isinstance(times, _Times):
        return times.of_work(work)
    layer, ranks = work.layer, 2 if work.spread else 1
    return times.time(layer, work.inputs, work.dtype, work.trainable, input_gradient=work.input_gradient, ranks=ranks)
