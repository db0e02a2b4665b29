"""CUDA C++ sources as text: programs, their kernels, and the layout of the struct that each kernel takes.

The struct in the source is the only declaration of a kernel's arguments. All its members are 8 bytes long, so a NumPy
record of the same members has the same layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..kernel import ACTIVATIONS, KernelError

__all__ = [
    "ADDED",
    "CODES",
    "ELEMENTS",
    "INDEX",
    "CudaProgram",
    "dtype_name",
    "kernels_of",
    "record_of",
    "text_of",
]

FOLDER = Path(__file__).parent / "src"

#: C++ type of each dtype of data.
ELEMENTS = {"float32": "float", "float64": "double", "float16": "Half", "bfloat16": "Bfloat16"}
#: Codes of the target dtypes in ``number_at`` of common.cuh.
CODES = {
    "float32": 0,
    "float64": 1,
    "float16": 2,
    "bfloat16": 3,
    "int8": 4,
    "uint8": 5,
    "bool": 5,
    "int16": 6,
    "uint16": 7,
    "int32": 8,
    "uint32": 9,
    "int64": 10,
    "uint64": 11,
}
#: Offset type of small (False) and large (True) arrays.
INDEX = {False: "int", True: "int64"}

#: Flush float32 denormals (below 1.2e-38) to zero. CuPy adds this option to every module.
ADDED = ("-ftz=true",)

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)
_DEFINE = re.compile(r"^#define (\w+) (\d+)$", re.MULTILINE)
_STRUCT = re.compile(r"^struct (\w+Params) \{\n(.*?)^\};$", re.MULTILINE | re.DOTALL)
_MEMBER = re.compile(r"^(?:const )?(\w+)(\*?) (\w+)((?:\[\w+\])*);$")
_KERNEL = re.compile(r"^(?:BLOCK_|SHARING_)?KERNEL\((\w+), (\w+)\) \{", re.MULTILINE)
_NUMBERS = {"int64": np.int64, "uint64": np.uint64, "double": np.float64}


def dtype_name(array: Any) -> str:
    """Return the dtype name of an array or of a dtype: ``"float32"``, ``"bfloat16"``."""
    return str(np.dtype(getattr(array, "dtype", array)).name)


@dataclass(frozen=True)
class CudaProgram:
    """A source compiled for given element types.

    Parameters
    ----------
    source
        Name of a file without ``.cu``.
    dtypes
        Types for the macros ``SCALAR``, ``SECOND`` and ``THIRD``, as many as the source uses.
    large
        Whether offsets need 64 bits.
    activation
        Kind of the fused activation, or None.
    """

    source: str
    dtypes: tuple[str, ...] = ("float32",)
    large: bool = False
    activation: str | None = None

    def __post_init__(self) -> None:
        unknown = [d for d in self.dtypes if d not in ELEMENTS]
        if unknown:
            raise KernelError(
                f"{self.source}: expected a dtype out of {', '.join(ELEMENTS)}, got {unknown[0]}; convert the array"
            )

    @property
    def defines(self) -> dict[str, str]:
        """Macros that the program is compiled with."""
        # `zip` ends with the shorter of the two: a source has as many of these macros as it uses.
        names = ("SCALAR", "SECOND", "THIRD")
        # The position in ACTIVATIONS; `enum Kind` of activation.cuh has the same order (a test compares them).
        fused = {} if self.activation is None else {"ACTIVATION": str(ACTIVATIONS.index(self.activation))}
        return {**{n: ELEMENTS[d] for n, d in zip(names, self.dtypes)}, "INDEX": INDEX[self.large], **fused}

    @property
    def options(self) -> tuple[str, ...]:
        """NVRTC options, without the architecture and without :data:`ADDED`, which CuPy appends to every module.

        Fast math is not used otherwise, because NaN and rounding are part of the contract.
        """
        return ("-std=c++17", *(f"-D{name}={value}" for name, value in self.defines.items()))

    @property
    def text(self) -> str:
        """The source with its includes expanded."""
        return text_of(self.source)

    def __str__(self) -> str:
        fused = "" if self.activation is None else f" {self.activation}"
        return f"{self.source}<{', '.join(self.dtypes)}>{fused}" + (" large" if self.large else "")


@cache
def text_of(source: str) -> str:
    """Return a source with its includes expanded, each once."""
    return _expand((FOLDER / f"{source}.cu").read_text(encoding="utf-8"), set())


def _expand(text: str, seen: set[str]) -> str:
    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        # NVRTC gets one text and no path to includes, so this takes the part of `#pragma once`.
        if name in seen:
            return ""
        seen.add(name)
        included = (FOLDER / name).read_text(encoding="utf-8").replace("#pragma once\n", "")
        return _expand(included, seen)

    return _INCLUDE.sub(replace, text)


@cache
def kernels_of(source: str) -> Mapping[str, str]:
    """Return the kernels of a source: the struct that each kernel takes, by the kernel's name."""
    return dict(_KERNEL.findall(text_of(source)))


@cache
def record_of(source: str, struct: str) -> np.dtype:
    """Return the layout of a struct as a NumPy record.

    Raises
    ------
    AssertionError
        If a member's type is not 8 bytes long.
    """
    text = text_of(source)
    # Extents of members may be macros, also those of an included file.
    sizes = {name: int(value) for name, value in _DEFINE.findall(text)}
    bodies = dict(_STRUCT.findall(text))
    fields: list[tuple[Any, ...]] = []
    for line in bodies[struct].splitlines():
        member = line.split("//")[0].strip()
        if not member:
            continue
        match = _MEMBER.match(member)
        if match is None:
            raise AssertionError(f"{source}.cu: expected one member per line in {struct}, got {line!r}")
        kind, pointer, name, extents = match.groups()
        if not pointer and kind not in _NUMBERS:
            raise AssertionError(f"{source}.cu: expected members of 8 bytes in {struct}, got {line!r}")
        shape = tuple(sizes[e] if e in sizes else int(e) for e in re.findall(r"\[(\w+)\]", extents))
        # An address is stored as a number of 8 bytes: NumPy has no dtype of pointers.
        fields.append((name, np.uint64 if pointer else _NUMBERS[kind], shape))
    return np.dtype(fields)
