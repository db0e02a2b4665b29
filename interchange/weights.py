"""Weights alone, in safetensors files, with torch's names and order of axes.

============================  ==========================  ================================
parameter of a layer          ours                        torch's
============================  ==========================  ================================
``w`` of a convolution        ``(K, *kernel, C / g)``     ``weight (K, C / g, *kernel)``
``w``, transposed             ``(C, *kernel, K / g)``     ``weight (C, K / g, *kernel)``
``w`` of a dense layer        ``(units, F)``              ``weight (units, F)``
``b``, ``gamma``, ``beta``    ``(C,)``                    ``bias``, ``weight``, ``bias``
``mean``, ``var``             ``(C,)``                    ``running_mean``, ``running_var``
``slope`` of a PReLU          ``(1,)`` or ``(C,)``        ``weight``
``w`` of an embedding         ``(*spatial, C)``           a parameter ``(1, C, *spatial)``, ``(1, L, C)``
``w`` of tokens               ``(count, C)``              a parameter ``(1, count, C)``
``w``, `weight_norm`          as above                    ``parametrizations.weight.original1``
``g``, `weight_norm`          ``(K,)``                    ``parametrizations.weight.original0 (K, 1, ...)``
============================  ==========================  ================================

Flattened features are ``(*spatial, C)`` here and ``(C, *spatial)`` in torch: :mod:`halograd.interchange.feature_order`.
Weight norm of torch's older function, ``weight_g`` and ``weight_v``, can be read too.

Vision transformers have torchvision's arrays: queries, keys and values in one array, weights of dense layers for 1 x 1
convolutions, tables of relative biases ``(positions, heads)``.

Layers keep their names in torch. Layers of some of our models get torchvision's names: `vgg_a` is torchvision's
``vgg11``. torchvision's GoogLeNet has batch norms, unlike the paper and our model, so its files do not fit.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from halograd.documents import one_line
from halograd.errors import UserError

from ..data.disk import atomic_path, check_replaceable, reason_of, regular_size
from ..layers import Dense, Embedding, GivenValues, Network, Node, Parameter, Scale, Token
from ..layers.parameter import ForeignArray
from .feature_order import Order, feature_orders, torch_of_ours
from .files import finite, library

__all__ = [
    "Arrangement",
    "WeightsFile",
    "arrangements",
    "check_weights_path",
    "load_weights",
    "save_weights",
]

#: Metadata of files that this library writes.
WRITTEN_BY = {"written_by": "halograd", "format": "pt"}

# -- names in torch ---------------------------------------------------------------------------------------

Rules = tuple[tuple[str, str], ...]

_RESNET_PARTS = {"a": "1", "b": "2", "c": "3"}
#: Pattern of our names, and torchvision's replacement, for Inception-v3; the rest is in `_inception`.
_INCEPTION: Rules = (
    (r"1a", "Conv2d_1a_3x3"),
    (r"2a", "Conv2d_2a_3x3"),
    (r"2b", "Conv2d_2b_3x3"),
    (r"3b", "Conv2d_3b_1x1"),
    (r"4a", "Conv2d_4a_3x3"),
    (r"_aux_1", "AuxLogits.conv0"),
    (r"_aux_2", "AuxLogits.conv1"),
    (r"7a_7x7_(\d)", r"Mixed_7a.branch7x7x3_\1"),
    (r"(\w\w)_(1x1|5x5_\d|7x7_\d)", r"Mixed_\1.branch\2"),
    (r"(\w\w)_pool", r"Mixed_\1.branch_pool"),
    (r"(5[bcd])_3x3_(\d)", r"Mixed_\1.branch3x3dbl_\2"),
    (r"(7a)_3x3_(\d)", r"Mixed_\1.branch3x3_\2"),
    (r"6a_3x3", "Mixed_6a.branch3x3"),
    (r"6a_double_(\d)", r"Mixed_6a.branch3x3dbl_\1"),
    (r"(6[b-e])_double_(\d)", r"Mixed_\1.branch7x7dbl_\2"),
    (r"(7[bc])_3x3", r"Mixed_\1.branch3x3_1"),
    (r"(7[bc])_1x3", r"Mixed_\1.branch3x3_2a"),
    (r"(7[bc])_3x1", r"Mixed_\1.branch3x3_2b"),
    (r"(7[bc])_double_1x3", r"Mixed_\1.branch3x3dbl_3a"),
    (r"(7[bc])_double_3x1", r"Mixed_\1.branch3x3dbl_3b"),
    (r"(7[bc])_double_(\d)", r"Mixed_\1.branch3x3dbl_\2"),
)


def module_names(network: Network) -> Callable[[str], tuple[str, ...]]:
    """Return a function from a layer's name to the names of its module in torch; `save_weights` writes the first."""
    # "resnet50" -> "resnet", "vgg_a" -> "vgg", "inception_v3" -> "inception_v"
    kind = re.sub(r"\d.*|_a$", "", network.name)
    table = {"resnet": _resnet, "vgg": _vgg(network), "inception_v": _inception}.get(kind)

    def names(layer: str) -> tuple[str, ...]:
        other = None if table is None else table(layer)
        return (layer,) if other is None else (other, layer)

    return names


def _resnet(layer: str) -> str | None:
    """Return torchvision's name of a layer of a ResNet (``conv3_2b`` is ``layer2.1.conv2``); None for other names."""
    if layer == "dense":
        return "fc"
    match = re.fullmatch(r"(conv|bn)(\d+)_(\d+)([abcs])", layer)
    if match is None:
        return None
    kind, stage, block, part = match.groups()
    module = f"layer{int(stage) - 1}.{int(block) - 1}"
    if part == "s":
        return f"{module}.downsample.{0 if kind == 'conv' else 1}"
    return f"{module}.{kind}{_RESNET_PARTS[part]}"


def _vgg(network: Network) -> Callable[[str], str | None]:
    """Return a function from our names to torchvision's, whose numbers count convolutions, ReLUs and poolings."""
    modules, number = {}, 0
    for layer in network.layers:
        if re.fullmatch(r"conv\d+_\d+", layer):
            modules[layer] = f"features.{number}"
            number += 2  # and its ReLU
        elif re.fullmatch(r"pool\d+", layer):
            number += 1
    # A dense layer, its ReLU and its dropout.
    modules |= {f"dense{i}": f"classifier.{3 * (i - 1)}" for i in (1, 2, 3)}
    return modules.get


def _inception(layer: str) -> str | None:
    heads = {"dense": "fc", "dense_aux": "AuxLogits.fc"}
    match = re.fullmatch(r"(conv|bn)(\w+)", layer)
    if match is None:
        return heads.get(layer)
    for pattern, module in _INCEPTION:
        matched = re.fullmatch(pattern, match[2])
        if matched is not None:
            return f"{matched.expand(module)}.{match[1]}"
    return None


# -- order of axes in torch -------------------------------------------------------------------------------

_KEYS = {
    **{"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "slope": "weight"},
    **{"mean": "running_mean", "var": "running_var"},
}
#: With weight norm: the names that torch writes, and the names of its older function.
_NORMED = {
    "w": ("parametrizations.weight.original1", "weight_v"),
    "g": ("parametrizations.weight.original0", "weight_g"),
}


@dataclass(frozen=True)
class Arrangement:
    """Layout of one parameter or state in torch.

    Attributes
    ----------
    names
        Names in torch: the first is written, any of them is read.
    shape, torch_shape
        Extents of our array, and of torch's.
    orders
        Order of the features by axis, for axes where torch may have another order.
    ones
        Number of trailing axes of extent 1 in torch's array.
    stored
        For arrays with the axes of a sample: torch's shape, and whether channels come last there.
    foreign
        The array of torch from which the parameter was read, if the other attributes do not describe it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    orders: Mapping[int, Order] = field(default_factory=dict)
    ones: int = 0
    stored: tuple[tuple[int, ...], bool] | None = None
    foreign: ForeignArray | None = None

    @property
    def torch_shape(self) -> tuple[int, ...]:
        if self.foreign is not None:
            return self.foreign.shape
        if self.stored is not None:
            return self.stored[0]
        moved = self.shape if len(self.shape) < 3 else (self.shape[0], self.shape[-1], *self.shape[1:-1])
        return (*moved, *(1,) * self.ones)

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Return our whole array in torch's order."""
        for axis, order in self.orders.items():
            array = array.take(torch_of_ours(order), axis)
        if self.stored is not None:
            array = array if self.stored[1] else np.moveaxis(array, -1, 0)
        else:
            # (K, *kernel, C) -> (K, C, *kernel)
            array = array if array.ndim < 3 else np.moveaxis(array, -1, 1)
        return np.array(array.reshape(self.torch_shape), order="C")

    def fill(self, whole: np.ndarray, array: np.ndarray) -> None:
        """Write our `array` to its elements of `whole`, torch's array."""
        if self.foreign is not None:
            whole.reshape(-1)[self.foreign.positions().reshape(-1)] = array.reshape(-1)
        else:
            whole[...] = self.to_torch(array)

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """Return torch's array in our order."""
        if self.foreign is not None:
            return np.ascontiguousarray(self.foreign.order(array))
        if self.stored is not None:
            last = self.stored[1]
            array = array.reshape(self.shape if last else (self.shape[-1], *self.shape[:-1]))
            array = array if last else np.moveaxis(array, 0, -1)
        else:
            array = array.reshape(array.shape[: array.ndim - self.ones])
            array = array if array.ndim < 3 else np.moveaxis(array, 1, -1)
        # `argsort` inverts the permutation of `to_torch`.
        for axis, order in self.orders.items():
            array = array.take(np.argsort(torch_of_ours(order)), axis)
        return np.ascontiguousarray(array)


@dataclass(frozen=True)
class TransformerArrangement(Arrangement):
    """Layout of one parameter of a vision transformer in torchvision.

    Attributes
    ----------
    form
        Extents of the parameter in torch.
    part
        0, 1 or 2 if torch's array consists of three such parts along axis 0, for queries, keys and values; else None.
    transposed
        Whether torch has the heads at the last axis.
    """

    form: tuple[int, ...] = ()
    part: int | None = None
    transposed: bool = False

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return self.form if self.part is None else (3 * self.form[0], *self.form[1:])

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Return this parameter's part of torch's array."""
        return np.ascontiguousarray((array.reshape(len(array), -1).T if self.transposed else array).reshape(self.form))

    def fill(self, whole: np.ndarray, array: np.ndarray) -> None:
        # `np.split` returns views, so this writes to `whole`.
        part = whole if self.part is None else np.split(whole, 3)[self.part]
        part[...] = self.to_torch(array)

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        array = array if self.part is None else np.split(array, 3)[self.part]
        return np.ascontiguousarray(array.T if self.transposed else array).reshape(self.shape)


#: Names of packed weights and biases, and of the last projection, by the attention's name in torchvision.
_PROJECTIONS = {
    "self_attention": (".in_proj_weight", ".in_proj_bias", ".out_proj"),
    "attn": (".qkv.weight", ".qkv.bias", ".proj"),
}


def _of_transformer(network: Network, name: str, shape: tuple[int, ...]) -> Arrangement | None:
    """Return the layout of a parameter of a vision transformer that torchvision arranges in its own way; else None."""
    if not re.match(r"(vit|swin)(_[bt]|$)", network.name):
        return None
    layer, _, key = name.rpartition("/")
    owner, _, last = layer.rpartition(".")
    if layer in ("class_token", "encoder.pos_embedding"):
        return TransformerArrangement((layer,), shape, form=(1, *shape))
    if last == "attention":
        # The table is (heads, *extents) here, and (positions, heads) in torchvision.
        heads, *extents = shape
        table = int(np.prod(extents)), heads
        return TransformerArrangement((f"{owner}.relative_position_bias_table",), shape, form=table, transposed=True)
    # Dense layers, and convolutions of several positions, are as in any other network.
    if key == "w" and (len(shape) < 3 or any(n > 1 for n in shape[1:-1])):
        return None
    # A 1 x 1 convolution is a dense layer in torchvision.
    form = shape[:1] + shape[-1:] if key == "w" else shape
    weight, bias, out = _PROJECTIONS.get(owner.rpartition(".")[2], ("", "", ""))
    if out and last in ("query", "key", "value"):
        part = ("query", "key", "value").index(last)
        return TransformerArrangement((owner + (weight if key == "w" else bias),), shape, form=form, part=part)
    module = owner + out if out and last == "out" else layer
    return TransformerArrangement((f"{module}.{_KEYS.get(key, key)}",), shape, form=form)


def arrangements(network: Network, fresh: Collection[str] = ()) -> dict[str, Arrangement]:
    """Return the layout in torch of the parameters and states of a network, by our names. Pure arithmetic.

    Parameters
    ----------
    fresh
        Layers that are left out.

    Raises
    ------
    UserError
        A layer with parameters reads or returns features that have no order in torch (:func:`feature_orders`), or
        different orders at its calls.
    """
    modules, result = module_names(network), {}
    orders, mixed = feature_orders(network)
    calls: dict[str, list[Node]] = {}
    for name, node in network.layers.items():
        calls.setdefault(network.owners[name], []).append(node)
    for name, spec in {**network.parameters(), **network.state()}.items():
        layer, _, key = name.rpartition("/")
        read = isinstance(spec.init, GivenValues) and spec.init.foreign is not None
        own = None if read else _of_transformer(network, name, spec.shape)
        module = network.layers[layer].layer
        # Arrays that are not trained are constants of the network, which files of weights do not have.
        if layer in fresh or (isinstance(module, Embedding | Scale) and not module.trained):
            continue
        if own is not None:
            result[name] = own
        else:
            every = [_orders_of(call, key, spec.shape, orders) for call in calls[layer]]
            _check_features(network, calls[layer], every, mixed)
            keys, stored = _torch_keys(calls[layer][0], key), _stored_as(calls[layer][0], spec)
            # The only array of a layer may be a parameter of the parent module, under the name of our layer.
            keys = ("", *keys) if stored is not None and len(network.own_parameters(layer)) == 1 else keys
            names = tuple(dict.fromkeys(f"{module}.{label}".rstrip(".") for label in keys for module in modules(layer)))
            result[name] = Arrangement(names, spec.shape, every[0], _ones(calls[layer][0], keys), stored)
    return result | _of_foreign_arrays(network, result)


def _of_foreign_arrays(network: Network, arranged: Mapping[str, Arrangement]) -> dict[str, Arrangement]:
    """Return the layout of the parameters that were read from an array of torch, which may have any name and order.

    Parameters that are parts of one array belong to it if they fill it together, such as the rows of
    ``in_proj_weight``; else each is an array of its own.
    """
    specs = {**network.parameters(), **network.state()}
    sources = {
        name: spec.init.foreign
        for name, spec in specs.items()
        if isinstance(spec.init, GivenValues) and spec.init.foreign is not None
    }
    users: dict[str, list[str]] = {}
    for name, foreign in sources.items():
        users.setdefault(foreign.name, []).append(name)
    result = {}
    for label, names in users.items():
        whole = [name for name in names if math.prod(sources[name].shape) == specs[name].size]
        if not whole and sum(specs[name].size for name in names) == math.prod(sources[names[0]].shape):
            positions = np.concatenate([sources[name].positions().reshape(-1) for name in names])
            named = whole = names if len(np.unique(positions)) == len(positions) else []
        else:
            # Arrays that an exporter has merged are several again; only one of them has the name.
            named = [name for name in whole if name in arranged and label in arranged[name].names][:1] or whole[:1]
        for name in arranged.keys() & set(whole):
            first = (label,) if name in named else ()
            labels = tuple(dict.fromkeys((*first, *arranged[name].names)))
            result[name] = replace(arranged[name], names=labels, foreign=sources[name])
    return result


def _stored_as(node: Node, spec: Parameter) -> tuple[tuple[int, ...], bool] | None:
    """Return torch's shape of an array with the axes of a sample, and whether channels come last there; else None.

    By default images are channels first, and positions of a sequence before channels, as in transformers.
    """
    if not isinstance(node.layer, Embedding | Token) and not spec.spatial_axes:
        return None
    if len(spec.shape) < 3:
        return (spec.shape if len(spec.shape) == 1 else (1, *spec.shape)), True
    return (1, spec.shape[-1], *spec.shape[:-1]), False


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [source.shape for source in node.inputs]


def _torch_keys(node: Node, key: str) -> tuple[str, ...]:
    """Return the names of a parameter in torch's module; its own name if two parameters would share one."""
    if getattr(node.layer, "weight_norm", False) and key in _NORMED:
        return _NORMED[key]
    own = {**node.layer.parameters(*_shapes(node)), **node.layer.state(*_shapes(node))}
    named = [own_key for own_key in own if _KEYS.get(own_key, own_key) == _KEYS.get(key, key)]
    return (_KEYS.get(key, key) if len(named) == 1 else key,)


def _orders_of(node: Node, key: str, shape: tuple[int, ...], orders: Mapping[Node, Order]) -> dict[int, Order]:
    """Return the order of features by axis of a parameter, without the axes where torch has the same order."""
    along = {}
    if isinstance(node.layer, Dense):
        along = {0: orders[node], 1: orders[node.inputs[0]]} if key == "w" else {0: orders[node]}
    elif shape[-1:] == node.shape[-1:]:
        along = {len(shape) - 1: orders[node]}
    return {axis: order for axis, order in along.items() if any(len(piece) > 1 for piece in order)}


def _ones(node: Node, keys: tuple[str, ...]) -> int:
    """Return the number of trailing axes of extent 1 of torch's magnitudes (weight norm); 0 for other arrays."""
    return len(node.layer.parameters(*_shapes(node))["w"].shape) - 1 if keys == _NORMED["g"] else 0


def _check_features(
    network: Network, calls: list[Node], orders: list[dict[int, Order]], mixed: Mapping[Node, Node]
) -> None:
    """Raise UserError for a layer whose features have no order in torch, or different orders at its calls."""
    for call, order in zip(calls, orders):
        reason = next((mixed[member] for member in (call, *call.inputs) if member in mixed), None)
        if reason is not None:
            raise _refused(network, call, f"features that {_titled(network, reason)} mixes by position")
        if order != orders[0]:
            raise _refused(network, call, f"another order than at {network.names[calls[0]]!r}, the same layer")


def _titled(network: Network, node: Node) -> str:
    return f"{network.names[node]!r} ({node.layer.kind})"


def _refused(network: Network, node: Node, got: str) -> UserError:
    return UserError(
        f"layer {_titled(network, node)}: expected features that torch has too, in the order after its Flatten, got "
        f"{got}; put a GlobalAveragePool in place of the Flatten, or write ONNX"
    )


# -- files ------------------------------------------------------------------------------------------------


def save_weights(
    network: Network,
    parameters: Mapping[str, Any] | None,
    path: str | Path,
    normalization: Mapping[str, Any] | None = None,
) -> None:
    """Write parameters and running statistics as a safetensors file. Local.

    ``torch_module.load_state_dict(safetensors.torch.load_file(path))`` reads it if the modules have the names of our
    layers: for imported networks, and for torchvision's.

    Parameters
    ----------
    parameters
        Whole arrays by ``layer/name``; None: the initial values of the network.
    normalization
        Statistics of channels (`halograd.data.ChannelStatistics`) by name of an input or of a normalized target. The
        metadata of the file have them as JSON, ``normalization``: ``mean``, ``std`` and ``transforms`` of each.

    Raises
    ------
    UserError
        The library or a parameter is missing, or torch cannot express the network (:func:`arrangements`).
    DataError
        The file cannot be written.
    """
    arrays = network.initial_values() if parameters is None else parameters
    arranged = arrangements(network)
    missing = sorted(set(arranged) - set(arrays))
    if missing:
        raise UserError(f"parameters of network {network.name!r}: expected {missing[0]}, got none; give all of them")
    tensors: dict[str, np.ndarray] = {}
    for name, arrangement in arranged.items():
        array = np.asarray(arrays[name])
        # Several parameters may fill parts of one array: queries, keys and values.
        whole = tensors.setdefault(arrangement.names[0], np.empty(arrangement.torch_shape, array.dtype))
        arrangement.fill(whole, array)
    writer = library("safetensors.numpy")
    needed = sum(array.nbytes for array in tensors.values())
    with atomic_path(path, needed, parents=True) as partial:
        partial.touch()
        mode = partial.stat().st_mode  # that of all our files; the library allows its own only to their owner
        writer.save_file(tensors, partial, metadata=WRITTEN_BY | _metadata(normalization or {}))
        partial.chmod(mode)


def _metadata(normalization: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of statistics of channels by name; none without any."""
    kept = {name: {k: s.state_dict()[k] for k in ("mean", "std", "transforms")} for name, s in normalization.items()}
    return {"normalization": json.dumps(kept)} if kept else {}


def load_weights(network: Network, path: str | Path, fresh: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Read all parameters and states of a network, whole arrays by our names, from a safetensors file. Local.

    Parameters
    ----------
    fresh
        Layers to leave out, because the file lacks them or has them with other sizes.

    Raises
    ------
    UserError
        The file is missing or not a safetensors file, or a parameter does not fit.
    """
    file = WeightsFile(network, path, fresh)
    return {name: file.read(name) for name in file.names}


#: Supported types of weights in safetensors files.
_TYPES = ("F64", "F32", "F16")


class WeightsFile:
    """A safetensors file with the weights of a network, which are read one by one. Local.

    Parameters
    ----------
    network, path, fresh
        See :func:`load_weights`; its errors are raised here, before any weight is read.

    Attributes
    ----------
    names
        Parameters and states in the file, by our names.
    """

    def __init__(self, network: Network, path: str | Path, fresh: Collection[str] = ()) -> None:
        self.path = Path(path)
        self._open: Callable[..., Any] = library("safetensors").safe_open
        strange = sorted(set(fresh) - set(network.layers))
        if strange:
            raise UserError(f"init_fresh: expected layers of network {network.name!r}, got {strange[0]!r}")
        self._arrangements = arrangements(network, fresh)
        self._shapes = self._read_shapes()
        self._wrapper = self._find_wrapper()
        self._keys = {name: self._key(name, arrangement) for name, arrangement in self._arrangements.items()}
        self.names = list(self._arrangements)

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        try:
            regular_size(self.path)
            with self._open(self.path, framework="numpy") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                self._types = {key: str(entry.get_dtype()) for key, entry in slices.items()}
                return {key: tuple(entry.get_shape()) for key, entry in slices.items()}
        except OSError as error:
            raise UserError(
                f"weights {self.path}: expected a safetensors file, got none: {reason_of(error)}"
            ) from error
        except Exception as error:  # the library's error type differs between versions
            raise UserError(
                f"weights {self.path}: expected a safetensors file, got another ({one_line(error)}); make one of a "
                "state_dict by safetensors.torch.save_file"
            ) from error

    def _find_wrapper(self) -> str:
        """Return the prefix that a wrapper of the module gives all names, such as ``module.`` of data-parallel training
        and ``model.`` of Lightning; an empty string if there is none.

        All names of the network must have it. If two prefixes fit, such as those of weights and of their moving
        averages, none is chosen.
        """
        names = [arrangement.names for arrangement in self._arrangements.values()]
        if any(key in self._shapes for keys in names for key in keys):
            return ""
        before = {key[: i + 1] for key in self._shapes for i, letter in enumerate(key) if letter == "."}
        fitting = [w for w in before if all(any(w + key in self._shapes for key in keys) for keys in names)]
        return fitting[0] if len(fitting) == 1 else ""

    def _key(self, name: str, arrangement: Arrangement) -> str:
        """Return the name of a parameter in the file. Raises UserError if its array is missing or does not fit."""
        keys = [self._wrapper + key for key in arrangement.names]
        key = next((key for key in keys if key in self._shapes), None)
        if key is None:
            raise UserError(
                f"weights {self.path}: expected {name} under the name {' or '.join(arrangement.names)}, got none; the "
                "file is of another network: list the layers that it lacks in training.init_fresh"
            )
        if self._shapes[key] != arrangement.torch_shape:
            raise UserError(
                f"weights {self.path}: expected {name} as {key} of shape {arrangement.torch_shape}, got "
                f"{self._shapes[key]}; list the layer {name.rpartition('/')[0]!r} in training.init_fresh, or train "
                "another network"
            )
        if self._types[key] not in _TYPES:
            raise UserError(
                f"weights {self.path}: expected {name} as {key} of type {', '.join(_TYPES)}, got {self._types[key]}; "
                "write the weights before they are quantized, or convert them by state_dict()[key].float()"
            )
        return key

    def read(self, name: str) -> np.ndarray:
        """Return a whole array, in our order. Raises UserError if an element is not finite."""
        with self._open(self.path, framework="numpy") as file:
            array = self._arrangements[name].from_torch(file.get_tensor(self._keys[name]))
        return finite(array, f"weights {self.path}: {self._keys[name]}")

    def checksum(self) -> int:
        """Compute the CRC-32 of the bytes of the file."""
        checksum = 0
        with open(self.path, "rb") as file:
            while block := file.read(1 << 22):
                checksum = zlib.crc32(block, checksum)
        return checksum


def check_weights_path(path: Path) -> None:
    """Check early that weights can be written to `path`, and would replace only weights of this library. Local.

    Raises
    ------
    DataError
        The file belongs to something else, or its folder cannot be written.
    """
    safe_open = library("safetensors").safe_open

    def is_own(file: Path) -> bool:
        # The library's error type differs between versions.
        with suppress(Exception), safe_open(file, framework="numpy") as weights:
            return (weights.metadata() or {}).get("written_by") == WRITTEN_BY["written_by"]
        return False

    check_replaceable(path, "weights that halograd wrote", is_own)
