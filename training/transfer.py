"""Arrays into and out of an executor: whole arrays of a script, batches copied ahead to a device, outputs on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError

from ..data import LoadedBatch
from ..device import Ticket, is_low
from ..dtensor import Box, End, Exchange, Layout
from ..program.views import Value
from .kernels import Memory

if TYPE_CHECKING:
    from .executor import Executor

__all__ = ["DeviceFeed", "Gather", "block_of", "check_name"]


def check_name(name: str, known: Collection[str]) -> None:
    """Refuse what is no input of the network. Local.

    Raises
    ------
    UserError
        Naming those that there are.
    """
    if name not in known:
        raise UserError(f"input: expected one of {', '.join(map(repr, known))}, got {name!r}")


def block_of(name: str, array: Any, shape: tuple[int, ...], box: Box, dtype: np.dtype) -> np.ndarray:
    """The block of a whole array that this rank stores: a view, on the host. Local.

    Parameters
    ----------
    name
        Of the input.
    array
        ``(N, *spatial, C)``, what `numpy.asarray` takes: of any layout in memory, and not modified.
    shape
        The global shape that is wanted.
    box
        Of the block.
    dtype
        Of the storage. A floating-point one rounds; an integer one must hold every value of the block exactly.

    Raises
    ------
    UserError
        Another shape, no real numbers, masked elements, or values that the storage does not hold.
    """
    if np.ma.is_masked(array):
        raise UserError(f"input {name!r}: expected an array without masked elements, got some; fill them first")
    values = np.asarray(array)
    if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
        raise UserError(f"input {name!r}: expected an array of real numbers, got one of {values.dtype}")
    if values.shape != shape:
        raise UserError(
            f"input {name!r}: expected the whole array of shape {shape}, samples first and channels last, got "
            f"{values.shape}"
        )
    block = values[box.slices()]
    with np.errstate(invalid="ignore"):
        if dtype.kind in "iu" and not np.array_equal(block.astype(dtype), block):
            raise UserError(f"input {name!r}: expected whole numbers that {dtype} holds, got others in {values.dtype}")
    return block


# -- batches of a loader, on a device --------------------------------------------------------------
# Pinned memory, copied ahead beside the step that computes:
#
#   loader's thread   wait until the pinned buffers are free | read | upload ahead -> ticket
#   main thread                                  join(ticket) | staged -> inputs, enqueued | enqueue the step ...
#   device            [uploads of the next batch]             [copies of this one][kernels ...]
class DeviceFeed:
    """Copies what a loader has read to a device, ahead of its use: the loader's `ahead`. Local.

    Parameters
    ----------
    memory
        Counts the buffers on the device, one set per slot of the loader.
    inputs
        Arrays on the device by name, inputs of the network.
    slots
        Sets of buffers of the loader.
    dtype
        Of the loader's buffers; on the device they become what the inputs are.
    """

    def __init__(self, memory: Memory, inputs: Mapping[str, Any], slots: int, dtype: np.dtype) -> None:
        self._device, self._inputs = memory.device, dict(inputs)
        self._staged = [
            {name: memory.keep(array.shape, dtype, "input ahead") for name, array in inputs.items()}
            for _ in range(slots)
        ]
        self._copies = [self._taken(slot) for slot in range(slots)]
        self._uploaded: list[Ticket | None] = [None] * slots
        # Uploads run beside the queue, which may still be zeroing their targets.
        self._used = [self._device.mark()] * slots

    def _taken(self, slot: int) -> list[Callable[[], None]]:
        """What enqueues the copies of a slot into the inputs, in their dtypes."""
        floats, others = [], []
        for name, target in self._inputs.items():
            staged = self._staged[slot][name]
            if is_low(target.dtype) or target.dtype.kind == "f":
                floats.append((target, staged))
            else:
                others.append(partial(np.copyto, target, staged, casting="unsafe"))
        return [self._device.copies(floats), *others]

    # -- the loader's thread --------------------------------------------------------------------
    def before_fill(self, slot: int) -> None:
        """Return when the buffers of a slot may be written."""
        self._device.use()
        ticket = self._uploaded[slot]
        if ticket is not None:
            ticket.wait()

    def after_fill(self, slot: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Begin to copy what was read; it goes where the batch before in this slot has been taken from."""
        pairs = [(arrays[name], staged) for name, staged in self._staged[slot].items()]
        self._uploaded[slot] = self._device.upload_ahead(pairs, self._used[slot])

    def __enter__(self) -> DeviceFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Behind the end of that thread: when no copy is under way any more, the buffers may be freed.

        Not behind an error: copies wait for kernels, and those perhaps for a peer that is gone.
        """
        for ticket in filter(None, self._uploaded if kind is None else ()):
            ticket.wait()

    # -- the main thread ------------------------------------------------------------------------
    def bring(self, item: LoadedBatch) -> None:
        """Enqueue the copies into the inputs, behind the upload. Does not wait."""
        ticket = self._uploaded[item.slot]
        assert ticket is not None
        self._device.join(ticket)
        for copy in self._copies[item.slot]:
            copy()
        self._used[item.slot] = self._device.mark()


class Gather:
    """The way of some outputs, and of gradients of probed inputs, to rank 0. Collective to make, run and close.

    Made once, it gathers after every step: to set it up takes longer than to run it.

    Parameters
    ----------
    executor
        Whose arrays they are.
    names
        Of layers whose output is kept.
    gradients
        Of probed inputs (only theirs: other gradients share memory, and are gone when `backward` returns).

    Raises
    ------
    ValueError
        If an output or a gradient is not kept. Local, the same on all ranks.
    """

    def __init__(self, executor: Executor, names: Sequence[str] = (), gradients: Sequence[str] = ()) -> None:
        values = [(_output(executor, name), False) for name in names]
        values += [(_gradient(executor, name), True) for name in gradients]
        self._device, self._is_root = executor.device, executor.comm.rank == 0
        self._targets: list[Any] = []
        wanted: list[dict[str, Any]] = []
        for value, is_gradient in values:
            layout = Layout.on_rank(value.layout.shape, 0, executor.comm.size)
            self._targets.append(self._device.empty(layout.boxes[executor.comm.rank].shape, value.dtype))
            source = executor.runner.view(value.dy if is_gradient else value.view)
            ends = {"source": End(value.layout.boxes, source), "target": End(layout.boxes, self._targets[-1])}
            wanted.append({**ends, "kind": "gather"})
        self._exchanges = Exchange.together(executor.comm, wanted)

    def run(self) -> list[np.ndarray | None]:
        """The whole arrays on rank 0, None elsewhere: first outputs, then gradients; overwritten by the next run."""
        for exchange in self._exchanges:
            exchange.run()
        return [self._device.to_host(target) if self._is_root else None for target in self._targets]

    def close(self) -> None:
        """Free the channels."""
        for exchange in self._exchanges:
            exchange.close()


def _output(executor: Executor, name: str) -> Value:
    value = executor.values[name]
    if value.kept or value.read:
        return value
    raise ValueError(
        f"gather(): the output of {name!r} is not kept; build the executor with kept=[{name!r}], it has "
        f"{sorted(n for n, v in executor.values.items() if v.kept or v.read)}"
    )


def _gradient(executor: Executor, name: str) -> Value:
    value = executor.values[name]
    if name in executor.probed and value.gradient is not None:
        return value
    raise ValueError(
        f"gather(): the gradient of {name!r} is not kept; build the executor with probed=[...] of inputs "
        f"that the loss depends on, it has {sorted(executor.probed)}"
    )
