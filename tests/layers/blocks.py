"""Every rank's operator of a layer, one after the other in one process: what arrives by messages is written instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from halograd.kernels import Backend
from halograd.layers import Layer
from halograd.layers.binding import Binding
from halograd.layers.memory import Memory
from halograd.layers.operator import Mode
from halograd.layers.strategy import layout_of
from halograd.layers.value import Value

__all__ = ["computed_in_blocks"]


class _Silent:
    """Stands for the communicator of one rank; its channels carry nothing."""

    waits_for_network = False
    recorder = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def channel(self, sends: Mapping[int, int], recvs: Mapping[int, int], dtype: Any, **_: Any) -> _Buffers:
        return _Buffers(sends, recvs, dtype)


class _Buffers:
    def __init__(self, sends: Mapping[int, int], recvs: Mapping[int, int], dtype: Any) -> None:
        self._sends, self._recvs = ({p: np.empty(n, dtype) for p, n in some.items()} for some in (sends, recvs))

    def send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._sends[peer]

    def recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._recvs[peer]

    def close(self) -> None:
        return


def computed_in_blocks(
    layer: Layer,
    kernels: Backend,
    arrays: Mapping[str, np.ndarray],
    parts: Mapping[str, int],
    size: int,
    halo: str = "pad",
    dtype: str = "float32",
) -> dict[str, np.ndarray]:
    """``y``, ``dx``, ``dw``, ``db`` of a (transposed) convolution, put together from the blocks of all ranks.

    Parameters
    ----------
    arrays
        ``x``, ``dy``, ``w``, ``b``: whole.
    halo
        ``"overlap"``: the kernel runs before the halo is there, over NaN, and then the boundary strips.
    """
    found = {f"d{name}": np.zeros(arrays[name].shape) for name in ("w", "b")}
    found |= {"y": np.full(arrays["dy"].shape, np.nan), "dx": np.full(arrays["x"].shape, np.nan)}
    for rank in range(size):
        binding = _bind(layer, kernels, arrays, parts, _Silent(rank, size), halo, np.dtype(dtype))
        _compute_block(binding, arrays, found)
    return found


def _bind(
    layer: Layer,
    kernels: Backend,
    arrays: Mapping[str, np.ndarray],
    parts: Mapping[str, int],
    comm: Any,
    halo: str,
    dtype: np.dtype,
) -> Binding:
    memory = Memory(kernels)
    values = []
    for name in ("x", "dy"):
        layout = layout_of(arrays[name].shape, parts, comm.size)
        values.append(Value(name, layout, dtype, layout.boxes, comm.rank))
        values[-1].allocate(memory, "activation")
    params, grads = ({k: memory.keep(arrays[k].shape, dtype, "parameter") for k in ("w", "b")} for _ in range(2))
    for name, array in params.items():
        array[...] = arrays[name]
        grads[name].fill(np.nan)
    options = {"halo": halo}
    return Binding(
        layer, "layer", comm, kernels, memory, Mode(), values[:1], values[1], params, grads, {}, options, dict(parts)
    )


def _compute_block(b: Binding, arrays: Mapping[str, np.ndarray], found: dict[str, np.ndarray]) -> None:
    x, y = b.inputs[0], b.output
    operator: Any = b.layer.bind(b)
    transposed = hasattr(operator, "bias")
    _forward(operator, x, arrays["x"])
    if transposed and y.box.size:
        y.array[...] += b.params["b"]
    found["y"][y.box.slices()] = y.array
    y.new_contribution(b.memory)
    y.close_gradient(b.memory, b.kernels)
    y.dy[...] = arrays["dy"][y.box.slices()]
    operator.bind_backward()
    _fill(operator.dy, arrays["dy"])
    if transposed:
        _fill(operator.owned, arrays["x"])
        operator.db()
    operator.filter()
    operator.data()
    found["dx"][x.box.slices()] = x.contributions[0]
    for name, gradient in b.grads.items():
        found[f"d{name}"] += gradient
    operator.close()


def _forward(operator: Any, x: Value, whole: np.ndarray) -> None:
    if getattr(operator, "strips", None) is None:
        _fill(operator.x, whole)
        operator.kernel()
        return
    operator.x.array.fill(np.nan)
    own = x.box & operator.x.box
    operator.x.array[own.slices(operator.x.box.start)] = whole[own.slices()]
    operator.kernel()
    _fill(operator.x, whole)
    operator.strips()


def _fill(gathered: Any, whole: np.ndarray) -> None:
    if gathered.box.size:
        gathered.array[...] = whole[gathered.box.slices()]
