"""Layers and the graph that they build.

A :class:`Layer` is a description of global shapes and of the input box that an output box needs. Ranks and their arrays
are not part of it. A call on nodes extends a graph::

    x = Input((512, 512, 18), name="x")
    y = Conv(32, 3, padding=1)(x)

To write a layer of your own, subclass :class:`Layer`: see ``docs/custom_layers.md``.
"""

from __future__ import annotations

import copy
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np

from halograd.errors import UserError
from halograd.signatures import check_methods, is_ours

from ..dtensor import Blocks, Box, Layout, Window, input_box
from ..lowering.context import Context, Lowered
from .lowering import lower_local
from .needs import Shape, Stencil, all_of, probe, sliding
from .parameter import GivenValues, Parameter, as_given_values
from .targets import TargetReader

__all__ = ["ElementwiseLayer", "Input", "Layer", "Node", "Passes", "Shape"]

#: Stencil of layers without one; made once, because `Layer.windows` is called many times per layer and cut.
_POINTWISE = Stencil(1)
#: Type variable of a layer class.
LayerType = TypeVar("LayerType", bound="Layer")


@dataclass(frozen=True)
class Passes:
    """Number of times that the kernels of a layer pass over all inputs (x) and the output (y) in memory.

    Every kernel also reads the weights once, or writes their gradient once.

    Attributes
    ----------
    forward, data
        Passes ``(x, y)`` of the forward kernels, and of the kernels for the gradient of the inputs (in which x includes
        dx, and y includes dy).
    others
        Passes over each further input, forward and backward; None: as many as over the first input.
    """

    forward: tuple[float, float] = (1, 1)
    data: tuple[float, float] = (1, 1)
    others: tuple[float, float] | None = None

    def inputs(self, backward: bool, sizes: Sequence[int]) -> float:
        """Return the memory traffic for inputs of these sizes, in the unit of the sizes."""
        first = (self.data if backward else self.forward)[0]
        # `others` is (forward, backward): the bool is its index.
        return first * sizes[0] + (first if self.others is None else self.others[backward]) * sum(sizes[1:])


class NodeOperators(ABC):
    """Interface of the arithmetic on nodes, which creates layers; :mod:`halograd.layers.arithmetic` implements it."""

    @abstractmethod
    def add(self, first: Node, second: Node) -> Node:
        """Return the sum of two nodes; the second may broadcast, as in :meth:`Node.__mul__`."""

    @abstractmethod
    def multiply(self, first: Node, second: Node) -> Node:
        """Return the product of two nodes; the second may broadcast, as in :meth:`Node.__mul__`."""

    @abstractmethod
    def affine(self, node: Node, factor: float, shift: float) -> Node:
        """Return ``factor * node + shift``."""


class Node:
    """Value in the graph: the output of one call of a layer.

    Attributes
    ----------
    layer
        The layer that computes it.
    inputs
        The nodes that the layer reads.
    shape
        Shape of one sample: ``(*spatial, C)``.
    """

    def __init__(self, layer: Layer, inputs: Sequence[Node]) -> None:
        self.layer = layer
        self.inputs = tuple(inputs)
        # This checks the inputs too: errors arise at the call that the user wrote.
        self.shape: Shape = layer.output_shape(*(n.shape for n in inputs))

    #: Set when the package is imported.
    arithmetic: ClassVar[NodeOperators]

    # NumPy scalars then leave products with nodes to `__rmul__`; otherwise they would make arrays of objects.
    __array_ufunc__ = None

    def __add__(self, other: Any) -> Node:
        """Return the node of a sum with another node or a number; a smaller node broadcasts as in a product."""
        if _is_number(other):
            return self._affine(1.0, other)
        if not isinstance(other, Node) or other.shape == self.shape:  # other types are refused there
            return self.arithmetic.add(self, other)
        return self.arithmetic.add(*_large_first(self, other))

    def __radd__(self, other: Any) -> Node:
        return self + other

    def __sub__(self, other: Any) -> Node:
        """Return the node of a difference with another node or a number."""
        return self + -other

    def __rsub__(self, other: Any) -> Node:
        return self._affine(-1.0, other) if _is_number(other) else NotImplemented

    def __neg__(self) -> Node:
        return self._affine(-1.0, 0.0)

    def __mul__(self, other: Any) -> Node:
        """Return the node of a product with another node or a number.

        The smaller operand may have 1 for any extent, or be a vector per sample.
        """
        if _is_number(other):
            return self._affine(other, 0.0)
        if not isinstance(other, Node):
            raise TypeError(f"product: expected the outputs of two layers, or a number, got {type(other).__name__}")
        return self.arithmetic.multiply(*_large_first(self, other))

    def __rmul__(self, other: Any) -> Node:
        return self * other

    def __truediv__(self, other: Any) -> Node:
        """Return the node of this value divided by a number."""
        if not _is_number(other) or other == 0:
            raise TypeError(f"quotient: expected a number other than 0 as divisor, got {other!r}")
        return self._affine(1.0 / other, 0.0)

    def _affine(self, factor: float, shift: float) -> Node:
        # x * 1 and x + 0 create no layer.
        return self if (factor, shift) == (1, 0) else self.arithmetic.affine(self, factor, shift)


def _large_first(*nodes: Node) -> list[Node]:
    # The sort is stable: operands of the same size keep their order.
    return sorted(nodes, key=lambda node: math.prod(node.shape), reverse=True)


def _is_number(value: object) -> bool:
    # A bool is a number in Python, but in a product with a node it is an error.
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class Layer(TargetReader):
    """Global description of one step of a network.

    A subclass declares its inputs and computes on plain arrays. The library handles cuts, halos and the return of
    gradients to their owners. A subclass has:

    - `stencil`: the :class:`Stencil` that slides over the spatial axes, or None for a pointwise layer (an output
      element depends on the input elements of the same sample and position, all channels);
    - :meth:`forward` and :meth:`backward` on local arrays that include their halo and padding.

    Layers that need more (other input boxes, reductions across ranks, kernels of a backend) override
    :meth:`input_boxes` or :meth:`lower`.
    """

    #: Sliding window, or None for a pointwise layer.
    stencil: Stencil | None = None
    #: Whether the channels may be cut: "no", "channelwise" (a channel depends on the same channel only) or
    #: "contracts" (all input channels are summed over; weights can be cut along input and output channels).
    cuts_channels: str = "no"
    #: Whether the layer reads parameters in float32 if activations have 16 bits (norms), and not rounded to 16 bits.
    exact_parameters: bool = False
    #: Whether inputs of the network that it reads stay in float32 if activations have 16 bits: it needs their digits.
    exact_inputs: bool = False
    #: Whether the channels of its input may be padded with zeros in memory, see `Backend.padded_channels`.
    takes_padded_channels: bool = False
    #: Value of the elements outside the array.
    pad_value: float = 0.0
    #: Number of inputs of a call; None: `output_shape` checks it.
    inputs_taken: int | None = None
    #: Memory traffic of its kernels; by default backward reads x and dy, and writes dx.
    passes: Passes = Passes((1, 1), (2, 1))
    #: Operations of the gradient of the inputs, relative to those of the forward pass.
    backward_flops: float = 1.0
    #: Whether its operations for the halo algorithms "pad" and "overlap" differ by more than boundary strips.
    lowers_each_halo: bool = False
    #: Parameter of an activation that its own kernels compute.
    activation_alpha: float = 0.0
    #: Function that creates the layers that each call puts before it: padding that its own kernels do not compute.
    before: Callable[[Node], Node] | None = None
    #: Layer that each call puts after it: an activation that its own kernels do not compute.
    followed_by: Layer | None = None
    #: Whether its inputs are read after the end of a step (metrics read those of a loss).
    keeps_inputs: bool = False
    #: Whether it can compute boxes with a margin that other ranks own (`wide` in a strategy): it reads inputs, and
    #: gradients of its output, by the boxes of the context, and adds only elements that its rank owns to sums.
    widens: bool = False
    #: Rule by which its output may be computed again in the backward pass: "pointwise" if this takes little more than
    #: the traffic of its arrays, "block" if it takes more; "never": its kernels may have other effects.
    recomputation: str = "never"
    #: Given initial values of parameters and states, by their short names; the others are drawn.
    given_values: Mapping[str, GivenValues] = MappingProxyType({})
    #: Whether its parameters do not change in any network, as those of a frozen module of torch.
    frozen: bool = False

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def __call__(self, *inputs: Node) -> Node:
        self._refuse_others(inputs)
        # A method of a user's class with the wrong arguments is reported here, before anything is built.
        check_methods(self, len(inputs))
        # A lower() of the library calls neither method: those of a derived class would be ignored without an error.
        lower = type(self).lower
        unused = ("forward", "backward") if lower is not Layer.lower and is_ours(lower) else ()
        for name in unused:
            if not is_ours(getattr(type(self), name)):
                base = next(kind.__name__ for kind in type(self).__mro__ if is_ours(kind))
                raise UserError(
                    f"{self.kind}: expected no {name}() in a class derived from {base}, whose kernels compute instead, "
                    "got one; derive it from Layer, or override lower() too"
                )
        output = Node(self, inputs if self.before is None else [self.before(node) for node in inputs])
        self._check_extents(output)
        return output if self.followed_by is None else self.followed_by(output)

    def _refuse_others(self, inputs: Sequence[Node]) -> None:
        for node in inputs:
            if not isinstance(node, Node):
                raise TypeError(f"{self.kind}: expected the outputs of other layers, got {type(node).__name__}")
        if self.inputs_taken is not None and len(inputs) != self.inputs_taken:
            raise ValueError(
                f"{self.kind}: expected {self.inputs_taken} input, got {len(inputs)}; join more by Add or Concat before"
            )

    def _check_extents(self, output: Node) -> None:
        """Raise ValueError for inputs that the default rule of :meth:`input_boxes` would silently extend by padding."""
        kind, shapes = type(self), [node.shape for node in output.inputs]
        # A class that overrides one of these has a rule of its own.
        if (kind.lower, kind.input_boxes, kind.needed_blocks) != (Layer.lower, Layer.input_boxes, Layer.needed_blocks):
            return
        if any(len(shape) != len(output.shape) or shape[:-1] != shapes[0][:-1] for shape in shapes):
            raise ValueError(
                f"{self.kind}: expected inputs that have the extents of the first, and as many axes as the output "
                f"{output.shape}, got {', '.join(map(str, shapes))}; override input_boxes() for others"
            )

    @property
    def of_batch(self) -> str:
        """Name of a result that depends on all samples of a batch, so that the batch cannot be computed in parts; ""
        if there is none.
        """
        return ""

    @property
    def kind(self) -> str:
        """Name of the kind of layer, for messages and listings."""
        return type(self).__name__

    def windows(self, shape: Shape) -> tuple[Window, ...]:
        """Return one window per spatial axis for an input sample of this shape."""
        return (self.stencil or _POINTWISE).windows(shape[:-1])

    def output_shape(self, *shapes: Shape) -> Shape:
        """Return the shape of one output sample from those of the inputs (by default with the channels of the first
        input).
        """
        if self.stencil is None:
            return shapes[0]
        return (*self.stencil.output_spatial(shapes[0][:-1], self.kind), shapes[0][-1])

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        """Return the parameters by name, for inputs of these sample shapes."""
        return {}

    def state(self, *shapes: Shape) -> Mapping[str, Parameter]:
        """Return, by name, arrays that checkpoints store but gradients do not update, such as running statistics."""
        return {}

    def flops(self, *shapes: Shape) -> int:
        """Return the floating-point operations of the forward pass of one sample (a multiply-add counts as two)."""
        return 0

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        """Return, per input, the global box ``(N, *spatial, C)`` that the output `box` needs.

        The box may reach outside the array: elements there count as `pad_value`.
        """
        # With all channels of the inputs, unless each channel depends on the same channel only.
        boxes = tuple(input_box(self.windows(shape), box, shape[-1]) for shape in shapes)
        if self.cuts_channels != "channelwise":
            return boxes
        return tuple(b.replace(b.ndim - 1, *box.ranges[-1]) for b in boxes)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return, per rank, the box of input `i` that the rank's output box needs; it may reach outside the array.

        A rank without output must need nothing: otherwise the owner would expect a gradient that such a rank never
        computes.
        """
        shapes = [layout.shape[1:] for layout in inputs]
        # Windows give the boxes of thousands of ranks axis by axis, without a call of `input_boxes` for each.
        own = type(self).input_boxes is not Layer.input_boxes
        if not own and len(inputs[i].shape) == len(output.shape):
            channels = output.boxes.axes[-1]
            if self.cuts_channels != "channelwise":
                channels = all_of(channels, shapes[i][-1])
            return sliding(self.windows(shapes[i]), output.boxes, channels)
        # Only layers of the user are checked: tests check those of the library.
        users = own and not is_ours(type(self))
        return probe(lambda box: self.input_boxes(box, *shapes)[i], output.boxes, len(shapes[i]) + 1, self.kind, users)

    def gradient_box(self, box: Box, shape: Shape, out_shape: Shape) -> Box:
        """Return the box of the output's gradient from which the gradient of this box of the first input follows.

        A layer without this method (the default) computes the gradient on the ranks of the output and sends it to the
        owners of the input.
        """
        raise TypeError(f"{self.kind} does not gather the gradient of its output")

    def gradient_blocks(self, x: Layout, output: Layout) -> Blocks | None:
        """Return, per rank, the :meth:`gradient_box` of its box of the first input; None if the layer lacks this
        method.
        """
        method = type(self).gradient_box
        if method is Layer.gradient_box:
            return None
        users = not is_ours(method)
        shape, out = x.shape[1:], output.shape[1:]
        return probe(lambda box: self.gradient_box(box, shape, out), x.boxes, len(out) + 1, self.kind, users)

    def forward(self, inputs: list[Any], params: Mapping[str, Any], box: Box) -> Any:
        """Compute the output `box` from the input boxes it needs. Local.

        Parameters
        ----------
        inputs
            One array per input, with exactly the shape of :meth:`input_boxes`. Halo and padding are included, so a
            stencil is applied without padding.
        params
            Parameter arrays by name; do not modify them.
        box
            Global box of the output block.
        """
        raise TypeError(f"{self.kind} has neither forward() nor lower(): write one of them")

    def backward(
        self, dy: Any, inputs: list[Any], params: Mapping[str, Any], box: Box
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Compute the gradients of the inputs (of their shapes, halo included) and of the parameters. Local.

        The caller adds the halo of a gradient to the gradient of the ranks that own those elements, and sums parameter
        gradients over the ranks.
        """
        raise TypeError(f"{self.kind} has no backward(): it can be evaluated but not trained")

    def of_filters(self, filters: int) -> Layer:
        """Return a copy of the layer with this number of output channels, if these can be cut; else the layer itself.
        """
        return self

    def of_outputs(self, shape: Shape, outputs: tuple[int, ...]) -> tuple[Layer, Shape]:
        """Return a layer and an input shape that give a block of spatial extents `outputs`, to measure its time.

        `shape` is the sample shape of the rank's block of the input. If it and the padding do not give the outputs
        along an axis, the input gets the halo of a rank in the middle, and no padding. Nothing is modified.
        """
        if self.stencil is None:
            return self, shape
        windows = self.windows(shape)
        fits = [w.output_size(n) == count for w, n, count in zip(windows, shape, outputs)]
        if all(fits):
            return self, shape
        spatial = [
            # The shortest input that gives `count` outputs without padding.
            n if fit else (count - 1) * w.stride + w.extent for w, n, count, fit in zip(windows, shape, outputs, fits)
        ]
        pads = tuple((w.pad_lo, w.pad_hi) if fit else (0, 0) for w, fit in zip(windows, fits))
        axes = {name: tuple(getattr(w, name) for w in windows) for name in ("kernel", "stride", "dilation")}
        stencil = Stencil(axes["kernel"], axes["stride"], pads, axes["dilation"])
        return self.changed(stencil=stencil), (*spatial, shape[-1])

    def may_widen(self, inputs: int, parts: Mapping[str, int], options: Mapping[str, Any]) -> bool:
        """Return whether a call with this number of inputs under this cut can compute a margin (`widens`)."""
        return self.widens and parts["channel"] * parts["input_channel"] == 1

    def whole_gradient_blocks(self, x: Layout, output: Layout) -> Blocks | None:
        """Return, per rank, the box of the output's gradient from which the rank computes the gradient of its box of an
        input, without sums over ranks; None: the gradients that several ranks compute are added up.
        """
        if not self.widens:
            return None
        # Pointwise: the gradient of a box depends on that of the same box of the output.
        return x.boxes if self.stencil is None else self.gradient_blocks(x, output)

    def of_statistics(self, ranks: int, options: Mapping[str, Any]) -> tuple[Layer, bool]:
        """Return the layer as it computes when cut over this number of ranks, and whether it sums statistics over them.
        """
        return self, False

    def depends_on_cut(self, options: Mapping[str, Any]) -> bool:
        """Return whether the result depends on the cut, as statistics of one block do."""
        return False

    def initialized(self, **values: Any) -> Layer:
        """Return a copy whose parameters and states have these initial values, by their short names.

        Parameters
        ----------
        values
            Whole arrays, or :class:`GivenValues`, in the axis order of the layer's docstring: ``w``, ``b``, ``gamma``.
            A network rejects unknown names and other shapes.
        """
        own = {key: as_given_values(value) for key, value in values.items()}
        return self.changed(given_values={**self.given_values, **own})

    def changed(self: LayerType, **settings: Any) -> LayerType:
        """Return a copy with other settings."""
        changed = copy.copy(self)  # of any subclass, whatever its constructor takes
        for name, value in settings.items():
            setattr(changed, name, value)
        return changed

    def lower(self, context: Context) -> Lowered:
        """Add the operations of the forward pass of one rank to the program. Local.

        Returns
        -------
        Functions that add the other operations, such as the backward pass, when they are called.
        """
        return lower_local(self, context)


class ElementwiseLayer(Layer):
    """Layer whose output elements each depend on the input element at their position, parameters and settings."""

    recomputation = "pointwise"
    cuts_channels = "channelwise"
    inputs_taken = 1

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])


class _InputLayer(Layer):
    """Layer without inputs, whose output has a fixed shape."""

    def __init__(self, shape: Sequence[int], name: str) -> None:
        super().__init__(name)
        self._shape = tuple(shape)

    def output_shape(self, *shapes: Shape) -> Shape:
        return self._shape


#: Dtypes of class indices.
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "int64")


class Input(Node):
    """External value of the graph: samples or targets.

    Parameters
    ----------
    shape
        Shape of one sample, ``(*spatial, C)``.
    name
        Name of the input in batches.
    dtype
        ``"compute"`` for the dtype of the computation; an integer dtype for class indices.
    """

    def __init__(self, shape: Sequence[int], name: str = "x", dtype: str = "compute") -> None:
        if dtype != "compute" and dtype not in INTEGERS:
            raise ValueError(
                f"input {name!r}: expected an integer dtype ({', '.join(INTEGERS)}), got {dtype!r}; leave it out for "
                "numbers, which have the dtype of the computation"
            )
        # Kernels have at most 3 spatial axes; the last axis has the channels.
        if not 1 <= len(shape) <= 4 or min(shape) < 1:
            raise ValueError(
                f"input {name!r}: expected a shape (*spatial, C) of at least 1 each, with at most 3 spatial axes, got "
                f"{tuple(shape)}"
            )
        self.dtype = dtype
        super().__init__(_InputLayer(shape, name), ())

    def array_dtype(self, compute: np.dtype) -> np.dtype:
        """Return the dtype of the input's arrays if the computation is in `compute`."""
        return compute if self.dtype == "compute" else np.dtype(self.dtype)
