"""Networks for samples of another size: the same layers with the same parameters.

A network that halves its samples five times takes multiples of 32. Other samples are padded with zeros at their ends,
and predictions are cut to the sample, so that inputs, targets and outputs have the sample's own extents::

    input 50 x 70  ->  pad to 64 x 96  ->  the layers  ->  cut to 50 x 70  ->  output, loss
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from .layer import Input, Layer, Node, Shape
from .network import Network
from .padding import Pad, Pieced, WindowPadding
from .resize import Resize

__all__ = ["resized"]


def resized(network: Network, extents: Sequence[int]) -> Network:
    """Return a network of the same layers and parameters for samples of other extents; `network` itself if the extents
    are the same. Local.

    Parameters
    ----------
    extents
        Spatial extents of the first input, targets aside, that has as many spatial axes; other inputs and the targets
        keep their ratio to it.

    Raises
    ------
    ValueError
        If no input has as many spatial axes; if the layers do not take these extents, even padded; if parameters depend
        on them; if an axis that would have to be padded is circular.
    """
    read = [name for name in network.inputs if name not in network.targets]
    first = next((name for name in read if len(network.inputs[name].shape) == len(extents) + 1), None)
    if first is None:
        raise ValueError(f"network {network.name!r}: expected an input of {len(extents)} spatial axes, got none")
    before = network.inputs[first].shape[:-1]
    if tuple(extents) == before:
        return network
    steps = _steps(network, before)
    padded = [-(-n // step) * step for n, step in zip(extents, steps)]
    # Axes of other arrays, such as tokens or images among volumes, are not those of the samples.
    grids = [node.layer for node in network.nodes if len(node.shape) == len(extents) + 1]
    closed = {axis for layer in grids if isinstance(layer, Pieced) for axis in layer.closed_axes(len(extents))}
    faults = []
    # First without padding: many layers take any extents, and padding would cost time.
    for computed in dict.fromkeys([tuple(extents), tuple(padded)]):
        try:
            for axis in closed:
                if computed[axis] != extents[axis]:  # the first row would no longer follow the last one
                    raise ValueError(f"it is circular along an axis that would be padded to {computed[axis]}")
            network_of_extents = _Resizing(network, before, tuple(extents), computed).network()
            _check_parameters(network, network_of_extents)
            return network_of_extents
        except ValueError as error:
            faults.append(str(error))
    raise ValueError(f"network {network.name!r} takes no samples of {_by(extents)}: {faults[-1]}{_fixed(network)}")


def _fixed(network: Network) -> str:
    """Return a remedy for a layer whose output has a fixed size; "" without any."""
    names = [name for name, node in network.layers.items() if isinstance(node.layer, Resize) and node.layer.size]
    if not names:
        return ""
    return (
        f". Layer {names[0]!r} has an output of a fixed size; give it a scale (in torch, "
        f"interpolate(..., scale_factor=2) instead of size=x.shape[2:])"
    )


def _steps(network: Network, extents: Shape) -> list[int]:
    """Return, per axis, the least common multiple of the factors by which the layers reduce a sample."""
    shapes = [n.shape[:-1] for n in network.nodes if len(n.shape) == len(extents) + 1]
    # Only factors that divide the extent: an axis shortened by a convolution without padding gives none.
    axes = [[n // shape[axis] for shape in shapes if shape[axis] > 1 and not n % shape[axis]]
            for axis, n in enumerate(extents)]  # fmt: skip
    return [math.lcm(*factors) for factors in axes]


def _check_parameters(network: Network, new: Network) -> None:
    """Raise ValueError unless both networks have the same parameters and states."""
    mine, others = ({n: s.shape for n, s in {**net.parameters(), **net.state()}.items()} for net in (network, new))
    for name in {**mine, **others}:
        if mine.get(name) != others.get(name):
            raise ValueError(f"its parameter {name} depends on their size, {mine.get(name)} and {others.get(name)}")


class _Resizing:
    """Construction of a network whose first input had the extents `before`, now has `extents`, and is padded to
    `computed`.
    """

    def __init__(self, network: Network, before: Shape, extents: Shape, computed: Shape) -> None:
        self._old, self._before, self._extents, self._computed = network, before, extents, computed
        self._nodes: dict[Node, Node] = {}
        self._cut: dict[Node, Node] = {}

    def network(self) -> Network:
        # Predictions first: the extents of targets follow from theirs.
        old, targets = self._old, self._old.targets
        loss = old.outputs.get("loss")
        of_targets = self._only_of(targets)
        for node in old.nodes:
            if isinstance(node, Input):
                if old.names[node] not in targets:
                    self._nodes[node] = self._input(node)
            elif node is not loss and node not in of_targets:
                self._nodes[node] = Node(node.layer, [self._input_of(node.layer, n) for n in node.inputs])
        for name in targets:
            self._nodes[old.inputs[name]] = self._target(old.inputs[name])
        for node in old.nodes:
            if node in of_targets and not isinstance(node, Input):
                self._nodes[node] = Node(node.layer, [self._nodes[n] for n in node.inputs])
        outputs = {}
        for name, node in old.outputs.items():
            if node is loss:
                # Targets have the extents of the sample; predictions are cut to them.
                inputs = [n if m in of_targets else self._whole(m) for m in node.inputs for n in [self._nodes[m]]]
                outputs[name] = type(node)(node.layer, inputs)
            else:
                outputs[name] = self._whole(node)
        new = Network(outputs, old.name, sorted(old.frozen))
        # The network of the user, which checkpoints are compared with.
        new.origin = old.origin or old
        return new

    def _input_of(self, layer: Layer, node: Node) -> Node:
        """Return the new node of an input of a layer; the padding in a mode, before its windows, follows the extents.
        """
        padding = layer.before
        if isinstance(padding, WindowPadding):
            return padding(self._nodes[padding.source(node)])
        return self._nodes[node]

    def _only_of(self, targets: Collection[str]) -> set[Node]:
        """Return the nodes that depend on these inputs alone."""
        nodes: set[Node] = set()
        for node in self._old.nodes:
            if isinstance(node, Input):
                if self._old.names[node] in targets:
                    nodes.add(node)
            elif node.inputs and all(n in nodes for n in node.inputs):
                nodes.add(node)
        return nodes

    def _scaled(self, node: Node, to: Shape) -> Shape:
        """Return the extents that a node has if the first input has the extents `to`."""
        pairs = list(zip(node.shape[:-1], self._before, to))
        # An extent of 1 stands for the whole axis: it stays 1.
        if any(n > 1 and n * new % old for n, old, new in pairs):
            raise ValueError(f"{self._old.names[node]!r} of {_by(node.shape[:-1])} does not scale with {_by(to)}")
        return tuple(n if n == 1 else n * new // old for n, old, new in pairs)

    def _is_grid(self, node: Node) -> bool:
        return len(node.shape) == len(self._before) + 1

    def _input(self, node: Input) -> Node:
        name = self._old.names[node]
        if not self._is_grid(node):
            return Input(node.shape, name, node.dtype)
        own, computed = self._scaled(node, self._extents), self._scaled(node, self._computed)
        scaled: Node = Input((*own, node.shape[-1]), name, node.dtype)
        if own == computed:
            return scaled
        return Pad([(0, m - n) for n, m in zip(own, computed)], name=f"pad/{name}")(scaled)

    def _whole(self, node: Node) -> Node:
        """Return the new node of `node`, a prediction, cut to the sample."""
        whole = self._nodes[node]
        if not self._is_grid(node):
            return whole
        if node not in self._cut:
            self._cut[node] = whole
            cut = [self._kept(n, m, axis) - m for axis, (n, m) in enumerate(zip(node.shape, whole.shape[:-1]))]
            if any(cut):
                self._cut[node] = Pad([(0, n) for n in cut], name=f"cut/{self._old.names[node]}")(whole)
        return self._cut[node]

    def _kept(self, before: int, now: int, axis: int) -> int:
        """Return how many of the `now` rows of a prediction lie in the sample; the old prediction has `before` rows."""
        old, extent, computed = self._before[axis], self._extents[axis], self._computed[axis]
        if before == old and now != computed:
            raise ValueError(f"predictions of samples of {_by(self._computed)} have other extents")
        # Rounded up: a row that lies only partly in the sample is kept.
        return now if extent == computed or before == 1 else -(-extent * before // old)

    def _target(self, node: Input) -> Input:
        name, loss = self._old.names[node], self._old.outputs["loss"]
        grids = [n for n in loss.inputs if n in self._nodes and self._is_grid(n)]
        if not self._is_grid(node) or not grids:
            return Input(node.shape, name, node.dtype)
        was, now = grids[0].shape[:-1], self._whole(grids[0]).shape[:-1]
        if any(n > 1 and n * new % old for n, old, new in zip(node.shape, was, now)):
            raise ValueError(f"target {name!r} of {_by(node.shape[:-1])} does not scale with predictions of {_by(now)}")
        own = [n if n == 1 else n * new // old for n, old, new in zip(node.shape, was, now)]
        return Input((*own, node.shape[-1]), name, node.dtype)


def _by(extents: Sequence[int]) -> str:
    return " x ".join(map(str, extents))
