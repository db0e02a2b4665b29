"""From ONNX: what torch has exported becomes a network with inputs of its own, whose layers begin with its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from halograd.errors import UserError

from ..layers import Input, Network
from .builder import Activation, Builder, NeedsPositions
from .graph import Graph
from .onnx_file import read_onnx
from .operators import OPERATORS
from .patterns import recognize

__all__ = ["load"]


def load(path: str | Path, shapes: Mapping[str, Sequence[int]] | None = None) -> Network:
    """The network of an ONNX file that torch has exported. Local; every rank calls it.

    Parameters
    ----------
    path
        The file. Weights outside of it (``external_data``) lie in its folder.
    shapes
        Of samples, ``(*spatial, C)``, by input: needed where the file leaves extents open, else in place of its own.

    Returns
    -------
    Network
        Inputs and outputs have their names in the file, and samples ``(*spatial, C)``: channels last. Layers have the
        names of torch's modules, where the file says them. There is no loss: make one of an output, and a network of
        both. Parameters and running statistics begin with those of the file, wherever its nodes go
        (`Network.initial_values` has them as arrays): each is read from the file when a rank needs it.

    Raises
    ------
    UserError
        The file cannot be read, extents are not known, or a node has no equivalent here; it is named.
    """
    path = Path(path)
    graph = read_onnx(path, shapes or {})
    recognize(graph)
    keeping: frozenset[str] = frozenset()
    while True:
        try:
            return _built(path, graph, keeping)
        except NeedsPositions as error:
            keeping |= {error.pool}


def _built(path: Path, graph: Graph, keeping: frozenset[str]) -> Network:
    build = Builder(path, graph, keeping)
    for name in graph.inputs:
        _, channels, *spatial = graph.shapes[name]
        build.values[name] = Activation(Input((*spatial, channels), name))
    for op in graph.operations:
        if op.kind not in OPERATORS:
            raise build.refused(op, "an operator that has a layer", op.kind)
        made = OPERATORS[op.kind](build, op)
        build.values |= dict(zip(op.outputs, [made] if isinstance(made, Activation) else made))
    for name in graph.outputs:
        if build.values[name].spatial:
            raise UserError(
                f"{path}: expected outputs with spatial axes or of dense layers, got {name!r}, which is flattened; "
                "export the model without the Flatten at its end"
            )
    try:
        return Network({name: build.values[name].node for name in graph.outputs}, name=path.stem)
    except ValueError as error:
        raise UserError(f"{path}: no network was made of it: {error}") from error
