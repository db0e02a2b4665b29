"""What a layer was made with, as plain data: equal for layers that compute the same, in every process."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from numbers import Number
from typing import Any

import numpy as np

from .layer import Layer, Shape

__all__ = ["settings_of"]

_NAMES = ("name",)


def settings_of(layer: Layer, shape: Shape) -> dict[str, Any]:
    """Settings of a layer by name, without its own, beside a first input of this sample shape; of what JSON has."""
    settings = _own(layer)
    if layer.stencil is not None:
        # "same" and the numbers it stands for are one and the same.
        settings["stencil"] = [[w.kernel, w.stride, w.pad_lo, w.pad_hi, w.dilation] for w in layer.windows(shape)]
    return settings


def _own(layer: Layer) -> dict[str, Any]:
    return {key: _plain(value) for key, value in vars(layer).items() if key not in _NAMES}


def _plain(value: Any) -> Any:
    """A setting as JSON has it: no addresses, no order of sets or dictionaries."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return [array.dtype.name, list(array.shape), zlib.crc32(array.tobytes())]
    if isinstance(value, Layer):  # within another one
        return [value.kind, _own(value)]
    if isinstance(value, Mapping):
        return sorted([str(k), _plain(v)] for k, v in value.items())
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(v)) for v in value)
    if isinstance(value, Number):  # a fraction
        return str(value)
    named = type(value) if not callable(value) or is_dataclass(value) else value
    inner = {k: _plain(v) for k, v in vars(value).items()} if is_dataclass(value) else {}
    return [getattr(named, "__qualname__", type(value).__qualname__), inner]
