"""Predictions as the mean over mirror images of the samples (test-time flips).

::

    mirrored box of the sample -> forward -> block of the mirrored prediction -> mirrored back, to its owner -> mean

Each rank reads the mirrored box of its block. The mean is over the outputs themselves (logits), in the same order under
every cut. With `n` axes, a batch is computed ``2**n`` times, in the memory of one batch. With sliding windows, a batch
is one sample, and each image is computed from windows of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from ..data import Batch, Dataset
from ..data.source import DatasetView, sample_shape
from ..data.windows import AXES
from ..dtensor import Blocks, Box, End, Exchange
from ..lowering.views import Value
from .session import Session, open_loader
from .sliding import dtype_of, placed, predicted

__all__ = ["Flips"]

Images = tuple[tuple[int, ...], ...]


class Mirrored(DatasetView):
    """Mirror images of samples: sample ``k * len(images) + i`` is image `i` of sample `k`. Local.

    Parameters
    ----------
    images
        Mirrored spatial axes of each image. Fields without spatial axes do not change.
    """

    def __init__(self, dataset: Dataset, images: Images) -> None:
        super().__init__(dataset)
        self._images = images

    def __len__(self) -> int:
        return len(self.dataset) * len(self._images)

    def place(self, index: int) -> str:
        return self.dataset.place(index // len(self._images))

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box of the images, as :meth:`Dataset.read` does."""
        shape = self.fields[name].shape
        part = box & Box.of_shape((len(indices), *shape))
        filled = part.slices(origin=box.start)
        if part.size == 0:
            return tuple(slice(0, 0) for _ in filled)
        for k in range(*part.ranges[0]):
            sample, image = divmod(int(indices[k]), len(self._images))
            axes = self._images[image] if len(shape) > 1 else ()
            own = sample_shape(self.dataset, name, sample)  # samples may differ in size
            ranges = [(own[a] - high, own[a] - low) if a in axes else (low, high)
                      for a, (low, high) in enumerate(part.ranges[1:])]  # fmt: skip
            at: Any = (k - box.start[0], *filled[1:])
            # A view with reversed axes: what is read into it is mirrored in `out`.
            view = out[at][tuple(slice(None, None, -1 if a in axes else 1) for a in range(len(shape)))]
            self.dataset.read(name, [sample], Box.of_ranges([(0, 1), *ranges]), view[None])
        return filled


class Flips:
    """Mean of the outputs of a session over mirror images. Collective over the session's communicator; `close` is too.

    Parameters
    ----------
    axes
        Axes along which samples are mirrored, alone and together: names of :data:`halograd.data.windows.AXES`.
    values
        Outputs of the network.

    Raises
    ------
    UserError
        If the samples lack an axis, or have components of vectors, whose sign would change.
    """

    def __init__(self, session: Session, axes: Sequence[str], values: Sequence[Value]) -> None:
        dataset, comm = session.samples.dataset, session.comm
        spatial = max(len(field.shape) - 1 for field in dataset.fields.values())
        names = AXES[len(AXES) - spatial :] if spatial else ()
        unknown = [axis for axis in axes if axis not in names]
        if unknown or len({*axes}) < len(axes):
            raise UserError(
                f"--flips: expected different axes out of {', '.join(names) or 'none'}, got {', '.join(axes)}"
            )
        if getattr(session.config.data.augment, "vectors", ()):
            raise UserError("--flips: expected data without data.augment.vectors, which change sign, got some")
        numbers = sorted(names.index(axis) for axis in axes)
        # All subsets of the axes; the first one is empty, and its image is the sample itself.
        self._images: Images = tuple(
            itertools.chain.from_iterable(itertools.combinations(numbers, n) for n in range(len(numbers) + 1))
        )
        self._values, self._stack = list(values), ExitStack()
        with comm.agreement():
            mirrored = Mirrored(dataset, self._images)
            samples = replace(session.samples, dataset=mirrored, windows=session.samples.windows.over(mirrored))
            loader, ahead = open_loader(session.config, session.executor, samples, self._stack)
        self._session = replace(session, samples=samples, loader=loader, ahead=ahead)
        # Fixed arrays, because an exchange is made once for them.
        self._sent: dict[tuple[int, int], NDArray[Any]] = {}
        self._received: dict[tuple[int, int], NDArray[Any]] = {}
        exchanges = list[dict[str, Any]]()
        for v, value in enumerate(self._values):
            (shape, boxes), dtype = placed(session, value), dtype_of(value)
            for i, axes_ in enumerate(self._images[1:], 1):
                # A block of the mirrored output, mirrored back, lies in the mirrored box: often that of another rank.
                sources = _mirrored(boxes, (1, *shape), axes_)
                self._sent[v, i] = np.empty(boxes[comm.rank].shape, dtype)
                self._received[v, i] = np.empty(boxes[comm.rank].shape, dtype)
                ends = {"source": End(sources, self._sent[v, i]), "target": End(boxes, self._received[v, i])}
                exchanges.append({**ends, "kind": "gather"})
        self._exchanges = dict(zip(self._sent, Exchange.together(comm, exchanges)))

    def predicted(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, list[NDArray[Any]]]]:
        """Yield each batch with this rank's blocks of the mean outputs, in new arrays on the host. Collective."""
        count = len(self._images)
        images = (
            replace(batch, indices=tuple(k * count + i for k in batch.indices))
            for batch in batches
            for i in range(count)
        )
        means: list[NDArray[Any]] = []
        for number, (_, blocks) in enumerate(predicted(self._session, self._values, [*images])):
            image = number % count
            if image == 0:
                # New arrays, so they may be changed.
                means = blocks
                continue
            for v, (value, block) in enumerate(zip(self._values, blocks)):
                # Axis `a` of ``(N, *spatial, C)`` is spatial axis ``a - 1``.
                back = tuple(slice(None, None, -1 if a - 1 in self._images[image] else 1) for a in range(block.ndim))
                np.copyto(self._sent[v, image], block[back if _is_grid(value) else ...])
                self._exchanges[v, image].run()
                means[v] += self._received[v, image]
            if image + 1 == count:
                # A divisor of the same dtype keeps the dtype of the means.
                yield batches[number // count], [mean / mean.dtype.type(count) for mean in means]

    def close(self) -> None:
        """Free loader and exchanges. Collective."""
        for exchange in self._exchanges.values():
            exchange.close()
        self._stack.close()


def _is_grid(value: Value) -> bool:
    return len(value.layout.shape) > 2


def _mirrored(boxes: Blocks, shape: Sequence[int], axes: Sequence[int]) -> Blocks:
    """Return the boxes mirrored along spatial axes of ``(N, *spatial, C)``; a vector per sample is not mirrored."""
    if len(shape) <= 2:  # ``(N, C)`` has no spatial axes
        return boxes
    return Blocks(
        [
            tuple((shape[a] - high, shape[a] - low) for low, high in parts) if a - 1 in axes else parts
            for a, parts in enumerate(boxes.axes)
        ],
        boxes.size,
    )
