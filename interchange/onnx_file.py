"""Reader of ONNX files: returns a graph with fixed shapes, whose constants are computed or read when needed."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import one_line, shown
from halograd.errors import UserError

from ..data.disk import reason_of, regular_size
from .files import Buffer, library
from .graph import UNMERGED, Graph, OnnxConstant, OnnxNode, Origins, Shape, computed_from, titled
from .own_operators import DOMAIN, output_shape
from .traced_sizes import SizedOperation, frozen_size, stride_of

__all__ = ["read_onnx"]

#: Number of samples if the file does not fix it: a prime, so that no product of smaller extents is a multiple.
_BATCH = 1_000_003
#: Oldest supported version of operators.
_OPSET = 13
#: Constants with more elements are computed only when they are needed.
_LARGE = 4096
#: Limit of the elements of all computed constants, or 8 times those of the file if that is more.
_MOST = 1 << 24
#: Largest extent of a value, except along the sample axis.
_LONGEST = 1 << 24
#: Operators whose results differ from run to run, and from rank to rank.
_RANDOM = {"RandomNormal", "RandomNormalLike", "Bernoulli", "Multinomial"}
#: Operators whose results are random numbers of a uniform distribution, for dropout.
_UNIFORM = {"RandomUniform", "RandomUniformLike"}
#: Number of uniform numbers by whose results a dropout is recognized.
_DRAWS = 1 << 14
#: Operators that only move the numbers of a weight, or convert their type.
_SAME = {"Identity", "Cast", "CastLike", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Flatten"}

#: Directions and lengths of torch's weight norms, by the last part of their names.
_LENGTHS = {"original1": "v", "original0": "g", "weight_v": "v", "weight_g": "g"}
#: Operators that choose elements of their first input: all of an interval once (Slice), others perhaps repeatedly.
_CHOOSING = {"Slice", "Gather", "GatherND"}

#: Call of an instance norm with running statistics, in the notes of the new exporter.
_TRACKED = r"instance_norm\.default\]\(args = \([^,]*,[^,]*,[^,]*, %"


def read_onnx(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    buffers: Collection[str] | None = None,
    contents: Mapping[str, Buffer] | None = None,
) -> Graph:
    """Return the graph of a file; the parameters are those of `halograd.onnx.load`. Local.

    `contents` are files in memory, by name: that of `path`, and those with its weights. None: files on disk.

    Raises
    ------
    UserError
        The file is missing or not ONNX, extents are unknown, or a node is not supported.
    """
    onnx = library("onnx")
    try:
        if contents is None:
            regular_size(path)
        content = path.read_bytes() if contents is None else bytes(contents[path.name])
        model = onnx.load_model_from_string(content)
        offsets = _raw_offsets(content, model)
    except OSError as error:
        raise UserError(f"{path}: expected an ONNX file, got none: {reason_of(error)}") from error
    except Exception as error:  # the decoder's errors differ between versions
        raise UserError(f"{path}: expected an ONNX file, got one that cannot be read: {_line(error)}") from error
    mark = zlib.crc32(content)
    for name, other in (contents or {}).items():
        mark = mark if name == path.name else zlib.crc32(other, mark)
    source = f"{path.name} {mark:08x}"
    # The model has its own copy, so a large file is not held twice.
    del content
    versions = {opset.domain or "ai.onnx": opset.version for opset in model.opset_import}
    if versions.get("ai.onnx", 0) < _OPSET:
        raise UserError(
            f"{path}: expected operators of version {_OPSET} or later, got {versions.get('ai.onnx', 'none')}; export "
            "with opset_version=20"
        )
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    try:
        make = partial(_Folding, path, model, offsets, source, buffers, contents)
        own = _own_shapes(model, shapes)
        if own == shapes:
            return make().graph(shapes)
        # Sizes that the exporter computed for its example show at two extents (`traced_sizes`).
        traced = make()
        traced.graph(own)
        return make(traced=traced).graph(shapes)
    except UserError:
        raise
    except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: expected a graph as torch exports it, got one that cannot be read ({_line(error)}); export "
            "it again, with opset_version=20"
        ) from error


def _raw_offsets(content: bytes, model: Any) -> dict[str, int]:
    """Return the offsets of the data of large weights in the file's `content` [B], so that each is read when needed.

    The file has the data in the order of the weights in the model. A weight that is not found is left out, and then
    read at once.
    """
    offsets, end = dict[str, int](), 0
    for tensor in model.graph.initializer:
        raw = tensor.raw_data
        start = content.find(raw[:64], end) if len(raw) > 8 * _LARGE else -1
        if start >= 0 and content.startswith(raw, start):
            offsets[tensor.name], end = start, start + len(raw)
    return offsets


def _own_shapes(model: Any, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of inputs ``(*spatial, C)``, with the file's own extents, where it has them, in place of the
    given ones.
    """
    own_shapes = {name: tuple(requested) for name, requested in shapes.items()}
    for value in model.graph.input:
        extents = [dim.dim_value for dim in value.type.tensor_type.shape.dim][1:]
        if len(extents) == len(own_shapes.get(value.name, ())):
            own = [*extents[1:], extents[0]]
            own_shapes[value.name] = tuple(n or requested for n, requested in zip(own, own_shapes[value.name]))
    return own_shapes


def _line(error: BaseException) -> str:
    return one_line(error)[:200]


class _Folding:
    """Pass over the nodes in order: computes nodes of constants, and the shapes of all other nodes."""

    def __init__(
        self,
        path: Path,
        model: Any,
        offsets: Mapping[str, int],
        source: str,
        buffers: Collection[str] | None,
        contents: Mapping[str, Buffer] | None = None,
        traced: _Folding | None = None,
    ) -> None:
        #: The same file at its own extents, if other extents are requested.
        self.traced = traced
        #: Axes of the inputs whose extents differ, and the operations seen so far, by output.
        self.moved: set[int] = set()
        self.runs: dict[str, SizedOperation] = {}
        self.path, self.model, self.offsets, self.source, self.contents = path, model, offsets, source, contents
        self.onnx = library("onnx")
        self.origins = Origins(model, buffers)
        self.merges = all(entry.key != UNMERGED for entry in model.metadata_props)
        self.constants: dict[str, OnnxConstant] = {}
        #: Weights of the file.
        self.weights: dict[str, OnnxConstant] = {}
        self.types: dict[str, Any] = {}
        self.operations: list[OnnxNode] = []
        #: Number of elements of constants: stored in the file, and computed.
        self.stored = self.computed = 0
        self.aliases: dict[str, str] = {}
        #: Nodes that compute constants, by output.
        self.computing: dict[str, Any] = {}
        #: Names of the inputs.
        self.inputs: frozenset[str] = frozenset()
        #: Nodes that split a value into a sequence of parts.
        self.sequences: dict[str, Any] = {}
        #: Random numbers, and constants that are computed from them, by name: the node that draws them.
        self.drawn: dict[str, Any] = {}
        #: Those of these nodes whose numbers are multiplied by a value.
        self.used: list[Any] = []
        #: Placeholder for the number of samples.
        self.batch = _BATCH
        #: Rows of the network's input per row of a value, by its name.
        self.strides: dict[str, float] = {}

    def graph(self, shapes: Mapping[str, Sequence[int]]) -> Graph:
        file = self.model.graph
        if self.traced is not None:
            # The first pass has read the weights, and removed them from the model.
            self.constants, self.stored = dict(self.traced.weights), self.traced.stored
        else:
            for tensor in file.initializer:
                self._keep(tensor.name, self._weight(tensor))
                # The constant has a copy, or reads the file.
                tensor.ClearField("raw_data")
        self.weights = dict(self.constants)
        inputs, batch = self._inputs([value for value in file.input if value.name not in self.constants], shapes)
        self.batch = batch
        self.inputs = frozenset(inputs)
        self._walk(file.node)
        self.types |= {name: _type_of(self.onnx, constant) for name, constant in self.constants.items()}
        known = {name: shape for name, kind in self.types.items() if (shape := _shape_of(kind)) is not None}
        outputs = [value.name for value in file.output]
        computed = {name for op in self.operations for name in op.outputs} | set(inputs)
        # Constant outputs are left out.
        outputs = [name for name in outputs if self.aliases.get(name, name) in computed]
        by_torch = self.model.producer_name == "pytorch"
        graph = Graph(
            self.operations, self.constants, known, inputs, outputs, batch, self.source, by_torch, self.merges
        )
        _without_aliases(graph, self.aliases)
        return graph

    # -- inputs ----------------------------------------------------------------------------------

    def _inputs(self, values: Sequence[Any], shapes: Mapping[str, Sequence[int]]) -> tuple[list[str], int]:
        names = [value.name for value in values]
        unknown = sorted(set(shapes) - set(names))
        if unknown:
            raise UserError(f"{self.path}: expected shapes of inputs ({', '.join(names)}), got one of {unknown[0]!r}")
        batches = {
            value.type.tensor_type.shape.dim[0].dim_value for value in values if value.type.tensor_type.shape.dim
        }
        # 0: the file leaves the extent open. Inputs that differ have no common number of samples.
        batch = batches.pop() if len(batches) == 1 else 0
        batch = batch or _BATCH
        for value in values:
            self._input(value, shapes.get(value.name), batch)
        return names, batch

    def _input(self, value: Any, shape: Sequence[int] | None, batch: int) -> None:
        """Fix the extents of an input: the given ones (channels last), else those of the file."""
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if len(dims) < 2:
            raise UserError(f"{self.path}: expected inputs (N, C, *spatial), got {value.name!r} with {len(dims)} axes")
        if shape is not None:
            if len(shape) != len(dims) - 1:
                raise UserError(
                    f"{self.path}: expected {len(dims) - 1} extents (*spatial, C) of input {value.name!r}, got "
                    f"{tuple(shape)}"
                )
            # (*spatial, C) -> (C, *spatial)
            dims[1:] = [shape[-1], *shape[:-1]]
        if not all(dims[1:]):
            raise UserError(
                f"{self.path}: expected fixed extents of input {value.name!r} (N, C, *spatial), got some that the file "
                f"leaves open; give them: load(path, shapes={{{value.name!r}: (*spatial, C)}})"
            )
        kind = value.type.tensor_type.elem_type
        if self.onnx.helper.tensor_dtype_to_np_dtype(kind).kind != "f":
            raise UserError(f"{self.path}: expected floating-point inputs, got {value.name!r} of integers")
        self.types[value.name] = self.onnx.helper.make_tensor_type_proto(kind, [batch, *dims[1:]])
        if self.traced is not None:
            own = _shape_of(self.traced.types[value.name]) or ()
            self.moved |= {axis for axis, (a, b) in enumerate(zip(own, (batch, *dims[1:]))) if a != b}

    # -- weights ---------------------------------------------------------------------------------

    def _weight(self, tensor: Any) -> OnnxConstant:
        """Return a weight of the file. A small one is read at once, others when needed."""
        dtype = self.onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
        shape = tuple(tensor.dims)
        self.stored += math.prod(shape)
        size = math.prod(shape) * dtype.itemsize
        origin = self.origins.of(tensor.name, math.prod(shape)) if dtype.kind == "f" else {}
        if tensor.data_location == self.onnx.TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            file, offset = self._sibling(entries.get("location", "")), int(entries.get("offset", 0))
        elif tensor.name in self.offsets and len(tensor.raw_data) == size:
            file, offset = self._sibling(self.path.name), self.offsets[tensor.name]
        else:
            return OnnxConstant.of(self.onnx.numpy_helper.to_array(tensor), **origin)
        constant = OnnxConstant(shape, dtype, partial(_read, file, dtype, shape, offset), **origin)
        return constant if size > 8 * _LARGE else OnnxConstant.of(constant.read(), **origin)

    def _sibling(self, location: str) -> Path | Buffer:
        """Return the file `location` in the folder of the model, or its content if the files are in memory."""
        if self.contents is not None:
            return self.contents[location]
        file = self.path.parent / location
        if not location or not file.resolve().is_relative_to(self.path.parent.resolve()):
            raise UserError(f"{self.path}: expected weights in a file in the same folder, got {shown(location)}")
        return file

    # -- nodes -----------------------------------------------------------------------------------

    def _walk(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            self._check_traced(node)
            if node.op_type == "If":
                self._branch(node)
            elif node.op_type in _UNIFORM or self.drawn.keys() & set(node.input):
                self._random(node)
            # All shapes are fixed here, so that of an activation is a constant.
            elif node.op_type == "Shape" and node.input[0] in self.types:
                self._shape(node)
            elif node.op_type == "CastLike" and node.input[0] in self.constants:
                self._cast(node)
            elif node.op_type == "SplitToSequence":
                self.sequences[node.output[0]] = node
            elif node.op_type == "SequenceAt" and node.input[0] in self.sequences:
                element = self._element(node, self.sequences[node.input[0]])
                (self._constant if element.input[0] in self.constants else self._operation)(element)
            elif all(name in self.constants or not name for name in node.input):
                self._constant(node)
            # A cast of an activation has no layer: a run sets the dtype of the computation.
            elif node.op_type in ("Identity", "Cast", "CastLike"):
                self.aliases[node.output[0]] = self.aliases.get(node.input[0], node.input[0])
                self.types[node.output[0]] = self.types[node.input[0]]
            else:
                self._operation(node)

    def _check_traced(self, node: Any) -> None:
        """Raise UserError if the metadata or the mode of a node show that torch computes something else."""
        traced = next((entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.fx_node"), "")
        if node.op_type == "Identity" and "target=torch.ops.aten.detach." in traced:
            source = self.aliases.get(node.input[0], node.input[0])
            constant = self.constants.get(source)
            if source not in self.inputs and not (constant is not None and constant.is_fixed):
                raise self._refused(node, "a value without a gradient (detach): no layer stops gradients")
        if node.op_type == "BatchNormalization" and not self.merges:
            # `from_torch` exports in training mode. Only the old exporter writes the mode of a norm as an attribute.
            trains = any(a.name == "training_mode" and a.i for a in node.attribute)
            if "no_training" in traced if traced else not trains:
                raise self._refused(node, "a norm of running statistics in training (batch_norm with training=False)")
        if node.op_type == "InstanceNormalization" and re.search(_TRACKED, traced):
            raise self._refused(
                node,
                "an instance norm that evaluates with running statistics, which the file does not have: make it with "
                "track_running_stats=False, or take a BatchNorm",
            )

    def _branch(self, node: Any) -> None:
        """Process the branch that a constant selects."""
        if node.input[0] not in self.constants:
            raise self._refused(node, "a branch that depends on the data")
        name = "then_branch" if bool(self.constants[node.input[0]].read()) else "else_branch"
        (branch,) = (a.g for a in node.attribute if a.name == name)
        for tensor in branch.initializer:
            self._keep(tensor.name, self._weight(tensor))
        self._walk(branch.node)
        for inner, outer in zip(branch.output, node.output):
            if inner.name in self.constants:
                self.constants[outer] = self.constants[inner.name]
            else:
                self.aliases[outer] = self.aliases.get(inner.name, inner.name)
                self.types[outer] = self.types[inner.name]

    def _cast(self, node: Any) -> None:
        """Convert a constant to the type of another value."""
        constant, other = self.constants[node.input[0]], node.input[1]
        kind = self.types[other].tensor_type.elem_type if other in self.types else None
        dtype = self.constants[other].dtype if kind is None else self.onnx.helper.tensor_dtype_to_np_dtype(kind)
        read = constant.read
        self._keep(node.output[0], replace(constant, dtype=dtype, read=lambda: read().astype(dtype)))

    def _random(self, node: Any) -> None:
        """Process a node of random numbers: one that computes others of them, or their product with a value, which must
        be a dropout of elements, channels or samples.

        A dropout is recognized by its factors for uniform numbers in equal distances, not by its operators: a part of
        the factors is 0, and the others are equal.
        """
        refused = self._refused(node, "random numbers that are not those of a dropout of elements, channels or samples")
        values = [name for name in node.input if name and name not in self.constants]
        if not values:
            sources = [self.constants[name] for name in node.input if name]
            if any(source.made_of or not source.is_fixed for source in sources):
                raise refused
            self.types |= self._inferred(node)
            for name in node.output:
                shape = _shape_of(self.types[name]) or ()
                first = next((self.drawn[source] for source in node.input if source in self.drawn), node)
                # Only functions of each number: their results for many numbers need no more memory than these.
                if first is not node and shape != self.constants[first.output[0]].shape and math.prod(shape) > 1:
                    raise refused
                self.drawn[name], self.computing[name] = first, node
                self._keep(name, OnnxConstant(shape, np.dtype(np.float32), _no_numbers))
            return
        if node.op_type != "Mul" or len(values) != 1:
            raise refused
        (value,), (name,) = values, [name for name in node.input if name in self.drawn]
        x, first = _shape_of(self.types[value]) or (0,), self.drawn[name]
        over = {(*x[:2], *(1 for _ in x[2:])): "channels", x: "elements", (x[0], *(1 for _ in x[1:])): "samples"}
        # Other layers would draw other numbers for a second value.
        if self.constants[name].shape not in over or x[0] != self.batch or first in self.used:
            raise refused
        self.used.append(first)
        limits = {a.name: a.f for a in first.attribute if a.name in ("low", "high")}
        low, high = limits.get("low", 0.0), limits.get("high", 1.0)
        uniform = low + (high - low) * (np.arange(_DRAWS) + 0.5) / _DRAWS
        dtype = self.onnx.helper.tensor_dtype_to_np_dtype(self.types[first.output[0]].tensor_type.elem_type)
        draws = uniform.astype(dtype).reshape(-1, *(1 for _ in x[1:]))
        try:
            numbers = self._replayed(name, {first.output[0]: draws}).reshape(-1).astype(np.float64)
        except (KeyError, UserError, RecursionError):
            raise refused from None
        kept = numbers[numbers != 0]
        if numbers.size != draws.size or not 0 < kept.size < numbers.size or kept.min() < kept.max() or kept[0] < 0:
            raise refused
        attributes = {
            "over": over[self.constants[name].shape],
            "kept": kept.size / numbers.size,
            "scale": kept[0],
        }
        dropout = self.onnx.helper.make_node(
            "RandomFactors", [value], list(node.output), node.name, domain=DOMAIN, **attributes
        )
        dropout.metadata_props.extend(node.metadata_props)
        self._operation(dropout)

    def _element(self, node: Any, split: Any) -> Any:
        """Return a part of a split value, as a slice of it."""
        parts, index = self.constants.get(split.input[1]), self.constants.get(node.input[1])
        if parts is None or index is None:
            raise self._refused(node, "parts whose sizes depend on the data")
        axis = next((a.i for a in split.attribute if a.name == "axis"), 0)
        sizes, i = parts.read().tolist(), int(index.read())
        if isinstance(sizes, int):
            # One size for all parts; the last part may be smaller.
            source = self.constants.get(split.input[0])
            shape = _shape_of(self.types[split.input[0]]) if source is None else source.shape
            extent = (shape or ())[axis]
            sizes = [min(sizes, extent - start) for start in range(0, extent, sizes)]
        first = sum(sizes[:i])
        last = first + sizes[i]
        names = [f"{node.output[0]} {what}" for what in ("first", "last", "axis")]
        for name, number in zip(names, (first, last, axis)):
            self._keep(name, OnnxConstant.of(np.array([number], np.int64)))
        slice_node = self.onnx.helper.make_node("Slice", [split.input[0], *names], list(node.output), node.name)
        slice_node.metadata_props.extend(node.metadata_props)
        return slice_node

    def _shape(self, node: Any) -> None:
        shape = _shape_of(self.types[node.input[0]])
        if shape is None:
            raise self._refused(node, "a shape that is not known")
        attributes = {a.name: a.i for a in node.attribute}
        part = shape[attributes.get("start", 0) : attributes.get("end", len(shape))]
        self._keep(node.output[0], OnnxConstant.of(np.array(part, np.int64)))

    def _constant(self, node: Any) -> None:
        """Compute a node of constants: now, or when needed if it only moves the numbers of a named or large array."""
        self._check_computable(node)
        self.computing |= dict.fromkeys(node.output, node)
        sources = [self.constants[name] for name in node.input if name]
        if node.op_type == "Expand" and self._repeats_samples(node, sources[0].shape):
            self.types |= self._inferred(node)
            self._keep(node.output[0], sources[0])  # one array for all samples, broadcast by its reader
            return
        factors = [
            source for source in sources if source.shape or source.made_of or not source.is_fixed or source.read() != 1
        ]
        if node.op_type == "Mul" and len(factors) == 1:
            self._keep(node.output[0], factors[0])  # exporters write a factor that was left out as 1
            return
        moved = node.op_type in _SAME and bool(sources)
        # A shape does not depend on the numbers of the array.
        origin: dict[str, Any] = {"made_of": computed_from(() if node.op_type in ("Shape", "Size") else sources)}
        if node.op_type == "Constant" or any(source.origin == "buffer" for source in sources):
            origin["origin"] = "buffer"
        # Chosen elements of a parameter are trained, as the parameter is.
        chosen = node.op_type in _CHOOSING and bool(sources[0].name) and not sources[0].is_fixed
        if moved or (chosen and all(source.is_fixed for source in sources[1:])):
            kept = ("name", "origin", "made_of", "part", "frozen", "repeats")
            origin = {key: getattr(sources[0], key) for key in kept}
            if chosen and node.op_type == "Slice":
                origin["part"] += "".join(f" {source.read().reshape(-1).tolist()}" for source in sources[1:])
            elif chosen:
                origin["repeats"] = True
            origin |= {"stored": sources[0].stored or sources[0].shape, "order": self._moving(node, sources[0].order)}
        if (
            all(source.name == "" and int(np.prod(source.shape)) <= _LARGE for source in sources)
            or node.op_type not in _SAME
        ):
            for output, array in zip(node.output, self._computed(node)):
                self._keep(output, OnnxConstant.of(np.asarray(array), **origin))
            return
        (output, kind), *_ = self._inferred(node).items()
        shape = _shape_of(kind)
        dtype = self.onnx.helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
        if shape is None:
            raise self._refused(node, "weights whose shape is not known")
        self._keep(output, OnnxConstant(shape, dtype, lambda: np.asarray(self._computed(node)[0]), **origin))

    def _repeats_samples(self, node: Any, shape: tuple[int, ...]) -> bool:
        """Return whether an Expand of an array of this shape only repeats it for every sample."""
        (kind,) = self._inferred(node).values()
        inferred = _shape_of(kind) or ()
        return len(shape) > 1 and shape[0] == 1 and (len(inferred), inferred[1:]) == (len(shape), shape[1:])

    def _check_computable(self, node: Any) -> None:
        """Raise UserError for a node with random results, a loop, or results that need too much time or memory for this
        file.
        """
        if node.op_type in _RANDOM:
            raise self._refused(node, "random numbers")
        if any(a.HasField("g") or a.graphs for a in node.attribute):
            raise self._refused(node, "a loop over constants")
        for kind in self._inferred(node).values():
            self.computed += math.prod(_shape_of(kind) or ())
        most = max(_MOST, 8 * self.stored)
        if self.computed > most:
            raise self._refused(node, f"constants of {self.computed} numbers, more than {most}")

    def _moving(
        self, node: Any, before: Callable[[np.ndarray], np.ndarray] | None
    ) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return a function that rearranges any array as `before` does, and then as `node` does."""
        if node.op_type in ("Identity", "Cast", "CastLike"):
            return before
        moved = node.input[0]
        return lambda array: self._computed(node, {moved: array if before is None else before(array)})[0]

    def _weight_norm(self, node: Any, name: str) -> OnnxConstant | None:
        """Return the directions of the weights `name`, with their lengths, if they are torch's weight norm of two
        parameters, with one length per filter; else None.

        It is recognized by its results for random parameters, not by its operators.
        """
        if node.op_type not in ("Conv", "Gemm", "MatMul"):
            return None
        # MatMul, and Gemm without transB, have weights ``(features, units)``.
        moved = node.op_type != "Conv" and not any(a.name == "transB" and a.i for a in node.attribute)
        origins = self.constants[name].made_of
        factors = {_LENGTHS.get(origin.rpartition(".")[2]): self.constants.get(origin) for origin in origins}
        v, g = factors.get("v"), factors.get("g")
        if len(factors) != 2 or v is None or g is None or g.shape != (v.shape[0], *(1 for _ in v.shape[1:])):
            return None
        draw = np.random.default_rng(0)
        # Numbers far from 0, so that no length vanishes and the comparison can be relative.
        tried = {part.name: draw.uniform(0.5, 2, part.shape).astype(part.dtype) for part in (v, g)}
        directions, lengths = (tried[part.name].astype(np.float64) for part in (v, g))
        norms = np.sqrt(np.sum(directions**2, axis=tuple(range(1, directions.ndim)), keepdims=True))
        try:
            weights = self._replayed(name, dict(tried))
        except (KeyError, UserError, RecursionError):
            return None
        expected = lengths * directions / norms
        expected = expected.T if moved else expected
        if weights.shape != expected.shape or not np.allclose(weights, expected, rtol=1e-4, atol=0):
            return None
        if not moved:
            return replace(v, lengths=g)
        read = v.read
        return replace(
            v, lengths=g, shape=v.shape[::-1], read=lambda: read().T, stored=v.shape, order=lambda array: array.T
        )

    def _replayed(self, name: str, values: dict[str, np.ndarray]) -> np.ndarray:
        """Return a constant as the file computes it if parameters have the arrays in `values`, by name.

        Intermediate results are added to `values`.
        """
        if name not in values:
            node = self.computing.get(name)
            if node is None:
                values[name] = self.constants[name].read()
            else:
                inputs = {source: self._replayed(source, values) for source in node.input if source}
                values |= dict(zip(node.output, self._computed(node, inputs)))
        return values[name]

    def _computed(self, node: Any, others: Mapping[str, np.ndarray] | None = None) -> list[np.ndarray]:
        """Return the outputs of a node of constants; `others` are arrays to read in place of constants, by name."""
        helper, reference = self.onnx.helper, library("onnx.reference")
        inputs = {name: self.constants[name].read() for name in node.input if name and name not in (others or {})}
        inputs |= others or {}
        kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
        described = [helper.make_tensor_value_info(name, kinds[name], list(a.shape)) for name, a in inputs.items()]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
        graph = helper.make_graph([node], "constant", described, outputs)
        model = helper.make_model(graph, opset_imports=list(self.model.opset_import))
        try:
            return list(reference.ReferenceEvaluator(model).run(None, inputs))
        except Exception as error:
            raise self._refused(node, f"constants that cannot be computed ({_line(error)})") from error

    def _operation(self, node: Any) -> None:
        inputs = [self.aliases.get(name, name) for name in node.input]
        for i, name in enumerate(inputs):
            constant = self.constants.get(name)
            # A sum may read repeated elements: a table of relative positions that is added to scores of attention.
            if constant is not None and (constant.made_of or (constant.repeats and node.op_type != "Add")):
                normed = self._weight_norm(node, name)
                if normed is not None:
                    # Under another name, because other readers of the weights do not read directions.
                    inputs[i] = f"{name} with lengths"
                    self._keep(inputs[i], normed)
                    continue
                names = constant.made_of or (constant.name,)
                raise UserError(
                    f"{titled(self.path, _title(node), node.op_type, _scope(node))}: "
                    "expected parameters as they are trained, "
                    f"got numbers computed from {', '.join(map(repr, names[:4]))}, which would be trained differently; "
                    + self.origins.remedy(names)
                )
        self.types |= self._inferred(node)
        helper = self.onnx.helper
        attributes = {a.name: _plain(helper.get_attribute_value(a)) for a in node.attribute}
        op = OnnxNode(_title(node), node.op_type, tuple(inputs), tuple(node.output), attributes, _scope(node))
        self._check_sizes(op)
        self.operations.append(op)

    def _check_sizes(self, op: OnnxNode) -> None:
        """Raise UserError for impossible extents, and for sizes of the exporter's example if other extents are
        requested.
        """
        x, y = (_shape_of(self.types[name]) if name in self.types else None for name in (op.inputs[0], op.outputs[0]))
        if x is None or y is None:
            return
        if any(not 0 < n <= _LONGEST for n in y[1:]):
            raise UserError(
                f"{titled(self.path, op.name, op.kind, op.scope)}: expected extents from 1 to {_LONGEST}, got "
                f"{y[1:]} of {x[1:]}; give inputs of other extents"
            )
        # Of several inputs, that with the coarsest rows.
        before = max((self.strides.get(name, 1.0) for name in op.inputs if name not in self.constants), default=1.0)
        self.strides |= dict.fromkeys(op.outputs, before * stride_of(op, x, y))
        constants = {i: self.constants[name] for i, name in enumerate(op.inputs) if name in self.constants}
        numbers = {
            i: constant.read().reshape(-1).tolist() for i, constant in constants.items() if constant.dtype.kind == "i"
        }
        run = self.runs[op.outputs[0]] = SizedOperation(x, y, numbers)
        if self.traced is None or op.outputs[0] not in self.traced.runs:
            return
        frozen = frozen_size(op, self.traced.runs[op.outputs[0]], run, sorted(self.moved))
        if frozen:
            raise UserError(
                f"{titled(self.path, op.name, op.kind, op.scope)}: expected sizes that follow those of the input, got "
                f"{frozen}, written for the extents of the example; export with dynamic_axes or dynamic_shapes, or "
                "load the model at the extents that it was exported with"
            )

    def _inferred(self, node: Any) -> dict[str, Any]:
        """Infer the types of a node's outputs; return them by name."""
        known = {name: _type_of(self.onnx, self.constants[name]) for name in node.input if name in self.constants}
        known |= {name: self.types[name] for name in node.input if name in self.types}
        numbers = self.onnx.numpy_helper
        # The shape of the result may follow from numbers, such as those of a Reshape.
        small = {
            name: numbers.from_array(self.constants[name].read(), name)
            for name in known
            if name in self.constants and name not in self.types and int(np.prod(self.constants[name].shape)) <= 64
        }
        versions = {opset.domain: opset.version for opset in self.model.opset_import}
        if node.domain == DOMAIN:
            size = next((list(a.ints) for a in node.attribute if a.name == "size"), [])
            kind, shape = known[node.input[0]].tensor_type.elem_type, _shape_of(known[node.input[0]]) or ()
            return {node.output[0]: self.onnx.helper.make_tensor_type_proto(kind, output_shape(shape, size))}
        if node.op_type == "Celu":  # ONNX defines it for float32 only, but torch exports other types
            return dict.fromkeys(node.output, known[node.input[0]])
        try:
            schema = self.onnx.defs.get_schema(node.op_type, versions[node.domain], node.domain)
            opsets = list(self.model.opset_import)
            infer = self.onnx.shape_inference.infer_node_outputs
            return dict(infer(schema, node, known, small, opset_imports=opsets))
        except (KeyError, self.onnx.defs.SchemaError) as error:
            raise self._refused(node, "an operator that ONNX does not have") from error
        except Exception as error:
            self._check_extents(node)
            raise self._refused(node, f"shapes that do not fit ({_line(error)})") from error

    def _check_extents(self, node: Any) -> None:
        """Raise UserError for values that do not fit because strides do not divide the extents of the inputs."""
        values = [name for name in node.input if name in self.types and name not in self.constants]
        shapes = [(_shape_of(self.types[name]) or ())[1:] for name in values]
        whole = [
            _shape_of(self.types[value.name]) or () for value in self.model.graph.input if value.name in self.types
        ]
        factor = math.ceil(max(self.strides.values(), default=1))
        if len({shape[1:] for shape in shapes}) > 1 and any(n % factor for shape in whole for n in shape[2:]):
            raise UserError(
                f"{titled(self.path, _title(node), node.op_type, _scope(node))}: expected values of one shape "
                f"(C, *spatial), got {' and '.join(map(str, shapes))}; give inputs whose extents are multiples of "
                f"{factor}"
            )

    def _refused(self, node: Any, what: str) -> UserError:
        return UserError(
            f"{titled(self.path, _title(node), node.op_type, _scope(node))}: expected a supported operation, got "
            f"{what}; export the model without it"
        )

    def _keep(self, name: str, constant: OnnxConstant) -> None:
        self.constants[name] = constant


def _without_aliases(graph: Graph, aliases: Mapping[str, str]) -> None:
    """Rename values of which outputs are aliases: a value gets the name of the output.

    If several outputs are one value, the others copy the first.
    """
    now: dict[str, str] = {}
    for output in graph.outputs:
        first = aliases.get(output)
        if first is None:
            continue
        value = now.get(first, first)
        if value in graph.inputs or value in graph.outputs:
            graph.operations.append(OnnxNode(output, "Identity", (value,), (output,)))
        else:
            graph.rename(value, output)
            now[first] = output


def _read(file: Path | Buffer, dtype: np.dtype, shape: Shape, offset: int) -> np.ndarray:
    """Read an array from a file, or from its content in memory. Raises UserError if a file is missing or short."""
    count = math.prod(shape)
    if not isinstance(file, Path):
        # A copy can be written, and does not keep a mapped file open.
        return np.frombuffer(file, dtype.newbyteorder("<"), count, offset).reshape(shape).copy()
    try:
        # A damaged file may give any shape: no more memory is taken than the file has.
        there = max(0, regular_size(file) - offset) // dtype.itemsize
        array = np.fromfile(file, dtype.newbyteorder("<"), min(count, there), offset=offset)
    except OSError as error:
        raise UserError(f"{file}: expected weights, got none: {reason_of(error)}") from error
    if array.size != count:
        raise UserError(f"{file}: expected {count} numbers at {offset}, got {array.size}; the file is truncated")
    return array.reshape(shape)


def _no_numbers() -> np.ndarray:
    """Read random numbers, which differ from step to step: raise ValueError."""
    raise ValueError("random numbers in the place of constants")


def _title(node: Any) -> str:
    return node.name or (node.output[0] if node.output else node.op_type)


def _scope(node: Any) -> str:
    """Return the torch module of a node. The new exporter stores it; the old one derives node names from it.

    Both contain all parent modules: ``/layer1/layer1.0/conv1/Conv`` belongs to ``layer1.0.conv1``.
    """
    scopes = [entry.value for entry in node.metadata_props if entry.key == "pkg.torch.onnx.name_scopes"]
    if scopes:
        parts = [part for part in re.findall(r"'([^']*)'", scopes[0]) if part]
        # The last scope is the node itself.
        return parts[-2] if len(parts) > 1 else ""
    parts = [part for part in node.name.split("/")[:-1] if part] if node.name.startswith("/") else []
    names: list[str] = []
    for part in parts:
        # A part that repeats its parent's name replaces it.
        if names and part.startswith(f"{names[-1]}."):
            names[-1] = part
        else:
            names.append(part)
    return ".".join(names)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float):  # float32: use the shortest decimal number, 0.1 and not 0.10000000149
        return float(str(np.float32(value)))
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _type_of(onnx: Any, constant: OnnxConstant) -> Any:
    kind = onnx.helper.np_dtype_to_tensor_dtype(constant.dtype)
    return onnx.helper.make_tensor_type_proto(kind, list(constant.shape))


def _shape_of(kind: Any) -> Shape | None:
    """Return the extents of a type; None if one is unknown."""
    if not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.HasField("dim_value") for dim in dims) else None
