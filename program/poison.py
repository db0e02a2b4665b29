"""Poison: memory that a kernel may not read is filled with marked NaNs, to find wrong declarations of accesses.

Memory that is free by the lifetimes of a program, and memory that a kernel holds but a run of it does not declare
(:mod:`halograd.kernels.access`), is filled with NaNs that carry the number of their buffer. Arithmetic preserves these
numbers, so a result shows the array from which it was computed. ::

    before a run    hide what is not declared: save it, fill it;  fill what is only written
    the run
    after it        a result holds the number of a hidden array   -> it reads what it does not declare
                    a hidden array has changed                    -> it writes what it does not declare
                    what is only read has changed                 -> it writes what it declares to read
                    restore what was hidden; fill what no later operation of the step uses

Arrays that messages in flight send or receive, and arrays outside the arena (parameters, gradients of parameters), are
not filled. Integers, booleans and numbers of 16 bits are filled with marker bytes, which reveal writes, but not reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..lowering.operations import Operation, Run, Sum, Total, Transfer
from ..lowering.views import Buffer, View
from .arena import lifetimes
from .program import Program, name_of

__all__ = ["AccessError", "Poison"]


class AccessError(RuntimeError):
    """Error: a kernel reads or writes arrays that it does not declare."""


#: By itemsize [B]: type of the bits, the bits of a quiet NaN, and the shift of the number in it. A conversion between
#: the two types keeps the number, which it shifts by 52 - 23 = 29 bits, the difference of the mantissas.
_BITS = {4: (np.uint32, 0x7FC00000, 0), 8: (np.uint64, 0x7FF8000000000000, 29)}
#: Largest number that fits into a NaN of 32 bits.
_NUMBERS = (1 << 22) - 1
_ODD = 0xA5


@dataclass(eq=False)
class _Held:
    """Array that a kernel holds.

    Attributes
    ----------
    name
        Name of the kernel's parameter for it.
    number
        Number of its buffer.
    """

    name: str
    buffer: Buffer
    array: Any
    number: int


class Poison:
    """Detector of undeclared accesses of kernels to the memory of a running program. Local; on the host.

    Parameters
    ----------
    program
        Program whose operations run.
    array
        Function that returns the array of a view.

    Notes
    -----
    Every buffer needs separate memory. A detected access is kept until :meth:`check` raises it.
    """

    def __init__(self, program: Program, array: Callable[[View], Any]) -> None:
        self._array = array
        self._numbers: dict[Buffer, int] = {}
        self._faults: list[str] = []
        #: Buffers of messages in flight, as keys.
        self._flying: dict[Buffer, int] = {}
        self._ends: dict[Operation, list[Buffer]] = {}
        operations = list(program)
        for buffer, spans in lifetimes(operations, program.kept).items():
            for _, last in spans:
                self._ends.setdefault(operations[last], []).append(buffer)
            self._fill(buffer)

    def watched(
        self, operation: Operation, call: Callable[[], object], guarded: Sequence[Callable[[], object]] = ()
    ) -> Callable[[], object]:
        """Return the call of an operation, with a check of its accesses.

        If `call` returns true, the calls `guarded` follow; they have accesses of their own.
        """
        ends = self._ends.get(operation, ())
        run = call
        if isinstance(operation, Run):
            run = self._kernel(operation, call)
        elif isinstance(operation, Transfer | Total):
            run = self._message(operation, call)

        def watched() -> object:
            result = run()
            for other in guarded if guarded and result else ():
                other()
            for buffer in ends:
                self._fill(buffer)
            return result

        return watched

    def check(self) -> None:
        """Raise AccessError if undeclared accesses were detected since the last call."""
        faults, self._faults = self._faults, []
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise AccessError(f"{faults[0]}{more}; declare it by @reads and @writes next to the kernel's method")

    # -- operations ----------------------------------------------------------------------------

    def _message(self, operation: Transfer | Total, call: Callable[[], object]) -> Callable[[], object]:
        if isinstance(operation, Transfer):
            buffers = [operation.exchange.source.buffer, operation.exchange.target.buffer]
        else:
            buffers = [operation.sum.view.buffer]
        starts = operation.end == "start"

        def run() -> object:
            for buffer in buffers if starts else ():
                self._flying[buffer] = 1
            result = call()
            for buffer in () if starts else buffers:
                self._flying.pop(buffer, None)
            return result

        return run

    def _kernel(self, operation: Run, call: Callable[[], object]) -> Callable[[], object]:
        kernel, access = operation.kernel, operation.access
        # The kernel starts and finishes these sums itself, so messages may use their arrays during the run.
        own = {array.view.buffer for array in kernel.sums.values() if isinstance(array, Sum)}
        views = {
            name: view
            for name, view in kernel.views.items()
            if view is not None and view.size and view.buffer.location is None and view.buffer not in own
        }
        held = {name: _Held(name, v.buffer, self._array(v), self._number(v.buffer)) for name, v in views.items()}
        read, written = access.read(held), access.written(held)
        # By buffer, because several arrays of a kernel may be views of one buffer.
        used = {held[name].buffer for name in (*read, *written)}
        hidden = [array for array in held.values() if array.buffer not in used]
        inputs = {held[name].buffer for name in read}
        changed = {held[name].buffer for name in written}
        fixed = [held[name] for name in read if held[name].buffer not in changed]
        blank = [held[name] for name in written if held[name].buffer not in inputs]
        results = [held[name] for name in written]
        origin = f"layer {operation.layer!r}, {name_of(operation)}"

        def run() -> object:
            away = [array for array in hidden if array.buffer not in self._flying]
            saved = [array.array.copy() for array in away]
            before = [array.array.copy() for array in fixed if array.buffer not in self._flying]
            for array in (*away, *blank):
                _poison(array.array, array.number)
            # Numbers in declared inputs come from earlier kernels: they are no fault of this one.
            known = _numbers_in(held[name].array for name in read)
            result = call()
            self._check_results(origin, away, results, known, blank)
            for array in away:
                if not _is_poisoned(array.array, array.number):
                    self._note(f"{origin}: writes {array.name!r}, which it does not declare")
            for array, was in zip(away, saved):
                np.copyto(array.array, was)
            for array, was in zip((array for array in fixed if array.buffer not in self._flying), before):
                if not _same(array.array, was):
                    self._note(f"{origin}: writes {array.name!r}, which it declares to read only")
            return result

        return run

    def _check_results(
        self,
        origin: str,
        hidden: Iterable[_Held],
        results: Iterable[_Held],
        known: Mapping[int, object],
        blank: Iterable[_Held],
    ) -> None:
        """Record the arrays on which a result depends, but which the run does not declare as read."""
        names = {array.number: (array.name, "does not declare") for array in hidden}
        names |= {array.number: (array.name, "declares to write only") for array in blank}
        for result in results:
            # Elements that the run did not write keep the number of the result itself.
            for number in _numbers_in([result.array]):
                if number in names and number not in known and number != result.number:
                    name, how = names[number]
                    self._note(f"{origin}: makes {result.name!r} from {name!r}, which it {how}")

    def _note(self, text: str) -> None:
        if text not in self._faults:
            self._faults.append(text)

    # -- memory --------------------------------------------------------------------------------

    def _number(self, buffer: Buffer) -> int:
        return self._numbers.setdefault(buffer, len(self._numbers) % _NUMBERS + 1)

    def _fill(self, buffer: Buffer) -> None:
        _poison(self._array(buffer.view), self._number(buffer))


def _carries_numbers(array: Any) -> bool:
    # Only float32 and float64: a NaN of 16 bits has 9 bits for a number, and gives other bits when it is converted.
    return array.dtype.kind == "f" and array.itemsize in _BITS


def _poison(array: Any, number: int) -> None:
    """Fill an array with NaNs that carry a number, or with marker bytes if its dtype has no such NaN."""
    if _carries_numbers(array):
        kind, nan, shift = _BITS[array.itemsize]
        array.view(kind)[...] = nan | number << shift
    else:
        kind = np.dtype(f"u{array.itemsize}").type
        array.view(kind)[...] = int.from_bytes(bytes([_ODD]) * array.itemsize, "little")


def _is_poisoned(array: Any, number: int) -> bool:
    expected = np.empty((1,) * array.ndim, array.dtype)
    _poison(expected, number)
    return _same(array, np.broadcast_to(expected, array.shape))


def _same(a: Any, b: Any) -> bool:
    """Return whether two arrays hold the same bytes."""
    kind = f"u{a.itemsize}"
    return bool(np.array_equal(a.view(kind), b.view(kind)))


def _numbers_in(arrays: Iterable[Any]) -> dict[int, None]:
    """Return the numbers that NaNs in some arrays carry."""
    numbers: dict[int, None] = {}
    for array in arrays:
        if not _carries_numbers(array):
            continue
        wrong = np.isnan(array)
        if wrong.any():
            kind, _, shift = _BITS[array.itemsize]
            bits = array.view(kind)[wrong] & kind(_NUMBERS << shift)
            numbers.update(dict.fromkeys(int(n) for n in np.unique(bits >> kind(shift))))
    return numbers
