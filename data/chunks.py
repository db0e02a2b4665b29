"""Compressed chunks of an HDF5 dataset: how many of them are kept in memory, and what reading by blocks costs.

HDF5 decompresses a whole chunk for any number in it. The chunks that were used last stay in a cache; one that does not
fit is decompressed again for every read. A rank reads its box of one sample after the other, in a random order: a chunk
of many samples, or of more than the box, is decompressed many times over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import h5py
from h5py import h5d, h5p

__all__ = ["CACHE", "SLOW", "Chunks", "chunks_of", "open_cached"]

CACHE = 256 << 20
"""Memory of a rank for decompressed chunks of all open files [B]. A single dataset may need more, for one sample."""
SLOW = 4.0
"""Decompressed numbers per number that is used, from which on reading is called slow."""
_LARGEST = 256 << 10  # of a chunk that is suggested [B]
_SLOTS = (1009, 10_007, 100_003, 1_000_003)  # primes: places of chunks follow from their numbers modulo one of these


@dataclass(frozen=True)
class Chunks:
    """Compressed chunks of a dataset. Axes are those of the file, samples first.

    Attributes
    ----------
    shape, whole : tuple of int
        Shape of a chunk, and of the dataset.
    rows : int
        Axis along which a sample is read part by part: the first one of space.
    itemsize : int
        Size of an element [B].
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    rows: int
    itemsize: int

    def cache(self, share: int) -> int:
        """Return the memory to keep decompressed chunks in [B]: `share`, and at least what a sample needs at a time.

        Samples are read one by one, and each by rows. A chunk of several samples is kept until the next sample.
        """
        padded = [-(-n // c) * c for n, c in zip(self.whole, self.shape)]
        total = math.prod(padded) * self.itemsize
        padded[0] = self.shape[0]
        if self.shape[0] == 1 and len(padded) > 1:
            padded[self.rows] = self.shape[self.rows]
        return min(total, max(share, math.prod(padded) * self.itemsize))

    def factor(self, ranges: Sequence[tuple[int, int]], cache: int, shuffled: bool) -> float:
        """Return how many numbers are decompressed for each that is read, on average.

        Parameters
        ----------
        ranges
            What is read of every sample, on the axes behind the samples.
        cache
            Memory for chunks [B].
        shuffled
            Whether samples are read in a random order; otherwise those of a chunk follow one another.
        """
        touched = math.prod((-(-high // c) - low // c) * c for (low, high), c in zip(ranges, self.shape[1:]))
        used = math.prod(high - low for low, high in ranges)
        several = min(self.shape[0], self.whole[0])
        if shuffled:
            chunks = -(-self.whole[0] // self.shape[0]) * self.shape[0] * touched * self.itemsize
            again = several * (1 - min(1.0, cache / chunks))
        else:
            again = 1.0
        return max(1.0, again) * touched / used

    def better(self, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return the shape of chunks of which reading these ranges of every sample needs few."""
        shape = [1, *(high - low for low, high in ranges)]
        while math.prod(shape) * self.itemsize > _LARGEST and max(shape) > 1:
            longest = shape.index(max(shape))
            shape[longest] = -(-shape[longest] // 2)
        return tuple(shape)


def chunks_of(dataset: h5py.Dataset, rows: int) -> Chunks | None:
    """Return the chunks of a dataset; None if it is not compressed, so that HDF5 reads any part by itself. Local."""
    if dataset.is_virtual or dataset.chunks is None or dataset.id.get_create_plist().get_nfilters() == 0:
        return None
    return Chunks(tuple(dataset.chunks), tuple(dataset.shape), rows, dataset.dtype.itemsize)


def open_cached(file: h5py.File, name: str, nbytes: int, chunks: Chunks) -> h5py.Dataset:
    """Open a dataset with this memory for its decompressed chunks; it must not be open yet. Local."""
    count = nbytes // (math.prod(chunks.shape) * chunks.itemsize)
    slots = next((prime for prime in _SLOTS if prime >= 10 * count), _SLOTS[-1])
    access = h5p.create(h5p.DATASET_ACCESS)
    access.set_chunk_cache(slots, nbytes, 0.75)
    return h5py.Dataset(h5d.open(file.id, name.encode("utf-8", "surrogateescape"), access))
