"""Pooling by oneDNN's primitive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import Kernel, deferred, either
from halograd.kernels.onednn import abi as c
from halograd.kernels.onednn.abi import dims
from halograd.kernels.onednn.finite import Finite
from halograd.kernels.onednn.formats import geometry_dims, image, image_desc, read_part, zero_rest
from halograd.kernels.onednn.program import Engine, Program, ReferenceOnly

__all__ = ["MAX", "average", "max_pool", "pool"]

MAX = c.POOLING_MAX

Pair = tuple[Kernel, Kernel | None]


def average(count_include_pad: bool) -> int:
    """The algorithm of an average pooling."""
    return c.POOLING_AVERAGE_INCLUDE if count_include_pad else c.POOLING_AVERAGE_EXCLUDE


def max_pool(engine: Engine, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, plain: Callable[[], Pair]) -> Pair:
    """Maxima and their gradient: by oneDNN, or by what `plain` makes where an element of `x` is not finite.

    Of a window oneDNN takes the largest number and drops NaN, and -inf is -3e38 to it.

    Raises
    ------
    ReferenceOnly
        As :func:`pool`.
    """
    forward, backward = pool(engine, MAX, x, y, dy, dx, geometry)
    finite = Finite(engine, x)
    plain = functools.cache(plain)
    safe = either(forward, finite.fails, deferred(lambda: plain()[0]), *finite.kernels)
    if backward is None:
        return safe, None

    def gradient() -> Kernel:
        made = plain()[1]
        assert made is not None
        return made

    return safe, either(backward, finite.failed, deferred(gradient))


def pool(
    engine: Engine, algorithm: int, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry
) -> tuple[Kernel, Kernel | None]:
    """Forward and backward; the positions of the maxima lie in memory that the forward kernel owns.

    Raises
    ------
    ReferenceOnly
        For windows that are dilated or reach further into the padding than they are long.
    """
    spatial, g = read_part(x.shape[1:-1], geometry)
    if any(max(lo, hi) >= k for k, (lo, hi) in zip(g.kernel, g.padding)) or set(g.dilation) != {1}:
        raise ReferenceOnly(f"oneDNN's pooling: expected padding below the kernel and no dilation, got {geometry}")
    stride, dilation, lo, hi = geometry_dims(g)
    shape = (stride, dims(g.kernel), dilation, lo, hi)
    p = Program(engine)
    kind = c.FORWARD_INFERENCE if dx is None else c.FORWARD_TRAINING
    source, target = image_desc(p, x, spatial), image_desc(p, y)
    pd = p.descriptor("pooling_forward", kind, algorithm, source, target, *shape)
    arguments = {c.SRC: p.brought_to(image(p, x, spatial), source)}
    positions = p.wanted(pd, c.WORKSPACE)
    workspace = p.kept(positions) if positions and p.size(positions) else None
    if workspace is not None:
        arguments[c.WORKSPACE] = workspace
    p.step(pd, {**arguments, c.DST: image(p, y)})
    if dx is None:
        return p.kernel(), None
    q = Program(engine)
    source, target = image_desc(q, dx, spatial), image_desc(q, dy)
    back = q.descriptor("pooling_backward", algorithm, source, target, *shape, pd)
    arguments = {c.DIFF_DST: image(q, dy)}
    if workspace is not None:
        arguments[c.WORKSPACE] = q.array(workspace.array, q.borrowed(positions))
    zero_rest(q, dx, spatial)
    q.step_into(back, arguments, c.DIFF_SRC, image(q, dx, spatial))
    return p.kernel(), q.kernel()
