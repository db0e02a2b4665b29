"""Settings of layers and networks as plain data. Layers that compute the same have equal settings in every process."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from numbers import Number
from typing import Any

import numpy as np

from .layer import Layer, Shape
from .network import Network

__all__ = ["difference", "fingerprint", "settings_of"]

#: Attributes that are not settings: an activation after it is its own layer, checkpoints hold parameters, and a resumed
#: run may freeze others.
_NAMES = ("name", "followed_by", "frozen", "given_values")
_READS, _SETTINGS = ": reads ", ": settings "
#: Shape of an activation, after the layer's name and kind.
_SHAPE = re.compile(r"(?<=: )(?!parameter |state )(\w+) [\dx]+$")


def settings_of(layer: Layer, shape: Shape, private: bool = True) -> dict[str, Any]:
    """Return the settings of a layer as JSON data, by name, for a first input of this sample shape.

    Attributes whose names begin with ``_`` are included only if `private` is true.
    """
    settings = _own(layer, private)
    if layer.stencil is not None:
        # "same" and the numbers that it stands for are equal settings.
        settings["stencil"] = [[w.kernel, w.stride, w.pad_lo, w.pad_hi, w.dilation] for w in layer.windows(shape)]
    return settings


def _own(layer: Layer, private: bool) -> dict[str, Any]:
    settings = {key: value for key, value in vars(layer).items() if key not in _NAMES}
    return {key: _plain(value, private) for key, value in settings.items() if private or not key.startswith("_")}


def _plain(value: Any, private: bool) -> Any:
    """Return a setting as JSON data, independent of addresses and of the order of sets or dictionaries."""
    inside = partial(_plain, private=private)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        # A checksum, because arrays may be large.
        return [array.dtype.name, list(array.shape), zlib.crc32(array.tobytes())]
    if isinstance(value, Layer):  # within another layer
        return [value.kind, _own(value, private)]
    if isinstance(value, Mapping):
        return sorted([str(k), inside(v)] for k, v in value.items())
    if isinstance(value, Sequence):
        return [inside(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(inside(v)) for v in value)
    if isinstance(value, Number):  # a fraction
        return str(value)
    # A function or class by its own name, any other object by that of its class.
    named = type(value) if not callable(value) or is_dataclass(value) else value
    inner = {k: inside(v) for k, v in vars(value).items()} if is_dataclass(value) else {}
    return [getattr(named, "__qualname__", type(value).__qualname__), inner]


def fingerprint(network: Network) -> list[str]:
    """Return lines of text that are equal for equal networks: layers in order with kind, shape, inputs, settings, and
    arrays.

    Attributes of a layer that begin with ``_`` are not settings: a layer of the user may store anything in them. A copy
    for samples of another size is equal to its origin.
    """
    network = network.origin or network  # also for samples of another size, checkpoints fit
    lines = [f"{name}: {kind} {_by(shape)}" for name, kind, shape, *_ in network.rows()]
    for name, node in network.layers.items():
        settings = json.dumps(settings_of(node.layer, node.inputs[0].shape, private=False), sort_keys=True)
        lines += [f"{name}: reads {', '.join(network.names[n] for n in node.inputs)}", f"{name}: settings {settings}"]
    lines += [f"{name}: parameter {_by(p.shape)}" for name, p in network.parameters().items()]
    return lines + [f"{name}: state {_by(p.shape)}" for name, p in network.state().items()]


def difference(there: Sequence[str], here: Sequence[str], extents: bool = True) -> tuple[str, str] | None:
    """Return the first line or setting in which two fingerprints differ, that of `here` and that of `there`; None if
    they are equal.

    Only settings that both networks have are compared: later versions of a layer have more. Without `extents`, neither
    the shapes of activations nor the padding of windows, which may follow from the shapes, are compared: samples may
    have another size.
    """
    if not extents:
        there, here = ([_SHAPE.sub(r"\1", line) for line in lines] for lines in (there, here))
    # The fingerprint of an older version may have no lines on inputs: then they are not compared.
    known = [line for line in here if _SETTINGS not in line and (_READS not in line or any(_READS in a for a in there))]
    differing = [line for line in there if _SETTINGS not in line]
    for own, other in itertools.zip_longest(known, differing, fillvalue="nothing"):
        if own != other:
            return own, other
    before, now = (dict(line.split(_SETTINGS, 1) for line in lines if _SETTINGS in line) for lines in (there, here))
    for name, text in now.items():
        own, other = json.loads(text), json.loads(before.get(name, "{}"))
        for windows in (settings.get("stencil", ()) for settings in (own, other) if not extents):
            for window in windows:
                del window[2:4]  # the padding
        differs = _differs(own, other, "")
        if differs is not None:
            return f"{name}: {differs[0]}", f"{name}: {differs[1]}"
    return None


def _differs(own: Any, other: Any, at: str) -> tuple[str, str] | None:
    """Return the innermost settings that differ, with their location; None if all are equal."""
    if isinstance(own, dict) and isinstance(other, dict):
        pairs = [(f"{at}.{key}".lstrip("."), own[key], other[key]) for key in sorted(set(own) & set(other))]
    elif isinstance(own, list) and isinstance(other, list) and len(own) == len(other):
        pairs = [(f"{at}[{i}]", *both) for i, both in enumerate(zip(own, other))]
    elif json.dumps(own) == json.dumps(other):  # NaN is equal to NaN
        return None
    else:
        return f"{at} {own}", f"{at} {other}"
    return next((differing for key, a, b in pairs if (differing := _differs(a, b, key)) is not None), None)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
