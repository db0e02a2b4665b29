"""Attention by cuDNN where it takes the shape, else by our own kernels.

A plan computes tiles in which every query reads every key: samples, blocks of them, windows. Its arrays are ours, or
packed copies of windows whose positions have no common stride. A table of relative biases becomes a matrix, and the
gradient of the matrix is summed to that of the table. In a ring, results for further keys are merged by the stored
logarithms of sums (`lse`).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.documents import one_line

from ..attention import (
    AttentionArrays,
    AttentionGeometry,
    Everywhere,
    HeadGroup,
    Interval,
    Neighborhood,
    Reach,
    TileGroup,
    TileRun,
    runs,
)
from ..cuda.boxes import AXES, join
from ..cuda.launch import THREADS, Launch, Launcher, address, is_float, scalar_program, sequence
from ..kernel import Kernel, KernelError, Substitute, chain, filled
from ..memory import nbytes_of
from .conv import ConvSettings, planned
from .frontend import ALIGNMENT, Frontend
from .graphs import HALF, Tensor
from .sdpa import (
    ATTENTION_BACKWARD,
    ATTENTION_FORWARD,
    BIAS_MATRIX,
    DBIAS_MATRIX,
    DK,
    DO,
    DQ,
    DV,
    STATS,
    AttentionKey,
    K,
    O,
    Q,
    V,
    packed,
)

__all__ = ["CudnnAttention", "SharedMemory"]

_log = logging.getLogger("halograd.kernels")
# LANES of attention_parts.cu.
_LANES = 64
#: Largest workspace, and largest matrix of biases: this multiple of the bytes of queries, keys, values and outputs, and
#: `_SMALL` [B] more. So cuDNN's gradients (float32 sums of dq) fit, but scores of all pairs of a large sample do not.
_LARGEST, _SMALL = 4, 32 << 20
#: Largest number of boxes of a copy.
_PIECES = 4096


class SharedMemory:
    """Temporary arrays of kernels that run one after the other: kernels that need the same size share one buffer.

    A buffer is never replaced, so the addresses that a kernel takes when it is built stay valid.

    Parameters
    ----------
    empty
        Function that returns a packed device array of a shape and dtype, aligned to 256 B.
    """

    def __init__(self, empty: Callable[[Sequence[int], Any], Any]) -> None:
        self._empty = empty
        self._buffers: dict[int, tuple[Any, int]] = {}

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers [B]."""
        return sum(self._buffers)

    def take(self, nbytes: int) -> Any:
        """Return the buffer of `nbytes` bytes; :meth:`give` returns it."""
        buffer, users = self._buffers.get(nbytes) or (self._empty((nbytes,), np.uint8), 0)
        self._buffers[nbytes] = buffer, users + 1
        return buffer

    def give(self, nbytes: int) -> None:
        """Return a buffer that was taken; it is freed if no other kernel uses it."""
        buffer, users = self._buffers.pop(nbytes, (None, 0))
        if users > 1:
            self._buffers[nbytes] = buffer, users - 1


class _Refused(Exception):
    """Error: cuDNN's attention does not take a geometry, or has no plan for it. The message is the reason."""


class CudnnAttention:
    """Factory of attention kernels for one backend.

    Parameters
    ----------
    engine
        Settings that all plans of cuDNN share.
    launcher, xp
        Launcher of our own kernels, and the array module of the device.
    frontend
        The cuDNN adapter.
    sm_version
        Compute capability as a number, 90 for 9.0.

    Attributes
    ----------
    memory : SharedMemory
        Temporary arrays.
    substitutes : list of Substitute
        Kernels that are our own because cuDNN refused, with its reason.
    """

    def __init__(self, engine: ConvSettings, launcher: Launcher, xp: Any, frontend: Frontend, sm_version: int) -> None:
        self.engine, self.launcher, self.xp = engine, launcher, xp
        self.frontend, self.sm_version = frontend, sm_version
        self.memory = SharedMemory(engine.empty)
        self.substitutes: list[Substitute] = []

    def forward(self, arrays: AttentionArrays, geometry: AttentionGeometry, tiles: Callable[[], Kernel]) -> Kernel:
        """Return cuDNN's forward kernel, or the one of `tiles` if cuDNN refuses or tuning finds it slower."""
        return self._either("attention_forward", lambda: _ForwardCall(self, arrays, geometry), tiles)

    def backward(self, arrays: AttentionArrays, geometry: AttentionGeometry, tiles: Callable[[], Kernel]) -> Kernel:
        """Return cuDNN's backward kernel, or the one of `tiles` if cuDNN refuses or tuning finds it slower."""
        return self._either("attention_backward", lambda: _BackwardCall(self, arrays, geometry), tiles)

    def _either(self, what: str, describe: Callable[[], _AttentionCall], tiles: Callable[[], Kernel]) -> Kernel:
        try:
            call = describe()
            kernel = call.kernel()
        except _Refused as refusal:
            of_tiles = tiles()
            self.substitutes.append(Substitute(what, of_tiles.impl, str(refusal)))
            return of_tiles
        if self.engine.tuned:
            of_tiles = tiles()
            try:
                slower = self.engine.plans.faster(call.keys, kernel, of_tiles)
            except KernelError as error:  # the device refuses all plans
                slower = True
                self.substitutes.append(Substitute(what, of_tiles.impl, one_line(error)))
            (kernel if slower else of_tiles).close()  # frees the temporary arrays of the one that is not taken
            if slower:
                return of_tiles
        return _guarded(what, kernel, tiles)


def _guarded(what: str, kernel: Kernel, tiles: Callable[[], Kernel]) -> Kernel:
    """Return a kernel that is replaced by our own if the device refuses all of cuDNN's plans at the first run."""
    current, proven = [kernel], False

    def run() -> None:
        nonlocal proven
        try:
            current[-1]()
        except KernelError as error:
            # After a first success an error is one of this step, not of the plan: our own kernel would hide it.
            if proven:
                raise
            _log.warning("kernels: %s by our own kernel, which is slower: %s", what, one_line(error))
            # The refused kernel stays open: `close` frees both.
            current.append(tiles())
            current[-1]()
        proven = True

    def close() -> None:
        for each in current:
            each.close()

    whole = Kernel(run, kernel.impl, kernel.workspace_bytes, close)
    whole.scratch_bytes = kernel.scratch_bytes
    return whole


class _Temporaries:
    """Temporary arrays of one kernel in a shared buffer: first all are reserved, then they are used."""

    def __init__(self, shared: SharedMemory) -> None:
        self._shared, self.nbytes = shared, 0
        self._buffer: Any = None

    def reserve(self, shape: Sequence[int], dtype: Any) -> Callable[[], Any]:
        """Reserve an array; return a function that returns it."""
        size = nbytes_of(shape, dtype)
        # 256 B, the alignment of an allocation, so that cuDNN and wide copies take each array.
        offset, self.nbytes = self.nbytes, self.nbytes + -(-size // 256) * 256

        def array() -> Any:
            # At the first use, after all arrays are reserved and the size is known.
            if self._buffer is None:
                self._buffer = self._shared.take(self.nbytes)
            return self._buffer[offset : offset + size].view(dtype).reshape(tuple(shape))

        return array

    def close(self) -> None:
        if self._buffer is not None:
            self._shared.give(self.nbytes)
        self._buffer = None


class _TileOperand:
    """An array of one group of tiles as cuDNN takes it: ``(B, H, S, D)`` by strides, our own array or a packed copy.

    Parameters
    ----------
    view
        The tiles in our array, ``(samples, *tiles, *positions, heads * channels)``.
    lead
        Number of axes of samples and tiles.
    copied
        Whether a copy is needed in any case.
    """

    def __init__(self, view: Any, lead: int, heads: int, temporaries: _Temporaries, copied: bool = False) -> None:
        self.view, size = view, np.dtype(view.dtype).itemsize
        batch, positions = math.prod(view.shape[:lead]), math.prod(view.shape[lead:-1])
        channels, strides = view.shape[-1], [s // size for s in view.strides]
        # cuDNN takes one stride for all tiles and one for all positions of a tile.
        across = _joined(view.shape[:lead], strides[:lead])
        within = _joined(view.shape[lead:-1], strides[lead:-1])
        if batch == 1:
            across = positions * channels  # never used, but shown as packed
        if across is None or within is None or address(view) % ALIGNMENT or channels * size % ALIGNMENT:
            copied = True
        self._own = temporaries.reserve((batch, positions, channels), view.dtype) if copied else None
        if across is None or within is None or copied:
            across, within = positions * channels, channels
        width = channels // heads
        self.tensor = Tensor((batch, heads, positions, width), (across, width, within, 1))

    @property
    def array(self) -> Any:
        """The array that cuDNN reads or writes."""
        return self.view if self._own is None else self._own()

    @property
    def copies(self) -> list[tuple[Any, Any]]:
        """Pairs of our array and the packed one, between which the data must be copied."""
        return [] if self._own is None else _pairs(self.view, self._own().reshape(self.view.shape))


def _joined(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Return the stride of axes joined to one, or None if they cannot be joined."""
    joined, (stride,) = join(shape, [list(strides)])
    return stride[0] if len(joined) == 1 else None


def _pairs(first: Any, second: Any) -> list[tuple[Any, Any]]:
    """Return two arrays of one shape as pairs of views, each with few enough axes for a copy."""
    strides = [(*a.strides, 1) for a in (first, second)]
    size, split = np.dtype(first.dtype).itemsize, 0
    # Leading axes become separate boxes until the copy kernel can take the others.
    while len(join((*first.shape[split:], size), [s[split:] for s in strides])[0]) > AXES:
        split += 1
    if math.prod(first.shape[:split]) > _PIECES:
        raise _Refused(f"copies of its windows take more than {_PIECES} boxes")
    return [(first[index], second[index]) for index in np.ndindex(*first.shape[:split])]


class _Group:
    """Tiles of one shape, which one plan computes, with the arrays of the plan by number."""

    def __init__(self, call: _AttentionCall, axes: Sequence[TileRun], starts: Sequence[Interval], reaches: Any) -> None:
        a, g = call.arrays, call.geometry
        self.call, self.heads, self.key_heads = call, g.heads[1] - g.heads[0], g.key_heads[1] - g.key_heads[0]
        # cuDNN has heads by strides, so all are one axis of channels here; a table of biases has an axis of heads.
        self.tiles, self.by_head = (
            TileGroup(a.q.shape[0], axes, starts, reaches, HeadGroup(0, 1, 0, count)) for count in (1, self.heads)
        )
        self.lead = 1 + len(axes)
        self.batch, self.queries, self.keys = (
            math.prod(extents) for extents in (self.tiles.lead, self.tiles.queries, self.tiles.keys)
        )
        # Each tile would write the gradient of a key that tiles share, and cuDNN has no mask for our rules.
        if self.tiles.overlaps or self.tiles.blocked() or any(self.tiles.margins()):
            raise _Refused("some queries of a tile do not read all of its keys")
        self.operands: dict[int, _TileOperand] = {}
        self.stats = call.temporaries.reserve((self.batch, self.heads, self.queries), np.float32)
        self._matrices: dict[int, Callable[[], Any]] = {}

    def add(self, uid: int, array: Any, of_keys: bool = False, copied: bool = False) -> None:
        """Add an array of queries or keys; `copied`: in any case a packed copy."""
        view = self.view(array, of_keys)
        heads = self.key_heads if of_keys else self.heads
        self.operands[uid] = _TileOperand(view, self.lead, heads, self.call.temporaries, copied)

    def add_matrix(self, uid: int) -> None:
        """Add a matrix with one element per pair of a tile: the bias of its score, or the gradient of that bias."""
        shape, dtype = (self.heads, self.queries, self.keys), self.call.arrays.q.dtype
        if nbytes_of(shape, dtype) > self.call.largest:
            raise _Refused(f"the biases of all pairs take {nbytes_of(shape, dtype)} B, more than {self.call.largest} B")
        self._matrices[uid] = self.call.temporaries.reserve(shape, dtype)

    def view(self, array: Any, of_keys: bool = False) -> Any:
        """Return the tiles of an array, ``(samples, *tiles, *positions, all channels)``."""
        views = self.tiles.of_keys if of_keys else self.tiles.of_queries
        # Without the axis of heads, whose extent is 1.
        return views(array, 1, self.call.xp)[(*(slice(None),) * self.lead, 0)]

    def copies(self, *uids: int) -> list[tuple[Any, Any]]:
        """Return pairs of views of our arrays and of their packed copies."""
        return [pair for uid in uids for pair in self.operands[uid].copies]

    def copies_of_stats(self) -> list[tuple[Any, Any]]:
        """Return pairs of views of `lse` and of cuDNN's `stats`, whose axis of heads comes before the positions."""
        view = self.view(self.call.arrays.lse)
        own = self.stats().reshape((*view.shape[: self.lead], self.heads, *view.shape[self.lead : -1]))
        return _pairs(view, own.transpose((*range(self.lead), *range(self.lead + 1, own.ndim), self.lead)))

    def copies_of_bias(self) -> list[tuple[Any, Any]]:
        """Return pairs of views of the table of biases and of the matrix that cuDNN reads, by head, query and key."""
        first, margins = self.call.geometry.heads[0], [0] * len(self.tiles.queries)
        view = self.by_head.of_bias(self.call.arrays.bias, first, margins, self.call.xp)
        return _pairs(view, self._matrices[BIAS_MATRIX]().reshape(view.shape))

    def sums_of_bias(self) -> Launch:
        """Return the launch that adds the gradient of the matrix to that of the table."""
        call, matrix = self.call, self._matrices[DBIAS_MATRIX]()
        a, g, absent = call.arrays, call.geometry, 3 - len(self.tiles.queries)
        return call.launch(
            "attention_bias_sums",
            self.heads * math.prod(g.bias_extents),
            matrix=matrix,
            dbias=a.dbias,
            bias_float=is_float(a.dbias),
            query_count=[*(1,) * absent, *self.tiles.queries],
            key_count=[*(1,) * absent, *self.tiles.keys],
            origin=[*(0,) * absent, *self.by_head.origins([0] * (3 - absent))],
            table=[*(1,) * absent, *g.bias_extents],
            heads=self.heads,
            first_head=g.heads[0],
        )

    def kernel(self, direction: str) -> Kernel:
        """Return the kernel of the plan. Raises _Refused if cuDNN has none."""
        call, engine = self.call, self.call.engine
        arrays = {uid: operand.array for uid, operand in self.operands.items()}
        tensors = {uid: operand.tensor for uid, operand in self.operands.items()}
        arrays[STATS], tensors[STATS] = self.stats(), packed(self.batch, self.heads, self.queries, 1)
        for uid, matrix in self._matrices.items():
            arrays[uid], tensors[uid] = matrix(), packed(1, self.heads, self.queries, self.keys)
        limit = min(call.largest, engine.workspace_limit or call.largest)
        key = AttentionKey(
            direction,
            np.dtype(call.arrays.q.dtype).name,
            tuple(sorted(tensors.items())),
            float(call.geometry.scale),
            call.owner.sm_version,
            engine.arithmetic,
            limit,
            engine.tuned,
        )
        # Before the plan is built: a comparison with our own kernel is stored under the keys of all groups.
        call.keys.append(key)
        try:
            return planned(engine, key, {uid: address(a) for uid, a in arrays.items()}, list(arrays.values()))
        except KernelError as error:
            raise _Refused(one_line(error)) from error


class _AttentionCall:
    """One kernel of attention: groups of tiles, and the kernels that run before and after those of cuDNN.

    Attributes
    ----------
    largest
        Largest workspace, and largest matrix of biases [B].
    keys
        Keys of its plans.

    Raises
    ------
    _Refused
        If cuDNN's attention does not take the geometry.
    """

    direction = ""

    def __init__(self, owner: CudnnAttention, arrays: AttentionArrays, geometry: AttentionGeometry) -> None:
        self.owner, self.engine, self.xp = owner, owner.engine, owner.xp
        self.arrays, self.geometry = arrays, geometry
        self.temporaries, self.keys = _Temporaries(owner.memory), list[AttentionKey]()
        self.largest = _SMALL + _LARGEST * sum(a.nbytes for a in (arrays.q, arrays.k, arrays.v, arrays.y))
        self._check()
        self.groups = self._grouped()
        # The merge kernel reads whole arrays, so one group must cover all queries.
        if geometry.merge and [group.batch for group in self.groups] != [arrays.q.shape[0]]:
            raise _Refused("results for further keys are merged for whole blocks only")

    def _check(self) -> None:
        """Raise _Refused for what cuDNN cannot compute, or would compute by another rule than ours."""
        g, dtype = self.geometry, np.dtype(self.arrays.q.dtype).name
        if dtype not in HALF:
            raise _Refused(f"cuDNN's attention takes {' and '.join(HALF)}, not {dtype}")
        if g.dropout is not None:
            raise _Refused("the mask of dropout is counted by our own kernels")
        heads, key_heads = g.heads[1] - g.heads[0], g.key_heads[1] - g.key_heads[0]
        # The key head of each query head, by our rule and by cuDNN's: it divides query heads evenly.
        own = [(g.heads[0] + head) // g.groups - g.key_heads[0] for head in range(heads)]
        if heads % key_heads or own != [head * key_heads // heads for head in range(heads)]:
            raise _Refused(f"the {heads} heads of this rank read parts of {key_heads} groups")
        if any(isinstance(reach, Neighborhood) for reach in g.reaches):
            raise _Refused("cuDNN's attention has no neighborhoods that are moved inwards at the ends")

    def _grouped(self) -> list[_Group]:
        g, reaches = self.geometry, self.geometry.reaches
        queries, keys = g.queries, g.keys
        # All pairs and no table with an index per axis: positions of several axes are one sequence.
        if self.arrays.bias is None and all(isinstance(reach, Everywhere) for reach in reaches):
            counts = [math.prod(b - a for a, b in intervals) for intervals in (queries, keys)]
            reaches, queries, keys = (Everywhere(*counts),), ((0, counts[0]),), ((0, counts[1]),)
        axes = [_runs(*axis) for axis in zip(reaches, queries, keys)]
        for tiles, *intervals in zip(axes, queries, keys):
            parts = ((run.queries for run in tiles), (run.keys for run in tiles))
            covered = [sum(run.count * len(part) for run, part in zip(tiles, side)) for side in parts]
            # cuDNN writes the tiles only: what no tile covers would keep its old contents.
            if covered != [b - a for a, b in intervals]:
                raise _Refused("some queries read no keys, or some keys are not read")
        starts = [(q[0], k[0]) for q, k in zip(queries, keys)]
        return [_Group(self, tiles, starts, reaches) for tiles in itertools.product(*axes)]

    def launch(self, name: str, rows: int, **members: Any) -> Launch:
        """Return a launch of one of our kernels, with blocks of several rows."""
        launcher, rows_of_block = self.owner.launcher, THREADS // _LANES
        arrays = [a for a in members.values() if hasattr(a, "shape")]  # offsets must be wide enough for all of them
        program = scalar_program("attention_parts", self.arrays.q, self.arrays.y, *arrays)
        grid = (max(1, min(-(-rows // rows_of_block), launcher.blocks(16))),)
        return Launch(launcher, program, name, grid, (_LANES, rows_of_block), **members)

    def kernel(self) -> Kernel:
        """Return the kernel. Raises _Refused if cuDNN has no plan."""
        built: list[Kernel] = []
        try:
            for group in self.groups:
                built.append(group.kernel(self.direction))
            whole = chain(*self.before(), *built, *self.after())
        except BaseException:
            for kernel in built:
                kernel.close()
            self.temporaries.close()
            raise
        impl, temporaries = " + ".join(dict.fromkeys(kernel.impl for kernel in built)), self.temporaries

        def close() -> None:
            whole.close()
            temporaries.close()

        kernel = Kernel(whole, impl, whole.workspace_bytes, close)
        kernel.scratch_bytes = whole.scratch_bytes + temporaries.nbytes
        return kernel

    def before(self) -> list[Kernel]:
        """Return the kernels that run before those of cuDNN."""
        raise NotImplementedError

    def after(self) -> list[Kernel]:
        """Return the kernels that run after those of cuDNN."""
        raise NotImplementedError

    def _copied(self, pairs: Sequence[tuple[Any, Any]]) -> list[Kernel]:
        return [self.engine.boxes.copy(pairs)] if pairs else []


class _ForwardCall(_AttentionCall):
    direction = ATTENTION_FORWARD

    def __init__(self, owner: CudnnAttention, arrays: AttentionArrays, geometry: AttentionGeometry) -> None:
        super().__init__(owner, arrays, geometry)
        a = arrays
        for group in self.groups:
            for uid, array, of_keys in ((Q, a.q, False), (K, a.k, True), (V, a.v, True)):
                group.add(uid, array, of_keys)
            # With `merge` y holds the result for the keys before, which cuDNN must not overwrite.
            group.add(O, a.y, copied=geometry.merge)
            if a.bias is not None:
                group.add_matrix(BIAS_MATRIX)

    def before(self) -> list[Kernel]:
        pairs = [pair for group in self.groups for pair in group.copies(Q, K, V)]
        if self.arrays.bias is not None:
            pairs += [pair for group in self.groups for pair in group.copies_of_bias()]
        return self._copied(pairs)

    def after(self) -> list[Kernel]:
        a = self.arrays
        if self.geometry.merge:
            (group,) = self.groups
            part, heads = group.operands[O].array, group.heads
            members = {"part": part, "stats": group.stats(), "y": a.y, "lse": a.lse, "samples": a.y.shape[0]}
            members |= {"queries": group.queries, "heads": heads, "e": a.y.shape[-1] // heads}
            return [sequence("attention merge", self.launch("attention_merge", a.lse.size, **members))]
        pairs = [pair for group in self.groups for pair in (*group.copies(O), *group.copies_of_stats())]
        # The other way round than before cuDNN's kernels: from its arrays to ours.
        return self._copied([(own, ours) for ours, own in pairs])


class _BackwardCall(_AttentionCall):
    direction = ATTENTION_BACKWARD

    def __init__(self, owner: CudnnAttention, arrays: AttentionArrays, geometry: AttentionGeometry) -> None:
        super().__init__(owner, arrays, geometry)
        a = arrays
        for group in self.groups:
            for uid, array in ((Q, a.q), (O, a.y), (DO, a.dy)):
                group.add(uid, array)
            for uid, array in ((K, a.k), (V, a.v), (DK, a.dk), (DV, a.dv)):
                group.add(uid, array, of_keys=True)
            # With `merge` dq is the sum over the keys before: cuDNN's gradient is added to it.
            group.add(DQ, a.dq, copied=geometry.merge)
            if a.bias is not None:
                group.add_matrix(BIAS_MATRIX)
            if a.dbias is not None:
                group.add_matrix(DBIAS_MATRIX)

    def _check(self) -> None:
        super()._check()
        fault = self.owner.frontend.attention_fault
        if fault:
            raise _Refused(fault)

    def before(self) -> list[Kernel]:
        pairs = [p for group in self.groups for p in (*group.copies(Q, K, V, O, DO), *group.copies_of_stats())]
        if self.arrays.bias is not None:
            pairs += [pair for group in self.groups for pair in group.copies_of_bias()]
        return self._copied(pairs)

    def after(self) -> list[Kernel]:
        a, merge, boxes = self.arrays, self.geometry.merge, self.engine.boxes
        steps = []
        if merge:
            (group,) = self.groups
            # dq is summed over blocks of keys; dk and dv belong to this block.
            steps.append(boxes.add_into([(own, ours) for ours, own in group.copies(DQ)]))
        pairs = [p for group in self.groups for p in group.copies(*(() if merge else (DQ,)), DK, DV)]
        steps += self._copied([(own, ours) for ours, own in pairs])
        if a.dbias is not None:
            # The sums cover the heads of this rank only.
            steps += [] if merge else [filled(0, a.dbias)]
            steps.append(sequence("attention bias sums", *(group.sums_of_bias() for group in self.groups)))
        return steps


def _runs(reach: Reach, queries: Interval, keys: Interval) -> list[TileRun]:
    """Return the tiles of one axis: a single one if all queries read all keys, so that no matrix of pairs is formed."""
    if isinstance(reach, Everywhere):
        return [TileRun(range(*queries), range(*keys))]
    return runs(reach, queries, keys)
