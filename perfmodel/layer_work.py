"""What one rank computes of one layer, and the key under which its time is kept. Pure arithmetic."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np

from halograd.layers import Layer

__all__ = ["LayerKey", "LayerTime", "LayerWork"]

#: Attributes that say what a layer is called, not what it computes.
_NAMES = ("name",)


@dataclass(frozen=True)
class LayerTime:
    """Time that one layer takes on one rank, messages left out.

    Attributes
    ----------
    forward
        [s]
    backward_data
        The gradient of the inputs, and whatever is not the gradient of the weights [s].
    backward_filter
        The gradient of the weights, where a layer computes it with a kernel of its own; 0 elsewhere [s].
    """

    forward: float
    backward_data: float = 0.0
    backward_filter: float = 0.0

    @property
    def backward(self) -> float:
        """Both gradients [s]."""
        return self.backward_data + self.backward_filter

    @property
    def total(self) -> float:
        """Forward and backward [s]."""
        return self.forward + self.backward


@dataclass(frozen=True)
class LayerKey:
    """Identity of the work of one layer on one rank: equal keys take equal time. The same in every process.

    Attributes
    ----------
    kind
        Class of the layer.
    config
        Its settings as JSON, without its name.
    inputs
        Shapes ``(n, *spatial, C)`` that the kernels see.
    dtype
        Of the computation.
    trainable, input_gradient
        Whether there is a backward pass, and whether it computes the gradient of the inputs.
    spread
        Whether the layer's statistics are sums over several ranks (other kernels are used then).
    """

    kind: str
    config: str
    inputs: tuple[tuple[int, ...], ...]
    dtype: str
    trainable: bool = True
    input_gradient: bool = True
    spread: bool = False

    def text(self) -> str:
        """The key as one line of JSON; `parse` reads it."""
        shapes = [list(shape) for shape in self.inputs]
        flags = [self.trainable, self.input_gradient, self.spread]
        return json.dumps([self.kind, self.config, shapes, self.dtype, *flags], separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> LayerKey:
        """The key that `text` was written from; ValueError if it was not."""
        kind, config, shapes, dtype, trainable, input_gradient, spread = json.loads(text)
        return cls(kind, config, tuple(tuple(s) for s in shapes), dtype, trainable, input_gradient, spread)


@dataclass(frozen=True)
class LayerWork:
    """A layer on blocks of one rank: the layer itself, made local, with the shapes that its kernels see.

    Made by :meth:`of`. Under a cut of the output channels (`filters`) the inputs have all their channels, because
    they are gathered before; under a cut of the input channels they have those of the rank.
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
        ranks: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> LayerWork:
        """The work of `layer` on local blocks.

        Parameters
        ----------
        layer
            As in the network; it is not modified.
        inputs
            Local shapes ``(n, *spatial, C)`` of what the kernels read, without halos and padding.
        dtype
            Of the computation.
        trainable
            Whether there is a backward pass.
        input_gradient
            Whether it computes the gradient of the inputs (the first layer of a network does not).
        filters
            Local output channels of a convolution or dense layer; all of them if None.
        outputs
            Local spatial extents of the output. Without them they follow from those of the input as in the
            whole network, which is a few rows off for a layer without padding that is cut in space.
        ranks
            Ranks that the layer is cut into: more than one may mean sums for statistics.
        options
            Options of the layer in the strategy (`statistics`).
        """
        shapes = tuple(tuple(int(n) for n in shape) for shape in inputs)
        local = layer if filters is None else layer.of_filters(filters)
        if outputs is not None:
            local, sample = local.of_outputs(shapes[0][1:], tuple(outputs))
            shapes = ((shapes[0][0], *sample), *shapes[1:])
        local, spread = local.of_statistics(ranks, options or {})
        return cls(local, shapes, dtype, trainable, input_gradient and trainable, spread)

    @cached_property
    def key(self) -> LayerKey:
        """What its time is kept under."""
        kind = type(self.layer)
        name = kind.__name__ if kind.__module__.startswith("halograd.") else f"{kind.__module__}.{kind.__qualname__}"
        config = _config(self.layer, self.inputs[0][1:])
        return LayerKey(name, config, self.inputs, self.dtype, self.trainable, self.input_gradient, self.spread)

    @property
    def samples(self) -> int:
        """Local samples."""
        return self.inputs[0][0]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Sample shapes of the inputs."""
        return [shape[1:] for shape in self.inputs]

    @property
    def empty(self) -> bool:
        """Whether the rank has nothing of the layer."""
        return not all(math.prod(shape) for shape in self.inputs)


def _config(layer: Layer, shape: tuple[int, ...]) -> str:
    """Settings of a layer as JSON; equal for layers that compute the same, and in every process."""
    settings = {k: _plain(v) for k, v in vars(layer).items() if k not in _NAMES}
    if layer.stencil is not None:
        # "same" and the numbers it stands for are one and the same.
        settings["stencil"] = [[w.kernel, w.stride, w.pad_lo, w.pad_hi, w.dilation] for w in layer.windows(shape)]
    return json.dumps(settings, sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """A setting as JSON has it: no addresses, no order of sets or dictionaries."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return [array.dtype.name, list(array.shape), zlib.crc32(array.tobytes())]
    if isinstance(value, Mapping):
        return sorted([str(k), _plain(v)] for k, v in value.items())
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(v)) for v in value)
    named = type(value) if not callable(value) or is_dataclass(value) else value
    inner = {k: _plain(v) for k, v in vars(value).items()} if is_dataclass(value) else {}
    return [getattr(named, "__qualname__", type(value).__qualname__), inner]
