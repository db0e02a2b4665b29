"""HDF5 chunks: the size of the cache for them, and the cost of reading by blocks.

HDF5 reads, and decompresses, a whole chunk for any element in it. Its cache keeps the chunks used last; an uncompressed
chunk that does not fit into the cache is read in part. A rank reads its box of one sample after the other, in a random
order: so it reads a chunk of many samples many times, and of a chunk that reaches beyond the box also elements that it
does not use.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import h5py
from h5py import h5d, h5p

__all__ = ["CACHE", "SLOW", "Chunks", "chunks_of", "open_cached"]

CACHE = 256 << 20
"""Cache of a rank, over all open files, for chunks that hold several samples [B]. One sample may need more."""
SLOW = 4.0
"""Ratio of numbers read to numbers used from which on reading counts as slow."""
_LEAST = 8 << 20  # cache for chunks that hold one sample each, if the sample has so many [B]
_LARGEST = 256 << 10  # size of a suggested chunk [B]
_SLOTS = (1009, 10_007, 100_003, 1_000_003)  # primes: the slot of a chunk is its number modulo one of these


@dataclass(frozen=True)
class Chunks:
    """Layout of a chunked dataset whose chunks are read as a whole. Axes are those of the file, samples first.

    Attributes
    ----------
    shape, whole : tuple of int
        Shape of a chunk, and of the dataset.
    rows : int
        Axis along which a sample is read part by part: the first spatial axis.
    itemsize : int
        Size of an element [B].
    remedy : str
        Remedy for slow reading: a format string with the fields ``{dataset}``, ``{path}`` and ``{better}`` (a better
        shape).
    """

    shape: tuple[int, ...]
    whole: tuple[int, ...]
    rows: int
    itemsize: int
    remedy: str = "write smaller chunks, `halograd data repack {path} NEW.h5 --chunk {dataset}={better}`"

    @property
    def nbytes(self) -> int:
        """Memory of all chunks [B]."""
        return math.prod(-(-n // c) * c for n, c in zip(self.whole, self.shape)) * self.itemsize

    def cache(self, share: int) -> int:
        """Return the memory for cached chunks [B].

        A sample is read by rows. If chunks hold one sample each, the cache has one row of chunks, or up to 8 MiB (the
        default of HDF5 2.0) of the sample, because some chunks are read again. Chunks of several samples are used again
        by other samples: they have `share` [B], but at least the memory of the chunks of one sample, and at most that
        of all chunks.
        """
        # Chunks at the ends of the dataset are stored whole.
        padded = [-(-n // c) * c for n, c in zip(self.whole, self.shape)]
        padded[0] = self.shape[0]  # only the chunks that hold one sample
        sample = math.prod(padded) * self.itemsize
        if self.shape[0] > 1:
            return min(self.nbytes, max(share, sample))
        padded[self.rows] = self.shape[self.rows]
        return max(math.prod(padded) * self.itemsize, min(sample, _LEAST))

    def factor(self, ranges: Sequence[tuple[int, int]], cache: int, shuffled: bool) -> float:
        """Return how many elements are read for each element used, on average.

        Parameters
        ----------
        ranges
            Part that is used of every sample, per axis after the sample axis.
        cache
            Memory for chunks [B].
        shuffled
            Whether samples are read in a random order; else the samples of a chunk follow one another.
        """
        # Elements per sample of all chunks that overlap the ranges.
        touched = math.prod((-(-high // c) - low // c) * c for (low, high), c in zip(ranges, self.shape[1:]))
        used = math.prod(high - low for low, high in ranges)
        several = min(self.shape[0], self.whole[0])  # a chunk may be longer than the dataset
        if shuffled:
            # Each of the samples of a chunk reads it again, unless it is still cached: with probability cache / chunks.
            chunks = -(-self.whole[0] // self.shape[0]) * self.shape[0] * touched * self.itemsize
            again = several * (1 - min(1.0, cache / chunks))
        else:
            again = 1.0
        return max(1.0, again) * touched / used

    def better(self, ranges: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Return a chunk shape, of at most 256 KiB, for which these ranges of every sample need few chunks."""
        shape = [1, *(high - low for low, high in ranges)]
        # Halving the longest axis keeps chunks compact, so that few overlap a box.
        while math.prod(shape) * self.itemsize > _LARGEST and max(shape) > 1:
            longest = shape.index(max(shape))
            shape[longest] = -(-shape[longest] // 2)
        return tuple(shape)


def chunks_of(dataset: h5py.Dataset, rows: int) -> Chunks | None:
    """Return the chunks of a dataset, with `rows` as in :class:`Chunks`; None if HDF5 reads parts of it without whole
    chunks. Local.
    """
    if dataset.is_virtual or dataset.chunks is None:
        return None
    chunks = Chunks(tuple(dataset.chunks), tuple(dataset.shape), min(rows, dataset.ndim - 1), dataset.dtype.itemsize)
    filtered = dataset.id.get_create_plist().get_nfilters() > 0
    # Of an unfiltered chunk that is larger than the cache, HDF5 reads only the elements that are needed.
    fits = math.prod(chunks.shape) * chunks.itemsize <= dataset.file.id.get_access_plist().get_cache()[2]
    return chunks if filtered or fits else None


def open_cached(file: h5py.File, name: str, nbytes: int, chunks: Chunks) -> h5py.Dataset:
    """Open a dataset with a cache of `nbytes` [B] for its chunks; the dataset must not be open yet. Local."""
    count = nbytes // (math.prod(chunks.shape) * chunks.itemsize)
    # HDF5 evicts a chunk whose slot another one needs, however much memory is left: ten slots per chunk make that rare.
    slots = next((prime for prime in _SLOTS if prime >= 10 * count), _SLOTS[-1])
    access = h5p.create(h5p.DATASET_ACCESS)
    access.set_chunk_cache(slots, nbytes, 0.75)  # 0.75: HDF5's default preference for evicting chunks that were read
    # h5py, too, represents bytes of a name that are no UTF-8 as surrogates.
    return h5py.Dataset(h5d.open(file.id, name.encode("utf-8", "surrogateescape"), access))
