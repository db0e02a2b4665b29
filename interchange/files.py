"""Files of other frameworks: their libraries, the check before writing, and the offsets of tensors in a file.

An ONNX file is one Protocol Buffers message. This parser reads only the lengths of its fields. The data of a tensor are
one field, ``raw_data``; its offset in the file is kept, so that weights are read one by one when needed.
"""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np

from halograd.errors import UserError

from ..data.disk import DataError, check_writable

__all__ = [
    "Buffer",
    "check_place",
    "finite",
    "library",
    "tensor_places",
]


#: Content of a file, in memory or mapped.
Buffer = bytes | mmap.mmap


def library(name: str, source: str = "'halograd[interchange]'") -> ModuleType:
    """Import the module `name`, which only the exchange with other frameworks needs; pip installs it from `source`.

    Raises
    ------
    UserError
        If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"expected the library {package}, got none ({error}); install it by: pip install {source}"
        ) from error


def finite(array: np.ndarray, what: str) -> np.ndarray:
    """Return an array of weights. Raises UserError if one of its elements is infinite or NaN."""
    bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if bad:
        raise UserError(
            f"{what}: expected finite numbers, got {bad} of {array.size} that are infinite or NaN; write the weights "
            "of an earlier step of that training"
        )
    return array


def check_place(path: Path, ours: str, is_ours: Callable[[], bool]) -> None:
    """Check early that a file can be written, and replaces only a file of this library. Local.

    Parameters
    ----------
    path
        File that will be written.
    ours
        Description of the file that may be replaced, for the message.
    is_ours
        Function that returns whether the existing file may be replaced. Any error in it means that it may not.

    Raises
    ------
    DataError
        If the path cannot be written, or another file exists there.
    """
    check_writable(path)
    if not path.exists():
        return
    with suppress(Exception):  # an unreadable file is a foreign file
        if is_ours():
            return
    raise DataError(f"cannot write {path}: expected no file there, or {ours}, got another; give another path")


#: Numbers of fields: ModelProto.graph, GraphProto.initializer, TensorProto.name and TensorProto.raw_data.
_GRAPH, _INITIALIZER, _NAME, _RAW = 7, 5, 8, 9
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5

Span = tuple[int, int]


def tensor_places(content: bytes) -> dict[str, Span]:
    """Return offset and length [B] of each initializer's raw data in a file's content, by name. Local.

    Raises
    ------
    ValueError
        If the content is not a message of Protocol Buffers.
    """
    spans: dict[str, Span] = {}
    for graph in _fields(content, (0, len(content)), _GRAPH):
        for tensor in _fields(content, graph, _INITIALIZER):
            raw = list(_fields(content, tensor, _RAW))
            for low, high in _fields(content, tensor, _NAME):
                if raw:
                    spans[content[low:high].decode()] = raw[-1][0], raw[-1][1] - raw[-1][0]
    return spans


def _fields(content: bytes, span: Span, field: int) -> Iterator[Span]:
    """Yield start and end of the length-delimited fields of a message with the number `field`."""
    at, stop = span
    while at < stop:
        key, at = _varint(content, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, at = _varint(content, at)
        elif kind in (_EIGHT, _FOUR):
            at += 8 if kind == _EIGHT else 4
        elif kind == _BYTES:
            length, at = _varint(content, at)
            if at + length > stop:
                raise ValueError(f"a field of {length} bytes at {at} reaches beyond its message, which ends at {stop}")
            if number == field:
                yield at, at + length
            at += length
        else:
            raise ValueError(f"a field of kind {kind} at {at}")


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Read a number of seven bits per byte, the lowest first. Return it and the offset after it."""
    value, shift = 0, 0
    while True:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number of more than ten bytes at {at}")
