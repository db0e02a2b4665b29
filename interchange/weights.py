"""Weights alone, in safetensors files, with the names and the order of axes that torch has.

============================  ==========================  ================================
parameter of a layer          ours                        torch's
============================  ==========================  ================================
``w`` of a convolution        ``(K, *kernel, C / g)``     ``weight (K, C / g, *kernel)``
``w``, transposed             ``(C, *kernel, K / g)``     ``weight (C, K / g, *kernel)``
``w`` of a dense layer        ``(units, F)``              ``weight (units, F)``
``b``, ``gamma``, ``beta``    ``(C,)``                    ``bias``, ``weight``, ``bias``
``mean``, ``var``             ``(C,)``                    ``running_mean``, ``running_var``
``slope`` of a PReLU          ``(1,)`` or ``(C,)``        ``weight``
``w``, `weight_norm`          as without                  ``parametrizations.weight.original1``
``g``, `weight_norm`          ``(K,)``                    ``parametrizations.weight.original0 (K, 1, ...)``
============================  ==========================  ================================

Flattened features are ``(*spatial, C)`` here and ``(C, *spatial)`` there: :mod:`halograd.interchange.feature_order`.
Weight norm of torch's older function, ``weight_g`` and ``weight_v``, is read too.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from halograd.errors import UserError

from ..data import DataError
from ..data.disk import atomic_path, check_writable
from ..layers import Dense, Network, Node
from .feature_order import Order, feature_orders, torch_of_ours
from .library import library
from .names import module_names

__all__ = ["Arrangement", "WeightsFile", "arrangements", "check_weights_place", "load_weights", "save_weights"]

#: Says in the metadata of a file what has written it.
WRITTEN_BY = {"written_by": "halograd", "format": "pt"}
_KEYS = {
    **{"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "slope": "weight"},
    **{"mean": "running_mean", "var": "running_var"},
}
#: With weight norm: the names that torch writes, and those of its older function.
_NORMED = {
    "w": ("parametrizations.weight.original1", "weight_v"),
    "g": ("parametrizations.weight.original0", "weight_g"),
}


@dataclass(frozen=True)
class Arrangement:
    """One parameter or state, as torch has it.

    Attributes
    ----------
    names
        In torch: the first is written, any of them is read.
    shape, torch_shape
        Extents of our array, and of torch's.
    orders
        By axis, the order of the features along it, where torch may have another one.
    ones
        Number of axes with one element that torch has behind ours.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    orders: Mapping[int, Order] = field(default_factory=dict)
    ones: int = 0

    @property
    def torch_shape(self) -> tuple[int, ...]:
        moved = self.shape if len(self.shape) < 3 else (self.shape[0], self.shape[-1], *self.shape[1:-1])
        return (*moved, *(1,) * self.ones)

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Our whole array in torch's order."""
        for axis, order in self.orders.items():
            array = array.take(torch_of_ours(order), axis)
        array = array if array.ndim < 3 else np.moveaxis(array, -1, 1)
        return np.ascontiguousarray(array.reshape(self.torch_shape))

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """Torch's array in our order."""
        array = array.reshape(array.shape[: array.ndim - self.ones])
        array = array if array.ndim < 3 else np.moveaxis(array, 1, -1)
        for axis, order in self.orders.items():
            array = array.take(np.argsort(torch_of_ours(order)), axis)
        return np.ascontiguousarray(array)


def arrangements(network: Network, fresh: Collection[str] = ()) -> dict[str, Arrangement]:
    """How torch has the parameters and states of a network, by our names. Pure arithmetic.

    Parameters
    ----------
    fresh
        Layers that are left out.

    Raises
    ------
    UserError
        A layer with parameters, behind one that mixes flattened features by their place: torch has no such layer.
    """
    modules, found = module_names(network), {}
    orders, mixed = feature_orders(network)
    calls: dict[str, list[Node]] = {}
    for name, node in network.layers.items():
        calls.setdefault(network.owners[name], []).append(node)
    for name, spec in {**network.parameters(), **network.state()}.items():
        layer, _, key = name.rpartition("/")
        if layer not in fresh:
            every = [_orders_of(call, key, spec.shape, orders) for call in calls[layer]]
            _check_features(network, calls[layer], every, mixed)
            keys = _torch_keys(calls[layer][0], key)
            names = tuple(dict.fromkeys(f"{module}.{one}" for one in keys for module in modules(layer)))
            found[name] = Arrangement(names, spec.shape, every[0], _ones(calls[layer][0], keys))
    return found


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [one.shape for one in node.inputs]


def _torch_keys(node: Node, key: str) -> tuple[str, ...]:
    """Names of a parameter in torch's module; its own where two parameters of a layer would have one name."""
    if getattr(node.layer, "weight_norm", False) and key in _NORMED:
        return _NORMED[key]
    own = {**node.layer.parameters(*_shapes(node)), **node.layer.state(*_shapes(node))}
    named = [one for one in own if _KEYS.get(one, one) == _KEYS.get(key, key)]
    return (_KEYS.get(key, key) if len(named) == 1 else key,)


def _orders_of(node: Node, key: str, shape: tuple[int, ...], orders: Mapping[Node, Order]) -> dict[int, Order]:
    """By axis of a parameter, the order of the features that it belongs to; nothing where torch has the same one."""
    along = {}
    if isinstance(node.layer, Dense):
        along = {0: orders[node], 1: orders[node.inputs[0]]} if key == "w" else {0: orders[node]}
    elif shape[-1:] == node.shape[-1:]:
        along = {len(shape) - 1: orders[node]}
    return {axis: order for axis, order in along.items() if any(len(piece) > 1 for piece in order)}


def _ones(node: Node, keys: tuple[str, ...]) -> int:
    """Axes with one element that torch has behind ours: lengths have as many axes as the directions."""
    return len(node.layer.parameters(*_shapes(node))["w"].shape) - 1 if keys == _NORMED["g"] else 0


def _check_features(
    network: Network, calls: list[Node], orders: list[dict[int, Order]], mixed: Mapping[Node, Node]
) -> None:
    """Refuse a layer whose features torch does not have in any order, or in one order at each call."""
    for call, order in zip(calls, orders):
        reason = next((mixed[one] for one in (call, *call.inputs) if one in mixed), None)
        if reason is not None:
            raise _refused(network, call, f"features that {_titled(network, reason)} mixes by their place")
        if order != orders[0]:
            raise _refused(network, call, f"another order than at {network.names[calls[0]]!r}, the same layer")


def _titled(network: Network, node: Node) -> str:
    return f"{network.names[node]!r} ({node.layer.kind})"


def _refused(network: Network, node: Node, got: str) -> UserError:
    return UserError(
        f"layer {_titled(network, node)}: expected features that torch has too, in the order behind its Flatten, got "
        f"{got}; put a GlobalAveragePool in place of the Flatten, or write ONNX"
    )


def save_weights(network: Network, parameters: Mapping[str, Any] | None, path: str | Path) -> None:
    """Write parameters and running statistics as a safetensors file. Local.

    ``torch_module.load_state_dict(safetensors.torch.load_file(path))`` takes it where the modules have the names of our
    layers: a network that was imported, or one that torchvision has.

    Parameters
    ----------
    parameters
        Whole arrays by ``layer/name``; None: those that the network begins with.

    Raises
    ------
    UserError
        The library is not there, parameters are missing, or torch has no such network (:func:`arrangements`).
    DataError
        The file cannot be written.
    """
    arrays = network.initial_values() if parameters is None else parameters
    wanted = arrangements(network)
    missing = sorted(set(wanted) - set(arrays))
    if missing:
        raise UserError(f"parameters of network {network.name!r}: expected {missing[0]}, got none; give all of them")
    tensors = {one.names[0]: one.to_torch(np.asarray(arrays[name])) for name, one in wanted.items()}
    writer = library("safetensors.numpy")
    with atomic_path(path, needed=sum(array.nbytes for array in tensors.values())) as partial:
        writer.save_file(tensors, partial, metadata=WRITTEN_BY)


def load_weights(network: Network, path: str | Path, fresh: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Whole arrays of all parameters and states of a network, by our names, from a safetensors file. Local.

    Parameters
    ----------
    fresh
        Layers of which the file has nothing, or other sizes: they are left out.

    Raises
    ------
    UserError
        There is no such file, it is none of these, or the first parameter that does not fit.
    """
    file = WeightsFile(network, path, fresh)
    return {name: file.read(name) for name in file.names}


class WeightsFile:
    """A safetensors file that holds the weights of a network; they are read one by one. Local.

    Parameters
    ----------
    network, path, fresh
        As of :func:`load_weights`, whose errors are raised here: nothing is read that does not fit.

    Attributes
    ----------
    names
        Parameters and states that it has, by our names.
    """

    def __init__(self, network: Network, path: str | Path, fresh: Collection[str] = ()) -> None:
        self.path = Path(path)
        self._open: Callable[..., Any] = library("safetensors").safe_open
        strange = sorted(set(fresh) - set(network.layers))
        if strange:
            raise UserError(f"expected layers of network {network.name!r} to begin anew, got {strange[0]!r}")
        self._wanted = arrangements(network, fresh)
        self._places = {name: self._place(name, one) for name, one in self._found().items()}
        self.names = list(self._wanted)

    def _found(self) -> dict[str, Arrangement]:
        try:
            with self._open(self.path, framework="numpy") as file:
                keys = file.keys()
                self._shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"weights {self.path}: expected a safetensors file, got none: {reason}") from error
        except Exception as error:  # the library has an error of its own for each version
            said = " ".join(str(error).split())
            raise UserError(
                f"weights {self.path}: expected a safetensors file, got another ({said}); make one of a state_dict by "
                "safetensors.torch.save_file"
            ) from error
        return self._wanted

    def _place(self, name: str, one: Arrangement) -> str:
        """Under which name the file has a parameter."""
        key = next((key for key in one.names if key in self._shapes), None)
        if key is None:
            raise UserError(
                f"weights {self.path}: expected {name} under the name {' or '.join(one.names)}, got none; the file is "
                "of another network: have layers that it has not begin anew (training.init_fresh)"
            )
        if self._shapes[key] != one.torch_shape:
            raise UserError(
                f"weights {self.path}: expected {name} as {key} of shape {one.torch_shape}, got {self._shapes[key]}; "
                f"have the layer {name.rpartition('/')[0]!r} begin anew (training.init_fresh), or train another network"
            )
        return key

    def read(self, name: str) -> np.ndarray:
        """A whole array, in our order."""
        with self._open(self.path, framework="numpy") as file:
            return self._wanted[name].from_torch(file.get_tensor(self._places[name]))

    def checksum(self) -> int:
        """Compute the CRC-32 of the bytes of the file."""
        found = 0
        with open(self.path, "rb") as file:
            while block := file.read(1 << 22):
                found = zlib.crc32(block, found)
        return found


def check_weights_place(path: Path) -> None:
    """See that weights can be written, and replace none but ours. Local. Raises DataError."""
    check_writable(path)
    if not path.exists():
        return
    try:
        with library("safetensors").safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("written_by") == WRITTEN_BY["written_by"]:
                return
    except UserError:
        raise
    except Exception:  # whatever it is, it is not ours
        pass
    raise DataError(f"cannot write {path}: expected no file there, or weights of ours, got another; give another path")
