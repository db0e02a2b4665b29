"""Where the weights lie in an ONNX file: they are read from there one by one, when they are needed.

An ONNX file is one Protocol Buffers message. Of it only the lengths of fields are looked at; the numbers of a tensor
are one field, ``raw_data``, whose place in the file is remembered.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

__all__ = ["tensor_places"]

#: Numbers of fields: ModelProto.graph, GraphProto.initializer, TensorProto.name and TensorProto.raw_data.
_GRAPH, _INITIALIZER, _NAME, _RAW = 7, 5, 8, 9
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5

Span = tuple[int, int]


def tensor_places(path: Path) -> dict[str, Span]:
    """Offset and length [B] of the numbers of the initializers that lie in the file as they are, by name. Local.

    Raises
    ------
    ValueError
        If the file is not a message of Protocol Buffers.
    """
    found: dict[str, Span] = {}
    if not path.stat().st_size:
        return found
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for graph in _fields(content, (0, len(content)), _GRAPH):
            for tensor in _fields(content, graph, _INITIALIZER):
                raw = list(_fields(content, tensor, _RAW))
                for low, high in _fields(content, tensor, _NAME):
                    if raw:
                        found[content[low:high].decode()] = raw[-1][0], raw[-1][1] - raw[-1][0]
    return found


def _fields(content: mmap.mmap, span: Span, wanted: int) -> Iterator[Span]:
    """Begin and end of the fields of a message that have this number and a length."""
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
            if number == wanted:
                yield at, at + length
            at += length
        else:
            raise ValueError(f"a field of kind {kind} at {at}")


def _varint(content: mmap.mmap, at: int) -> tuple[int, int]:
    """A number of seven bits per byte, the lowest first; and where the next thing begins."""
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
