"""CUDA updates of flat parameter buckets, one launch each; sums of whole arrays; loss scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..kernel import Kernel, ScratchKernel, idle, run_all
from ..memory import Scratch, round_up
from ..updates import ALIGNMENT, Rule, StepNumbers, UpdateArrays, Updates, piece_of
from .launch import (
    LARGE,
    THREADS,
    Launch,
    Launcher,
    address,
    is_large,
    items_grid,
    scalar_program,
    sequence,
    suffix,
    vector_lanes,
)
from .sources import CudaProgram, dtype_name

__all__ = ["CudaUpdates"]

#: Elements of a parameter per block of LARS.
_CHUNK = 16 * THREADS
# Most blocks per parameter: each of them adds up the partial sums of all, one per thread.
_CHUNKS = 256


class CudaUpdates(Updates):
    """Update kernels in CUDA. Per-step scalars are kept in device memory."""

    launcher: Launcher
    scratch: Scratch
    reads_rounded = True

    # ------------------------------------------------------------------ optimizers
    def _sgd(self, arrays: UpdateArrays, momentum: float, nesterov: bool, weight_decay: float) -> Kernel:
        return self._update("sgd", arrays, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)

    def _adam(
        self, arrays: UpdateArrays, betas: tuple[float, float], epsilon: float, weight_decay: float, decoupled: bool
    ) -> Kernel:
        members = {"momentum": betas[0], "beta2": betas[1], "epsilon": epsilon, "decoupled": decoupled}
        return self._update("adam", arrays, weight_decay=weight_decay, **members)

    def _average(self, arrays: UpdateArrays) -> Kernel:
        return self._update("average", arrays)

    def _by_rule(self, name: str, arrays: UpdateArrays, rule: Rule, scratch: int, whole: bool) -> Kernel:
        """Build an update that calls the rule on whole ranges of device arrays.

        The device decides whether a step is skipped, so the arrays are saved and restored on the device.
        """
        # Views of one number each: a rule reads them on the device, and the host waits for nothing.
        numbers = StepNumbers(*(arrays.scalars[i : i + 1] for i in range(len(StepNumbers._fields))))
        kept = () if arrays.skip is None else (arrays.p, *arrays.state)
        skipped = None if arrays.skip is None else self.launcher.empty(arrays.skip.shape, np.bool_)
        refresh = None if arrays.copy is None else self.device.copies([(arrays.copy, arrays.p)])
        # A rule sees one array of gradients, so those of 16 bits are converted into it.
        pairs = [(arrays.g[start:stop], arrays.rounded[start:stop]) for start, stop in arrays.rounds]
        widen = self.device.copies(pairs) if pairs else None
        size = round_up(arrays.p.nbytes)

        def bind() -> Callable[[], None]:
            views = [
                self.scratch.view((arrays.p.size,), arrays.p.dtype, i * size) for i in range(scratch + len(kept))
            ]
            pieces = [piece_of(arrays, *where, views[:scratch]) for where in arrays.decays if where[1] > where[0]]

            def run() -> None:
                if widen is not None:
                    widen()
                for array, copy in zip(kept, views[scratch:]):
                    np.copyto(copy, array)
                for piece in pieces:
                    rule(piece, numbers)
                if skipped is not None:
                    np.not_equal(arrays.skip, 0, out=skipped)
                for array, copy in zip(kept, views[scratch:]):
                    np.copyto(array, copy, where=skipped)
                if refresh is not None:
                    refresh()

            return run

        return ScratchKernel(bind, self.scratch, (scratch + len(kept)) * size, f"cuda:{name}")

    def _update(self, rule: str, a: UpdateArrays, **members: Any) -> Kernel:
        """Build an update; see optimizer.cu for the members."""
        arrays = [array for array in (a.p, a.g, a.copy, a.rounded, *a.state) if array is not None]
        # Only the addresses count: the kernel takes the elements after the last whole vector one by one.
        lanes = min(vector_lanes(4, array, lanes=4) for array in arrays)
        arguments = {**self._members(a), **self._decays(a.p.size, a.decays), **members}
        grid = items_grid(self.launcher, a.p.size // lanes)
        return sequence(rule, Launch(self.launcher, _program(a), f"{rule}_{lanes}", grid, **arguments))

    def _decays(self, count: int, decays: Sequence[tuple[int, int, bool]]) -> dict[str, Any]:
        """Return the members for weight decay of `count` elements: a number of leading elements, or a mask."""
        # The mask has one byte per four elements, the widest access of the kernels (optimizer.cu).
        flags = np.zeros(-(-count // 4) * 4, np.uint8)
        for start, stop, decayed in decays:
            flags[start:stop] = bool(decayed)
        last = int(flags[:count].sum())
        # Everything decays, or nothing, or a leading part: a number replaces the mask.
        if flags[:last].all():
            return {"decayed": last}
        return {"mask": self.launcher.upload(np.packbits(flags.reshape(-1, 4), axis=1, bitorder="little").reshape(-1))}

    def _members(self, a: UpdateArrays) -> dict[str, Any]:
        """Return the arrays as struct members: `v` is the momentum or the first moment, `m` the second moment."""
        v, m = (*a.state, None, None)[:2]
        fields = {"p": a.p, "g": a.g, "v": v, "m": m, "scalars": a.scalars, "copy": a.copy, "skip": a.skip}
        if a.rounds:
            flags = np.zeros(-(-a.p.size // ALIGNMENT), np.uint8)
            for start, stop in a.rounds:
                # A range may end with the array, within a unit: this unit then counts as a whole.
                flags[start // ALIGNMENT : -(-stop // ALIGNMENT)] = 1
            fields |= {"rounded": a.rounded, "rounds": self.launcher.upload(np.packbits(flags, bitorder="little"))}
        return {**fields, "count": a.p.size}

    def _lars(self, arrays: UpdateArrays, momentum: float, trust: float, weight_decay: float) -> Kernel:
        table = np.array([(a, b, bool(d)) for a, b, d in arrays.decays if b > a], np.int64).reshape(-1, 3)
        if not len(table):
            return idle()
        longest = int((table[:, 1] - table[:, 0]).max())
        # As many for every parameter, since a grid is a box; blocks without elements add 0.
        chunks = max(1, min(-(-longest // _CHUNK), _CHUNKS))
        arguments = {"momentum": momentum, "trust": trust, "weight_decay": weight_decay, **self._members(arrays)}
        arguments.update(segments=self.launcher.upload(table), chunks=chunks)
        program, grid = _program(arrays), (chunks, len(table))
        launches = [Launch(self.launcher, program, name, grid, **arguments) for name in ("lars_norms", "lars")]
        run = run_all(launches)

        def bind() -> Callable[[], Any]:
            partial = self.scratch.view((len(table), chunks, 2), np.float64)
            for launch in launches:
                # The address changes when the scratch memory grows.
                launch.set(partial=partial)
            return run

        # Two float64 numbers per parameter and chunk: the squares of parameters and of gradients.
        return ScratchKernel(bind, self.scratch, 16 * len(table) * chunks, "cuda:lars", table.nbytes)

    # ------------------------------------------------------------------ norms and scales
    def _sum_of_squares(self, terms: Sequence[tuple[Any, int]], out: Any) -> Kernel:
        """Build a sum of squares: a launch per run of adjacent arrays for partial sums, and one that adds those."""
        joined = _joined(terms)
        if not joined:
            return Kernel(lambda: out.fill(0), "empty")
        launches, offsets, count = [], [], 0
        for first, size, divisor in joined:
            grid = items_grid(self.launcher, size // 4, per_unit=4)
            program = CudaProgram("reduce", (dtype_name(first),), size >= LARGE)
            members: dict[str, Any] = {"x": first, "count": size, "weight": 1.0 / divisor}
            launches.append(Launch(self.launcher, program, f"squares_{_reads(first)}", grid, **members))
            offsets.append(count)
            count += grid[0]
        # Joined terms have the address of the first only, so all arrays are kept alive here.
        launches[0].keep([array for array, _ in terms])
        # The last launch reads partial sums in float64 only; the dtype selects a program that is compiled already.
        program = CudaProgram("reduce", (dtype_name(terms[0][0]),))
        launches.append(Launch(self.launcher, program, "finish_squares", (1,), partials=count, total=out))
        offsets.append(0)
        run = run_all(launches)

        def bind() -> Callable[[], Any]:
            partial = self.scratch.view((count,), np.float64)
            for launch, first in zip(launches, offsets):
                launch.set(partial=partial[first:])
            return run

        return ScratchKernel(bind, self.scratch, 8 * count, "cuda:squares")

    def _clip(self, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
        members = {"squares": squares, "inverse": inverse, "max_norm": max_norm, "norm": norm, "factor": factor}
        return sequence("clip", Launch(self.launcher, CudaProgram("reduce"), "clip", (1,), **members))

    def _find_nonfinite(self, arrays: Sequence[Any], flag: Any) -> Kernel:
        launches = []
        for x in arrays:
            name, grid = f"find_nonfinite_{_reads(x)}", items_grid(self.launcher, x.size // 4, per_unit=8)
            members = {"x": x, "count": x.size, "flag": flag}
            launches.append(Launch(self.launcher, scalar_program("reduce", x), name, grid, **members))
        return sequence("find_nonfinite", *launches) if launches else idle()

    def _update_loss_scale(self, state: Any, flag: Any, growth: float, backoff: float, interval: int) -> Kernel:
        members = {"state": state, "flag": flag, "growth": growth, "backoff": backoff, "interval": interval}
        return sequence(
            "loss_scale", Launch(self.launcher, CudaProgram("reduce"), "update_loss_scale", (1,), **members)
        )


def _program(a: UpdateArrays) -> CudaProgram:
    dtypes = (dtype_name(a.p), dtype_name(a.g), dtype_name(a.p if a.copy is None else a.copy))
    return CudaProgram("optimizer", dtypes, is_large(a.p))


def _reads(x: Any) -> str:
    """Return the suffix of a kernel for reading `x`. Only the address must be aligned: the kernels handle the tail."""
    return suffix(vector_lanes(0, x))


def _joined(terms: Sequence[tuple[Any, int]]) -> list[tuple[Any, int, int]]:
    """Join arrays of one dtype and divisor that are adjacent in memory; return ``(first array, size, divisor)`` of each
    run.
    """
    joined: list[tuple[Any, int, int]] = []
    for array, divisor in terms:
        if joined:
            first, count, other = joined[-1]
            after = address(first) + count * first.dtype.itemsize
            if after == address(array) and other == divisor and first.dtype == array.dtype:
                joined[-1] = (first, count + array.size, divisor)
                continue
        joined.append((array, array.size, divisor))
    return joined
