"""Codecs: how messages encode the data of a sum. Pure arithmetic on host arrays.

A codec is one class: its arithmetic, and the properties that links, schemes, traffic counters, and the memory and cost
models read (dtype, bytes in messages, whether it is lossy, passes over memory). No other file compares names of codecs.
A class in a file of the user is named by its location: ``reduction.payload = "half.py:Half"``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from halograd.registry import Registry
from halograd.schema import STRICT

__all__ = ["CODECS", "PIECE", "UNCHANGED", "BFloat16", "Codec", "Unchanged"]

#: Elements that are encoded or decoded in one call, at most: three arrays of this length stay in the cache.
PIECE = 1 << 14
# Multiplied by this, a float32 splits into its 8 leading bits and the rest (Veltkamp, see `BFloat16`).
_SPLIT = np.float32((1 << 16) + 1)


@dataclass(frozen=True)
class Codec(ABC):
    """Format of elements in messages. Local; an object has no state, because several threads use it.

    A subclass is a frozen dataclass, whose fields are its settings (``"half.py:Half:scale=1024"``), or a class without
    settings. Summands are encoded before they are sent to the rank that adds them up, and decoded there; that rank
    encodes the sum for all ranks. All ranks decode the same bytes, so all get the same bits.

    Attributes
    ----------
    name
        Name in the registry; a class in a file of a user needs none.
    dtype
        Dtype of the arrays that the codec encodes; ``""``: any dtype.
    wire
        Dtype of an element in messages; not used if `identity`.
    lossy
        Whether decoded values differ from those that were encoded. The difference can then be added to the next
        contribution (`reduction.error_feedback`).
    scratch
        Number of scratch arrays, of the length and dtype of `values`, that `encode` needs.
    identity
        Whether messages hold the elements unchanged: links then skip encoding and decoding, and device transports sum
        without the host. There is one such codec, :data:`UNCHANGED`; sums with any other codec are made by the host.
    """

    __pydantic_config__ = STRICT

    name: ClassVar[str] = ""
    dtype: ClassVar[str] = "float32"
    wire: ClassVar[str]
    lossy: ClassVar[bool] = True
    scratch: ClassVar[int] = 0
    identity: ClassVar[bool] = False

    @abstractmethod
    def encode(self, values: np.ndarray, wire: np.ndarray, work: Sequence[np.ndarray]) -> None:
        """Encode `values`, ``(n,)`` of `dtype`, into `wire`, ``(n,)`` of the dtype `wire`.

        `n` is at most `PIECE`; the code of an element must not depend on the others, because links cut arrays anywhere.
        `values` is not modified. `work` has at least `scratch` arrays ``(n,)`` of `dtype`, which may be overwritten.
        """

    @abstractmethod
    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Decode `wire`, ``(n,)``, into `out`, ``(n,)`` of `dtype`."""

    def encode_with(self, error: np.ndarray, values: np.ndarray, wire: np.ndarray, work: Sequence[np.ndarray]) -> None:
        """Compute ``wire = encoded(values + error)``, and set `error`, ``(n,)`` of `dtype`, to the encoding error.

        Override it where the error is known without decoding; `work` has at least one array.
        """
        # The value to encode is v = values + error; the new error is v - decoded(encoded(v)).
        np.add(values, error, out=error)
        self.encode(error, wire, work)
        self.decode(wire, work[0])
        np.subtract(error, work[0], out=error)

    def takes(self, dtype: str) -> bool:
        """Return whether arrays of this dtype can be encoded."""
        return self.dtype in ("", dtype)

    def payload(self, nbytes: int) -> int:
        """Return the size that a contribution of `nbytes` [B] has on the wire [B]."""
        return nbytes * np.dtype(self.wire).itemsize // np.dtype(self.dtype).itemsize

    def held(self, itemsize: int) -> int:
        """Return the scratch memory with which a sum encodes, adds up and decodes its elements, piece by piece [B].

        `itemsize` is the size of an element before encoding [B].
        """
        return self.arrays * PIECE * itemsize

    @property
    def arrays(self) -> int:
        """Number of scratch arrays of `PIECE` elements that a sum needs: those of `encode`, at least one, plus one."""
        return max(1, self.scratch) + 1

    def encoding(self, feedback: bool) -> float:
        """Return the memory traffic of encoding, in reads or writes of the whole contribution.

        With error feedback (`feedback`) the error is read and written, too.
        """
        # The values are read, the encoded ones written.
        return 1 + self._encoded_share + 2 * feedback

    @property
    def decoding(self) -> float:
        """Memory traffic of decoding, in reads or writes of the whole contribution."""
        return 1 + self._encoded_share

    @property
    def _encoded_share(self) -> float:
        return np.dtype(self.wire).itemsize / np.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return vars(type(self)).get("name") or repr(self)  # not the name of the class that it is derived from


#: Codecs by name, for `Scheme.payload` and `Communicator.reduction`.
CODECS: Registry[Codec] = Registry("codec", Codec, key="reduction.payload")


@CODECS.register
@dataclass(frozen=True)
class Unchanged(Codec):
    """Codec that leaves elements unchanged. Elements may have any dtype."""

    name: ClassVar[str] = "float32"
    dtype: ClassVar[str] = ""
    lossy: ClassVar[bool] = False
    identity: ClassVar[bool] = True

    def encode(self, values: np.ndarray, wire: np.ndarray, work: Sequence[np.ndarray]) -> None:
        np.copyto(wire, values)

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, wire)

    def payload(self, nbytes: int) -> int:
        return nbytes

    def encoding(self, feedback: bool) -> float:
        return 0.0

    @property
    def decoding(self) -> float:
        return 0.0


UNCHANGED = Unchanged()


@CODECS.register
@dataclass(frozen=True)
class BFloat16(Codec):
    """Codec that rounds float32 to the nearest bfloat16, which has half the bytes.

    A bfloat16 is the upper half of a float32: 8 significant bits. `encode` splits a number ``v`` by Veltkamp's method:
    ``c = (2**16 + 1) * v; high = c - (c - v)`` holds its 8 leading bits, rounded to nearest. NaN stays NaN; infinity
    and magnitudes of about 2**112 or more become NaN: training that produces them has diverged.

    References
    ----------
    Dekker 1971, *A floating-point technique for extending the available precision*, Section 5.
    """

    name: ClassVar[str] = "bfloat16"
    wire: ClassVar[str] = "uint16"
    scratch: ClassVar[int] = 2

    def encode(self, values: np.ndarray, wire: np.ndarray, work: Sequence[np.ndarray]) -> None:
        self._split(values, work)
        self._upper_half(work[0], wire)

    def encode_with(self, error: np.ndarray, values: np.ndarray, wire: np.ndarray, work: Sequence[np.ndarray]) -> None:
        np.add(values, error, out=error)
        self._split(error, work)
        # Before `_upper_half`, which overwrites the leading bits.
        np.subtract(error, work[0], out=error)
        self._upper_half(work[0], wire)

    @staticmethod
    def _split(values: np.ndarray, work: Sequence[np.ndarray]) -> None:
        """Write the leading bits of the values into ``work[0]``."""
        high, rest = work[0], work[1]
        # c in `high`, then c - v in `rest`, then high = c - (c - v).
        np.multiply(values, _SPLIT, out=high)
        np.subtract(high, values, out=rest)
        np.subtract(high, rest, out=high)

    @staticmethod
    def _upper_half(high: np.ndarray, wire: np.ndarray) -> None:
        bits = high.view(np.uint32)
        # The lower half is zero already: a float32 with 8 significant bits has 16 zeros at its end.
        np.right_shift(bits, 16, out=bits)
        np.copyto(wire, bits, casting="unsafe")

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        bits = out.view(np.uint32)
        # The 16 bits, widened to 32, are moved to the upper half; the lower half becomes zero.
        np.copyto(bits, wire)
        np.left_shift(bits, 16, out=bits)
