"""Export to ONNX: writes a network and its parameters, without losses and targets, for other programs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import bytes_text
from halograd.errors import UserError

from ..data.disk import atomic_path, check_replaceable
from ..data.normalize import CLIP, LARGEST
from ..layers import Input, Network, Node
from .export_layers import LAYERS
from .files import library
from .onnx_writer import PRODUCER, OnnxWriter

__all__ = ["check_onnx_path", "save"]

#: A file is one protobuf message, whose length has 31 bits; 1 MiB is for everything but the weights.
_MOST = 2**31 - 2**20


def save(
    network: Network,
    parameters: Mapping[str, Any] | None,
    path: str | Path,
    normalization: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> None:
    """Write a network as an ONNX file, with inputs and outputs ``(N, C, *spatial)`` and any number of samples. Local.

    Parameters
    ----------
    network
        Network to write: all outputs but the loss, and the nodes that they depend on.
    parameters
        Whole arrays of parameters and states, by ``layer/name``; None: the initial values of the network.
    normalization
        Statistics of channels (`halograd.data.ChannelStatistics`) by name of an input or of a normalized target; the
        graph then includes the normalization, and its predictions are in the units of the targets.
    dtype
        Type of all arrays: ``"float32"``, or ``"float64"``, for which few programs have all operators.

    Raises
    ------
    UserError
        ONNX has no operator for a layer (such as one of your own), a parameter is missing or has another shape, the
        network has no output but a loss, the parameters exceed 2 GiB, or the file cannot be written.
    """
    arrays = network.initial_values() if parameters is None else parameters
    _check(network, arrays)
    writer = OnnxWriter(network, arrays, np.dtype(dtype))
    for node in _needed(network):
        if isinstance(node, Input):
            writer.values[node] = network.names[node]
            _normalize(writer, node, (normalization or {}).get(network.names[node]))
        elif type(node.layer) in LAYERS:
            writer.values[node] = LAYERS[type(node.layer)](writer, node)
        else:
            raise writer.refused(node, "a layer of halograd with ONNX operators", "another one")
    _restore(writer, network, normalization or {})
    size = sum(array.nbytes for array in writer.weights.values())
    if size > _MOST:
        raise UserError(
            f"{path}: expected at most 2 GiB of parameters in an ONNX file, got {bytes_text(size)}; write safetensors"
        )
    model = writer.model(network.name)
    # Before anything is written; shapes are inferred, too.
    writer.onnx.checker.check_model(model, full_check=True)
    with atomic_path(path, needed=size, parents=True) as partial:
        partial.write_bytes(model.SerializeToString())


def check_onnx_path(path: Path) -> None:
    """Check early that a network can be written to `path`, and would replace only a network of this library. Local.

    Raises
    ------
    DataError
        The file belongs to something else, or its folder cannot be written.
    """
    onnx = library("onnx")

    def is_own(file: Path) -> bool:
        with suppress(Exception):  # the decoder's errors differ between versions
            return bool(onnx.load(str(file), load_external_data=False).producer_name == PRODUCER)
        return False

    check_replaceable(path, "a network that halograd wrote", is_own)


def _needed(network: Network) -> list[Node]:
    """Return the nodes that predictions depend on, in order of computation."""
    loss = network.outputs.get("loss")
    predictions = [node for node in network.outputs.values() if node is not loss]
    if not predictions:
        raise UserError(f"network {network.name!r}: expected another output than the loss, got none; name a prediction")
    needed: set[Node] = set()
    stack = list(predictions)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.inputs
    return [node for node in network.nodes if node in needed]


def _check(network: Network, arrays: Mapping[str, Any]) -> None:
    for name, spec in {**network.parameters(), **network.state()}.items():
        shape = np.shape(arrays[name]) if name in arrays else "none"
        if shape != spec.shape:
            raise UserError(
                f"parameters of network {network.name!r}: expected {name} of shape {spec.shape}, got {shape}; give "
                "whole arrays of this network"
            )


def _normalize(w: OnnxWriter, node: Node, statistics: Any) -> None:
    """Write nodes that normalize an input as `ChannelStatistics.apply` does."""
    if statistics is None:
        return
    name, shape = w.name(node), (1, node.shape[-1], *(1 for _ in node.shape[:-1]))
    rules = list(statistics.transforms)
    value = name
    for rule, kinds in _TRANSFORMS.items():
        if rule in rules:
            value = _to_channels(w, f"{name}::{rule}", value, kinds, np.reshape([r == rule for r in rules], shape))
    # A constant channel becomes 0, as in `ChannelStatistics.apply`.
    std = np.asarray(statistics.std, np.float64)
    scale = np.divide(1.0, std, out=np.zeros_like(std), where=std > 0)
    mean = w.numbers(f"{name}::mean", np.reshape(statistics.mean, shape))
    value = w.add("Sub", [value, mean], f"{name}::centered")
    value = w.add("Mul", [value, w.numbers(f"{name}::scale", scale.reshape(shape))], f"{name}::normalized")
    # Limits of normalized values, so after mean and standard deviation.
    if "clip" in rules:
        value = _to_channels(
            w, f"{name}::clip", value, ("Clip",), np.reshape([r == "clip" for r in rules], shape), CLIP
        )
    w.values[node] = value


def _restore(w: OnnxWriter, network: Network, normalization: Mapping[str, Any]) -> None:
    """Write nodes that convert the predictions of normalized targets to the units of the targets."""
    loss = network.outputs.get("loss")
    comparisons = [] if loss is None else loss.layer.comparisons(*(node.shape for node in loss.inputs))
    for comparison in comparisons:
        assert loss is not None
        node, statistics = (
            loss.inputs[comparison.prediction],
            normalization.get(network.names[loss.inputs[comparison.target]]),
        )
        title, shape = f"{w.name(node)}::restored", (1, node.shape[-1], *(1 for _ in node.shape[:-1]))
        # Several losses may compare one prediction, which is restored once.
        if statistics is None or node not in network.outputs.values() or w.values[node] == title:
            continue
        # The statistics repeat along the channels, as in `ChannelStatistics.restored`.
        std, mean = (np.resize(array, node.shape[-1]).reshape(shape) for array in (statistics.std, statistics.mean))
        scaled = w.add("Mul", [w.values[node], w.numbers(f"{title} std", std)], f"{title} scaled")
        w.values[node] = w.add("Add", [scaled, w.numbers(f"{title} mean", mean)], title)


#: Operators of each rule in order; "log" is sign(x) log(1 + |x|).
_TRANSFORMS = {"log": ("log",), "metric": ("Clip", "log"), "asinh": ("Asinh",)}


def _to_channels(
    w: OnnxWriter, title: str, value: str, kinds: tuple[str, ...], mask: np.ndarray, limit: float = LARGEST
) -> str:
    """Apply the operators `kinds`, in order, to the channels where `mask` is true; other channels are unchanged.

    ``Clip`` limits magnitudes to `limit`. Returns the name of the result.
    """
    output = value
    for kind in kinds:
        if kind == "Clip":
            limits = [w.numbers(f"{title}::{what}", n) for what, n in (("low", -limit), ("high", limit))]
            output = w.add("Clip", [output, *limits], f"{title}::limited")
        elif kind == "log":
            size = w.add("Abs", [output], f"{title}::size")
            size = w.add("Add", [size, w.numbers(f"{title}::one", 1.0)], f"{title}::more")
            size = w.add("Log", [size], f"{title}::log")
            output = w.add("Mul", [size, w.add("Sign", [output], f"{title}::sign")], f"{title}::signed")
        else:
            output = w.add(kind, [output], f"{title}::made")
    # All channels were transformed; the results of the chosen ones are taken.
    return w.add("Where", [w.numbers(f"{title}::mask", mask, bool), output, value], f"{title}::some")
