"""Lists of primitives that run in sequence over bound memory, with all the handles that they own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..guards import GUARDS, SIDE, guarded_bytes
from ..kernel import Kernel, KernelError, ScratchKernel, run_all
from ..memory import Scratch, aligned_empty, round_up
from . import abi as c
from .abi import Abi, Argument, DnnlError

__all__ = ["OnednnEngine", "OnednnMemory", "OnlyEmulated", "PrimitiveList", "ReferenceOnly"]


class ReferenceOnly(KernelError):
    """Error: oneDNN has no fast implementation: none at all, or only its reference, which is hundreds of times slower
    than the others.
    """


class OnlyEmulated(ReferenceOnly):
    """Error: the processor does not compute in a dtype, so that oneDNN would emulate it."""


class OnednnEngine:
    """oneDNN's engine and stream, and the scratch memory of its kernels.

    Attributes
    ----------
    workspace_bytes : int
        Memory that kernels hold individually [B].
    emulated : set of str
        Dtypes that oneDNN would only emulate: no primitive is made for them.
    """

    def __init__(self, abi: Abi, threads: int) -> None:
        self.abi, self.threads = abi, threads
        self.emulated = set[str]()
        self.scratch = Scratch(aligned_empty)
        self.workspace_bytes = 0
        self.handle = abi.cpu_engine()
        self.stream = abi.cpu_stream(self.handle)

    def close(self) -> None:
        """Free engine, stream and scratch memory. `close` may be called twice."""
        self.scratch.release()
        if self.handle:
            self.abi.destroy_stream(self.stream)
            self.abi.destroy_engine(self.handle)
            self.handle = self.stream = 0


@dataclass(frozen=True, eq=False)
class OnednnMemory:
    """A oneDNN memory object over an array or over scratch memory.

    Attributes
    ----------
    handle, desc
        Handles of the memory object and of its descriptor.
    array
        The array; None for scratch memory.
    offset, nbytes
        Position and size in scratch memory [B].
    """

    handle: int
    desc: int
    array: Any = None
    offset: int = 0
    nbytes: int = 0


class PrimitiveList:
    """A sequence of steps. Build it, then take its :meth:`kernel`.

    :meth:`close` destroys every handle that was created, in reverse order.
    """

    def __init__(self, engine: OnednnEngine) -> None:
        self.engine, self.abi = engine, engine.abi
        self._owned: list[tuple[Callable[[int], None], int]] = []
        self._keep: list[Any] = []
        self._temporaries: list[OnednnMemory] = []
        self._steps: list[Callable[[], Any]] = []
        self._binders: list[Callable[[], tuple[int, Callable[[], Any]]]] = []
        self._scratch_bytes = 0
        self._guards: list[tuple[int, int, str]] = []
        self.workspace_bytes = 0
        self.impls: list[str] = []
        # Most primitives fix their number of threads when they are created.
        self.abi.set_threads(engine.threads)

    # ------------------------------------------------------------------ owned handles
    def own(self, kind: str, handle: int) -> int:
        """Take ownership of a handle of this kind and return it."""
        self._owned.append((getattr(self.abi, f"destroy_{kind}"), handle))
        return handle

    def close(self) -> None:
        """Destroy all owned handles. `close` may be called twice."""
        owned, self._owned = self._owned, []
        # In reverse order: a handle is destroyed before those that it was made of.
        # A second call finds none, and must not subtract the workspace again.
        if owned:
            self.engine.workspace_bytes -= self.workspace_bytes
        for destroy, handle in reversed(owned):
            destroy(handle)
        self._keep, self._temporaries, self._steps, self._binders = [], [], [], []

    def __del__(self) -> None:
        # A list whose construction ended with ReferenceOnly has no kernel that closes it.
        self.close()

    # ------------------------------------------------------------------ descriptors and memory
    def desc(self, shape: Sequence[int], dtype: Any, strides: Sequence[int] | None = None) -> int:
        """Return a memory descriptor. Without strides the primitive chooses the format.

        Raises
        ------
        OnlyEmulated
            For a dtype that oneDNN would only emulate.
        """
        name = np.dtype(dtype).name
        if name in self.engine.emulated:
            raise OnlyEmulated(f"oneDNN {self.abi.version} only emulates {name} on this processor")
        return self.own("memory_desc", self.abi.desc(shape, name, strides))

    def borrowed(self, desc: int) -> int:
        """Return an owned copy of a descriptor that belongs to another list or primitive."""
        return self.own("memory_desc", self.abi.desc_clone(desc))

    def array(self, array: Any, desc: int) -> OnednnMemory:
        """Return a memory object over an array."""
        self._keep.append(array)  # oneDNN has its address only
        pointer = array.__array_interface__["data"][0]
        return OnednnMemory(self.own("memory", self.abi.memory(desc, self.engine.handle, pointer)), desc, array)

    def kept(self, desc: int) -> OnednnMemory:
        """Return memory owned by this list. Its contents are undefined at first, and kept between steps and calls."""
        nbytes = self.abi.desc_size(desc)
        self.workspace_bytes += nbytes
        self.engine.workspace_bytes += nbytes
        return self.array(aligned_empty((nbytes,), np.uint8), desc)

    def temporary(self, desc: int, margin: int = 0, what: str = "temporary") -> OnednnMemory:
        """Return scratch memory, undefined at the beginning of every call, with `margin` [B] after it; `what` names the
        memory in messages about its guard bytes.
        """
        nbytes = self.abi.desc_size(desc)
        handle = self.own("memory", self.abi.memory(desc, self.engine.handle, None))
        if GUARDS.active:
            begin, self._scratch_bytes = self._scratch_bytes, self._scratch_bytes + SIDE
            self._guards.append((begin, self._scratch_bytes, f"in front of a {what} of {nbytes} B"))
        memory = OnednnMemory(handle, desc, None, self._scratch_bytes, nbytes)
        end = self._scratch_bytes + nbytes
        self._scratch_bytes += round_up(nbytes + margin)  # temporaries do not share memory: all may be in use at once
        if GUARDS.active:  # cover the margin too: it exists for invalid writes
            self._scratch_bytes += guarded_bytes(nbytes)
            self._guards.append((end, self._scratch_bytes, f"after a {what} of {nbytes} B"))
        self._temporaries.append(memory)
        return memory

    def part(self, whole: OnednnMemory, desc: int, start: int) -> OnednnMemory:
        """Return the memory of `whole` from byte `start` on, as the descriptor `desc` describes it."""
        if whole.array is not None:
            pointer = whole.array.__array_interface__["data"][0] + start
            return OnednnMemory(
                self.own("memory", self.abi.memory(desc, self.engine.handle, pointer)), desc, whole.array
            )
        handle = self.own("memory", self.abi.memory(desc, self.engine.handle, None))
        memory = OnednnMemory(handle, desc, None, whole.offset + start, self.abi.desc_size(desc))
        self._temporaries.append(memory)
        return memory

    # ------------------------------------------------------------------ steps
    def attributes(self, *operations: tuple[Any, ...]) -> int:
        """Return attributes that fuse these operations after the primitive.

        Each is ``("eltwise", algorithm, alpha, beta)``, ``("binary", algorithm, descriptor)`` or, to add what the
        output holds, ``("sum", 1.0, 0, 0)``.
        """
        attr = self.own("primitive_attr", self.abi.attributes())
        if operations:
            post = self.own("post_ops", self.abi.post_operations())
            for kind, *values in operations:
                getattr(self.abi, f"append_{kind}")(post, *values)
            self.abi.attr_post_operations(attr, post)
        return attr

    def descriptor(
        self, kind: str, *args: Any, attributes: int | None = None, refused: Callable[[int, str], str] | None = None
    ) -> int:
        """Return the primitive descriptor of the first implementation that is not refused.

        Parameters
        ----------
        refused
            Function that takes a descriptor and the name of its implementation, and returns the reason not to use it,
            or "".

        Raises
        ------
        ReferenceOnly
            If oneDNN would run its reference implementation, or has none.
        """
        created, reasons = self.hint(kind, *args, attributes=attributes), list[str]()
        # One descriptor iterates over all implementations, from the fastest by oneDNN's order to the reference.
        while True:
            impl = self.abi.implementation(created)
            if impl.startswith("ref"):
                because = "".join(f"; {reason}" for reason in reasons)
                raise ReferenceOnly(
                    f"oneDNN {self.abi.version} has only the slow {impl} of {kind} for these arrays{because}"
                )
            reason = refused(created, impl) if refused else ""
            if not reason:
                return created
            reasons.append(f"{impl} is refused: {reason}")
            try:
                self.abi.next_implementation(created)
            except DnnlError as error:
                if error.status != c.LAST_IMPLEMENTATION:
                    raise
                raise ReferenceOnly(
                    f"oneDNN {self.abi.version} has no {kind} for these arrays; {'; '.join(reasons)}"
                ) from None

    def hint(self, kind: str, *args: Any, attributes: int | None = None) -> int:
        """Return a primitive descriptor that only serves to create another one, so it may be slow."""
        attr = self.attributes() if attributes is None else attributes
        try:
            created = getattr(self.abi, kind)(self.engine.handle, *args, attr)
        except DnnlError as error:
            # Arguments that oneDNN does not support are "invalid" or "unimplemented", depending on the primitive.
            if error.status in (c.UNIMPLEMENTED, c.INVALID):
                raise ReferenceOnly(f"oneDNN {self.abi.version} has no {kind} for these arrays: {error}") from None
            raise
        return self.own("primitive_desc", created)

    def step(self, descriptor: int, arguments: dict[int, OnednnMemory], name: bool = True, margin: int = 0) -> None:
        """Add a primitive with its arguments, and a scratchpad with `margin` [B] after it. With `name`, the kernel is
        named after the primitive's implementation, too.
        """
        pad = self.required(descriptor, c.SCRATCHPAD)
        if pad:
            arguments = {**arguments, c.SCRATCHPAD: self.temporary(pad, margin, "scratchpad")}
        primitive = self.own("primitive", self.abi.primitive(descriptor))
        table = (Argument * len(arguments))(*(Argument(i, m.handle) for i, m in arguments.items()))
        self._keep.append(table)  # run() has its address only
        execute, stream, count, address = self.abi.execute, self.engine.stream, len(table), ctypes.addressof(table)

        def run() -> None:
            status = execute(primitive, stream, count, address)
            if status:
                raise DnnlError("dnnl_primitive_execute", status)

        self._steps.append(run)
        if name:
            self.impls.append(self.abi.implementation(descriptor))

    def binary(
        self, algorithm: int, left: OnednnMemory, right: OnednnMemory, out: OnednnMemory, *operations: tuple[Any, ...]
    ) -> None:
        """Add a step that computes `out`, a function of two arrays, followed by fused operations.

        The operations are those of :meth:`attributes`, with the memory in place of its descriptor.
        """
        arguments, described = {c.SRC: left, c.SRC_1: right, c.DST: out}, list[tuple[Any, ...]]()
        # oneDNN numbers all operations of a primitive, from 0: the offset of an argument is that number plus 1.
        for i, (kind, *values) in enumerate(operations, 1):
            if kind == "binary":
                arguments[c.POST_OPERATION * i | c.SRC_1] = values[-1]
                values[-1] = values[-1].desc
            described.append((kind, *values))
        descs = (left.desc, right.desc, out.desc)
        self.step(self.descriptor("binary", algorithm, *descs, attributes=self.attributes(*described)), arguments)

    def number(self, value: float) -> OnednnMemory:
        """Return the memory of one float32 number, which a primitive broadcasts over a flat array."""
        return self.array(np.full((1,), value, np.float32), self.desc((1,), np.float32, (1,)))

    def reorder(self, source: OnednnMemory, target: OnednnMemory) -> None:
        """Add a copy from one format (and dtype) to another. Kernels are not named after their copies."""
        engine = self.engine.handle
        pd = self.abi.reorder(source.desc, engine, target.desc, engine, self.attributes())
        self.own("primitive_desc", pd)
        self.step(pd, {c.SRC: source, c.DST: target}, name=False)

    def required(self, descriptor: int, argument: int) -> int:
        """Return the memory descriptor that a primitive requires for an argument; 0 if the argument takes no memory.

        The descriptor belongs to the primitive.
        """
        desc = self.abi.argument_desc(descriptor, argument)
        return desc if desc and self.abi.desc_size(desc) else 0

    def converted(self, source: OnednnMemory, descriptor: int, argument: int) -> OnednnMemory:
        """Return `source` in the format that a primitive requires for an argument: itself, or a copy at every call."""
        desc = self.required(descriptor, argument)
        if self.abi.desc_equal(source.desc, desc):
            return source
        target = self.temporary(desc)
        self.reorder(source, target)
        return target

    def step_into(
        self,
        descriptor: int,
        arguments: dict[int, OnednnMemory],
        output: int,
        result: OnednnMemory,
        margin: int = 0,
    ) -> None:
        """Add a primitive that writes `result`, through a temporary if the primitive requires another format."""
        desc = self.required(descriptor, output)
        direct = self.abi.desc_equal(desc, result.desc)
        target = result if direct else self.temporary(desc)
        self.step(descriptor, {**arguments, output: target}, margin=margin)
        if not direct:
            self.reorder(target, result)

    def call(self, function: Callable[[], Any]) -> None:
        """Add a step that calls a Python function."""
        self._steps.append(function)

    def call_on(self, memory: OnednnMemory, dtype: Any, bind: Callable[[Any], Callable[[], Any]]) -> None:
        """Add a step in Python on a temporary: `bind` takes the temporary as a flat array and returns the function to
        run.
        """
        # The step is replaced when the kernel takes its views of the scratch memory, before each run after a growth.
        index = len(self._steps)
        self._steps.append(_unbound)
        shape = (memory.nbytes // np.dtype(dtype).itemsize,)
        scratch = self.engine.scratch
        self._binders.append(lambda: (index, bind(scratch.view(shape, dtype, memory.offset))))

    # ------------------------------------------------------------------ the result
    def kernel(self) -> Kernel:
        """Return a kernel that runs the steps and owns this list."""
        # Each implementation once, in the order of the steps.
        name = "onednn:" + "+".join(dict.fromkeys(self.impls))
        if not self._scratch_bytes:
            return Kernel(run_all(self._steps), name, self.workspace_bytes, self.close)
        scratch, nbytes = self.engine.scratch, self._scratch_bytes
        return ScratchKernel(self._bind, scratch, nbytes, name, self.workspace_bytes, self.close, self._guards)

    def _bind(self) -> Callable[[], Any]:
        """Point all temporaries to the current scratch memory and return the function that runs the steps."""
        whole = self.engine.scratch.view((self._scratch_bytes,), np.uint8)
        address = whole.__array_interface__["data"][0]
        for memory in self._temporaries:
            self.abi.set_data(memory.handle, address + memory.offset)
        steps = list(self._steps)
        for binder in self._binders:
            index, step = binder()
            steps[index] = step
        return run_all(steps)


def _unbound() -> None:
    raise AssertionError("a step on scratch memory ran before the memory was allocated")
