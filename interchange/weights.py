"""Weights alone, in safetensors files, with the names and the order of axes that torch has.

============================  ==========================  ================================
parameter of a layer          ours                        torch's
============================  ==========================  ================================
``w`` of a convolution        ``(K, *kernel, C / g)``     ``weight (K, C / g, *kernel)``
``w``, transposed             ``(C, *kernel, K / g)``     ``weight (C, K / g, *kernel)``
``w`` of a dense layer        ``(units, F)``              ``weight (units, F)``
``b``, ``gamma``, ``beta``    ``(C,)``                    ``bias``, ``weight``, ``bias``
``mean``, ``var``             ``(C,)``                    ``running_mean``, ``running_var``
============================  ==========================  ================================

Features of a dense layer behind a Flatten are ``(*spatial, C)`` here and ``(C, *spatial)`` there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from halograd.errors import UserError

from ..data import DataError
from ..data.atomic import atomic_path, check_writable
from ..layers import (
    ELU,
    GELU,
    BatchNorm,
    Clamp,
    Dropout,
    Flatten,
    HardSigmoid,
    HardSwish,
    LeakyReLU,
    Network,
    Node,
    ReLU,
    Sigmoid,
    SiLU,
    Tanh,
)
from .library import library
from .names import module_names

__all__ = ["Arrangement", "WeightsFile", "arrangements", "check_weights_place", "load_weights", "save_weights"]

#: Says in the metadata of a file what has written it.
WRITTEN_BY = {"written_by": "halograd", "format": "pt"}
_KEYS = {
    **{"w": "weight", "b": "bias", "gamma": "weight", "beta": "bias"},
    **{"mean": "running_mean", "var": "running_var"},
}
#: Behind these a flattened value is still one, element by element.
_POINTWISE = (ReLU, LeakyReLU, ELU, GELU, SiLU, Sigmoid, Tanh, HardSwish, HardSigmoid, Clamp, Dropout, BatchNorm)


@dataclass(frozen=True)
class Arrangement:
    """One parameter or state, as torch has it.

    Attributes
    ----------
    names
        In torch: the first is written, any of them is read.
    shape, torch_shape
        Of our array, and of torch's.
    flattened
        Extents ``(*spatial, C)`` of which the last axis is the product, in our order; empty for none.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    flattened: tuple[int, ...] = ()

    @property
    def torch_shape(self) -> tuple[int, ...]:
        return self.shape if len(self.shape) < 3 else (self.shape[0], self.shape[-1], *self.shape[1:-1])

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """Our whole array in torch's order."""
        if self.flattened:
            apart = array.reshape(*array.shape[:-1], *self.flattened)
            array = np.moveaxis(apart, -1, array.ndim - 1).reshape(array.shape)
        return np.ascontiguousarray(array if array.ndim < 3 else np.moveaxis(array, -1, 1))

    def from_torch(self, array: np.ndarray) -> np.ndarray:
        """Torch's array in our order."""
        if self.flattened:
            *spatial, channels = self.flattened
            apart = array.reshape(*array.shape[:-1], channels, *spatial)
            array = np.moveaxis(apart, array.ndim - 1, -1).reshape(array.shape)
        return np.ascontiguousarray(array if array.ndim < 3 else np.moveaxis(array, 1, -1))


def arrangements(network: Network) -> dict[str, Arrangement]:
    """How torch has the parameters and states of a network, by our names. Pure arithmetic."""
    modules, found = module_names(network), {}
    for name, spec in {**network.parameters(), **network.state()}.items():
        layer, _, key = name.rpartition("/")
        torch_key = _KEYS.get(key, key)
        names = tuple(dict.fromkeys(f"{module}.{torch_key}" for module in modules(layer)))
        flattened = _flattened(network.layers[layer]) if key not in ("b",) else ()
        fits = bool(flattened) and math.prod(flattened) == spec.shape[-1] and len(spec.shape) < 3
        found[name] = Arrangement(names, spec.shape, flattened if fits else ())
    return found


def _flattened(node: Node) -> tuple[int, ...]:
    """The shape of what is flattened before a layer; empty if nothing is, or if its order does not matter."""
    (before, *_) = node.inputs or (node,)
    while type(before.layer) in _POINTWISE and len(before.shape) == 1 and len(before.inputs) == 1:
        before = before.inputs[0]
    shape = before.inputs[0].shape if isinstance(before.layer, Flatten) else ()
    return shape if math.prod(shape[:-1]) > 1 else ()


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
        The library is not there, or parameters are missing.
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
        wanted = arrangements(network)
        self._wanted = {name: one for name, one in wanted.items() if name.rpartition("/")[0] not in fresh}
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
