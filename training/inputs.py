"""Inputs of an executor: blocks of whole arrays, and batches copied ahead to a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.errors import UserError
from halograd.schema import nearest

from ..data import LoadedBatch
from ..device import Event, is_low
from ..dtensor import Box
from ..layers import Network
from .memory import Memory

__all__ = ["DeviceFeed", "block_of", "check_name", "name_of"]

_LISTED = 20  # largest number of layers and inputs that a message lists


def check_name(name: str, known: Collection[str]) -> None:
    """Check that `name` is an input of the network. Local.

    Raises
    ------
    UserError
        If `name` is unknown; the message lists the inputs.
    """
    if name not in known:
        raise UserError(f"input: expected one of {', '.join(map(repr, known))}, got {name!r}")


def name_of(network: Network, name: str) -> str:
    """Return `name` if a layer or input has it, else the name of the node of the output called `name`. Local.

    Raises
    ------
    UserError
        If nothing has this name; the message lists the known names.
    """
    nodes = list(network.names.values())
    # A layer first: an output may have the name of another layer.
    if name in nodes:
        return name
    if name in network.outputs:
        return network.names[network.outputs[name]]
    more = f", and {len(nodes) - _LISTED} more" if len(nodes) > _LISTED else ""
    raise UserError(
        f"network {network.name!r}: expected an output ({', '.join(network.outputs)}), or a layer or input "
        f"({', '.join(nodes[:_LISTED])}{more}), got {name!r}{nearest(name, [*network.outputs, *nodes])}"
    )


def block_of(name: str, array: Any, shape: tuple[int, ...], box: Box, dtype: np.dtype) -> np.ndarray:
    """Return this rank's block of a whole array: a view, on the host, in the dtype of the array. Local.

    Parameters
    ----------
    name
        Name of the input.
    array
        ``(N, *spatial, C)``, anything that `numpy.asarray` accepts, with any strides; not modified.
    shape
        The expected global shape.
    box
        Global box of the block.
    dtype
        Dtype of the storage that the block will be copied to. A floating-point dtype rounds; an integer dtype must hold
        every value of the block exactly.

    Raises
    ------
    UserError
        If the array has another shape, no real numbers, masked elements, or values that the storage cannot hold.
    """
    if np.ma.is_masked(array):
        raise UserError(f"input {name!r}: expected an array without masked elements, got some; fill them first")
    values = np.asarray(array)
    # NumPy's kind of bfloat16 (ml_dtypes) is "V", as of structures.
    if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
        raise UserError(f"input {name!r}: expected an array of real numbers, got one of {values.dtype}")
    if values.shape != shape:
        raise UserError(
            f"input {name!r}: expected the whole array of shape {shape}, samples first and channels last, got "
            f"{values.shape}"
        )
    block = values[box.slices()]
    # NaN and infinity have no integer: the comparison finds them, and the warning of NumPy is redundant.
    with np.errstate(invalid="ignore"):
        if dtype.kind in "iu" and not np.array_equal(block.astype(dtype), block):
            raise UserError(f"input {name!r}: expected whole numbers that {dtype} holds, got others in {values.dtype}")
    return block


# -- batches of a loader, on a device --------------------------------------------------------------
# Pinned memory is copied ahead of its use, during the previous step:
#
#   loader's thread   wait until the pinned buffers are free | read | upload ahead -> event
#   main thread                                  join(event) | staged -> inputs, enqueued | enqueue the step ...
#   device            [uploads of the next batch]             [copies of this one][kernels ...]
class DeviceFeed:
    """Feed that copies batches of a loader to a device ahead of their use: the loader's `ahead`. Local.

    Parameters
    ----------
    memory
        Allocator of the buffers on the device, one set per slot of the loader.
    inputs
        Inputs of the network by name: arrays on the device.
    slots
        Number of sets of buffers of the loader.
    dtype
        Dtype of the loader's buffers; the device converts them to the dtype of the inputs.
    """

    def __init__(self, memory: Memory, inputs: Mapping[str, Any], slots: int, dtype: np.dtype) -> None:
        self._device, self._inputs = memory.device, dict(inputs)
        self._staged = [
            {name: memory.keep(array.shape, dtype, "input ahead") for name, array in inputs.items()}
            for _ in range(slots)
        ]
        # Made once per slot, so that a step allocates nothing.
        self._copies = [self._taken(slot) for slot in range(slots)]
        self._uploaded: list[Event | None] = [None] * slots
        # Uploads run concurrently with the main stream, which may still be zeroing their targets.
        self._used = [self._device.mark()] * slots

    def _taken(self, slot: int) -> list[Callable[[], None]]:
        """Return calls that copy a slot to the inputs, and convert it to their dtypes. The calls only enqueue work."""
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
        """Wait until the buffers of a slot may be written."""
        # The current device is a setting of each thread.
        self._device.use()
        event = self._uploaded[slot]
        if event is not None:
            event.wait()

    def after_fill(self, slot: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Start the upload of a batch, after the copies of the previous batch in this slot."""
        pairs = [(arrays[name], staged) for name, staged in self._staged[slot].items()]
        self._uploaded[slot] = self._device.upload_ahead(pairs, self._used[slot])

    def __enter__(self) -> DeviceFeed:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Wait for copies in progress, after the end of the loader's thread, so that the buffers may be freed.

        After an error it does not wait: copies wait for kernels, which may wait for a rank that has ended.
        """
        for event in filter(None, self._uploaded if kind is None else ()):
            event.wait()

    # -- the main thread ------------------------------------------------------------------------
    def copy_to_inputs(self, item: LoadedBatch) -> None:
        """Enqueue the copies of a batch into the inputs, after its upload. Does not wait."""
        event = self._uploaded[item.slot]
        assert event is not None
        # The device waits for the upload, the host does not.
        self._device.join(event)
        for copy in self._copies[item.slot]:
            copy()
        self._used[item.slot] = self._device.mark()
