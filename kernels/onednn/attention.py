"""Operations on tiles of attention in oneDNN.

The tiles of an attention have few shapes: a primitive is made at the first operation of a shape, and from then on runs
on the memory of each operation. Operations without a fast primitive are those of NumPy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..numpy.attention import TileOperations
from . import abi as c
from .abi import Argument, DnnlError
from .program import OnednnEngine, PrimitiveList, ReferenceOnly

__all__ = ["OnednnTileOperations"]

_SUM = ("sum", 1.0, 0, 0)
_EXP = ("eltwise", c.EXP, 0.0, 0.0)


class OnednnTileOperations(TileOperations):
    """Operations on tiles by oneDNN. One thread at a time calls them, and each runs on this thread alone."""

    #: Largest scratchpad of a product: oneDNN copies one of its matrices into it, in a format of its own.
    scratch_bytes = 1 << 16

    def __init__(self, engine: OnednnEngine) -> None:
        self._engine, self._abi = engine, engine.abi
        self._list = PrimitiveList(engine)
        # Shares of a pass run at the same time, each with a stream of its own.
        self._stream = self._list.own("stream", engine.abi.cpu_stream(engine.handle))
        # By operation, shapes and strides; None: oneDNN has no fast primitive.
        self._primitives: dict[Any, Callable[..., None] | None] = {}
        self._scratch: Any = None

    def bind(self, scratch: Any) -> None:
        self._scratch = scratch

    def begin(self) -> None:
        # oneDNN's products choose their threads when they run.
        self._abi.set_threads(1)

    def end(self) -> None:
        self._abi.set_threads(self._engine.threads)

    def close(self) -> None:
        self._primitives.clear()
        self._list.close()

    def copy(self, source: Any, target: Any) -> None:
        if not self._reorder(source, target):
            super().copy(source, target)

    def add(self, source: Any, target: Any) -> None:
        if not self._reorder(source, target, _SUM):
            super().add(source, target)

    def product(self, left: Any, right: Any, out: Any) -> None:
        if not self._multiply(left, right, out):
            super().product(left, right, out)

    def add_product(self, left: Any, right: Any, out: Any, spare: Any) -> None:
        if not self._multiply(left, right, out, _SUM):
            super().add_product(left, right, out, spare)

    def exponentials(self, scores: Any, subtracted: Any) -> None:
        if not self._binary(scores, subtracted, _EXP):
            super().exponentials(scores, subtracted)

    def softmax_gradient(self, gradient: Any, subtracted: Any, p: Any) -> None:
        if not self._binary(gradient, subtracted, ("binary", c.BINARY_MULTIPLY), p):
            super().softmax_gradient(gradient, subtracted, p)

    def _reorder(self, source: Any, target: Any, *operations: tuple[Any, ...]) -> bool:
        """Copy between views, or with `operations` add, by generated code: NumPy calls a loop for each row of channels,
        which are few. Return False if oneDNN cannot.
        """

        def make() -> Callable[..., None]:
            descs = []
            # Axes of extent 1 may have any stride, which oneDNN refuses if it interleaves with others.
            kept = [i for i, n in enumerate(source.shape) if n != 1] or [0]
            for array in (source, target):
                shape, strides = ([values[i] for i in kept] for values in (array.shape, array.strides))
                strides = [stride // array.itemsize for stride in strides]
                if not _is_nested(shape, strides):
                    raise ReferenceOnly("expected axes that do not interleave, as those of tiles that overlap")
                descs.append(self._list.desc(shape, array.dtype, strides))
            engine = self._engine.handle
            try:
                pd = self._abi.reorder(descs[0], engine, descs[1], engine, self._list.attributes(*operations))
            except DnnlError as error:
                raise ReferenceOnly(f"oneDNN has no copy between these views: {error}") from None
            self._list.own("primitive_desc", pd)
            if not self._abi.implementation(pd).startswith("jit"):
                raise ReferenceOnly("expected generated code for a copy of tiles")
            return self._primitive(pd, {c.SRC: descs[0], c.DST: descs[1]})

        key = ("reorder", operations, source.shape, source.strides, target.strides)
        return self._call(key, make, (source, target))

    def _multiply(self, left: Any, right: Any, out: Any, *operations: tuple[Any, ...]) -> bool:
        arrays = (left, right, out)
        key = (operations, left.shape, left.strides, right.shape, right.strides, out.strides)

        def make() -> Callable[..., None]:
            joined = [_joined(a) for a in arrays]
            if not all(_is_nested(shape, strides) for shape, _, strides in joined):
                raise ReferenceOnly("expected axes that do not interleave, as those of tiles with a dilation may")
            descs = [self._list.desc(*arguments) for arguments in joined]
            attributes = self._list.attributes(*operations)
            pd = self._list.descriptor("matmul", descs[0], descs[1], None, descs[2], attributes=attributes)
            # oneDNN copies a left matrix that is transposed: for tiles, NumPy's product takes less time.
            scratchpad = self.scratch_bytes if left.strides[-1] == left.itemsize else 0
            return self._primitive(pd, {c.SRC: descs[0], c.WEIGHTS: descs[1], c.DST: descs[2]}, scratchpad)

        return self._call(key, make, arrays)

    def _binary(self, array: Any, subtracted: Any, operation: tuple[Any, ...], *more: Any) -> bool:
        """Compute ``array = operation(array - subtracted)`` in place, on packed arrays. Return False if oneDNN cannot.
        """
        key = (operation, array.shape, subtracted.shape[-2:])

        def make() -> Callable[..., None]:
            rows, columns = math.prod(array.shape[:-1]), array.shape[-1]
            # One number per row, or for a single matrix per column.
            shape = (rows, 1) if subtracted.shape[-2:] == (array.shape[-2], 1) else (1, columns)
            whole, numbers = (self._list.desc(s, np.float32, (s[1], 1)) for s in ((rows, columns), shape))
            attributes = self._list.attributes((*operation, whole) if more else operation)
            pd = self._list.descriptor("binary", c.BINARY_SUBTRACT, whole, numbers, whole, attributes=attributes)
            extra = {c.POST_OPERATION | c.SRC_1: whole} if more else {}
            return self._primitive(pd, {c.SRC: whole, c.SRC_1: numbers, c.DST: whole, **extra})

        return self._call(key, make, (array, subtracted, array, *more))

    def _call(self, key: Any, make: Callable[[], Callable[..., None]], arrays: Sequence[Any]) -> bool:
        if key not in self._primitives:
            try:
                self._primitives[key] = make()
            except ReferenceOnly:
                self._primitives[key] = None
        run = self._primitives[key]
        if run is None:
            return False
        run(*arrays)
        return True

    def _primitive(self, descriptor: int, arguments: dict[int, int], most: int = 0) -> Callable[..., None]:
        """Return a function that runs a primitive on arrays, in the order of its arguments.

        It has a scratchpad of at most `most` [B]. Raises ReferenceOnly if the primitive needs more.
        """
        pad = self._list.required(descriptor, c.SCRATCHPAD)
        if pad:
            # All operations of a share use one scratch area, whose size is fixed before the shapes of tiles are known.
            nbytes = self._abi.desc_size(pad)
            if nbytes > most:
                raise ReferenceOnly(f"expected a scratchpad of at most {most} B, got {nbytes} B")
            arguments = {**arguments, c.SCRATCHPAD: pad}
        own, abi = self._list.own, self._abi
        primitive = own("primitive", abi.primitive(descriptor))
        memories = [own("memory", abi.memory(desc, self._engine.handle, None)) for desc in arguments.values()]
        table = (Argument * len(memories))(*(Argument(i, m) for i, m in zip(arguments, memories)))
        execute, stream, count, address, set_data = (
            *(abi.execute, self._stream, len(table), ctypes.addressof(table), abi.set_data),
        )

        # oneDNN has the address of `table` only; as a default value, it lives as long as the function.
        def run(*arrays: Any, keep: Any = table) -> None:
            # Without a scratchpad there is one memory less, so that `zip` ends before the scratch memory.
            for memory, array in zip(memories, (*arrays, self._scratch)):
                set_data(memory, array.__array_interface__["data"][0])
            status = execute(primitive, stream, count, address)
            if status:
                raise DnnlError("dnnl_primitive_execute", status)

        return run


def _joined(array: Any) -> tuple[tuple[int, ...], Any, tuple[int, ...]]:
    """Return shape, dtype and strides [elements] of matrices, with as few leading axes as possible."""
    axes = [(n, s // array.itemsize) for n, s in zip(array.shape, array.strides)]
    lead: list[tuple[int, int]] = []
    for n, stride in axes[:-2]:
        if lead and lead[-1][1] == n * stride:
            lead[-1] = (lead[-1][0] * n, stride)
        elif n > 1:
            lead.append((n, stride))
    shape, strides = zip(*lead, *axes[-2:])
    return shape, array.dtype, strides


def _is_nested(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the stride of each axis is at least the span of the axes with smaller ones, as oneDNN requires."""
    end = 0
    for stride, n in sorted(zip(strides, shape)):
        if stride < end:
            return False
        end = stride * n
    return True
