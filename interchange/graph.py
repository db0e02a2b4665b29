"""Graph of an ONNX file, as the importer modifies it, and the builder of the network.

The graph contains operations on activations; all other values are constants. A constant is a parameter that torch
trains, a buffer, or another constant of the source: its origin.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import one_line
from halograd.errors import UserError

from ..layers import GivenValues, Layer, Node, Reshape
from ..layers.parameter import ForeignArray
from ..layers.settings import settings_of
from .axes import Axes
from .files import finite

__all__ = [
    "FROZEN",
    "KIND",
    "UNMERGED",
    "Activation",
    "Builder",
    "Graph",
    "NeedsPositions",
    "OnnxConstant",
    "OnnxNode",
    "Origins",
    "Shape",
    "computed_from",
    "following",
    "is_named",
    "titled",
]

Shape = tuple[int, ...]

#: Remedy if a file does not distinguish buffers from parameters.
NAME_BUFFERS = (
    "this file does not distinguish parameters from buffers: export with dynamo=True, optimize=False, or with "
    "do_constant_folding=False and name the buffers, load(path, buffers=[name for name, _ in module.named_buffers()])"
)


@dataclass(frozen=True)
class OnnxConstant:
    """Array that does not depend on the input data: a weight of the file, or a result computed from weights.

    Attributes
    ----------
    shape, dtype
        Shape and type of the array.
    read
        Function that returns the array; it reads a large array from the file.
    name
        Name of the array in the file, whose axes may be in another order; empty for arrays that the exporter created.
    origin
        ``"parameter"``; ``"buffer"`` for buffers and other constants of the source, with and without a name;
        ``"unknown"`` if the file does not distinguish these, as for arrays that an exporter has computed;
        ``"number"`` for sizes and single numbers.
    made_of
        Names of the parameters from which it is computed by more than a change of shape or type.
    lengths
        With weight norm, the lengths of the filters; this array then has the directions.
    stored
        Shape of the array `name` in the file.
    order
        Function from the array in the file to this one, if axes were moved.
    part
        Which elements of the array in the file it has; empty for all of them.
    frozen
        Whether torch does not train the parameter.
    repeats
        Whether elements of the array in the file may be repeated or left out.
    """

    shape: Shape
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    name: str = ""
    origin: str = "number"
    made_of: tuple[str, ...] = ()
    lengths: OnnxConstant | None = None
    stored: Shape | None = None
    order: Callable[[np.ndarray], np.ndarray] | None = None
    part: str = ""
    frozen: bool = False
    repeats: bool = False

    @classmethod
    def of(cls, array: np.ndarray, **more: Any) -> OnnxConstant:
        """Return a constant for an array in memory; `more` are attributes."""
        return cls(array.shape, array.dtype, lambda: array, **more)

    @property
    def is_fixed(self) -> bool:
        """Whether the constant is not trained."""
        return self.origin in ("number", "buffer")

    def is_all(self, number: float) -> bool:
        """Return whether every element is `number` and the array has no name: the exporter wrote it for a missing
        parameter.
        """
        return not self.name and bool(np.all(self.read() == number))

    def scalar(self) -> float | None:
        """Return the number of a constant with one element, else None.

        Exporters write constants of the source in float32, without a name; for these, the result is the shortest
        decimal number with that float32 value.
        """
        if math.prod(self.shape) != 1:
            return None
        number = self.read().reshape(())[()]
        short = float(str(np.float32(number)))
        return short if not self.name and np.float32(number) == number else float(number)


@dataclass(frozen=True)
class OnnxNode:
    """A node of the graph.

    Attributes
    ----------
    name
        Name in the file, for messages.
    kind
        Name of the operator, or one of this package's own names if a pattern was recognized.
    inputs, outputs
        Names of values; an omitted input has an empty name.
    attributes
        Python values by name.
    scope
        Name of its torch module, if the file has it.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    scope: str = ""

    @property
    def module(self) -> str:
        """Name of the torch module; ``n_1`` is the second use of ``n``."""
        return re.sub(r"_\d+$", "", self.scope)

    def part(self, label: str) -> OnnxNode:
        """Return a copy with `label` appended to its name and scope, for an operation that becomes several layers."""
        return self.changed(name=f"{self.name}.{label}", scope=self.scope and f"{self.scope}.{label}")

    def changed(self, **settings: Any) -> OnnxNode:
        """Return a copy in which the fields `settings` have other values."""
        return replace(self, **settings)


@dataclass
class Graph:
    """Operations in an order in which they can be computed.

    Attributes
    ----------
    operations
        Operations on activations.
    constants, shapes
        Constants, and shapes of all values (ONNX's ``(N, C, *spatial)``), by name of the value.
    inputs, outputs
        Names of values.
    batch
        Placeholder for the number of samples in `shapes`.
    source
        The file and its checksum.
    by_torch
        Whether torch wrote the file.
    merges
        Whether the exporter may have merged equal arrays of several modules, which torch trains separately.
    """

    operations: list[OnnxNode]
    constants: dict[str, OnnxConstant]
    shapes: dict[str, Shape]
    inputs: list[str]
    outputs: list[str]
    batch: int
    source: str = ""
    by_torch: bool = False
    merges: bool = True

    def readers(self, value: str) -> list[OnnxNode]:
        """Return the operations that read a value, once per input."""
        return [op for op in self.operations for name in op.inputs if name == value]

    def only_reader(self, value: str) -> OnnxNode | None:
        """Return the operation that reads a value, if there is exactly one and the value is not an output."""
        readers = self.readers(value)
        return readers[0] if len(readers) == 1 and value not in self.outputs else None

    def maker(self, value: str) -> OnnxNode | None:
        """Return the operation that computes a value; None for inputs and constants."""
        return next((op for op in self.operations if value in op.outputs), None)

    def rename(self, old: str, new: str) -> None:
        """Rename a value in all operations."""

        def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(new if name == old else name for name in names)

        self.operations = [
            op.changed(inputs=renamed(op.inputs), outputs=renamed(op.outputs))
            if old in op.inputs or old in op.outputs
            else op
            for op in self.operations
        ]

    def leave_out(self, op: OnnxNode, value: str) -> None:
        """Remove an operation without effect: its readers read `value` instead."""
        output = op.outputs[0]
        # Inputs and outputs keep their names, so between two of them an operation is needed.
        if output in self.outputs and value in (*self.inputs, *self.outputs):
            self.replace([op], op.changed(kind="Identity", inputs=(value,)))
            return
        self.operations = [other for other in self.operations if other is not op]
        if output in self.outputs:
            self.rename(value, output)
        else:
            self.rename(output, value)

    def leave_out_unread(self) -> None:
        """Remove operations whose values no operation and no output reads, such as positions of maxima."""
        read, kept = set(self.outputs), []
        # Readers come after the operations that they read, so one pass is enough.
        for op in reversed(self.operations):
            if read & set(op.outputs):
                kept.append(op)
                read |= set(op.inputs)
        self.operations = kept[::-1]

    def replace(self, olds: list[OnnxNode], new: OnnxNode) -> None:
        """Replace several operations by one, at the position of the last."""
        positions = [i for i, op in enumerate(self.operations) if any(op is old for old in olds)]
        # There, all inputs of the new operation are computed.
        self.operations[positions[-1]] = new
        for i in reversed(positions[:-1]):
            del self.operations[i]


@dataclass(frozen=True)
class Activation:
    """A value of the graph and its node in the network.

    Attributes
    ----------
    node
        Node of samples ``(*spatial, C)``, or vectors ``(F,)``.
    last
        Whether ONNX has the channels last too, after a Transpose.
    pooled
        Whether the value has spatial axes of extent 1 in ONNX, ``(N, C, 1, 1)``, which the node ``(C,)`` lacks.
    pool
        Name of the output of the global pooling that the value comes from, or empty.
    spatial
        Extents ``(*spatial)`` of a value before it was flattened: its features are in another order in ONNX, which has
        channels first.
    source, axes
        For a value that Reshape and Transpose have made of a node: this node, and the axes of the value in ONNX.
        None: the value has the axes that the other attributes describe.
    refusal
        Error to raise if a layer reads the value, whose axes are in an order that no node has; None: `node` is the
        value.
    """

    node: Node
    last: bool = False
    pooled: bool = False
    pool: str = ""
    spatial: Shape = ()
    source: Node | None = None
    axes: Axes | None = None
    refusal: UserError | None = None

    def of(self, node: Node) -> Activation:
        """Return a copy of the activation with another node, whose samples have the same shape."""
        if self.refusal is not None:
            return replace(self, node=node, source=node)
        return replace(self, node=node, source=None, axes=None)


class NeedsPositions(Exception):
    """Signal that a pooled value is used with spatial axes, so the pooling must keep them.

    Attributes
    ----------
    pool
        Name of the pooling's output.
    """

    def __init__(self, pool: str) -> None:
        super().__init__(pool)
        self.pool = pool


def _module_of(name: str) -> str:
    """Return the module of a parameter, ``"net.0"`` for ``"net.0.parametrizations.weight.original1"``."""
    return re.sub(r"(^|\.)parametrizations\.\w+$", "", name.rpartition(".")[0])


def titled(path: Path, name: str, kind: str, scope: str) -> str:
    """Return the beginning of an error for a node, with the module of torch unless the node's name contains it."""
    module = f" of module {scope!r}" if scope and scope.rpartition(".")[2] not in re.split(r"[/.]", name) else ""
    return f"{path}: node {name!r} ({kind}){module}"


@contextmanager
def following(path: Path, op: OnnxNode) -> Iterator[None]:
    """Convert errors from malformed attributes and constants of an operation into a UserError that names the operation.
    """
    try:
        yield
    except (UserError, NeedsPositions):
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            f"{titled(path, op.name, op.kind, op.scope)}: expected attributes and constants of ONNX, got others "
            f"({one_line(error)[:200]}); export the model again"
        ) from error


class Builder:
    """Builder of the network: holds the values of the graph and the nodes made so far.

    Parameters
    ----------
    path
        The file, for messages.
    graph
        Its graph.
    keeping
        Names of the outputs of global poolings that keep their spatial axes.
    """

    def __init__(self, path: Path, graph: Graph, keeping: frozenset[str]) -> None:
        self.path, self.graph, self.keeping = path, graph, keeping
        self.values: dict[str, Activation] = {}
        self._names: set[str] = set(graph.inputs)
        #: Names of modules with weights, which layers without weights do not take.
        self._owned = {
            _module_of(constant.name) for constant in graph.constants.values() if constant.origin != "number"
        }
        #: By names of weights: the first node with them, its layer, and the names of all its weights.
        self._owners: dict[tuple[str, ...], tuple[OnnxNode, Layer, tuple[str, ...]]] = {}
        #: By name of an array (factor, summand, tokens): its layer, and the names of all arrays of the layer.
        self._arrays: dict[str, tuple[Layer, tuple[str, ...]]] = {}

    # -- reading -------------------------------------------------------------------------------

    def value(self, op: OnnxNode, i: int = 0) -> Activation:
        """Return input `i`, which must be an activation with its axes in an order that nodes have."""
        arranged = self.arranged(op, i)
        if arranged.refusal is not None:
            raise arranged.refusal
        return arranged

    def arranged(self, op: OnnxNode, i: int = 0) -> Activation:
        """Return input `i`, which must be an activation, but may have its axes in any order: see `refusal`."""
        name = op.inputs[i]
        if name not in self.values:
            raise self.refused(op, f"input {i} to depend on the data", "a constant")
        return self.values[name]

    def axes(self, name: str, computed: bool = False) -> tuple[Node, Axes]:
        """Return the node with the elements of a value, and the axes of the value in ONNX.

        With `computed`, the node is that of the value itself, if there is one, not the one that it was reshaped from.
        """
        value = self.values[name]
        # A value with `refusal` is no node: only `source`, arranged by `axes`, describes it.
        if value.source is not None and value.axes is not None and (value.refusal is not None or not computed):
            return value.source, value.axes
        shape, dims = (self.graph.batch, *value.node.shape), len(self.shape(name))
        inner: list[int | None] = list(range(1, len(shape) - 1))
        # A pooled value has axes of extent 1 in ONNX that its node lacks.
        inner += [None] * (dims - len(shape))
        channels = len(shape) - 1
        return value.node, Axes.whole(shape, (0, *inner, channels) if value.last else (0, channels, *inner))

    def samples(self, op: OnnxNode, i: int = 0) -> Activation:
        """Return input `i`, which must have its channels first in ONNX, and must not be flattened."""
        value = self.value(op, i)
        if value.spatial:
            raise self.refused(op, "samples with spatial axes, or a dense layer after Flatten", "a flattened value")
        if not value.last:
            return value
        # With one channel, or one position, a value with channels last also has them first.
        node, axes = self.axes(op.inputs[i])
        shape = axes.with_channels_at(False)
        if shape is None:
            raise self.refused(op, "channels at axis 1", "channels at the last axis")
        return Activation(self.add(op.part("first"), Reshape(shape), node))

    def with_positions(self, op: OnnxNode, i: int = 0) -> Activation:
        """Return input `i`, with its spatial axes. Raises NeedsPositions if a global pooling has removed them."""
        value = self.samples(op, i)
        if not value.pooled:
            return value
        if value.pool:
            # The network is built again, with a pooling that keeps its axes (`onnx_import.imported`).
            raise NeedsPositions(value.pool)
        raise self.refused(op, "samples with spatial axes", "vectors")

    def channels_at(self, op: OnnxNode, value: Activation) -> int:
        """Return the channel axis of `value` in ONNX; `value` must be input 0 of `op`."""
        return len(self.shape(op.inputs[0])) - 1 if value.last else 1

    def refused_array(self, op: OnnxNode) -> UserError:
        """Return the error for a sum or product with an array that may be a parameter or a buffer."""
        arrays = [self.graph.constants[name] for name in op.inputs if name in self.graph.constants]
        name = next((constant.name for constant in arrays if constant.origin == "unknown"), "")
        array = repr(name) if name else "an array without a name"
        return self.refused(op, "an array that is trained or not", f"{array}, a parameter or a buffer", NAME_BUFFERS)

    def constant(self, op: OnnxNode, i: int) -> OnnxConstant | None:
        """Return input `i`, which must be a constant; None if it is omitted."""
        if i >= len(op.inputs) or not op.inputs[i]:
            return None
        if op.inputs[i] not in self.graph.constants:
            raise self.refused(op, f"a constant as input {i}", "a value that depends on the data")
        return self.graph.constants[op.inputs[i]]

    def numbers(self, op: OnnxNode, i: int, attribute: str = "") -> list[Any] | None:
        """Return the elements of input `i`, or of an attribute instead; None if both are missing."""
        constant = self.constant(op, i)
        if constant is not None:
            return constant.read().reshape(-1).tolist()
        return op.attributes.get(attribute)

    def shape(self, name: str) -> Shape:
        """Return the extents of a value in ONNX."""
        return self.graph.shapes[name]

    # -- building ------------------------------------------------------------------------------

    def add(
        self,
        op: OnnxNode,
        layer: Layer,
        *inputs: Node,
        weights: Sequence[OnnxConstant | None] = (),
        states: Sequence[OnnxConstant | None] = (),
    ) -> Node:
        """Add a node to the network, and return it. It gets the name of the torch module, if the file has it.

        A second use of a module becomes another call of its layer. `weights` are trained, `states` are not.
        """
        for weight in weights:
            if weight is not None:
                self.check_trained(op, weight)
        frozen = self.frozen(op, [weight for weight in weights if weight is not None])
        weights = (*weights, *states)
        layer = self._called_before(op, layer, inputs, weights) or layer
        # A layer that is called again, or has arrays of the file (`array`), has its name already.
        layer.name = layer.name or self.name(op, weights)
        if frozen:
            layer.frozen = True
        try:
            return layer(*inputs)
        except ValueError as error:
            raise UserError(f"{self.title(op)}: {error}") from error

    def array(self, op: OnnxNode, layer: Layer, node: Node, *constants: OnnxConstant, merged: bool = False) -> Node:
        """Add a layer with arrays of the file that are multiplied or added: a factor, a summand, or both in this order.

        A trained layer has the name of the first array. A second use of the arrays becomes another call of their layer;
        with `merged`, a layer of its own if the exporter may have merged equal arrays of several modules. Returns the
        node of the call.
        """
        if constants[0].is_fixed:
            return self.add(op, layer, node)
        names = tuple(constant.name for constant in constants if constant.name)
        known = next((name for name in names if name in self._arrays), None)
        if known is not None and not (merged and self.graph.merges):
            before, its = self._arrays[known]
            settings = [settings_of(each, node.shape) for each in (before, layer)]
            if its != names or before.kind != layer.kind or settings[0] != settings[1]:
                raise self._refused_again(op, known)
            return before(node)
        other = next((name for name in names if any(name in its for *_, its in self._owners.values())), None)
        if other is not None:  # the array of another kind of layer
            raise self._refused_again(op, other)
        layer.name = self.name(op.changed(scope=constants[0].name) if constants[0].name else op)
        layer.frozen = self.frozen(op, constants)
        # Arrays that have a layer keep it.
        self._arrays = dict.fromkeys(names, (layer, names)) | self._arrays
        return self.add(op, layer, node)

    def frozen(self, op: OnnxNode, weights: Sequence[OnnxConstant]) -> bool:
        """Return whether there are weights and torch trains none. Raises UserError if it trains only some of them."""
        frozen = [weight for weight in weights if weight.frozen]
        if frozen and len(frozen) < len(weights):
            remedy = "set requires_grad of all parameters of the module to the same value"
            raise self.refused(op, "a layer that is trained or frozen as a whole", f"{frozen[0].name!r} frozen", remedy)
        return bool(frozen)

    def _refused_again(self, op: OnnxNode, name: str) -> UserError:
        remedy = "use a second parameter in its place"
        return self.refused(op, "an array of its own", f"{name!r} again", remedy)

    def check_trained(self, op: OnnxNode, weights: OnnxConstant) -> None:
        """Raise UserError for weights that torch does not train, or that the file does not distinguish from buffers."""
        what = repr(weights.name) if weights.name else "numbers of the source"
        if weights.repeats:
            raise self.refused(op, "weights that torch trains", f"elements of {what} that an index chooses")
        if weights.origin == "buffer":
            remedy = "make it a torch.nn.Parameter, and freeze its layer here (training.freeze)"
            raise self.refused(op, "weights that torch trains", f"a constant, {what}", remedy)
        if weights.origin == "unknown" and weights.name and self.graph.by_torch:
            raise self.refused(op, "weights that torch trains", f"{what}, a parameter or a buffer", NAME_BUFFERS)

    def _called_before(
        self, op: OnnxNode, layer: Layer, inputs: Sequence[Node], weights: Sequence[OnnxConstant | None]
    ) -> Layer | None:
        """Return the layer of a module that is used again; None for a new module.

        Two norms may share one weight if the exporter merges equal ones. Raises UserError for a node that shares some
        weights but is another layer, and for one with running statistics.
        """
        names = tuple(weight.name + weight.part for weight in weights if weight is not None and weight.name)
        # Equal vectors may have been merged (ones and zeros of norms); matrices are not equal by chance.
        matrices = tuple(
            weight.name + weight.part
            for weight in weights
            if weight is not None and weight.name and len(weight.shape) > 1
        )
        if not names:
            return None
        again = next((name for name in names if name in self._arrays), None)
        if again is not None:
            raise self._refused_again(op, again)
        # If nothing is merged, one common array suffices.
        sharing = () if self.graph.merges else (known for known in self._owners.values() if set(known[2]) & set(names))
        owner, before, its = next(iter(sharing), None) or self._owners.setdefault(matrices or names, (op, layer, names))
        # Vectors alone are a second use only in a node of the module that has them.
        if owner is op or (self.graph.merges and not (matrices or op.module == names[0].rpartition(".")[0])):
            return None
        shapes = [node.shape for node in inputs]
        equal = (owner.kind, owner.attributes, its) == (op.kind, op.attributes, names)
        equal = equal and settings_of(before, shapes[0]) == settings_of(layer, shapes[0])
        if not equal or layer.state(*shapes):
            raise self.refused(
                op, "weights of its own", f"those of node {owner.name!r} again", "use a second module in its place"
            )
        return before

    def name(self, op: OnnxNode, weights: Sequence[OnnxConstant | None] = ()) -> str:
        """Return a unique name: of the module of the weights, else of the operation's module, else of its node.

        A number is appended to a name that is taken.
        """
        named = [weight.name for weight in weights if weight is not None and "." in weight.name]
        scope = op.scope or re.sub(r"[^\w.]+", ".", op.name).strip(".") or op.kind.lower()
        stem = _module_of(named[0]) if named and _module_of(named[0]) else scope
        first = [] if stem in self._owned and not named else [stem]
        candidates = itertools.chain(first, (f"{stem}_{i}" for i in itertools.count(2)))
        name = next(name for name in candidates if name not in self._names)
        self._names.add(name)
        return name

    def initial(self, constant: OnnxConstant, order: Callable[[np.ndarray], np.ndarray], shape: Shape) -> GivenValues:
        """Return initial values of a weight, arranged by `order` to the layer's `shape`; they are read when needed."""
        what = f"{self.path}: weight {constant.name or 'without a name'}"
        if constant.dtype.kind != "f":
            raise UserError(f"{what}: expected a floating-point type, got {constant.dtype}; export in float32")
        before, stored = constant.order, constant.shape if constant.stored is None else constant.stored
        moved = order if before is None else lambda array: order(before(array))
        # Where the weight is in torch's array: `to_torch` and files of weights write it back there.
        foreign = ForeignArray(constant.name, stored, moved) if constant.name else None
        return GivenValues(
            shape, lambda: finite(np.ascontiguousarray(order(constant.read())), what), self.graph.source, foreign
        )

    # -- errors --------------------------------------------------------------------------------

    def title(self, op: OnnxNode) -> str:
        return titled(self.path, op.name, op.kind, op.scope)

    def refused(self, op: OnnxNode, expected: str, got: str, remedy: str = "") -> UserError:
        """Return the one-line error for an unsupported node."""
        remedy = remedy or "change the model, or write this part of it with halograd's layers"
        return UserError(f"{self.title(op)}: expected {expected}, got {got}; {remedy}")


def is_named(name: str) -> bool:
    """Return whether a weight has a name of the module, and not one of the exporter such as ``onnx::Conv_11`` or
    ``val_3``.
    """
    return not re.fullmatch(r"val_\d+|(scalar_tensor_default|lifted_tensor)(_\d+)*|\d+|.*::.*", name)


def computed_from(sources: Sequence[OnnxConstant]) -> tuple[str, ...]:
    """Return the names of the parameters among `sources`, and of those from which the others are computed."""
    names = (name for source in sources for name in (source.made_of if source.is_fixed else (source.name,)))
    return tuple(dict.fromkeys(name for name in names if name))


#: Names of values that the new exporter folds into a weight; they show that it is computed from others.
_ARITHMETIC = (
    r"(mul|div|sub|add|addcmul|neg|pow|square|sqrt|rsqrt|reciprocal|exp|log|abs|sum|mean|std|var|linalg_vector_norm|norm|"
    r"softplus|sigmoid|tanh|softmax|relu|clamp|where|mm|mv|bmm|matmul|dot|vdot|einsum|cat|stack)(_\d+)?"
)
#: Names of parameters from which torch computes a weight: parametrizations, and their older forms for spectral norm,
#: pruning (both ``_orig``) and weight norm (``_g``, ``_v``).
_PARAMETRIZED = r"(.*\.)?parametrizations\..*|.*_orig|.*weight_[gv]"
#: Entry of the parameters that torch does not train (``requires_grad=False``); `hg.from_torch` writes it.
FROZEN = "halograd.frozen"
#: Mark of a file in which an array that several modules read is one parameter of them.
UNMERGED = "halograd.unmerged"
#: Keys of metadata: of torch's new exporter for the kind of an array, of its optimizer for the values folded into one.
KIND, _FOLDED = "pkg.torch.export.graph_signature.InputSpec.kind", "pkg.onnxscript.optimizer.folded_from"


class Origins:
    """Origins of the arrays of a file: parameters of the module, buffers, or other constants.

    The new exporter of torch stores them. The old one does not, so a buffer that multiplies looks like a learned
    factor. If `buffers` is given, it decides for all arrays; else, in files of the old exporter, the last part of the
    name decides, as torch's own modules use it. In files of this library, every named array is a parameter.
    """

    def __init__(self, model: Any, buffers: Collection[str] | None) -> None:
        self.buffers = buffers
        self.by_torch, self.is_ours = (model.producer_name == name for name in ("pytorch", "halograd"))
        self.stored = {
            value.name: {entry.key: entry.value for entry in value.metadata_props} for value in model.graph.value_info
        }

    def of(self, name: str, count: int = 0) -> dict[str, Any]:
        """Return attributes of :class:`OnnxConstant` for the array `name` of `count` numbers: `origin`, `made_of`, ...

        Attributes that keep their defaults are left out.
        """
        stored = self.stored.get(name, {})
        folded = re.findall(r"'([^']*)'", stored.get(_FOLDED, ""))
        parts = [part for part in (*folded, name) if is_named(part)]
        # Folded from arithmetic and not only from views: computed from parameters in every step.
        if folded and any(re.fullmatch(f"{_ARITHMETIC}|{_PARAMETRIZED}", part) for part in parts):
            return {"made_of": tuple(part for part in parts if not re.fullmatch(_ARITHMETIC, part)) or (name,)}
        kind = stored.get(KIND, "").lower()
        # A constant tensor of the source is not trained either.
        kind = "buffer" if kind.startswith("constant") else kind
        if not is_named(name) or (folded and count == 1):
            return {"origin": kind or ("unknown" if self.by_torch and count > 1 else "number")}
        return {"name": name, "origin": self._origin(name, kind), "frozen": FROZEN in stored}

    def _origin(self, name: str, kind: str) -> str:
        # The caller's list has priority over the file.
        if self.buffers is not None:
            return "buffer" if name in self.buffers else kind or "parameter"
        last = name.rpartition(".")[2]
        if kind:
            return kind
        normed = last in ("original0", "original1", "weight_g", "weight_v")
        if normed or last.endswith(("weight", "bias")) or self.is_ours:
            return "parameter"
        return "buffer" if last in ("running_mean", "running_var", "num_batches_tracked") else "unknown"

    def remedy(self, names: Sequence[str]) -> str:
        """Return the remedy for weights that are computed from the parameters `names` in every step."""
        if any(re.fullmatch(_PARAMETRIZED, name) for name in names):
            return "remove the parametrization before the export (torch.nn.utils.parametrize.remove_parametrizations)"
        if all(self.of(name).get("origin") == "unknown" for name in names):
            return NAME_BUFFERS
        stored = self.buffers is not None or any(KIND in self.stored.get(name, {}) for name in names)
        return "compute them once, before the export, or write this layer with halograd's own" + (
            "" if stored else "; if they are buffers, name them: load(path, buffers=[...])"
        )
