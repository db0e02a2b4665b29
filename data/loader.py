"""Prefetch: a thread reads the next batches during the current step."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..dtensor.box import Box
from .augment import Augmentation
from .disk import DataError
from .normalize import ChannelStatistics, mark_absent
from .sampler import Batch
from .source import Dataset
from .targets import TargetReduction, has_no_weight
from .windows import SampleWindows

__all__ = ["Ahead", "LoadedBatch", "Loader"]


class LoadRecorder(Protocol):
    """Recorder of reads: :meth:`span` is called after every batch, with times of ``time.perf_counter`` [s]."""

    def span(self, name: str, category: str, t0: float, t1: float) -> None: ...


class Ahead(Protocol):
    """Consumer of batches that the reading thread calls during the current step, for example to copy them to a device.
    """

    def before_fill(self, slot: int) -> None:
        """Wait until the buffers of a slot may be overwritten."""

    def after_fill(self, slot: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Process the batch in the buffers of a slot."""


@dataclass(frozen=True)
class LoadedBatch:
    """This rank's boxes of one global batch.

    Attributes
    ----------
    arrays : dict
        Arrays by the name of the network's input, with the shape of its box. Inputs are normalized, and 0 outside the
        sample (padding). Targets with a reduction are reduced to patches. Arrays that the batch leaves out
        (:attr:`Batch.only`) have any contents.
    batch : Batch
    slot : int
        Number of the set of buffers.
    """

    arrays: Mapping[str, NDArray[Any]]
    batch: Batch
    slot: int = 0


class Loader:
    """Loader of the local boxes of global batches, in order; a thread reads ahead. Local.

    Buffers are reused: a batch that :meth:`iterate` yields is overwritten when the next batch is requested.

    Parameters
    ----------
    dataset : Dataset
        Data set; only the thread reads it while a loop runs.
    boxes : dict of Box
        Boxes of the global batch ``(N, *spatial, C)`` by name: the owned box with the halo that the first layer needs.
        They may reach outside of the batch. The box of a target with a reduction counts patches.
    statistics : dict of ChannelStatistics, optional
        Statistics by name, applied to inputs within the sample.
    reductions : dict of TargetReduction, optional
        Reductions of targets from cells to patches, by name.
    dtype : float32 or float64
        Dtype of the buffers.
    windows : optional
        Windows of the samples; by default those of `augmentation`, else samples are read whole.
    augmentation : optional
        Random changes of samples, with the same windows.
    depth : int
        Number of sets of buffers: one is in use, the others are filled ahead.
    recorder : optional
        The thread calls its ``span("read", "io", t0, t1)`` for every batch.
    allocate
        Function that allocates the buffers as `numpy.zeros` does (pinned if a device copies from them).
    ahead : optional
        Consumer of the batches, called by the thread.

    Attributes
    ----------
    seconds_waited : float
        Time that the consumer has waited for data so far [s].
    absent : int
        Count of NaN and infinite values so far, where the dataset permits them, of values that the augmentation leaves
        out, and of inputs outside of their samples. They are replaced by the mean of their channel, or by 0 without
        normalization.
    """

    def __init__(
        self,
        dataset: Dataset,
        boxes: Mapping[str, Box],
        *,
        statistics: Mapping[str, ChannelStatistics] | None = None,
        reductions: Mapping[str, TargetReduction] | None = None,
        windows: SampleWindows | None = None,
        augmentation: Augmentation | None = None,
        dtype: DTypeLike = np.float32,
        depth: int = 2,
        recorder: LoadRecorder | None = None,
        allocate: Callable[[Sequence[int], Any], NDArray[Any]] = np.zeros,
        ahead: Ahead | None = None,
    ) -> None:
        if depth < 2:
            raise DataError(f"depth: expected 2 or more sets of buffers, got {depth}")
        own = SampleWindows(dataset) if augmentation is None else augmentation.windows
        self._windows, reductions = windows or own, reductions or {}
        # Only for its check: patches must divide the window.
        for name, reduction in reductions.items():
            reduction.coarse_shape(self._windows.fields[name].shape)
        self._dataset, self._statistics, self._augmentation = dataset, statistics or {}, augmentation
        self._reductions, self._recorder, self._ahead = reductions, recorder, ahead
        self._boxes = dict(boxes)
        self._slots = [{name: allocate(box.shape, dtype) for name, box in boxes.items()} for _ in range(depth)]
        self._cells = {name: np.zeros(r.fine_box(boxes[name]).shape, dtype) for name, r in reductions.items()}
        # Boxes with the margin of a filter, by name; made at the first augmented batch.
        self._wide: dict[str, NDArray[Any]] = {}
        self._running: _Worker | None = None
        self.seconds_waited, self.absent = 0.0, 0

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def iterate(self, batches: Iterable[Batch | Sequence[int]]) -> Generator[LoadedBatch, None, None]:
        """Load these batches, and yield them in order; the thread takes them from the iterable one by one.

        An error in the thread is raised when its batch is due. The thread ends when the loop ends, breaks or fails.
        Only one loop may run at a time.
        """
        if self._running is not None:
            raise DataError("this loader is already in a loop; end that loop first, or make another loader")
        worker = self._running = _Worker(self, batches)
        worker.thread.start()
        try:
            while True:
                t0 = time.perf_counter()
                item = worker.ready.get()
                self.seconds_waited += time.perf_counter() - t0
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                slot, batch = item
                yield LoadedBatch(self._slots[slot], batch, slot)
                # The consumer has requested the next batch, so this one may be overwritten.
                worker.free.put(slot)
        finally:
            # Not close(): when an abandoned loop is garbage-collected, another loop may be running.
            worker.stop()
            if self._running is worker:
                self._running = None

    def close(self) -> None:
        """Stop the thread, if it runs, and wait for it. `close` may be called twice. Leaves the dataset open."""
        worker, self._running = self._running, None
        if worker is not None:
            worker.stop()

    def fill(self, batch: Batch, slot: int) -> None:
        """Read `batch` into the set of buffers `slot`, in the calling thread."""
        if self._ahead is not None:
            self._ahead.before_fill(slot)
        t0 = time.perf_counter()
        arrays = self._slots[slot]
        for name, array in arrays.items():
            if batch.only is None or name in batch.only:
                self._fill(name, batch, array)
        if self._ahead is not None:
            self._ahead.after_fill(slot, arrays)
        if self._recorder is not None:
            self._recorder.span("read", "io", t0, time.perf_counter())

    def _fill(self, name: str, batch: Batch, array: NDArray[Any]) -> None:
        box, reduction = self._boxes[name], self._reductions.get(name)
        if reduction is not None:
            cells = reduction.fine_box(box)
            self._read(name, batch, cells, self._cells[name])
            reduction.apply(self._cells[name], array, self._absent(name, batch, cells))
            if name in self._statistics:
                self._statistics[name].apply(array, max(0, box.start[-1]))
            return
        margin = self._augmentation.margin(name) if self._augmentation is not None and batch.augmented else 0
        if not margin:
            self._fill_box(name, batch, box, array)
            return
        around = [0, *[margin] * (box.ndim - 2), 0]  # none along samples and channels
        wide = Box.of_ranges([(low - m, high + m) for (low, high), m in zip(box.ranges, around)])
        if name not in self._wide:
            self._wide[name] = np.zeros(wide.shape, array.dtype)
        self._fill_box(name, batch, wide, self._wide[name])
        array[...] = self._wide[name][box.slices(origin=wide.start)]

    def _fill_box(self, name: str, batch: Batch, box: Box, array: NDArray[Any]) -> None:
        """Read, normalize and augment a box of a field that is not reduced, to `array`."""
        # Elements outside of the batch keep the zeros of the allocation: they are padding.
        part = array[self._read(name, batch, box, array)]
        gaps = self._windows.pads(name) and not self._dataset.fields[name].is_target
        gaps |= self._augmentation is not None and batch.augmented and self._augmentation.leaves_gaps(name)
        # Before normalization, whose rules may clip an infinite number to a finite one.
        absent = mark_absent(part) if gaps or name in self._dataset.lenient else None
        if name in self._statistics:
            self._statistics[name].apply(part, max(0, box.start[-1]))
        # After normalization, where 0 is the mean of the channel.
        if absent is not None:
            part[absent] = 0
            self.absent += int(np.count_nonzero(absent))
        if self._augmentation is not None:
            self._augmentation.alter(name, batch, box, part)

    def _absent(self, name: str, batch: Batch, box: Box) -> NDArray[np.bool_] | None:
        """Return which elements of a box have the weight 0; None without weights."""
        weights = getattr(self._dataset, "weighted", {}).get(name)
        if not weights or not box.size:
            return None
        fields = self._windows.fields
        return has_no_weight(lambda other, part, out: self._read(other, batch, part, out), fields, name, weights, box)

    def _read(self, name: str, batch: Batch, box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        reader = self._windows.read_batch if self._augmentation is None else self._augmentation.read
        return reader(name, batch, box, out)


class _Worker:
    """The thread of one loop and its two queues of slots: `free` to fill, `ready` to use."""

    def __init__(self, loader: Loader, batches: Iterable[Batch | Sequence[int]]) -> None:
        self._loader, self._batches = loader, batches
        self._stopped = threading.Event()
        self.free: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.ready: queue.SimpleQueue[tuple[int, Batch] | BaseException | None] = queue.SimpleQueue()
        for slot in range(len(loader._slots)):
            self.free.put(slot)
        # A daemon, so that a consumer that dies without closing does not keep the process alive.
        self.thread = threading.Thread(target=self._run, name="halograd-prefetch", daemon=True)

    def stop(self) -> None:
        self._stopped.set()
        # Wakes the thread if it waits for a free slot.
        self.free.put(None)
        if self.thread.ident is not None:
            self.thread.join()
        # Ends a loop that continues after close(), which would wait for ever.
        self.ready.put(None)

    def _run(self) -> None:
        try:
            for position, request in enumerate(self._batches):
                batch = _as_batch(request, position)
                slot = self.free.get()
                # Slots that were freed before stop() come out of the queue before its None.
                if slot is None or self._stopped.is_set():
                    return
                self._loader.fill(batch, slot)
                self.ready.put((slot, batch))
            self.ready.put(None)
        except BaseException as error:  # raised again in the consumer
            self.ready.put(error)


def _as_batch(batch: Batch | Sequence[int], position: int) -> Batch:
    if isinstance(batch, Batch):
        return batch
    indices = tuple(int(i) for i in batch)
    return Batch(indices, len(indices), 0, position)
